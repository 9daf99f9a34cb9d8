"""What a policy is told: the job, the places, what was seen of them and when."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from spotguard.policy.action import SPOT

NEVER = math.inf


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What is known of a place's spot nodes. Times are seconds before now."""

    up: bool = False
    """Whether as many nodes as the job needs could be had when it was last seen."""
    nodes: int | None = None
    """How many answered then; None if only whether they did is known."""
    age_s: float = 0.0
    """How long that had lasted then."""
    nodes_age_s: tuple[float, ...] = ()
    """For how long so many nodes had answered then: the first is of one node; empty if unknown."""
    unseen_s: float = NEVER
    """How long ago that was: 0 is now, infinite is never."""
    came: float = 0.0
    """Returns seen, the older the less."""
    came_expected: float = 0.0
    """Returns that the pooled rates would have led to expect meanwhile."""
    taken: float = 0.0
    taken_expected: float = 0.0
    lied: float = 0.0
    """Own nodes that were taken, and the place answered again at once; the older the less."""
    lived_h: float = 0.0
    """Hours that own spot nodes have lived here, the older the less."""

    @property
    def answers(self) -> bool | None:
        """Whether nodes can be had now; None if nobody asked now."""
        return self.up if self.unseen_s == 0 else None


@dataclass(frozen=True, kw_only=True)
class MarketPlace:
    """Where nodes can be bought. Prices are USD per node and hour."""

    name: str
    spot_usd_per_h: float | None = None
    """None: no spot nodes here."""
    on_demand_usd_per_h: float | None = None
    """None: no on-demand nodes here."""
    move_usd: float = 0.0
    """To bring the checkpoint here from where it is, once, for all nodes."""
    seen: Seen = field(default_factory=Seen)


@dataclass(frozen=True, kw_only=True)
class Running:
    """What runs now."""

    place: str
    market: str
    nodes: int
    starting_s: float = 0.0
    """Until it makes progress."""


@dataclass(frozen=True, kw_only=True)
class JobState:
    """What is to be done."""

    work_left_s: float
    """Seconds of training that are left, on `nodes` nodes."""
    left_s: float | None
    """Seconds until the deadline; None if there is none."""
    start_s: float
    """Seconds from buying to progress, its 95th percentile."""
    guard_start_s: float | None = None
    """What the guard reckons a start with, where that is more: one that takes whole ticks."""
    reserve_s: float = 0.0
    """Kept by the guard beyond a start: for ticks that do not end with the deadline, for work that
    an interruption undoes."""
    undone_s: float = 0.0
    """Work that an interruption undoes, on average."""
    nodes: int = 1
    """Of a gang. With elastic nodes: the most."""
    nodes_min: int | None = None
    """The fewest elastic nodes; None for a fixed gang."""
    alpha: float = 0.9
    """n nodes train n ** alpha times as fast as one."""
    budget_left_usd: float | None = None
    """None: no budget."""
    accelerator: str = ""
    gpus: int = 1
    """Of a node: records are of nodes with one each."""
    on_demand: bool = True
    """Whether on-demand nodes may be bought to keep the deadline."""
    max_usd_per_h: float | None = None
    """No node that costs more is bought as spot."""


@dataclass(frozen=True, kw_only=True)
class View:
    """All that `decide` is told."""

    job: JobState
    places: tuple[MarketPlace, ...]
    running: Running | None = None
    tick_s: float = 600.0
    """Seconds until the next decision is due."""
    gap_s: float = 0.0
    """The longest time between two decisions so far, where one came late."""

    @property
    def until_next_s(self) -> float:
        """The longest that it may take until the next decision, as far as was seen."""
        return max(self.tick_s, self.gap_s)

    @property
    def spot_places(self) -> tuple[MarketPlace, ...]:
        """The places whose spot price is known and within the maximum, and where spot nodes run."""
        most = self.job.max_usd_per_h
        return tuple(
            place
            for place in self.places
            if place.spot_usd_per_h is not None
            and (most is None or place.spot_usd_per_h <= most or self._runs_on(place))
        )

    def _runs_on(self, place: MarketPlace) -> bool:
        running = self.running
        return running is not None and running.market == SPOT and running.place == place.name
