"""How often spot nodes are taken and come back: by age, by size of the gang, and by zone.

A zone's state (enough nodes for the gang, or not) changes with a rate that depends on how long it
has lasted. The rates are pooled over recorded zones; what one zone shows of its own is a factor on
them, its frailty, which follows a Gamma distribution around what was seen there.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from spotguard.policy.market.recorded import DATASETS, recorded, zones_of
from spotguard.shared.hazard import HazardByAge, hazard_per_h

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from spotguard.policy.market.recorded import RecordedZone


AGE_EDGES_S = np.array([0.0, 600, 1200, 2400, 4800, 9600, 19200, 38400, 76800])
"""From which age on each of the nine rates holds."""
SHAPE = 1.5
"""Of the frailty before anything was seen: its mean is 1, its variance 1 / SHAPE."""
HALF_LIFE_S = 86_400.0
"""After so long, what was seen of a zone counts half."""
_ROUNDS = 4
_LEAST_EXPOSURE_H = 0.5


@dataclass(frozen=True, kw_only=True)
class Hazard:
    """Rates per hour by age, shape (2, 9): row 0 of coming back, row 1 of being taken."""

    per_h: NDArray[np.float64]
    source: str
    """Which records it rests on, in words."""

    def scaled(self, *, back: float, taken: float) -> Hazard:
        """Return the rates of a place that changes so many times as often as the records."""
        return Hazard(per_h=self.per_h * np.array([[back], [taken]]), source=self.source)

    def cumulative(self, state: int, age_s: float) -> float:
        """Return the changes to be expected in the first `age_s` seconds of a state."""
        return float(self.cumulative_many(state, np.array([age_s]))[0])

    def cumulative_many(self, state: int, age_s: NDArray[Any]) -> NDArray[np.float64]:
        """Return the same for many ages."""
        widths = np.append(np.diff(AGE_EDGES_S), np.inf)
        spans_h = np.clip(age_s[:, None] - AGE_EDGES_S, 0.0, widths) / 3600
        total: NDArray[np.float64] = spans_h @ self.per_h[state]
        return total

    def step_table(self, step_s: float, steps: int) -> NDArray[np.float64]:
        """Return the expected changes in a step, by state and age in steps: shape (2, steps)."""
        middle_s = (np.arange(steps) + 0.5) * step_s
        bins = np.searchsorted(AGE_EDGES_S, middle_s, side="right") - 1
        table: NDArray[np.float64] = self.per_h[:, bins] * (step_s / 3600)
        return table


def pooled(accelerator: str, gang: int) -> Hazard:
    """Return the rates for gangs of so many nodes, from the zones recorded for the accelerator.

    Where there are none for it, all recorded zones speak for it; where no record is large enough,
    the largest gang that was recorded does. Gangs with the same rates get the same object.
    """
    return _pooled(accelerator, min(gang, _largest(accelerator)))


@lru_cache(maxsize=64)
def _pooled(accelerator: str, gang: int) -> Hazard:
    zones, source = speaking_zones(accelerator)
    enough = [zone for zone in zones if zone.nodes_max >= gang]
    return fitted([(zone.capacity >= gang, zone.gap_s) for zone in enough], f"{source} x {gang}")


@lru_cache(maxsize=64)
def _largest(accelerator: str) -> int:
    return max(zone.nodes_max for zone in speaking_zones(accelerator)[0])


def speaking_zones(accelerator: str) -> tuple[tuple[RecordedZone, ...], str]:
    """Return the zones that speak for an accelerator, and what they are in words."""
    zones = zones_of(accelerator)
    if zones:
        return zones, accelerator
    return (
        tuple(zone for name in DATASETS for zone in recorded(name)),
        "all recorded accelerators",
    )


def fitted(states: Sequence[tuple[NDArray[np.bool_], float]], source: str) -> Hazard:
    """Return the rates that explain recorded states best.

    Args:
        states: of each zone, whether the gang could be had at each tick, and the tick in seconds.
        source: in words, where they are from.
    """
    counts = [_counted(up, gap_s) for up, gap_s in states]
    changes = np.array([each[0] for each in counts])  # (zones, 2, 9)
    exposure = np.array([each[1] for each in counts])
    frailty = np.ones((len(counts), 2))
    rates = np.zeros((2, len(AGE_EDGES_S)))
    for _ in range(_ROUNDS):
        weighted = (frailty[:, :, None] * exposure).sum(0)
        overall = changes.sum((0, 2)) / np.maximum(weighted.sum(1), _LEAST_EXPOSURE_H)
        prior_h = _LEAST_EXPOSURE_H
        rates = (changes.sum(0) + overall[:, None] * prior_h) / (weighted + prior_h)
        expected = (rates[None] * exposure).sum(2)
        frailty = (SHAPE + changes.sum(2)) / (SHAPE + expected)
        frailty /= frailty.mean(0, keepdims=True)
    return Hazard(per_h=np.maximum(rates, 1e-3), source=source)


def _counted(
    up: NDArray[np.bool_], gap_s: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the changes and the hours, by state and bin of age; both of shape (2, 9)."""
    changes = np.zeros((2, len(AGE_EDGES_S)))
    hours = np.zeros_like(changes)
    flips = np.flatnonzero(np.diff(up.astype(np.int8))) + 1
    begins = np.concatenate(([0], flips))
    for begin, end in zip(begins, [*flips, len(up)], strict=True):
        state = int(up[begin])
        ages_s = (np.arange(end - begin) + 0.5) * gap_s
        bins = np.searchsorted(AGE_EDGES_S, ages_s, side="right") - 1
        np.add.at(hours[state], bins, gap_s / 3600)
        if end < len(up):
            changes[state, bins[-1]] += 1
    return changes, hours


