"""A point compared with the others: who goes on, and what a killed controller leaves."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from spotguard.control.journal.record import Kind, Limits, RunRecord
from spotguard.control.journal.sweep.comparison import Comparison, goes_on
from spotguard.control.journal.sweep.part import SweepPart
from spotguard.control.journal.sweep.published import Values, read_all, read_values
from spotguard.control.status.history_words import history_lines
from spotguard.events import keys
from spotguard.events.states import RunState
from spotguard.spec.model import TeamCap
from spotguard.testing.stores import FaultyStore, MemoryStore, SimulatedCrash
from tests.control.made import made
from tests.control.world import RUN_ID, World

if TYPE_CHECKING:
    from pathlib import Path

    from spotguard.storage.base import ObjectStore

pytest.importorskip("optuna")

PART = SweepPart(
    sweep_id="s",
    number=1,
    cap=TeamCap(9.0, "sweep", 2),
    metric="loss",
    first_step=4,
)


@dataclass
class Logged:
    """A run's values, as if it had logged one after each step."""

    values: dict[int, float] = field(default_factory=lambda: dict.fromkeys(range(99), 2.0))

    def first_from(self, record: RunRecord, done: int) -> tuple[int, float] | None:
        """Return the first."""
        return next((found for found in sorted(self.values.items()) if found[0] >= done), None)


def publish(store: ObjectStore, **values: dict[int, float]) -> None:
    """Have other points say what they had."""
    for run_id, by_step in values.items():
        store.put(keys.values(run_id), Values(by_step=by_step).to_bytes())


def control(
    world: World, store: ObjectStore, *, part: SweepPart = PART, **values: Any
) -> RunRecord:
    """Control a run to its end, compared with what is in the sweep's store."""
    with world.journal() as journal:
        comparison = Comparison(part, store, Logged(**values), world.clock)
        return world.supervisor(journal, comparison=comparison).run()


@pytest.fixture
def world(tmp_path: Path) -> World:
    """A run of twenty steps, which saves every five of them."""
    return World(tmp_path, limits=Limits(budget_usd=1.0))


def test_the_worse_half_is_stopped_and_can_go_on_later(world: World) -> None:
    """It is saved where it was, says why, and whoever resumes it is not contradicted."""
    store = MemoryStore()
    publish(store, a={4: 1.0}, b={4: 1.5}, c={4: 3.0})
    record = control(world, store)
    assert record.settled is not None
    assert record.settled.state is RunState.STOPPED
    why = "pruned at step 4: loss 2, place 3 of 4 so far"
    assert record.settled.detail == why
    assert read_values(store, RUN_ID) == Values(by_step={4: 2.0}, stopped=why)
    (attempt,) = record.attempts
    assert attempt.saved is True
    assert attempt.last_save is not None
    with world.journal() as journal:
        story = [line.text for line in history_lines(journal.events())]
    assert why in story
    assert any("attempt ended: stopped by its sweep, state saved" in text for text in story), story
    assert not [text for text in story if "by you" in text]
    world.write(Kind.RESUMED, {"limits": record.limits.__dict__})
    again = control(world, store)
    assert again.settled is not None
    assert again.settled.state is RunState.FINISHED
    assert again.attempts[1].resumed_step == attempt.last_save.step
    assert [each.by_sweep for each in again.attempts] == [True, False]


def test_the_better_half_goes_on_through_all_looks(world: World) -> None:
    """At 4, 8 and 16 of 20 steps; each look is told."""
    store = MemoryStore()
    publish(store, a={4: 1.0, 8: 3.0, 16: 3.0}, b={4: 3.0}, c={4: 3.0})
    record = control(world, store)
    assert record.settled is not None
    assert record.settled.state is RunState.FINISHED
    assert read_values(store, RUN_ID).by_step == {4: 2.0, 8: 2.0, 16: 2.0}
    assert world.kinds().count(Kind.COMPARED.value) == 3


