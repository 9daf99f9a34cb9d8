from __future__ import annotations

import itertools
import math
import random
from typing import TYPE_CHECKING, Any

import pytest

from spotguard.errors import UsageError
from spotguard.runtime.checkpoint.save_schedule import SaveSchedule, best_interval_s
from spotguard.runtime.distributed.rendezvous import Alone
from spotguard.runtime.process.settings import SaveEvery
from spotguard.shared.hazard import HazardByAge, hazard_per_h
from spotguard.testing import FakeRendezvous

if TYPE_CHECKING:
    from spotguard.runtime.distributed.rendezvous import Coordinator


def drive(schedule: SaveSchedule, steps: int, **measured: Any) -> list[int]:
    """Return the steps at which one rank saves."""
    return [step for step in range(steps) if saves_at(schedule, step, **measured)]


def saves_at(schedule: SaveSchedule, step: int, **measured: Any) -> bool:
    """Let a rank look at the schedule at a step boundary, and save if it says so."""
    if not schedule.due(step):
        return False
    costs = {"step_s": 0.1, "stall_s": 0.01, "duration_s": 0.5, "age_s": 60.0}
    schedule.saved(step, **(costs | measured))
    return True


def alone(every: str, coordinator: Coordinator | None = None) -> SaveSchedule:
    """Return the schedule of a single process."""
    schedule = SaveSchedule(SaveEvery.parse(every), coordinator or Alone(), 0, 1)
    schedule.start(0)
    return schedule


def test_every_n_steps() -> None:
    """`10 steps` saves after 10, 20, 30 steps, whatever they cost."""
    assert drive(alone("10 steps"), 35, duration_s=1000.0) == [10, 20, 30]
    assert drive(alone("1 step"), 4) == [1, 2, 3]


def test_a_resume_counts_from_where_it_began() -> None:
    """Nothing is saved again right after it was restored."""
    schedule = SaveSchedule(SaveEvery(steps=10), Alone(), 0, 1)
    schedule.start(17)

    assert [step for step in range(17, 50) if saves_at(schedule, step)] == [27, 37, 47]


def test_every_n_seconds() -> None:
    """The first save comes soon, to measure; then steps are counted for the seconds asked for."""
    assert drive(alone("2s"), 60, step_s=0.1) == [3, 23, 43]
    assert drive(alone("1s"), 20, step_s=10.0) == [3, 6, 9, 12, 15, 18], "at least three steps"


def test_automatic_follows_cost_and_risk() -> None:
    """Dearer saves come more rarely; a save never follows before the one before can be done."""
    cheap = drive(alone("auto"), 3000, stall_s=0.001, duration_s=0.01)
    dear = drive(alone("auto"), 3000, stall_s=0.5, duration_s=5.0)

    assert cheap[0] == dear[0] == 3
    assert len(cheap) > 3 * len(dear)
    slow = drive(alone("auto"), 3000, stall_s=0.0, duration_s=100.0)
    assert slow[1] - slow[0] >= 2000


@pytest.mark.parametrize(("stall_s", "step_s"), [(0.0, 1e-9), (1e6, 0.1), (0.0, 0.0), (5.0, 1e5)])
def test_automatic_stays_in_bounds(stall_s: float, step_s: float) -> None:
    """No measurement, however odd, makes saves endless or drops them for hours."""
    schedule = alone("auto")
    assert saves_at(schedule, 3, stall_s=stall_s, step_s=step_s, duration_s=0.0)
    assert schedule._next is not None
    ahead = schedule._next - 3

    assert ahead >= 3
    assert ahead * max(step_s, 1e-6) <= max(1800, 3 * step_s) + step_s


def test_the_best_interval_is_youngs() -> None:
    """`sqrt(2 * cost / hazard)`: with 1.7 interruptions an hour a save of a second: 65 s."""
    assert best_interval_s(1.0, 60.0) == pytest.approx(math.sqrt(2 / (1.7 / 3600)))
    assert best_interval_s(4.0, 60.0) == pytest.approx(2 * best_interval_s(1.0, 60.0))
    assert best_interval_s(0.0, 60.0) == 0


def test_it_is_the_best() -> None:
    """Time lost to saving and to doing work again is least there."""

    def lost(interval_s: float, cost_s: float = 2.0) -> float:
        return cost_s / interval_s + interval_s / 2 * hazard_per_h(60.0) / 3600

    best = best_interval_s(2.0, 60.0)
    assert all(lost(best) < lost(best * factor) for factor in (0.5, 0.8, 0.9, 1.1, 1.25, 2))


