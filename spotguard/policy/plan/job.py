"""What a launch would do and cost: the table of `spotguard plan` and of the confirm screen."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Literal

from spotguard.events.masking import shown_arguments
from spotguard.events.states import Market
from spotguard.policy.plan.carbon.estimate import GREEN, draw, greener_first, machine
from spotguard.policy.plan.ladder import node_ladder
from spotguard.policy.plan.money import cost_usd, hours_bought, rate_usd_per_h, saved_pct
from spotguard.shared.batching import BatchPlan, split_micro_batches
from spotguard.shared.hazard import expected_interruptions
from spotguard.shared.json_documents import INSTANT, document

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spotguard.launch.base import Offer, PriceSource, Skipped, Unchecked
    from spotguard.policy.plan.batch_curve import BatchCurve
    from spotguard.policy.plan.carbon.estimate import NodeDevices
    from spotguard.policy.plan.carbon.factors import Factor
    from spotguard.policy.plan.forecast import CostForecast
    from spotguard.policy.plan.smoke import Smoke
    from spotguard.spec.model import JobSpec

SCHEMA: Final = 1

CLOUDS_THAT_TAKE = frozenset({"aws", "gcp", "azure"})
"""Where the recorded hazard holds; elsewhere nobody knows how often nodes are taken."""
SPAN_H = 24.0
"""What interruptions are told for when neither budget nor deadline ends the run."""
LOST_S = 600.0
"""Paid time without progress for each interruption: some minutes for new nodes and their set-up,
a restore, and half an interval between saves. A guess until a run has measured its own."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One place with one number of nodes. None is unknown, never zero."""

    infra: str
    region: str | None
    zone: str | None
    instance_type: str | None
    market: str
    nodes: int
    price_usd_per_h: float | None
    """Of one node."""
    rate_usd_per_h: float | None
    """Of all nodes."""
    on_demand_rate_usd_per_h: float | None
    """Of all nodes, bought on demand."""
    saved_pct: float | None
    """By how much less it costs than on demand; negative if it costs more."""
    hours_bought: float | None
    """How long the budget lasts; None also without a budget."""
    accumulation: int | None
    """Micro-batches that the busiest rank accumulates; None when the script does not say."""
    interruptions: float | None = None
    """To be expected in `JobPlan.span_h`, or while the budget lasts if that is less."""
    interruptions_usd: float | None = None
    """What these cost: nodes that are paid for and make no progress."""
    gpus: str | None = None
    """What each node has of them; of several that were asked for, this offer's."""
    co2e_g_per_h: float | None = None
    """Grams of CO2e that all nodes cause in an hour: an estimate from above."""

    @property
    def place(self) -> str:
        """Where it is, in words: `local`, `aws us-east-2 us-east-2a`."""
        return " ".join(part for part in (self.infra, self.region, self.zone) if part)


@dataclass(frozen=True, kw_only=True)
class Rung:
    """What one step means on one number of nodes; the global batch is the same on all."""

    nodes: int
    ranks: int
    micro_batches: int
    accumulation: int
    """Micro-batches that the rank with most of them accumulates."""
    least: int
    """Those of the rank with fewest."""
    idle_ranks: int
    """Ranks that have none: they are paid for, and wait."""
    busy_pct: float
    """Share of the ranks' time in a step that is work, as far as whole batches go."""
    last_samples: int
    """Samples of a global batch's last micro-batch."""


@dataclass(frozen=True, kw_only=True)
class PhasePlan:
    """One phase of the run, with a price of its own."""

    phase: int
    """From 1."""
    until_step: int | None
    """Steps done at which it ends; None: with the run."""
    infra: str
    gpus: str | None
    market: str
    nodes: str
    """`2` or `1:4`."""
    nproc_per_node: int
    demo_prices: bool
    """True if its nodes cost nothing: they are this machine's, and no price was given."""
    candidates: tuple[Candidate, ...]
    skipped: tuple[Skipped, ...]


