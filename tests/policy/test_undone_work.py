"""Interruptions that undo work: the guard keeps time for one like the worst before."""

from __future__ import annotations

import json
from typing import Any

import pytest

from spotguard.policy.decide import GREEDY
from spotguard.policy.protocol import driver_of

TICK_S = START_S = 600.0
WORK_S = 7200.0
FIRST = 5
"""At the end of so many ticks spot is taken first: more was done than any loss undoes."""


def _done_at_s(deadline_s: float, undone_s: float, back: int, second: int) -> float:
    """Return when the work is done, in whole ticks, where an adversary rules the one spot place.

    It is gone from `FIRST` to `back` and at `second`, and each time it undoes some work.
    """
    job = {"work_s": WORK_S, "deadline_s": deadline_s, "start_s": START_S, "rule": GREEDY}
    places = [{"name": "a", "spot_usd_per_h": 1, "on_demand_usd_per_h": 3}]
    driver = driver_of(json.dumps({"job": job, "places": places}))
    left_s, starting_s = WORK_S, 0.0
    running: dict[str, Any] | None = None
    for tick in range(40):
        up = not FIRST <= tick < back and tick != second
        if running is not None and running["market"] == "spot" and not up:
            running, left_s = None, left_s + undone_s
        told = {"tick": tick, "places": {"a": up}, "work_left_s": left_s, "running": running}
        action = json.loads(driver.tick(json.dumps(told)))
        if action["action"] in ("buy", "move"):
            running, starting_s = {"place": "a", "market": action["market"]}, START_S
        elif action["action"] in ("leave", "wait"):
            running = None
        if running is not None:
            left_s -= max(0.0, TICK_S - starting_s)
            starting_s = max(0.0, starting_s - TICK_S)
        if left_s <= 0:
            return (tick + 1) * TICK_S
    return float("inf")


@pytest.mark.slow
@pytest.mark.parametrize("deadline_s", [10_200.0, 11_400.0, 13_200.0])
@pytest.mark.parametrize("undone_s", [300.0, 600.0, 1200.0, 1500.0])
def test_the_same_loss_makes_nobody_late_twice(deadline_s: float, undone_s: float) -> None:
    """However long spot is away between two interruptions, and wherever the second comes."""
    for back in range(FIRST + 1, 14):
        for second in (back + 1, 15):
            done_s = _done_at_s(deadline_s, undone_s, back, second)
            assert done_s <= max(deadline_s, _sure_s(undone_s)), (back, second)


def _sure_s(undone_s: float) -> float:
    """Return when the work is done if nothing was kept for the first loss, which nobody foresaw."""
    first = WORK_S - (FIRST * TICK_S - START_S) + undone_s
    return FIRST * TICK_S + START_S + TICK_S * -(-first // TICK_S)