def test_alone_so_far_it_goes_on_unless_its_value_is_none(world: World, tmp_path: Path) -> None:
    """NaN is worse than all others, and of nobody any better."""
    assert control(world, MemoryStore()).settled.state is RunState.FINISHED  # type: ignore[union-attr]
    (tmp_path / "other").mkdir()
    other = World(tmp_path / "other", limits=Limits(budget_usd=1.0))
    record = control(other, MemoryStore(), values={4: math.nan})
    assert record.settled is not None
    assert record.settled.detail == "pruned at step 4: loss nan, place 1 of 1 so far"


def test_a_value_that_is_logged_rarely_decides_once(world: World) -> None:
    """Logged every nine steps, it halves the points at 8 and at 16, and at 4 it halves nothing."""
    store = MemoryStore()
    publish(store, a={4: 1.0, 8: 3.0, 16: 3.0}, b={4: 1.0, 8: 3.0, 16: 3.0})
    record = control(world, store, values={9: 2.0, 18: 2.5})
    assert record.settled is not None
    assert record.settled.state is RunState.FINISHED
    assert read_values(store, RUN_ID).by_step == {8: 2.0, 16: 2.5}


def test_of_points_that_log_rarely_half_survive_each_value() -> None:
    """The second best of four goes on at its first value, though that is beyond three looks."""
    others = [1.0, 3.0, 4.0]
    assert goes_on(PART, 16, others, 2.0)
    assert not goes_on(PART, 16, others, 3.5)


def test_a_maximum_is_another_order(world: World) -> None:
    """The same values, and it goes on."""
    store = MemoryStore()
    publish(store, a={4: 1.0}, b={4: 1.5}, c={4: 1.9})
    part = SweepPart(**{**PART.__dict__, "goal": "max"})
    assert control(world, store, part=part).settled.state is RunState.FINISHED  # type: ignore[union-attr]


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("write", [1, 2])
def test_killed_between_any_two_writes_it_stays_with_its_word(
    world: World, write: int, after: bool
) -> None:
    """Whatever others say meanwhile: what it had published of itself counts."""
    store = MemoryStore()
    publish(store, a={4: 1.0})
    with pytest.raises(SimulatedCrash):
        control(world, FaultyStore(store).crash_at(write, after=after))
    before = read_values(store, RUN_ID)
    record = control(world, store, values=dict.fromkeys(range(99), 9.0))
    assert record.settled is not None
    known = 2.0 if before.by_step else 9.0
    assert record.settled.detail == f"pruned at step 4: loss {known:g}, place 2 of 2 so far"
    assert world.kinds().count(Kind.COMPARED.value) == 1


def test_a_store_that_cannot_be_read_stops_nobody(world: World) -> None:
    """The run goes on, and is compared as soon as the store is back."""
    store = FaultyStore(MemoryStore()).fail("list", times=3)
    record = control(world, store)
    assert record.settled is not None
    assert record.settled.state is RunState.FINISHED
    assert 16 in read_values(store, RUN_ID).by_step


def test_what_others_wrote_is_not_believed() -> None:
    """A damaged file is as if that point had said nothing."""
    store = MemoryStore()
    for number, raw in enumerate((b"", b"{}", b'{"values": [[1]]}', b'{"values": [[0, 1]]}')):
        store.put(keys.values(f"run-{number}"), raw)
    store.put("values/NO RUN.json", b"{}")
    assert read_all(store) == {f"run-{number}": Values() for number in range(4)}


@pytest.mark.parametrize(
    ("happened", "why"),
    [
        ((("compared", {"stop": True, "why": "pruned"}),), "pruned"),
        ((("compared", {"stop": True, "why": "pruned"}), ("user_stop", {})), "pruned"),
        ((("compared", {"stop": True, "why": "pruned"}), ("user_down", {})), ""),
        ((("user_stop", {}), ("compared", {"stop": True, "why": "pruned"})), ""),
    ],
)
def test_who_asked_first_or_for_more_is_who_ends_it(
    happened: tuple[tuple[str, dict[str, Any]], ...], why: str
) -> None:
    """A user's `down` is harder than the sweep's stop; what was asked for has its reason."""
    lines = [(kind, float(at), None, data) for at, (kind, data) in enumerate(happened)]
    assert made(*lines).wish_why == why