def test_the_hazard_falls_with_age() -> None:
    """Machines that have lived long live on: never more risk later, no jump anywhere."""
    ages = [60.0 * minute for minute in range(600)]
    hazards = [hazard_per_h(age) for age in ages]

    assert hazards == sorted(hazards, reverse=True)
    assert (hazards[0], hazards[-1]) == (1.7, 0.2)
    assert max(a - b for a, b in itertools.pairwise(hazards)) < 0.06
    assert best_interval_s(1.0, 5 * 3600) > 2.5 * best_interval_s(1.0, 60)


@pytest.mark.parametrize("every", ["7 steps", "1s", "auto"])
@pytest.mark.parametrize("seed", range(10))
def test_all_ranks_save_at_the_same_steps(every: str, seed: int) -> None:
    """Each rank measures other times, and looks earlier or later: the steps are the same.

    Ranks can be a step apart, for the gradients of each step need all of them.
    """
    rng = random.Random(seed)
    world, words = rng.randint(2, 4), FakeRendezvous(patience_s=0.0)
    schedules = [
        SaveSchedule(SaveEvery.parse(every), words.rank(rank), rank, world) for rank in range(world)
    ]
    for schedule in schedules:
        schedule.start(5)
    saved: list[list[int]] = [[] for _ in range(world)]
    for step in range(5, 200):
        for rank in rng.sample(range(world), world):
            measured = {"step_s": rng.uniform(0.5, 2), "stall_s": rng.random() / 1000}
            if saves_at(schedules[rank], step, **measured):
                saved[rank].append(step)

    assert len(saved[0]) > 3
    assert all(steps == saved[0] for steps in saved)


def test_a_silent_first_rank_is_lost_contact() -> None:
    """The others do not guess when to save: it is treated as the first node's end."""
    schedule = SaveSchedule(SaveEvery(seconds=1.0), FakeRendezvous(patience_s=0.0).rank(1), 1, 2)
    schedule.start(0)
    assert saves_at(schedule, 3)
    assert not schedule.due(4)
    with pytest.raises(ConnectionError, match="when to save next"):
        schedule.due(5)


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("auto", SaveEvery()),
        (" AUTO ", SaveEvery()),
        ("100 steps", SaveEvery(steps=100)),
        ("1 step", SaveEvery(steps=1)),
        ("25steps", SaveEvery(steps=25)),
        ("30s", SaveEvery(seconds=30.0)),
        ("10m", SaveEvery(seconds=600.0)),
        ("90", SaveEvery(seconds=90.0)),
    ],
)
def test_the_policy_is_read(text: str, policy: SaveEvery) -> None:
    """Three forms: by measured risk, by time, by steps."""
    assert SaveEvery.parse(text) == policy


@pytest.mark.parametrize(
    "text", ["", "often", "0 steps", "-5 steps", "0s", "-1s", "nan", "inf", "steps"]
)
def test_a_wrong_policy_is_refused(text: str) -> None:
    """One sentence: what was given and what is allowed."""
    with pytest.raises(UsageError, match=r"save_every: given .*; allowed: auto, 30s, or 100 steps"):
        SaveEvery.parse(text)


def test_a_place_that_takes_nodes_often_is_saved_in_often() -> None:
    """The hazard that the launcher tells of a place decides, at the age that the attempt has."""
    calm, rough = HazardByAge(((0.0, 0.01),)), HazardByAge(((0.0, 4.0), (3600.0, 0.01)))
    assert best_interval_s(30.0, 60.0, calm) > 15 * best_interval_s(30.0, 60.0, rough)
    assert best_interval_s(30.0, 3600.0, rough) == best_interval_s(30.0, 3600.0, calm)
    steps = []
    for hazard in (calm, rough, None):
        schedule = SaveSchedule(SaveEvery(), Alone(), 0, 1, hazard)
        schedule.start(0)
        steps.append(len(drive(schedule, 3000, stall_s=0.5, duration_s=1.0)))
    assert steps[0] < steps[2] < steps[1]


def test_rates_by_age_survive_being_written() -> None:
    """What the launcher writes the job reads; no rates are those of all records."""
    rates = HazardByAge(((0.0, 1.75), (600.0, 0.9), (2400.0, 0.125)))
    assert HazardByAge.parse(rates.written()) == rates
    assert rates.per_h(599.0) == 1.75
    assert rates.per_h(1e9) == 0.125
    assert HazardByAge.parse("").per_h(60.0) == hazard_per_h(60.0)


@pytest.mark.parametrize(
    "text", ["1", "0:1:2", "a:1", "0:nan", "0:-1", "-1:1", "600:1,0:2", "0:1,0:2", "0:inf"]
)
def test_rates_that_make_no_sense_are_refused(text: str) -> None:
    """A job does not start on them."""
    with pytest.raises(ValueError, match=r"rates|rise|float"):
        HazardByAge.parse(text)