@dataclass(frozen=True, kw_only=True)
class JobPlan:
    """What would be launched: the candidates in the order in which they would be tried."""

    schema: Literal[1] = field(default=SCHEMA, init=False)
    """Version of this document's form."""
    name: str
    script: str
    args: tuple[str, ...]
    workdir: str
    store: str
    save_every: str
    market: str
    nodes: str
    """`2` or `1:4`."""
    nproc_per_node: int
    budget_usd: float | None
    allow_unknown_price: bool = False
    """Whether places without a known price are taken under a budget, which is not kept there."""
    deadline_s: float | None
    start_at: float | None = field(default=None, metadata=INSTANT)
    """Before when nothing is launched; None: at once."""
    global_batch: int | None
    micro_batch: int | None
    candidates: tuple[Candidate, ...]
    rungs: tuple[Rung, ...] = ()
    """A step on each number of nodes; none when nobody says the batch sizes."""
    span_h: float = SPAN_H
    """For how long interruptions are told: until the deadline, else a day."""
    on_demand: str = "never"
    """When nodes may be bought on demand; those candidates come last."""
    on_demand_infra: str | None = None
    """Where they are bought then; None is where spot ones are, too."""
    prefer: str = "cheap"
    """`green`: of those that cost the same within 5 %, the one that causes least CO2e first."""
    carbon: tuple[Factor, ...] = ()
    """What the CO2e of the first candidate is made of, each number with its source and year."""
    demo_prices: bool = False
    """True if the money is played: local nodes cost nothing, and their price was not given."""
    skipped: tuple[Skipped, ...] = ()
    """Places that cannot be tried, and why."""
    prices: tuple[PriceSource, ...] = ()
    """Where prices come from."""
    unchecked: tuple[Unchecked, ...] = ()
    """Places of which nobody could say whether there are such."""
    not_installed: tuple[str, ...] = ()
    """What the script's PEP 723 block asks for and local nodes lack: they install nothing."""
    forecast: CostForecast | None = None
    """What it is expected to cost and when it is done; None for nodes of this machine."""
    smoke: Smoke | None = None
    """What the script's first steps on this machine measured; None: not tried, or changed since."""
    probe: BatchCurve | None = None
    """What sizes of its micro-batches take on this machine; None: they were not tried."""
    phases: tuple[PhasePlan, ...] = ()
    """All phases of the job; what stands outside of it is the first one's."""
    moves: str | None = None
    """What goes on there, in words, where a run moves; None: a new one begins."""

    def to_json(self) -> dict[str, Any]:
        """Return the object of `plan --json`."""
        return document(self)


def plan_job(
    spec: JobSpec,
    offers: Sequence[Offer],
    *,
    batches: tuple[int, int] | None = None,
    skipped: Sequence[Skipped] = (),
    prices: Sequence[PriceSource] = (),
    unchecked: Sequence[Unchecked] = (),
    not_installed: Sequence[str] = (),
    forecast: CostForecast | None = None,
    smoke: Smoke | None = None,
) -> JobPlan:
    """Return the plan for `spec` with these offers.

    Args:
        spec: what to run.
        offers: the places, best first. Those of another market than the spec's are left out, but
            on-demand ones come last where the spec allows them.
        batches: global batch and micro-batch, if the script or the command line says them.
        skipped: places that have no offer.
        prices: where the offers' prices come from.
        unchecked: places of which nobody could say whether there are such.
        not_installed: requirements of the script that its nodes will not have.
        forecast: of its cost and finish.
        smoke: what the script's first steps on this machine measured.
    """
    markets = planned_markets(spec)
    if spec.prefer == GREEN:
        offers = greener_first(offers, lambda offer: machine_of(spec, offer))
    ladder = node_ladder(spec.nodes.min, spec.nodes.max)
    return JobPlan(
        name=spec.name,
        script=spec.script,
        args=tuple(shown_arguments(spec.args)),
        workdir=spec.workdir,
        store=spec.store,
        save_every=spec.save_every,
        market=str(spec.market),
        nodes=str(spec.nodes),
        nproc_per_node=spec.nproc_per_node,
        budget_usd=spec.budget_usd,
        allow_unknown_price=spec.allow_unknown_price,
        deadline_s=spec.deadline_s,
        start_at=spec.start_at,
        global_batch=batches and batches[0],
        micro_batch=batches and batches[1],
        candidates=tuple(
            _candidate(spec, offer, nodes, batches)
            for market in markets
            for nodes in ladder
            for offer in offers
            if offer.market is market
        ),
        rungs=tuple(_rung(nodes, spec.nproc_per_node, batches) for nodes in ladder if batches),
        span_h=_span_h(spec),
        on_demand=spec.on_demand,
        on_demand_infra=spec.on_demand_infra,
        prefer=spec.prefer,
        carbon=_carbon(spec, offers, markets),
        demo_prices=spec.infra == "local" and spec.price_usd_per_h is None,
        skipped=tuple(place for place in skipped if place.market in markets),
        prices=tuple(prices),
        unchecked=tuple(unchecked),
        not_installed=tuple(not_installed),
        forecast=forecast,
        smoke=smoke,
    )


