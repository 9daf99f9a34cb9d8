"""What a launch would do and cost: the table of `spotguard plan` and of the confirm screen."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from spotguard.batching import BatchPlan, split_micro_batches
from spotguard.plan.ladder import node_ladder
from spotguard.plan.money import hours_bought, rate_usd_per_h, saved_pct

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spotguard.launch.base import Offer
    from spotguard.spec.model import JobSpec

SCHEMA = 1


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
    hours_bought: float | None
    """How long the budget lasts; None also without a budget."""
    accumulation: int | None
    """Micro-batches that the busiest rank accumulates; None when the script does not say."""

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
class JobPlan:
    """What would be launched: the candidates in the order in which they would be tried."""

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
    deadline_s: float | None
    global_batch: int | None
    micro_batch: int | None
    candidates: tuple[Candidate, ...]
    rungs: tuple[Rung, ...] = ()
    """A step on each number of nodes; none when nobody says the batch sizes."""

    def to_json(self) -> dict[str, Any]:
        """Return the schema-versioned object of `plan --json`."""
        return {"schema": SCHEMA, **asdict(self)}


def plan_job(
    spec: JobSpec, offers: Sequence[Offer], *, batches: tuple[int, int] | None = None
) -> JobPlan:
    """Return the plan for `spec` with these offers.

    Args:
        spec: what to run.
        offers: the places, best first; those of another market than the spec's are left out.
        batches: global batch and micro-batch, if the script or the command line says them.
    """
    ladder = node_ladder(spec.nodes.min, spec.nodes.max)
    return JobPlan(
        name=spec.name,
        script=spec.script,
        args=spec.args,
        workdir=spec.workdir,
        store=spec.store,
        save_every=spec.save_every,
        market=str(spec.market),
        nodes=str(spec.nodes),
        nproc_per_node=spec.nproc_per_node,
        budget_usd=spec.budget_usd,
        deadline_s=spec.deadline_s,
        global_batch=batches and batches[0],
        micro_batch=batches and batches[1],
        candidates=tuple(
            _candidate(spec, offer, nodes, batches)
            for nodes in ladder
            for offer in offers
            if offer.market is spec.market
        ),
        rungs=tuple(_rung(nodes, spec.nproc_per_node, batches) for nodes in ladder if batches),
    )


def _candidate(
    spec: JobSpec, offer: Offer, nodes: int, batches: tuple[int, int] | None
) -> Candidate:
    rate = rate_usd_per_h(offer.price_usd_per_h, nodes)
    on_demand_rate = rate_usd_per_h(offer.on_demand_usd_per_h, nodes)
    return Candidate(
        infra=offer.infra,
        region=offer.region,
        zone=offer.zone,
        instance_type=offer.instance_type,
        market=str(offer.market),
        nodes=nodes,
        price_usd_per_h=offer.price_usd_per_h,
        rate_usd_per_h=rate,
        on_demand_rate_usd_per_h=on_demand_rate,
        saved_pct=saved_pct(rate, on_demand_rate),
        hours_bought=hours_bought(spec.budget_usd, rate),
        accumulation=batches and _rung(nodes, spec.nproc_per_node, batches).accumulation,
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
