from __future__ import annotations

import random

import pytest

from spotguard.shared.hazard import expected_interruptions, hazard_per_h


def _simulated(hours: float, runs: int = 1500) -> float:
    """Return the mean number of interruptions in runs played minute by minute."""
    chance = random.Random(1)
    count = 0
    for _ in range(runs):
        age_h = 0.0
        for _ in range(round(hours * 60)):
            if chance.random() < hazard_per_h(age_h * 3600) / 60:
                count, age_h = count + 1, 0.0
            else:
                age_h += 1 / 60
    return count / runs


@pytest.mark.parametrize("hours", [0.5, 3.0])
def test_expectations_are_what_happens(hours: float) -> None:
    """The renewal function agrees with a simulation of the same hazard."""
    assert expected_interruptions(hours) == pytest.approx(_simulated(hours), rel=0.1)


def test_expectations_grow_with_time() -> None:
    """None in no time, more in more, at a steady rate in the end."""
    hours = [0.0, 0.05, 0.1, 1.0, 10.0, 23.95, 24.0, 24.05, 48.0, 500.0]
    told = [expected_interruptions(h) for h in hours]
    assert told[0] == 0.0
    assert told == sorted(told)
    assert (told[-1] - told[-2]) / 452 == pytest.approx((told[-2] - told[-4]) / 24, rel=0.02)
