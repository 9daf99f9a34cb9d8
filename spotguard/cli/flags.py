"""The options that describe a job, written once for every command that takes a job."""

from __future__ import annotations

import functools
import inspect
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spotguard.cli.terminal.output import note
from spotguard.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from spotguard.api.settings import Resolved


@dataclass(frozen=True, kw_only=True)
class JobFlag:
    """One option; its value goes, as typed, to the setting `key`. Checking it is `spec`'s work."""

    key: str
    """Key of the setting, as in `spotguard.toml`; dotted below a table."""
    option: str
    help: str
    metavar: str = "TEXT"
    panel: str = "The job"
    switch: bool = False
    repeatable: bool = False

    @property
    def parameter(self) -> str:
        """Name of the Python parameter that stands for this option."""
        return "job_" + self.key.replace(".", "_")

    def signature(self) -> inspect.Parameter:
        """Return the parameter that typer turns into the option."""
        declared: Any = str | None
        if self.switch:
            declared = bool | None
        elif self.repeatable:
            declared = list[str] | None
        option = typer.Option(
            self.option,
            help=self.help,
            metavar=None if self.switch else self.metavar,
            rich_help_panel=self.panel,
            show_default=False,
        )
        return inspect.Parameter(
            self.parameter,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[declared, option],
        )


_MONEY = "Money and time"
_NODE = "Nodes from SkyPilot"
_SMOKE = "Smoke before money"
_LOCAL = "The local cloud (--infra local)"

