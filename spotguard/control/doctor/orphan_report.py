"""What `doctor` finds in SkyPilot's books: clusters of spotguard's, their cost, who wants them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from spotguard.policy.plan import money
from spotguard.shared.json_documents import INSTANT
from spotguard.shared.units import format_duration, format_usd
from spotguard.storage.urls import below

if TYPE_CHECKING:
    from spotguard.launch.skypilot.cluster_list import OurCluster


class ClusterFate(str, Enum):
    """Whether anybody wants a cluster."""

    WANTED = "wanted"
    ORPHAN = "orphan"
    """Its run is at rest, or neither its controller nor its job gives a sign of life."""
    TRAINING = "training"
    """Its controller is silent, and its job trains on. Ended only by its name."""
    UNSURE = "unsure"
    """Who knows could not be asked. Ended only by its name."""


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What is known of who wants a cluster."""

    fate: ClusterFate
    why: str = ""
    run_goes_on: bool = False
    """This machine knows the run, which has not come to rest and is on this cluster."""
    adoptable: bool = False
    """The run can be brought to this machine, which does not know it or not its newest part."""
    training_at_step: int | None = None
    """The step of a job that gave a sign of life a moment ago; None if it is silent."""


@dataclass(frozen=True, kw_only=True)
class Leftover:
    """A cluster that costs money and that nobody is known to want."""

    cluster: OurCluster
    verdict: Judgement
    looked_at: float
    ended: bool = False
    problem: str = ""
    """Why it could not be ended."""

    @property
    def is_orphan(self) -> bool:
        """False if its job trains, or if nobody can say whether it is wanted."""
        return self.verdict.fate is ClusterFate.ORPHAN

    @property
    def training_at_step(self) -> int | None:
        """The step of a job that gave a sign of life a moment ago; None if it is silent."""
        return self.verdict.training_at_step

    @property
    def usd_per_h(self) -> float | None:
        """What all its nodes cost in an hour."""
        return money.rate_usd_per_h(self.cluster.price_usd_per_h, self.cluster.nodes)

    @property
    def age_s(self) -> float:
        """For how long its nodes have cost."""
        return max(0.0, self.looked_at - self.cluster.since)

    @property
    def cost_usd(self) -> float | None:
        """What it has cost, by the price at which it was launched."""
        return money.cost_usd(self.usd_per_h, self.age_s)

    @property
    def end_with(self) -> str:
        """The command that ends it."""
        if self.verdict.run_goes_on:
            return f"spotguard down {self.cluster.run_id}"
        if self.is_orphan:
            return f"sky down -y {self.cluster.name}"
        return f"spotguard doctor --end {self.cluster.name}"

    @property
    def keep_with(self) -> str:
        """The command by which its run goes on instead; empty if none does."""
        if self.verdict.run_goes_on:
            return f"spotguard status {self.cluster.run_id}"
        place = below(self.cluster.store, self.cluster.run_id)
        return f"spotguard adopt {place}" if self.verdict.adoptable else ""

    def words(self) -> str:
        """Return the whole finding in one sentence."""
        cluster = self.cluster
        nodes = f"{cluster.nodes} {'node' if cluster.nodes == 1 else 'nodes'}"
        machine = f"{nodes} ({cluster.instance_type})" if cluster.instance_type else nodes
        rate = "price unknown" if self.usd_per_h is None else f"{format_usd(self.usd_per_h)}/h"
        books = "" if cluster.sky_usd is None else f" (SkyPilot: {format_usd(cluster.sky_usd)})"
        trains = ""
        if self.training_at_step is not None:
            trains = f"; its job still trains, at step {self.training_at_step}"
        return (
            f"{cluster.name}: {machine} on {cluster.place} for {format_duration(self.age_s)}, "
            f"{rate}, {format_usd(self.cost_usd)} so far{books}; {self.verdict.why}{trains}"
        )

    def told(self) -> ListedCluster:
        """Return what `doctor --json` says of it."""
        cluster = self.cluster
        return ListedCluster(
            cluster=cluster.name,
            run_id=cluster.run_id,
            place=cluster.place,
            instance_type=cluster.instance_type,
            market=cluster.market,
            nodes=cluster.nodes,
            since=cluster.since,
            age_s=self.age_s,
            usd_per_h=self.usd_per_h,
            cost_usd=self.cost_usd,
            skypilot_usd=cluster.sky_usd,
            orphan=self.is_orphan,
            why=self.verdict.why,
            training_at_step=self.training_at_step,
            end_with=self.end_with,
            keep_with=self.keep_with,
            ended=self.ended,
            problem=self.problem,
        )


@dataclass(frozen=True, kw_only=True)
class ListedCluster:
    """A cluster in `doctor --json` that costs money and that nobody is known to want."""

    cluster: str
    """Its name at SkyPilot."""
    run_id: str
    place: str
    instance_type: str | None
    market: str | None
    nodes: int
    since: float = field(metadata=INSTANT)
    """From when on its nodes cost."""
    age_s: float
    """For how long they have."""
    usd_per_h: float | None
    """What all its nodes cost in an hour; None is unknown, never zero."""
    cost_usd: float | None
    """What it has cost, by the price at which it was launched."""
    skypilot_usd: float | None
    """The same by SkyPilot's books."""
    orphan: bool
    """False if its job trains, or if nobody can say whether it is wanted."""
    why: str
    """What is known of who wants it, in a sentence."""
    training_at_step: int | None
    """The step of a job that gave a sign of life a moment ago; None if it is silent."""
    end_with: str
    """The command that ends it."""
    keep_with: str
    """The command by which its run goes on instead; empty if none does."""
    ended: bool
    """Whether this command has ended it."""
    problem: str
    """Why it could not be ended."""


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What SkyPilot's books have of spotguard's."""

    asked: bool = False
    """False where SkyPilot is not installed or was never used: there is nothing to ask."""
    problem: str = ""
    """Why SkyPilot could not say it."""
    wanted: int = 0
    """Clusters that a living controller looks after."""
    leftovers: tuple[Leftover, ...] = ()

    @property
    def orphans(self) -> tuple[Leftover, ...]:
        """Those that nobody wants, and that are not ended yet."""
        return tuple(each for each in self.leftovers if each.is_orphan and not each.ended)

    def words(self) -> str:
        """Return how many orphans there are and what they cost, in words."""
        count = len(self.orphans)
        rates = [each.usd_per_h for each in self.orphans]
        known = [rate for rate in rates if rate is not None]
        cost = f"{format_usd(sum(known))}/h" if known else "money"
        more = " and more" if 0 < len(known) < count else ""
        them = "1 cluster that nobody wants costs"
        return f"{them if count == 1 else f'{count} clusters that nobody wants cost'} {cost}{more}"

    def told(self) -> ListedClusters:
        """Return what `doctor --json` says of them."""
        return ListedClusters(
            asked=self.asked,
            problem=self.problem,
            wanted=self.wanted,
            leftovers=tuple(each.told() for each in self.leftovers),
        )


@dataclass(frozen=True, kw_only=True)
class ListedClusters:
    """SkyPilot's books in `doctor --json`."""

    asked: bool
    """False where SkyPilot is not installed or was never used: there is nothing to ask."""
    problem: str
    """Why SkyPilot could not say it."""
    wanted: int
    """Clusters that a living controller looks after."""
    leftovers: tuple[ListedCluster, ...]
