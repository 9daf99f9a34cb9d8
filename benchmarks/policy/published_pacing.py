"""Priced pacing as it was first written down, to compare ours with.

`lambda = kappa alpha n^(alpha - 1) / p` is what a dollar must earn; of each place the number of
nodes is taken whose `f(m) max(L - r, 0) / L - lambda m p` is greatest, with `L` the expected life
of the place at its age and `r` a start. A change has to gain more than a start costs within the
life, six hours, or the time left.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from spotguard.policy.market.hazard import pooled

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from spotguard.policy.market.recorded import RecordedZone

KAPPA, FADED, MOST, AHEAD_H = 0.8, 0.3, 1.2, 6.0
_STEP_H, _OLDEST_H, _LONGEST_H = 1 / 6, 72.0, 96.0


class Bought(NamedTuple):
    """So many nodes of a place; None is on demand."""

    zone: int | None
    nodes: int


@dataclass
class PublishedPacing:
    """The rule for one market; asked once a tick, it knows nothing of later ones."""

    zones: Sequence[RecordedZone]
    most: int
    alpha: float
    start_h: float

    def __post_init__(self) -> None:
        """Get ready: the expected life by age, of one node."""
        hazard = pooled(self.zones[0].accelerator, 1)
        grid_s = (np.arange(_STEP_H, _LONGEST_H, _STEP_H) - _STEP_H / 2) * 3600
        ages_s = np.arange(0, _OLDEST_H, _STEP_H) * 3600
        self._lives_h = [
            float(
                np.exp(hazard.cumulative(1, age) - hazard.cumulative_many(1, age + grid_s)).sum()
                * _STEP_H
            )
            for age in ages_s
        ]
        self._on_demand = min(zone.on_demand_usd_per_h for zone in self.zones)

    def price(self, zone: int | None, at: int) -> float:
        """Return what a node costs an hour there."""
        return self._on_demand if zone is None else float(self.zones[zone].spot_usd_per_h[at])

    def choice(self, at: int, left_h: float, usd: float, running: Bought | None) -> Bought | None:
        """Return what to be on in the tick `at`, of what can be paid for its length."""
        gap_h = self.zones[0].gap_s / 3600
        places: list[int | None] = [*range(len(self.zones)), None]
        dollar, rate = self._dollar(min(self.price(each, at) for each in places), left_h, usd)
        best, best_value, best_life_h = None, 0.0, 0.0
        for place in places:
            price, there = self.price(place, at), self.most
            if place is not None:
                there = min(there, int(self.zones[place].capacity[at]))
            life_h = self._life_h(place, at)
            for nodes in range(1, min(there, round(MOST * rate / price)) + 1):
                useful = max(life_h - self.start_h, 0.0) / life_h
                value = nodes**self.alpha * useful - dollar * nodes * price
                if nodes * price * gap_h <= usd and value > best_value:
                    best, best_value, best_life_h = Bought(place, nodes), value, life_h
        if running is None or running.nodes * self.price(running.zone, at) * gap_h > usd:
            return best
        if best is None or best == running:
            return running
        gain = self._rate_of(best, dollar, at) - self._rate_of(running, dollar, at)
        pays = gain * min(best_life_h, AHEAD_H, left_h) > best.nodes**self.alpha * self.start_h
        return best if pays else running

    def _dollar(self, least: float, left_h: float, usd: float) -> tuple[float, float]:
        rate = usd / left_h
        nodes = min(max(rate / least, 1.0), float(self.most))
        full: float = KAPPA * self.alpha * nodes ** (self.alpha - 1) / least
        plenty = min(max((rate / (least * self.most) - 0.5) / 0.5, 0.0), 1.0)
        return full * (1 - (1 - FADED) * plenty), rate

    def _rate_of(self, bought: Bought, dollar: float, at: int) -> float:
        speed: float = bought.nodes**self.alpha
        return speed - dollar * bought.nodes * self.price(bought.zone, at)

    def _life_h(self, zone: int | None, at: int) -> float:
        if zone is None:
            return 1e9
        up: NDArray[np.bool_] = self.zones[zone].capacity[: at + 1] > 0
        gone = np.flatnonzero(~up)
        age_h = (at - (int(gone[-1]) if len(gone) else -1)) * self.zones[zone].gap_s / 3600
        return self._lives_h[min(int(age_h / _STEP_H), len(self._lives_h) - 1)]


def published_work(
    zones: Sequence[RecordedZone],
    begin: int,
    ticks: int,
    rule: PublishedPacing,
    usd: float,
) -> float:
    """Return the work that it does in a window, in node-hours of one node's speed."""
    gap_h = zones[0].gap_s / 3600
    running: Bought | None = None
    work = spent = starting_h = 0.0
    for at in range(begin, begin + ticks):
        if running is not None and running.zone is not None:
            left = min(running.nodes, int(zones[running.zone].capacity[at]))
            running = Bought(running.zone, left) if left else None
        left_h = (begin + ticks - at) * gap_h
        chosen = rule.choice(at, left_h, usd - spent, running)
        if chosen != running:
            starting_h = rule.start_h
        running = chosen
        if running is not None:
            spent += rule.price(running.zone, at) * running.nodes * gap_h
            work += running.nodes**rule.alpha * max(0.0, gap_h - starting_h)
            starting_h = max(0.0, starting_h - gap_h)
    return work
