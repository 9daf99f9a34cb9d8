"""Ending a sweep: no run is forgotten, wherever it is and whatever is wrong with another."""

from __future__ import annotations

import shutil
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from spotguard.control.controller import start
from spotguard.control.controller.one_run import run_store
from spotguard.control.handover import through_store
from spotguard.control.journal.fold import read_record
from spotguard.control.journal.record import Kind
from spotguard.control.run_folder import RunFolder, runs_folder
from spotguard.control.supervisor.lease import Lease
from spotguard.control.sweep import begin, ending, table
from spotguard.control.sweep.sweep_request import SweepPlan
from spotguard.control.sweep.table import SweepWatch
from spotguard.errors import EnvironmentFailure
from spotguard.events.states import RunState
from spotguard.shared.units import SystemClock

if TYPE_CHECKING:
    from spotguard.control.sweep.sweep_request import SweepRecord
    from spotguard.spec.model import JobSpec

PLAN = SweepPlan(points=tuple({"seed": str(n)} for n in range(4)), at_once=2, metric="loss")


@pytest.fixture
def sweep(job: JobSpec, started: list[str]) -> SweepRecord:
    """Four runs of this machine's."""
    return begin.begin(job, PLAN)


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Places of the runs that were asked through their store."""
    places: list[str] = []

    def ask(place: str, kind: Kind, seen: object) -> bool:
        places.append(place)
        return True

    monkeypatch.setattr(through_store, "ask_to_end", ask)
    return places


def folder(sweep: SweepRecord, number: int) -> RunFolder:
    """Return the folder of a point's run."""
    return RunFolder(runs_folder() / f"{sweep.sweep_id}-{number:02d}")


def take_away(sweep: SweepRecord, number: int) -> str:
    """Have another machine control a point's run; return its place."""
    with folder(sweep, number).journal() as journal:
        journal.append(Kind.TAKEN_OVER.value, at=time.time(), data={"by": "a node"})
        rest = {"state": RunState.STOPPED.value, "detail": "it goes on there", "exit_code": 75}
        journal.append(Kind.SETTLED.value, at=time.time(), data=rest)
    store = run_store(sweep.store_root, folder(sweep, number).run_id)
    Lease(store, SystemClock(), "another-machine").take()
    return f"{sweep.store_root}/{sweep.sweep_id}-{number:02d}"


def end_here(sweep: SweepRecord, *numbers: int) -> None:
    """Bring runs to rest on this machine."""
    rest = {"state": RunState.FINISHED.value, "detail": "all steps done", "exit_code": 0}
    for number in numbers:
        with folder(sweep, number).journal() as journal:
            journal.append(Kind.SETTLED.value, at=time.time(), data=rest)


def wishes(sweep: SweepRecord) -> dict[int, Kind | None]:
    """Return what each run of this machine's was asked, but for those that cannot be read."""
    found = {}
    for number in range(1, 5):
        with folder(sweep, number).journal() as journal:
            found[number] = read_record(journal).wish
    return found


def test_a_damaged_journal_keeps_no_other_run_from_being_asked(
    sweep: SweepRecord, heard: list[str]
) -> None:
    """It is named at the end, as the one that nobody asked."""
    bad = folder(sweep, 2)
    whole = bad.journal_path.read_bytes()
    bad.journal_path.write_bytes(b"damaged" * 200)
    with pytest.raises(EnvironmentFailure) as told:
        ending.end(sweep, Kind.USER_DOWN)
    bad.journal_path.write_bytes(whole)
    assert wishes(sweep) == {
        number: None if number == 2 else Kind.USER_DOWN for number in range(1, 5)
    }
    assert bad.run_id in told.value.message
    assert f"{sweep.sweep_id}-03" not in told.value.message
    assert f"spotguard down {bad.run_id}" in told.value.hint


def test_a_run_that_another_machine_controls_is_asked_there(
    sweep: SweepRecord, heard: list[str]
) -> None:
    """And counts as asked."""
    place = take_away(sweep, 3)
    assert ending.end(sweep, Kind.USER_STOP) == 4
    assert heard == [place]


def test_one_that_nobody_hears_for_is_named(sweep: SweepRecord) -> None:
    """No node of its own has it: who wants it stopped takes it over."""
    place = take_away(sweep, 3)
    with pytest.raises(EnvironmentFailure) as told:
        ending.end(sweep, Kind.USER_STOP)
    assert place in told.value.message
    assert f"spotguard adopt {place}" in told.value.hint
    assert wishes(sweep)[4] is Kind.USER_STOP


def test_a_controller_that_does_not_start_keeps_no_other_from_it(
    sweep: SweepRecord, started: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every run is asked, and every other controller is started."""
    bad, tried = folder(sweep, 1).run_id, list[str]()

    def fail(run: RunFolder) -> None:
        tried.append(run.run_id)
        if run.run_id == bad:
            raise EnvironmentFailure("it did not start")

    monkeypatch.setattr(start, "start", fail)
    with pytest.raises(EnvironmentFailure, match=bad):
        ending.end(sweep, Kind.USER_STOP)
    assert len(tried) == 4
    assert set(wishes(sweep).values()) == {Kind.USER_STOP}


def test_a_sweep_is_not_settled_while_a_point_goes_on_elsewhere(sweep: SweepRecord) -> None:
    """What the store says of that one counts; here it is at rest for good."""
    for number in (1, 2):
        take_away(sweep, number)
    end_here(sweep, 3, 4)
    told = SweepWatch(sweep, stored=False).look()
    assert not told.settled
    assert [point.settled for point in told.points] == [False] * 2 + [True] * 2


def test_what_a_point_that_cannot_be_read_has_spent_is_unknown(
    sweep: SweepRecord,
) -> None:
    """So is the sum. One that is not begun has spent nothing."""
    shutil.rmtree(folder(sweep, 4).path)
    watch = SweepWatch(sweep, stored=False)
    assert watch.look().spent_usd == 0.0
    folder(sweep, 2).journal_path.write_bytes(b"damaged" * 200)
    told = watch.look()
    assert told.spent_usd is None
    assert [each.unreadable for each in told.points] == [False, True, False, False]
    assert [each.spent_usd for each in told.points] == [0.0, None, 0.0, 0.0]
    assert not told.is_stuck


def test_waiting_ends_when_nothing_else_than_unreadable_points_is_left(
    sweep: SweepRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not at once: a store that does not answer may do so at the next look."""
    now = [0.0]
    of_table = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr("spotguard.control.sweep.table.time", of_table)
    watch, bad = SweepWatch(sweep, stored=False), folder(sweep, 2)
    whole = bad.journal_path.read_bytes()
    bad.journal_path.write_bytes(b"damaged" * 200)
    assert not watch.is_over(watch.look())
    end_here(sweep, 1, 3, 4)
    assert not watch.is_over(watch.look())
    now[0] = table.PATIENCE_S - 1
    bad.journal_path.write_bytes(whole)
    assert not watch.is_over(watch.look())
    bad.journal_path.write_bytes(b"damaged" * 200)
    now[0] += 2
    assert not watch.is_over(watch.look())
    now[0] += table.PATIENCE_S
    told = watch.look()
    assert watch.is_over(told)
    assert not told.settled
