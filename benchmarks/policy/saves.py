"""What periodic saves and interruptions waste on recorded lifetimes, by where the hazard is from.

Each stretch for which a gang could be had is one attempt that saves by Young's rule at its age; a
save takes 30 s in which nothing is trained, and what was trained since the last one is lost at the
end of the stretch, which falls anywhere into its last tick. No notice helps. Rates are fitted on
one half of a record, lifetimes are those of the other. The last column knows more than anybody can:
it saves by the best schedule for the rates by age of the judged lifetimes themselves.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from benchmarks.policy.windows import H100, V100, V100X4, interval
from spotguard.policy.market.hazard import HALF_LIFE_S, fitted, loss_level, taken_by_age
from spotguard.policy.market.recorded import recorded
from spotguard.runtime.checkpoint.save_schedule import LONGEST_S, best_interval_s
from spotguard.shared.hazard import HazardByAge

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from spotguard.policy.market.hazard import Hazard

SAVE_S = 30.0
_ENDS = 8
LEAST_S = 600.0
"""Stretches shorter than a start train nothing."""
STEP_S, LATEST_S, LONGEST_LIFE_S = 10.0, 5400.0, 260 * 3600.0
"""Of the best schedule: how finely it is looked for, its longest wait, and its end of time."""


class Life(NamedTuple):
    """One stretch, and what was seen of its zone before."""

    length_s: float
    gap_s: float
    taken: float
    expected: float
    day: int


def saves_table(half: str) -> None:
    """Print the share of time that is wasted, per market and rule."""
    names = ("one for all", "by GPU and gang", "and what was seen", "best for their rates")
    print(
        f"{half} lifetimes, a save takes {SAVE_S:g} s: time lost to saves and to doing work again "
        "[95 %]"
    )
    print(f"{'market':10}" + "".join(f"{name:>22}" for name in names) + f"{'lives':>8}{'hours':>8}")
    for name, dataset, gang in (
        ("V100x1", V100, 1),
        ("V100x4", V100X4, 4),
        ("H100x8", H100, 8),
        ("H100x16", H100, 16),
    ):
        zones = recorded(dataset)
        middle = min(len(zone.capacity) for zone in zones) // 2
        judged = slice(middle, None) if half == "held" else slice(0, middle)
        other = slice(0, middle) if half == "held" else slice(middle, None)
        states = [(zone.capacity >= gang, zone.gap_s) for zone in zones]
        level = loss_level([(up[other], gap_s) for up, gap_s in states])
        lives = [
            life for up, gap_s in states for life in _lives(up[judged], gap_s, taken_by_age(level))
        ]
        best = _best_for(fitted([(up[judged], gap_s) for up, gap_s in states], "their own"))
        rules: list[Callable[[Life], Callable[[float], float]]] = [
            lambda _: _young(HazardByAge()),
            lambda _, level=level: _young(taken_by_age(level)),  # type: ignore[misc]
            partial(_of_zone, level),
            lambda _, best=best: best,  # type: ignore[misc]
        ]
        cells = [_wasted(lives, rule) for rule in rules]
        hours = sum(life.length_s for life in lives) / 3600
        print(
            f"{name:10}"
            + "".join(f"{cell:>22}" for cell in cells)
            + f"{len(lives):>8}{hours:>8.0f}",
            flush=True,
        )


def _young(hazard: HazardByAge) -> Callable[[float], float]:
    return lambda age_s: min(best_interval_s(SAVE_S, age_s, hazard), LONGEST_S)


def _of_zone(level: float, life: Life) -> Callable[[float], float]:
    return _young(taken_by_age(level, taken=life.taken, expected=life.expected))


def _best_for(hazard: Hazard) -> Callable[[float], float]:
    """Return the seconds until the next save, by age, that leave most work to count.

    From the end of time backwards: the work up to a save counts if its nodes live until it is done.
    """
    waits_s = np.arange(STEP_S, LATEST_S + STEP_S, STEP_S)
    reach = ((waits_s + SAVE_S) / STEP_S).astype(int)
    ages = int(LONGEST_LIFE_S / STEP_S)
    alive = np.zeros(ages + reach[-1] + 1)
    alive[:ages] = np.exp(-hazard.cumulative_many(1, np.arange(ages) * STEP_S))
    value = np.zeros_like(alive)
    best_s = np.zeros(ages)
    for age in range(ages - 1, -1, -1):
        counts = waits_s * alive[age + reach] + value[age + reach]
        choice = int(counts.argmax())
        value[age], best_s[age] = counts[choice], waits_s[choice]
    return lambda age_s: float(best_s[min(int(age_s / STEP_S), ages - 1)])


def _lives(up: NDArray[np.bool_], gap_s: float, hazard: HazardByAge) -> list[Life]:
    """Return the stretches, each with what was seen of the zone before it."""
    flips = np.flatnonzero(np.diff(up.astype(np.int8))) + 1
    edges = [0, *(int(each) for each in flips), len(up)]
    taken = expected = 0.0
    lives = []
    for begin, end in pairwise(edges):
        length_s = (end - begin) * gap_s
        if up[begin] and length_s > LEAST_S:
            day = int(begin * gap_s // 86_400)
            lives.append(Life(length_s, gap_s, taken, expected, day))
        keep = 0.5 ** (length_s / HALF_LIFE_S)
        taken, expected = taken * keep, expected * keep
        if up[begin]:
            taken += end < len(up)
            ages_s = (np.arange(end - begin) + 0.5) * gap_s
            expected += sum(hazard.per_h(float(age_s)) for age_s in ages_s) * gap_s / 3600
    return lives


def _wasted(lives: Sequence[Life], rule: Callable[[Life], Callable[[float], float]]) -> str:
    """Return the share that is wasted, with the interval from a bootstrap over days."""
    wasted, total = np.zeros(len(lives)), np.zeros(len(lives))
    for index, life in enumerate(lives):
        wait_s = rule(life)
        for end in range(_ENDS):
            length_s = life.length_s - life.gap_s * (end + 0.5) / _ENDS
            wasted[index] += _wasted_s(length_s, wait_s)
            total[index] += length_s
    low, high = interval(wasted, np.array([life.day for life in lives]), total)
    return f"{100 * wasted.sum() / total.sum():.1f} % [{100 * low:.1f} {100 * high:.1f}]"


def _wasted_s(life_s: float, wait_s: Callable[[float], float]) -> float:
    """Return the time of one life that trained nothing that counts."""
    age_s = useful_s = 0.0
    while True:
        interval_s = wait_s(age_s)
        if age_s + interval_s + SAVE_S > life_s:
            return life_s - useful_s
        age_s += interval_s + SAVE_S
        useful_s += interval_s