JOB_FLAGS = (
    JobFlag(key="nodes", option="--nodes", metavar="N|MIN:MAX", help="Nodes, or a range: 1:4."),
    JobFlag(
        key="nproc_per_node",
        option="--nproc-per-node",
        metavar="N",
        help="Processes on each node, one per GPU.",
    ),
    JobFlag(
        key="infra",
        option="--infra",
        metavar="PLACE",
        help="local, aws, gcp/us-central1, slurm/CLUSTER/PARTITION; several: gcp,aws.",
    ),
    JobFlag(
        key="gpus",
        option="--gpus",
        metavar="NAME:N",
        help="GPUs of each node: A100:8; or any of several: A100:8,H100:8.",
    ),
    JobFlag(key="store", option="--store", metavar="URL", help="Where the run's state is kept."),
    JobFlag(key="name", option="--name", help="Name of the run; default: the script's."),
    JobFlag(
        key="template",
        option="--template",
        metavar="NAME|FILE",
        help="Task template to start from, or one of your own: ./mine.yaml.",
    ),
    JobFlag(
        key="save_every",
        option="--save-every",
        metavar="EVERY",
        help="auto, a duration (30s) or '100 steps'.",
    ),
    JobFlag(
        key="cache",
        option="--cache",
        metavar="FOLDER",
        help="A folder that is back on the next node: ~/.cache/huggingface; may be repeated.",
        repeatable=True,
    ),
    JobFlag(
        key="trust_script",
        option="--trust-script",
        help="Take SCRIPT though no import of spotguard.runtime is seen.",
        switch=True,
    ),
    JobFlag(
        key="node.image",
        option="--image",
        metavar="IMAGE",
        help="Image of the nodes: docker:NAME, or one of the cloud.",
        panel=_NODE,
    ),
    JobFlag(
        key="node.setup",
        option="--setup",
        metavar="COMMAND",
        help="A command that makes nodes ready; may be repeated.",
        panel=_NODE,
        repeatable=True,
    ),
    JobFlag(
        key="node.file_mounts",
        option="--file-mount",
        metavar="PLACE=WHAT",
        help="A bucket, file or folder on the nodes: /data=s3://b/data; may be repeated.",
        panel=_NODE,
        repeatable=True,
    ),
    JobFlag(
        key="node.volumes",
        option="--volume",
        metavar="PLACE=NAME",
        help="A volume of SkyPilot's on the nodes; may be repeated.",
        panel=_NODE,
        repeatable=True,
    ),
    JobFlag(
        key="smoke.steps",
        option="--smoke-steps",
        metavar="N",
        help="Steps to try on this machine's CPU first; default: 2.",
        panel=_SMOKE,
    ),
    JobFlag(
        key="smoke.limit",
        option="--smoke-limit",
        metavar="DURATION",
        help="How long that may take; default: 50s.",
        panel=_SMOKE,
    ),
    JobFlag(
        key="env",
        option="--env",
        metavar="K=V",
        help="A variable for the job; may be repeated.",
        repeatable=True,
    ),
    JobFlag(
        key="budget",
        option="--budget",
        metavar="USD",
        help="Never spend more than this.",
        panel=_MONEY,
    ),
    JobFlag(
        key="team.budget",
        option="--team-budget",
        metavar="USD / PERIOD",
        help="What all runs of the store may cost together: '2000 / month'.",
        panel=_MONEY,
    ),
    JobFlag(
        key="priority",
        option="--priority",
        metavar="N",
        help="Place in the queue for the team's money: higher is served first.",
        panel=_MONEY,
    ),
    JobFlag(
        key="deadline",
        option="--deadline",
        metavar="DURATION",
        help="Save and stop this long after the start: 8h.",
        panel=_MONEY,
    ),
    JobFlag(
        key="start_at",
        option="--start-at",
        metavar="INSTANT",
        help="Launch nothing before: 2026-05-01T22:00Z.",
        panel=_MONEY,
    ),
    JobFlag(
        key="work",
        option="--work",
        metavar="DURATION",
        help="Training time on all nodes, for forecasts: 20h.",
        panel=_MONEY,
    ),
    JobFlag(
        key="market", option="--market", metavar="spot|on_demand", help="How to buy.", panel=_MONEY
    ),
    JobFlag(
        key="on_demand",
        option="--on-demand",
        metavar="RULE",
        help="never, deadline, or 'fallback-after 20m': when to buy on demand after all.",
        panel=_MONEY,
    ),
    JobFlag(
        key="on_demand_infra",
        option="--on-demand-infra",
        metavar="PLACE",
        help="Where to buy on demand, if elsewhere than --infra.",
        panel=_MONEY,
    ),
    JobFlag(
        key="prefer",
        option="--prefer",
        metavar="cheap|green",
        help="Of places that cost the same within 5 %, take the greener one.",
        panel=_MONEY,
    ),
    JobFlag(
        key="max_price",
        option="--max-price",
        metavar="USD",
        help="Buy no spot node that costs more per hour.",
        panel=_MONEY,
    ),
    JobFlag(
        key="price",
        option="--price",
        metavar="USD",
        help="What a node costs per hour, if you know better.",
        panel=_MONEY,
    ),
    JobFlag(
        key="on_demand_price",
        option="--on-demand-price",
        metavar="USD",
        help="The same on demand, to compare with.",
        panel=_MONEY,
    ),
    JobFlag(
        key="allow_unknown_price",
        option="--allow-unknown-price",
        help="Start under a budget even where no price is known.",
        panel=_MONEY,
        switch=True,
    ),
    JobFlag(
        key="local.metadata",
        option="--metadata",
        metavar="aws|gcp|azure",
        help="Whose notices the local nodes get.",
        panel=_LOCAL,
    ),
    JobFlag(
        key="local.interrupt",
        option="--interrupt",
        metavar="WHAT",
        help="As in 'node=1@step=40:notice'; also :term :kill :reclaim-all; may be repeated.",
        panel=_LOCAL,
        repeatable=True,
    ),
    JobFlag(
        key="local.mtbf",
        option="--mtbf",
        metavar="DURATION",
        help="Interrupt at random, this often on average: 60s.",
        panel=_LOCAL,
    ),
    JobFlag(
        key="local.interrupt_seed",
        option="--interrupt-seed",
        metavar="N",
        help="Seed of the random interruptions.",
        panel=_LOCAL,
    ),
    JobFlag(
        key="local.trace",
        option="--trace",
        metavar="FILE",
        help="Replay a recorded capacity trace.",
        panel=_LOCAL,
    ),
    JobFlag(
        key="local.speed_up",
        option="--speed-up",
        metavar="X",
        help="Make the cloud's own times X times shorter.",
        panel=_LOCAL,
    ),
)


