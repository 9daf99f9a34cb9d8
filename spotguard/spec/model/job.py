"""`JobSpec`: all that a user asked for, checked and frozen.

The string under each field is its documentation: `docs/configuration.md` and the starter's
`spotguard.toml` are made from it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, ValidationError

from spotguard.errors import SpecError
from spotguard.events.masking import know
from spotguard.events.states import Market
from spotguard.spec.complaint import setting_of, spec_error
from spotguard.spec.infra import (
    DEADLINE,
    FALLBACK,
    NEVER,
    PLACES,
    gpu_names,
    on_demand_rule,
    places,
)
from spotguard.spec.model.checks import check_together
from spotguard.spec.model.own_template import TemplateName
from spotguard.spec.model.phases import PhaseSpec, moved_values, parse_phases
from spotguard.spec.model.tables import DURATION, Frozen, LocalSpec, NodeSpec, SmokeSpec
from spotguard.spec.model.team import TeamSpec
from spotguard.spec.nodes import MAX_NODES, NodeRange
from spotguard.spec.setting import (
    DEFAULT_TOPICS,
    MAX_NAME_CHARS,
    IfGiven,
    OneOf,
    Setting,
    Whole,
    alert_topics,
    cache_folders,
    duration,
    hooks,
    instant,
    run_name,
    save_interval,
    store_url,
    switch,
    text,
    usd,
    variables,
)
from spotguard.spec.templates import template_names

SCHEMA = 1
"""Version of the JSON form. A reader refuses any other."""

LOCAL_SPOT_USD_PER_H = 0.918
"""What a local node costs unless told otherwise: AWS p3.2xlarge spot, us-east-2, February 2023."""
LOCAL_ON_DEMAND_USD_PER_H = 3.06
"""The same machine on demand. Both are the prices of the recorded traces."""

_USD_PER_H = "a price in USD per node and hour above 0, decimals after a point: 0.918"
_PUBLIC_NAMES = "env_names"


def _phases(raw: Any) -> object:
    return parse_phases(raw, lambda name: setting_of(JobSpec, name))


class JobSpec(Frozen):
    """What to run, where, and within which limits."""

    script: str
    """Absolute path of the training script."""

    args: tuple[str, ...] = ()
    """Arguments for the script, as they are."""

    workdir: Annotated[
        str,
        Setting(parse=text, allowed="the path of a folder", example='"."', is_path=True),
    ]
    """The folder in which the script runs. Default: the folder in which you are."""

    name: Annotated[
        str,
        Setting(
            parse=run_name,
            allowed=f"1 to {MAX_NAME_CHARS} of a-z, 0-9 and '-', no '-' at the ends",
            example='"my-gpt"',
            flag="--name",
        ),
    ]
    """First part of the run's id. Default: the script's name."""

    infra: Annotated[
        str,
        Setting(
            parse=places,
            allowed="local, or clouds such as aws, aws/us-east-1 or gcp,aws, or kubernetes, or "
            "slurm/CLUSTER/PARTITION",
            example='"gcp,aws/us-east-1"',
            flag="--infra",
            choices=PLACES,
        ),
    ] = "local"
    """Where nodes come from: clouds, with region and zone if need be, a Kubernetes context, or
    partitions of a Slurm cluster; of several, the cheapest is tried first. `local`: processes of
    this machine that play a cloud."""

    on_demand_infra: Annotated[
        str | None,
        Setting(
            parse=IfGiven(places),
            allowed="as for infra, and of its kind",
            example='"aws/us-east-2"',
            flag="--on-demand-infra",
            choices=PLACES,
        ),
    ] = None
    """Where nodes are bought on demand, if elsewhere than in `infra`, and of its kind: clouds
    beside clouds; on Slurm, where the market is a partition, another one. Default: on clouds the
    same places, on Kubernetes and Slurm none."""

    gpus: Annotated[
        str | None,
        Setting(
            parse=IfGiven(gpu_names),
            allowed="a kind of GPU, and how many if more than one, such as A100:8; or any of "
            "several, such as A100:8,H100:8",
            example='"A100:8"',
            flag="--gpus",
        ),
    ] = None
    """GPUs of each node, by SkyPilot's names; of several alternatives, what is cheapest where it
    can be had, and the price of what was had is what counts. Without it, nodes have CPUs only."""

    store: Annotated[
        str,
        Setting(
            parse=store_url,
            allowed="a folder or a URL such as s3://bucket/prefix",
            example='"/data/spotguard-store"',
            flag="--store",
            is_path=True,
        ),
    ]
    """Where runs keep their state, each below its own id. Default: `store` in spotguard's home."""

    nodes: Annotated[
        NodeRange,
        Setting(
            parse=NodeRange.parse,
            allowed=f'a count from 1 to {MAX_NODES} or a range min:max of them, such as 2 or "1:4"',
            example='"1:4"',
            flag="--nodes",
        ),
    ] = NodeRange(1, 1)
    """Nodes of the cluster. With a range, spotguard asks for the most and makes do with less."""

    nproc_per_node: Annotated[
        int,
        Setting(
            parse=Whole(1, 1024),
            allowed="a whole number from 1 to 1024",
            example="8",
            flag="--nproc-per-node",
        ),
    ] = 1
    """Processes on each node. Default: one for each of `gpus`, or one."""

    budget_usd: Annotated[
        float | None,
        Setting(
            parse=IfGiven(usd),
            allowed='an amount of USD above 0, decimals after a point: 200 or "$1,200.50"',
            example="200",
            key="budget",
            flag="--budget",
        ),
    ] = None
    """The most that the run may cost, over all attempts. It is saved and released before that."""

    deadline_s: Annotated[
        float | None,
        Setting(
            parse=IfGiven(duration),
            allowed=DURATION,
            example='"12h"',
            key="deadline",
            flag="--deadline",
            is_duration=True,
        ),
    ] = None
    """Time from the start of the run after which it is saved and released."""

    priority: Annotated[
        int,
        Setting(
            parse=Whole(-100, 100),
            allowed="a whole number from -100 to 100",
            example="10",
            flag="--priority",
        ),
    ] = 0
    """The run's place in the queue for the money of the team's budget: a higher number is served
    first, and of equals who asked first."""

    start_at: Annotated[
        float | None,
        Setting(
            parse=IfGiven(instant),
            allowed="an instant with a zone, such as 2026-05-01T22:00Z or 2026-05-01T22:00+02:00",
            example='"2026-05-01T22:00Z"',
            flag="--start-at",
        ),
    ] = None
    """When the run begins: nothing is launched before, and `deadline` counts from then."""

    work_s: Annotated[
        float | None,
        Setting(
            parse=IfGiven(duration),
            allowed=DURATION,
            example='"20h"',
            key="work",
            flag="--work",
            is_duration=True,
        ),
    ] = None
    """How long it trains on all nodes, undisturbed, if you know it. Forecasts, and what is bought
    for a deadline, rest on it until the run has shown its own pace. Default: for forecasts, what an
    earlier run of the same script has shown."""

    market: Annotated[
        Market,
        Setting(
            parse=OneOf(("spot", "on_demand")),
            allowed="spot or on_demand",
            example='"spot"',
            flag="--market",
            choices=("spot", "on_demand"),
        ),
    ] = Market.SPOT
    """How nodes are bought."""

    on_demand: Annotated[
        str,
        Setting(
            parse=on_demand_rule,
            allowed='never, deadline, or "fallback-after 20m"',
            example='"fallback-after 20m"',
            flag="--on-demand",
            choices=(NEVER, DEADLINE, FALLBACK),
        ),
    ] = NEVER
    """When nodes may be bought on demand though `market` is spot: never, once no spot node was to
    be had for some time, or only if the deadline cannot be kept otherwise."""

    max_price_usd_per_h: Annotated[
        float | None,
        Setting(
            parse=IfGiven(usd),
            allowed=_USD_PER_H,
            example="1.20",
            key="max_price",
            flag="--max-price",
        ),
    ] = None
    """No spot node that costs more per hour is bought, and none whose price is unknown. What is
    bought on demand is not bound by it."""

    template: Annotated[
        str,
        Setting(
            parse=TemplateName(template_names()),
            allowed=f"one of {', '.join(template_names())}; or the path of a YAML file, such as "
            "./mine.yaml",
            example='"./mine.yaml"',
            is_path=True,
            flag="--template",
            choices=template_names(),
        ),
    ] = "base"
    """Which task template describes the nodes; or a file of your own, which is put on top of that
    of the place. It may hold `resources`, `envs`, `file_mounts`, `volumes` and `config` of a
    SkyPilot task, but for what spotguard fills in, and no secrets."""

    save_every: Annotated[
        str,
        Setting(
            parse=save_interval,
            allowed='auto, a duration above 0 such as "30s", or a count such as "100 steps"',
            example='"5m"',
            flag="--save-every",
        ),
    ] = "auto"
    """Time or steps between periodic saves. `auto` weighs their cost against the risk of loss.

    Left alone, it leaves the choice to the script's own `init(save_every=...)`.
    """

    notify: Annotated[
        tuple[str, ...],
        Setting(
            parse=hooks,
            allowed="http:// or https:// URLs, or those of apprise, such as ntfy://TOPIC",
            example='["https://hooks.example.com/services/..."]',
        ),
    ] = ()
    """Who is told of what `notify_on` names. `https://` is a webhook that gets a JSON body by POST,
    whose `text` Slack and its like show. Any other URL is one of apprise (Slack, e-mail, Teams,
    Discord, ntfy, PagerDuty and more), for which `spotguard[alerts]` is installed. Kept as a
    secret."""

    notify_on: Annotated[
        tuple[str, ...],
        Setting(
            parse=alert_topics,
            allowed='a list of "budget 50,80,95", "burn-rate USD", "preempted", '
            '"waiting DURATION", "no-save DURATION", "contact-lost" and "ended"',
            example='["budget 80,95", "waiting 30m", "ended"]',
        ),
    ] = DEFAULT_TOPICS
    """What is told, each thing once: shares of the budget in percent; a price of all nodes above
    so much an hour; an attempt that was taken; a wait for capacity, or a time without a save, that
    is longer; a job that is not heard of; the end of the run."""

    prefer: Annotated[
        str,
        Setting(
            parse=OneOf(("cheap", "green")),
            allowed="cheap or green",
            example='"green"',
            flag="--prefer",
            choices=("cheap", "green"),
        ),
    ] = "cheap"
    """Which of several places is tried first: the cheapest; or, of those whose prices differ by
    less than 5 %, the one whose electricity causes least CO2."""

    keep_last: Annotated[
        int,
        Setting(parse=Whole(2), allowed="a whole number from 2", example="3"),
    ] = 3
    """How many checkpoints to keep. Two at least: one may turn out to be damaged.

    Left alone, it leaves the choice to the script's own `init(keep_last=...)`.
    """

    cache: Annotated[
        tuple[str, ...],
        Setting(
            parse=cache_folders,
            allowed="folders below ~/ or below the workdir, none that holds keys or logins",
            example='["~/.cache/huggingface", "data/tokens"]',
            flag="--cache",
        ),
    ] = ()
    """Folders that are back on the next node before the script starts: their files are kept in the
    run store while it trains, those that have changed, and never while a save is in flight. Logins,
    keys and unfinished downloads in them stay on the node."""

    cache_limit_gb: Annotated[
        int,
        Setting(parse=Whole(1, 4096), allowed="a whole number from 1 to 4096", example="200"),
    ] = 50
    """How much of `cache` is kept, in GB; more of it stays on the node, and that is told."""

    cache_compiled: Annotated[
        bool,
        Setting(parse=switch, allowed="true or false", example="false"),
    ] = True
    """Keep what `torch.compile` makes, in the same way, so that the next attempt need not compile
    again. A run that compiles nothing keeps nothing."""

    store_patience_s: Annotated[
        float,
        Setting(
            parse=duration,
            allowed=DURATION,
            example='"30m"',
            key="store_patience",
            is_duration=True,
        ),
    ] = 3600.0
    """How long a run's store may be away before its job ends for that. Training goes on meanwhile,
    and what it does is lost if its nodes go before the store is back."""

    heartbeat_s: Annotated[
        float,
        Setting(
            parse=duration, allowed=DURATION, example='"1s"', key="heartbeat", is_duration=True
        ),
    ] = 1.0
    """Time between two signs of life of each node. Left alone, it is 10 s where the store is a
    bucket, since each one costs money there."""

    seed: Annotated[
        int | None,
        Setting(parse=IfGiven(Whole(0)), allowed="a whole number from 0", example="0"),
    ] = None
    """Seed of the sample order and of the job's randomness. Default: the script's own, else 0."""

    learn_market: Annotated[
        bool,
        Setting(parse=switch, allowed="true or false", example="false"),
    ] = True
    """Keep what the run sees of spot nodes, where they were asked for, had, refused and taken, in
    `market.jsonl` in spotguard's home, for the decisions and forecasts of later runs. It never
    leaves this machine."""

    in_place: Annotated[
        bool,
        Setting(parse=switch, allowed="true or false", example="false"),
    ] = True
    """When local nodes leave, the others go on without a new cluster, if `nodes` allows so few."""

    ask_ahead: Annotated[
        bool,
        Setting(parse=switch, allowed="true or false", example="false"),
    ] = True
    """Where a cloud announces when it takes a node, ask for the next nodes at once. The old ones
    train on until shortly before: both are paid meanwhile, for two minutes at most on AWS."""

    trust_script: Annotated[
        bool,
        Setting(parse=switch, allowed="true or false", example="false", flag="--trust-script"),
    ] = False
    """Launch the script though neither it nor the files that it imports from beside it are seen to
    import `spotguard.runtime`, such as when an installed package does."""

    allow_unknown_price: Annotated[
        bool,
        Setting(
            parse=switch,
            allowed="true or false",
            example="false",
            flag="--allow-unknown-price",
        ),
    ] = False
    """Start under a budget even where the price is unknown, so that the budget cannot hold."""

    price_usd_per_h: Annotated[
        float | None,
        Setting(
            parse=IfGiven(usd), allowed=_USD_PER_H, example="0.918", key="price", flag="--price"
        ),
    ] = None
    """What a node costs in an hour. Default: the launcher knows (locally 0.918)."""

    on_demand_usd_per_h: Annotated[
        float | None,
        Setting(
            parse=IfGiven(usd),
            allowed=_USD_PER_H,
            example="3.06",
            key="on_demand_price",
            flag="--on-demand-price",
        ),
    ] = None
    """What such a node costs on demand. Default: the launcher knows (locally 3.06)."""

    phases: Annotated[
        tuple[PhaseSpec, ...],
        Setting(
            parse=_phases,
            allowed="a list of tables, each with until_step (but for the last) and any of infra, "
            "on_demand_infra, gpus, nodes, nproc_per_node, market, on_demand, max_price, price, "
            "on_demand_price and template",
            example='[{ until_step = 500, infra = "local" }, { gpus = "A100:8" }]',
        ),
    ] = ()
    """Where the run is when: each phase but the last ends, saved, once `until_step` steps are done,
    and the next one begins by itself. What a phase does not say is as set outside of it; but a
    price, an instance type and a cloud's image are of one machine, and do not go along to another
    `infra` or other `gpus`."""

    env: Annotated[
        dict[str, str],
        Setting(
            parse=variables,
            allowed="names of variables with a text each, none of spotguard's own",
            example='{ TOKENIZERS_PARALLELISM = "false" }',
            flag="--env",
        ),
    ] = Field(default_factory=dict, repr=False)
    """Variables for the job. Their values are never printed, nor written into the store."""

    local: LocalSpec = LocalSpec()
    """What the local cloud does to the run."""

    node: NodeSpec = NodeSpec()
    """What a node from SkyPilot is."""

    smoke: SmokeSpec = SmokeSpec()
    """How the script is tried on this machine before anything is paid for."""

    team: TeamSpec = TeamSpec()
    """What all runs of the store may cost together."""

    def to_json(self) -> dict[str, Any]:
        """Return the whole spec, for the private journal: it holds the values of `env`."""
        return {"schema": SCHEMA, **self.model_dump(mode="json")}

    def public_json(self) -> dict[str, Any]:
        """Return the spec for the run store: of `env` only the names, and no `notify`."""
        body = self.to_json()
        body.pop("notify")
        body[_PUBLIC_NAMES] = list(body.pop("env"))
        return body

    @classmethod
    def from_json(
        cls, body: Mapping[str, Any], *, environ: Mapping[str, str] | None = None
    ) -> JobSpec:
        """Return the spec that `to_json` or `public_json` wrote.

        The values of variables whose names alone were kept come from `environ` (this process's
        environment unless given).

        Raises:
            SpecError: it is none, of another schema, or a variable has no value here.
        """
        if not isinstance(body, Mapping) or body.get("schema") != SCHEMA:
            found = body.get("schema") if isinstance(body, Mapping) else None
            raise SpecError(
                "schema",
                f"given {found!r}; allowed: {SCHEMA}",
                hint="the run was written by another version of spotguard; use that version",
            )
        values = {key: value for key, value in body.items() if key != "schema"}
        if names := values.pop(_PUBLIC_NAMES, None):
            values["env"] = _values_of(names, os.environ if environ is None else environ)
        return build_spec(values)

    def replace(self, **changes: object) -> JobSpec:
        """Return the spec with some fields changed, checked as if given by a user."""
        return build_spec({**self.model_dump(), **changes})

    def at_place(self, place: Mapping[str, Any]) -> JobSpec:
        """Return the job as it is elsewhere; `place` has some of `PLACE_FIELDS`, None left out.

        Raises:
            SpecError: it cannot be there.
        """
        return self.replace(**moved_values(self, place))

    def in_phase(self, index: int) -> JobSpec:
        """Return the job as it is in a phase, the first being 0; itself where it has none."""
        if not self.phases:
            return self
        return self.model_copy(update={"phases": ()}).at_place(self.phases[index].place)

    def moved(self, index: int, place: Mapping[str, Any]) -> JobSpec:
        """Return the job with another place for a phase; without phases, for all of it."""
        if not self.phases:
            return self.at_place(place)
        given = moved_values(self.in_phase(index), place)
        kept = {name: value for name, value in given.items() if name in PhaseSpec.model_fields}
        phase = self.phases[index].model_copy(update=kept)
        return self.replace(phases=(*self.phases[:index], phase, *self.phases[index + 1 :]))


def _values_of(names: object, environ: Mapping[str, str]) -> dict[str, str]:
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise SpecError(_PUBLIC_NAMES, f"given {names!r}; allowed: a list of names")
    missing = [name for name in names if name not in environ]
    if missing:
        raise SpecError(
            "env",
            f"the run store holds no values, and these are not set here: {', '.join(missing)}",
            hint="set the variables in this shell, then try again",
        )
    return {name: environ[name] for name in names}


def build_spec(values: Mapping[str, object], origins: Mapping[str, str] | None = None) -> JobSpec:
    """Return the spec with these fields; `origins` (by config key) says who gave them.

    Raises:
        SpecError: a field is wrong; names it, what was given, by whom, and what is allowed.
    """
    try:
        spec = JobSpec.model_validate(dict(values))
    except ValidationError as problem:
        raise spec_error(problem, JobSpec, origins or {}) from None
    check_together(spec, (origins or {}).get("on_demand_infra", ""))
    know(spec.env, spec.args, secrets=spec.notify)
    return spec
