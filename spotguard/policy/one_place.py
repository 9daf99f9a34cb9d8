"""One spot place alone: when to wait, when to pay, and when to return, by the least expected cost.

With one place there is no price to choose. From the deadline backwards, for all amounts of work,
for what runs, and for how long the place has had nodes or none, the choice is found that costs
least on average, where nodes are taken and come back at rates by age. A start is work to be done
again, wherever it was begun.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from spotguard.policy.market.hazard import AGE_EDGES_S

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from spotguard.policy.market.hazard import Hazard

SPOT, OVER, NOTHING = 0, 1, 2
"""What runs: spot nodes, on-demand nodes, none."""
STEP_S = 600.0
"""Decisions are planned in steps of ten minutes, of twenty where those would be too many."""
STEPS = 288
"""So many at most: four days. What ends later is left to the rollouts."""
_SIZES = (36, 72, 144, 216, STEPS)
"""Plans are made for so many steps, so that one serves many decisions."""
_FINE = 3
"""Units of work in a step."""
_RATIO = 1.05
"""Prices that differ by less share a plan."""
_DEAREST = 1e6
"""Where on demand costs more than so many times as much, spot is next to free."""
_LATE_USD = 1e4
"""Of each unit of work that the deadline leaves undone, where spot costs a dollar a unit."""


@dataclass(frozen=True, kw_only=True)
class OnePlacePlan:
    """The best choice by steps left, units of work, what runs, the place's state and its age."""

    best: NDArray[np.int8]
    step_s: float

    def wanted(
        self, *, left_s: Any, work_s: Any, running: Any, up: Any, age_s: Any
    ) -> NDArray[np.int64]:
        """Return what is to run now: `SPOT`, `OVER` or `NOTHING`.

        Args:
            left_s: until the deadline.
            work_s: with what is left of a start.
            running: what runs, in the same words.
            up: whether the place has nodes.
            age_s: for how long it has had them, or none.
        """
        steps, units = self.best.shape[:2]
        left = np.clip(np.floor(np.asarray(left_s) / self.step_s + 1e-9), 0, steps - 1)
        work = np.ceil(np.asarray(work_s) / self.step_s * _FINE - 1e-6)
        age = np.searchsorted(AGE_EDGES_S, np.asarray(age_s), side="right") - 1
        index = (left.astype(int), np.clip(work, 0, units - 1).astype(int), running, up, age)
        chosen: NDArray[np.int8] = self.best[tuple(np.asarray(each, dtype=int) for each in index)]
        return chosen.astype(np.int64)


def plan_for(
    hazard: Hazard,
    *,
    spot: float,
    on_demand: float,
    left_s: float,
    work_s: float,
    start_s: float,
    tick_s: float,
) -> OnePlacePlan | None:
    """Return the plan that holds for this deadline and work; None if they are too far away.

    None, too, where a start takes longer than any plan, and where spot is next to free.

    Args:
        hazard: rates of being taken and of coming back, by age.
        spot: price.
        on_demand: price, in the same unit.
        left_s: until the deadline.
        work_s: that is left.
        start_s: from buying to progress.
        tick_s: between two decisions.
    """
    step_s = max(STEP_S, tick_s)
    if max(left_s, work_s) > STEPS * step_s:
        step_s *= 2
    steps = next((each for each in _SIZES if left_s <= each * step_s), None)
    works = next((each for each in _SIZES if work_s <= each * step_s), None)
    if steps is None or works is None or start_s > STEPS * step_s:
        return None
    if spot <= 0 or on_demand > _DEAREST * spot:
        return None
    return _planned(
        hazard.per_h.tobytes(),
        _RATIO ** round(math.log(on_demand / spot, _RATIO)),
        round(start_s / step_s * _FINE),
        step_s,
        steps,
        works * _FINE,
    )


@lru_cache(maxsize=32)
def _planned(
    rates: bytes, ratio: float, start: int, step_s: float, steps: int, units: int
) -> OnePlacePlan:
    """Return the plan; a price of one is spot's, of `ratio` that on demand."""
    per_h = np.frombuffer(rates).reshape(2, -1)
    flip = -np.expm1(-per_h * step_s / 3600)
    grows = np.append(np.minimum(1.0, step_s / np.diff(AGE_EDGES_S)), 0.0)
    amount = np.arange(units + start + 1)
    fresh = np.minimum(amount + start, amount[-1])
    fresh[0] = 0
    value = np.empty((len(amount), 3, 2, len(AGE_EDGES_S)))
    value[:] = (_LATE_USD * amount)[:, None, None, None]
    best = np.full((steps + 1, *value.shape), NOTHING, dtype=np.int8)
    best[0] = OVER
    best[0, :, SPOT, 1] = SPOT  # nodes that run are kept as long as the guard lets them
    options = np.empty((3, *value.shape))
    for step in range(1, steps + 1):
        later = _expected(value, flip, grows)
        options[NOTHING] = later[:, None, NOTHING]
        for kind, price in ((SPOT, 1.0), (OVER, ratio)):
            begun = _bought(later[:, kind], fresh, price)
            options[kind] = begun[:, None]
            options[kind][:, kind] = _bought(later[:, kind], amount, price)
        options[SPOT][:, :, 0] = np.inf
        best[step] = options.argmin(0)
        value = options.min(0)
    return OnePlacePlan(best=best, step_s=step_s)


def _bought(
    later: NDArray[np.float64], work: NDArray[np.int64], price: float
) -> NDArray[np.float64]:
    """Return the cost of a step on nodes, and of all that comes after it."""
    paid = price * np.minimum(work, _FINE)
    rest: NDArray[np.float64] = later[np.maximum(work - _FINE, 0)]
    return paid[:, None, None] + rest


def _expected(
    value: NDArray[np.float64], flip: NDArray[np.float64], grows: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the mean over what the place may do in a step: shape (units, 3, 2, ages)."""
    older = np.concatenate((value[..., 1:], value[..., -1:]), axis=-1)
    stays = (1 - flip) * (value + grows * (older - value))
    changed: NDArray[np.float64] = stays + flip * value[:, :, ::-1, :1]
    changed[:, SPOT, 1] = stays[:, SPOT, 1] + flip[1] * value[:, NOTHING, 0, :1]
    changed[:, SPOT, 0] = changed[:, NOTHING, 0]
    return changed
