"""What periodic saves and interruptions waste on recorded lifetimes, by where the hazard is from.

Each stretch for which a gang could be had is one attempt that saves by Young's rule at its age; a
save takes 30 s in which nothing is trained, and what was trained since the last one is lost at the
end of the stretch, which falls anywhere into its last tick. No notice helps. Rates are fitted on
the first half of a record, lifetimes are those of the second.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from benchmarks.policy.windows import H100, V100, V100X4
from spotguard.policy.market.hazard import HALF_LIFE_S, loss_level, taken_by_age
from spotguard.policy.market.recorded import recorded
from spotguard.runtime.checkpoint.save_schedule import LONGEST_S, best_interval_s
from spotguard.shared.hazard import HazardByAge

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from numpy.typing import NDArray

SAVE_S = 30.0
_ENDS = 8
LEAST_S = 600.0
"""Stretches shorter than a start train nothing."""


class Life(NamedTuple):
    """One stretch, and what was seen of its zone before."""

    length_s: float
    gap_s: float
    taken: float
    expected: float


def saves_table() -> None:
    """Print the share of time that is wasted, per market and rule."""
    names = ("one for all", "by GPU and gang", "and what was seen")
    print(f"held lifetimes, a save takes {SAVE_S:g} s: time lost to saves and to doing work again")
    print(f"{'market':12}" + "".join(f"{name:>20}" for name in names) + f"{'lives':>8}{'hours':>8}")
    for name, dataset, gang in (
        ("V100x1", V100, 1),
        ("V100x4", V100X4, 4),
        ("H100x8", H100, 8),
        ("H100x16", H100, 16),
    ):
        zones = recorded(dataset)
        half = min(len(zone.capacity) for zone in zones) // 2
        states = [(zone.capacity >= gang, zone.gap_s) for zone in zones]
        level = loss_level([(up[:half], gap_s) for up, gap_s in states])
        lives = [_lives(up[half:], gap_s, taken_by_age(level)) for up, gap_s in states]
        rules: list[Callable[[Life], HazardByAge]] = [
            lambda _: HazardByAge(),
            partial(_of_record, level),
            partial(_of_zone, level),
        ]
        cells = [_wasted(lives, rule) for rule in rules]
        count = sum(map(len, lives))
        hours = sum(life.length_s for zone in lives for life in zone) / 3600
        print(
            f"{name:12}" + "".join(f"{100 * cell:>18.1f} %" for cell in cells) + f"{count:>8}"
            f"{hours:>8.0f}",
            flush=True,
        )


def _of_record(level: float, _: Life) -> HazardByAge:
    return taken_by_age(level)


def _of_zone(level: float, life: Life) -> HazardByAge:
    return taken_by_age(level, taken=life.taken, expected=life.expected)


def _lives(up: NDArray[np.bool_], gap_s: float, hazard: HazardByAge) -> list[Life]:
    """Return the stretches, each with what was seen of the zone before it."""
    flips = np.flatnonzero(np.diff(up.astype(np.int8))) + 1
    edges = [0, *(int(each) for each in flips), len(up)]
    taken = expected = 0.0
    lives = []
    for begin, end in pairwise(edges):
        length_s = (end - begin) * gap_s
        if up[begin] and length_s > LEAST_S:
            lives.append(Life(length_s, gap_s, taken, expected))
        keep = 0.5 ** (length_s / HALF_LIFE_S)
        taken, expected = taken * keep, expected * keep
        if up[begin]:
            taken += end < len(up)
            ages_s = (np.arange(end - begin) + 0.5) * gap_s
            expected += sum(hazard.per_h(float(age_s)) for age_s in ages_s) * gap_s / 3600
    return lives


def _wasted(lives: Iterable[list[Life]], rule: Callable[[Life], HazardByAge]) -> float:
    wasted = total = 0.0
    for zone in lives:
        for life in zone:
            hazard = rule(life)
            for end in range(_ENDS):
                length_s = life.length_s - life.gap_s * (end + 0.5) / _ENDS
                wasted += _wasted_s(length_s, hazard)
                total += length_s
    return wasted / total


def _wasted_s(life_s: float, hazard: HazardByAge) -> float:
    """Return the time of one life that trained nothing that counts."""
    age_s = useful_s = 0.0
    while True:
        interval_s = min(best_interval_s(SAVE_S, age_s, hazard), LONGEST_S)
        if age_s + interval_s + SAVE_S > life_s:
            return life_s - useful_s
        age_s += interval_s + SAVE_S
        useful_s += interval_s