_RECORD_WORTH, _ZONE_WORTH = 8.0, 128.0
"""Losses that must be seen before a record, or a zone, counts as much as what stands before it. A
zone's losses of a day say little of its next ones: on recorded lifetimes 128 wastes no more than
16, or none at all, does, and 16 was 0.3 points of V100s' time worse (`benchmarks.policy`)."""
_AGE_MIDDLES_S = (300.0, 900.0, 1800.0, 3600.0, 7200.0, 14_400.0, 28_800.0, 57_600.0, 86_400.0)


def loss_level(states: Sequence[tuple[NDArray[np.bool_], float]]) -> float:
    """Return how many times as often nodes were taken as on average of all recorded markets.

    Args:
        states: as for `fitted`.
    """
    curve = np.array([hazard_per_h(age_s) for age_s in _AGE_MIDDLES_S])
    counts = [_counted(up, gap_s) for up, gap_s in states]
    taken = sum(float(changes[1].sum()) for changes, _ in counts)
    expected = sum(float((hours[1] * curve).sum()) for _, hours in counts)
    return (_RECORD_WORTH + taken) / (_RECORD_WORTH + expected)


@lru_cache(maxsize=64)
def recorded_level(accelerator: str, gang: int) -> float:
    """Return the same for the recorded zones of an accelerator; 1 where none was so large."""
    zones = [zone for zone in zones_of(accelerator) if zone.nodes_max >= gang]
    return loss_level([(zone.capacity >= gang, zone.gap_s) for zone in zones])


def taken_by_age(level: float, *, taken: float = 0.0, expected: float = 0.0) -> HazardByAge:
    """Return how often nodes are taken by age, for who plans saves.

    The shape over age is that of all records; the level is that of the market, corrected by what
    this place has shown of itself.

    Args:
        level: of the market, from `loss_level`.
        taken: losses that were seen in this place.
        expected: losses that were to be expected meanwhile.
    """
    factor = level * (_ZONE_WORTH + taken) / (_ZONE_WORTH + expected)
    return HazardByAge(
        tuple(
            (float(edge_s), hazard_per_h(age_s) * factor)
            for edge_s, age_s in zip(AGE_EDGES_S, _AGE_MIDDLES_S, strict=True)
        )
    )


class Evidence:
    """What zones have shown of themselves: changes seen and expected, the older the less.

    Arrays have any leading shape and a last axis of 2: row 0 of coming back, row 1 of being taken.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.changes = np.zeros((*shape, 2))
        self.expected = np.zeros((*shape, 2))

    def fade(self, elapsed_s: float) -> None:
        """Let what was seen count less."""
        keep = 0.5 ** (elapsed_s / HALF_LIFE_S)
        self.changes *= keep
        self.expected *= keep

    def gamma(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return shape and rate of the frailties' Gamma distributions."""
        return SHAPE + self.changes, SHAPE + self.expected