SmokeOption = Annotated[
    bool | None,
    typer.Option(
        "--smoke/--no-smoke",
        help="Try SCRIPT on this machine's CPU first, also where nodes cost nothing, or not at "
        "all; default: before nodes that cost money.",
        rich_help_panel=_SMOKE,
        show_default=False,
    ),
]
OldSeedOption = Annotated[
    int | None,
    typer.Option("--seed", min=0, hidden=True, help="The old name of --interrupt-seed."),
]
_OLD_SEED = inspect.Parameter(
    "old_seed", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=OldSeedOption
)
_SEED_KEY = "local.interrupt_seed"


def interrupt_seed(new: int | None, old: int | None) -> int | None:
    """Return the seed of the interruptions, and say what `--seed` is called now."""
    if old is not None:
        note(
            "note: --seed is called --interrupt-seed now, since it seeds the interruptions; "
            "SPOTGUARD_SEED seeds the training"
        )
    return old if new is None else new


def takes_job_flags(
    *, only: Collection[str] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command all job options (or those whose key is in `only`).

    The command must take a keyword `flags`; it gets the values that were given, by key.
    """
    chosen = [flag for flag in JOB_FLAGS if only is None or flag.key in only]
    seeded = any(flag.key == _SEED_KEY for flag in chosen)

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def wrapped(**given: Any) -> None:
            flags = {flag.key: given.pop(flag.parameter) for flag in chosen}
            if seeded:
                flags[_SEED_KEY] = interrupt_seed(flags[_SEED_KEY], given.pop(_OLD_SEED.name))
            command(flags={key: v for key, v in flags.items() if v not in (None, [])}, **given)

        own = inspect.signature(command, eval_str=True)
        parameters = [
            p.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for p in own.parameters.values()
            if p.name != "flags"
        ]
        at = next((i for i, p in enumerate(parameters) if p.name == "yes"), len(parameters))
        parameters[at:at] = [flag.signature() for flag in chosen]
        if seeded:
            parameters.insert(at, _OLD_SEED)
        wrapped.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
        wrapped.__annotations__ = {p.name: p.annotation for p in parameters}
        return wrapped

    return decorate


def with_smoke(flags: dict[str, object], smoke: bool | None) -> dict[str, object]:
    """Return the flags with what `--smoke` or `--no-smoke` says."""
    if smoke is None:
        return flags
    return {**flags, "smoke.when": "always" if smoke else "never"}


def resolve_job(script: str, args: Sequence[str], flags: dict[str, object]) -> Resolved:
    """Return the job's settings from the options that were given and all other sources."""
    from spotguard.api.settings import resolve

    return resolve(script, flags=with_variables(flags), args=args)


def resolve_launch(script: str, args: Sequence[str], flags: dict[str, object]) -> Resolved:
    """Return the same for a job that is to be launched or priced."""
    from spotguard.api import settings

    return settings.resolve_launch(script, flags=with_variables(flags), args=args)


def with_variables(flags: dict[str, object]) -> dict[str, object]:
    """Return the flags with `--env` as a table."""
    given = flags.get("env")
    if not isinstance(given, list):
        return flags
    return {**flags, "env": dict(_variable(text) for text in given)}


def setting_value(key: str, raw: str | None) -> Any:
    """Return the value of one setting outside of a whole job, parsed as anywhere else.

    Raises:
        SpecError: names the setting, what was given and what is allowed.
    """
    from spotguard.api.settings import catalogue

    if raw is None:
        return None
    setting = catalogue()[key].setting
    try:
        return setting.parse(raw)
    except ValueError:
        raise SpecError(key, f"given {raw!r}; allowed: {setting.allowed}") from None


def _variable(text: str) -> tuple[str, str]:
    """`K=V`, or `K` alone for this shell's own value, which no process list then shows."""
    name, given, value = text.partition("=")
    if given:
        return name, value
    if name not in os.environ:
        raise SpecError(
            "env",
            f"given {name!r} without a value, and this shell has no variable of that name",
            hint="--env NAME=VALUE, or --env NAME for a variable that is set",
        )
    return name, os.environ[name]