def with_phases(job: JobSpec, plans: Sequence[JobPlan]) -> JobPlan:
    """Return the plan of a job with phases; `plans` are those of its phases.

    Nobody knows how long a phase is to last before its first step, so nothing is forecast.
    """
    phases = tuple(
        PhasePlan(
            phase=index + 1,
            until_step=job.phases[index].until_step,
            infra=spec.infra,
            gpus=spec.gpus,
            market=plan.market,
            nodes=plan.nodes,
            nproc_per_node=plan.nproc_per_node,
            demo_prices=plan.demo_prices,
            candidates=plan.candidates,
            skipped=plan.skipped,
        )
        for index, plan in enumerate(plans)
        for spec in [job.in_phase(index)]
    )
    played = all(plan.demo_prices for plan in plans)
    return replace(plans[0], phases=phases, demo_prices=played, forecast=None)


def _carbon(
    spec: JobSpec, offers: Sequence[Offer], markets: tuple[Market, ...]
) -> tuple[Factor, ...]:
    first = next((offer for offer in offers if offer.market is markets[0]), None)
    causes = None if first is None else draw(first.infra, first.region, machine_of(spec, first))
    return () if causes is None else causes.factors


def planned_markets(spec: JobSpec) -> tuple[Market, ...]:
    """Return the markets in which nodes may be bought, the preferred one first."""
    if spec.market is Market.SPOT and spec.on_demand != "never":
        return (Market.SPOT, Market.ON_DEMAND)
    return (spec.market,)


def machine_of(spec: JobSpec, offer: Offer) -> NodeDevices:
    """Return what a node that is offered to the job is made of, as far as they say."""
    return machine(
        offer.gpus or spec.gpus,
        spec.node.cpus,
        processes=spec.nproc_per_node,
        is_local=spec.infra == "local",
    )


def _span_h(spec: JobSpec) -> float:
    return SPAN_H if spec.deadline_s is None else spec.deadline_s / 3600


def _interruptions(spec: JobSpec, offer: Offer, hours: float | None) -> float | None:
    if offer.market is Market.ON_DEMAND:
        return 0.0
    if offer.infra not in CLOUDS_THAT_TAKE:
        return None
    span_h = _span_h(spec)
    return expected_interruptions(span_h if hours is None else min(span_h, hours))


def _candidate(
    spec: JobSpec, offer: Offer, nodes: int, batches: tuple[int, int] | None
) -> Candidate:
    rate = rate_usd_per_h(offer.price_usd_per_h, nodes)
    on_demand_rate = rate_usd_per_h(offer.on_demand_usd_per_h, nodes)
    hours = hours_bought(spec.budget_usd, rate)
    interruptions = _interruptions(spec, offer, hours)
    causes = draw(offer.infra, offer.region, machine_of(spec, offer))
    return Candidate(
        infra=offer.infra,
        region=offer.region,
        zone=offer.zone,
        instance_type=offer.instance_type,
        gpus=offer.gpus,
        market=str(offer.market),
        nodes=nodes,
        price_usd_per_h=offer.price_usd_per_h,
        rate_usd_per_h=rate,
        on_demand_rate_usd_per_h=on_demand_rate,
        saved_pct=saved_pct(rate, on_demand_rate),
        hours_bought=hours,
        accumulation=batches and _rung(nodes, spec.nproc_per_node, batches).accumulation,
        interruptions=interruptions,
        interruptions_usd=cost_usd(rate, None if interruptions is None else interruptions * LOST_S),
        co2e_g_per_h=None if causes is None else causes.g_per_h * nodes,
    )


def _rung(nodes: int, nproc_per_node: int, batches: tuple[int, int]) -> Rung:
    global_batch, micro_batch = batches
    step = BatchPlan(
        global_batch=global_batch, micro_batch=micro_batch, world_size=nodes * nproc_per_node
    )
    return Rung(
        nodes=nodes,
        ranks=step.world_size,
        micro_batches=step.micro_batches,
        accumulation=step.accumulation,
        least=step.least,
        idle_ranks=step.idle_ranks,
        busy_pct=100 * step.busy,
        last_samples=split_micro_batches(global_batch, micro_batch)[-1],
    )
