"""How often spot nodes are taken, from recorded availability; and what to expect of a run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

_STEP_H = 0.1
_EXACT_H = 24.0
"""From here on, interruptions come at their long-run rate."""


def hazard_per_h(age_s: float) -> float:
    """Return the expected interruptions per hour of an attempt of this age.

    Recorded spot availability (AWS V100 2023, GCP H100 2025) shows about 1.7 per hour in the first
    half hour and 0.2 after four hours; in between it falls evenly on a logarithmic scale of time.
    """
    early_s, late_s, early, late = 1800.0, 14400.0, 1.7, 0.2
    if age_s <= early_s:
        return early
    if age_s >= late_s:
        return late
    share = math.log(age_s / early_s) / math.log(late_s / early_s)
    return float(early * (late / early) ** share)


@dataclass(frozen=True)
class HazardByAge:
    """Expected interruptions per hour by age; without rates of its own, those of all records."""

    rates: tuple[tuple[float, float], ...] = ()
    """(from which age on in seconds, per hour), by age."""

    def per_h(self, age_s: float) -> float:
        """Return the expected interruptions per hour of an attempt of this age."""
        known = [per_h for from_s, per_h in self.rates if from_s <= age_s]
        if known:
            return known[-1]
        return self.rates[0][1] if self.rates else hazard_per_h(age_s)

    def written(self) -> str:
        """Return the rates as `parse` reads them: `0:1.7,600:0.9`."""
        return ",".join(f"{from_s:g}:{per_h:.4g}" for from_s, per_h in self.rates)

    @classmethod
    def parse(cls, text: str) -> HazardByAge:
        """Return what was written; nothing at all is no rates.

        Raises:
            ValueError: an age or a rate is none, or the ages do not rise.
        """
        pairs = [item.split(":") for item in text.split(",") if item.strip()]
        if any(len(pair) != 2 for pair in pairs):
            raise ValueError(f"not rates by age: {text!r}")
        rates = tuple((float(from_s), float(per_h)) for from_s, per_h in pairs)
        for each in rates:
            if not (math.isfinite(each[0]) and math.isfinite(each[1])) or min(each) < 0:
                raise ValueError(f"not rates by age: {text!r}")
        if any(later[0] <= sooner[0] for sooner, later in pairwise(rates)):
            raise ValueError(f"the ages do not rise: {text!r}")
        return cls(rates)


def expected_interruptions(hours: float) -> float:
    """Return how many interruptions to expect in so many hours, each followed by a new attempt.

    A new attempt is young, and the young die early: so it is the renewal function of the hazard.
    """
    counts = _renewals()
    steps = hours / _STEP_H
    if steps >= len(counts) - 1:
        rate_per_h = (counts[-1] - counts[len(counts) // 2]) / (_EXACT_H / 2)
        return counts[-1] + rate_per_h * (hours - _EXACT_H)
    whole = int(steps)
    return counts[whole] + (steps - whole) * (counts[whole + 1] - counts[whole])


@lru_cache(maxsize=1)
def _renewals() -> tuple[float, ...]:
    """Return the expected number of interruptions after 0, 1, 2 … steps of time."""
    count = round(_EXACT_H / _STEP_H)
    alive, dies = 1.0, []
    for step in range(count):
        left = alive * math.exp(-hazard_per_h((step + 0.5) * _STEP_H * 3600) * _STEP_H)
        dies.append(alive - left)
        alive = left
    # An attempt that begins within a step is, on average, half a step old at its end.
    again = [dies[0] / 2, *((dies[i - 1] + dies[i]) / 2 for i in range(1, count))]
    rates: list[float] = []
    for step in range(count):
        later = sum(rate * again[step - k] for k, rate in enumerate(rates))
        rates.append((dies[step] + later) / (1 - again[0]))
    totals = [0.0]
    for rate in rates:
        totals.append(totals[-1] + rate)
    return tuple(totals)
