"""Beginning a sweep: killed between any two acts, no point is created twice, and none is lost."""

from __future__ import annotations

import json
import os
import shutil
from typing import TYPE_CHECKING

import pytest

from spotguard.control import create_run
from spotguard.control.controller.one_run import run_store
from spotguard.control.journal.fold import read_record
from spotguard.control.journal.journal import Journal
from spotguard.control.journal.record import Kind
from spotguard.control.run_folder import RunFolder, known_runs, runs_folder
from spotguard.control.sweep import begin, ending, sweep_request
from spotguard.control.sweep.sweep_request import SweepPlan
from spotguard.control.sweep.table import SweepPoint, SweepWatch, best_of
from spotguard.control.sweep.where import created_runs
from spotguard.errors import BudgetExhausted, EnvironmentFailure, UsageError
from spotguard.events import keys
from spotguard.events.states import RunState
from spotguard.spec.model import JobSpec
from spotguard.storage import open_store

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from spotguard.control.sweep.sweep_request import SweepRecord

POINTS = tuple({"lr": value, "seed": "1"} for value in ("0.1", "0.2", "0.3"))
PLAN = SweepPlan(points=POINTS, at_once=2, metric="loss")


class Killed(BaseException):
    """The process is gone."""


def args_of(run_id: str) -> tuple[str, ...]:
    """Return what a run's script is called with."""
    with RunFolder(runs_folder() / run_id).journal() as journal:
        return JobSpec.from_json(read_record(journal).spec).args


def check_whole(sweep: SweepRecord, started: list[str]) -> None:
    """Each point has one run, with its arguments and its part of the money."""
    ids = [f"{sweep.sweep_id}-{number:02d}" for number in (1, 2, 3)]
    assert sorted(known_runs()) == ids
    assert sorted(set(started)) == ids
    for run_id, point in zip(ids, POINTS, strict=True):
        assert args_of(run_id) == ("--steps", "9", "--lr", point["lr"], "--seed", "1")
        with RunFolder(runs_folder() / run_id).journal() as journal:
            assert read_record(journal).limits.budget_usd == 2.0
    folders = open_store(sweep.store_root).list_folders("")
    assert sorted(folders) == sorted([*(f"{run_id}/" for run_id in ids), "sweeps/"])


def test_each_point_is_a_run_and_the_store_names_all(job: JobSpec, started: list[str]) -> None:
    """And holds nothing of the job's that is secret, as it does not of a run."""
    sweep = begin.begin(job, PLAN)
    check_whole(sweep, started)
    place = f"{sweep.store_root}/{sweep.sweep_id}"
    for named in (place, f"{sweep.store_root}/sweeps/{sweep.sweep_id}"):
        assert sweep_request.stored_sweep(named).points == POINTS
    text = open_store(sweep.store_root).get(f"sweeps/{sweep.sweep_id}/sweep.json").decode()
    assert "secret-word" not in text
    assert not begin.go_on(sweep).created


def _die_at(patch: pytest.MonkeyPatch, target: object, name: str, nth: int, *, after: bool) -> None:
    real: Callable[..., object] = getattr(target, name)
    calls = 0

    def act(*args: object, **named: object) -> object:
        nonlocal calls
        calls += 1
        if calls == nth and not after:
            raise Killed
        done = real(*args, **named)
        if calls == nth:
            raise Killed
        return done

    patch.setattr(target, name, act)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(
    ("target", "name", "nth"),
    [
        (begin, "publish", 1),
        (create_run, "_make_folder", 2),
        (Journal, "append", 2),
        (create_run, "run_store", 2),
        (os, "rename", 3),
        (begin, "create_run", 3),
    ],
)
def test_killed_anywhere_it_goes_on_where_it_was(
    job: JobSpec, started: list[str], after: bool, target: object, name: str, nth: int
) -> None:
    """What is there stays, what is missing is created, by whoever looks next."""
    with pytest.MonkeyPatch.context() as patch, dead():
        # A process that dies tidies up nothing.
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)
        _die_at(patch, target, name, nth, after=after)
        begin.begin(job, PLAN)
    sweep = sweep_request.find_sweep(None)
    before = set(known_runs())
    made = begin.go_on(sweep)
    assert made.created == 3 - len(before)
    check_whole(sweep, started)


class dead:
    """Takes the death of the process for what it is."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, problem: object, trace: object) -> bool:
        return problem is None or isinstance(problem, Killed)


def test_a_sweep_of_which_no_run_can_be_created_leaves_nothing(
    job: JobSpec, started: list[str]
) -> None:
    """A budget that buys nothing is the same sentence as for a run."""
    with pytest.raises(BudgetExhausted):
        begin.begin(job.replace(budget_usd=1e-6), PLAN)
    assert sweep_request.known_sweeps() == []
    assert known_runs() == []


def test_what_is_stopped_before_it_is_created_never_is(job: JobSpec, started: list[str]) -> None:
    """The others are asked to save and stop, and the table says of each what became of it."""
    with pytest.MonkeyPatch.context() as patch, dead():
        _die_at(patch, begin, "create_run", 2, after=True)
        begin.begin(job, PLAN)
    sweep = sweep_request.find_sweep(None)
    assert ending.end(sweep, Kind.USER_STOP) == 2
    assert not begin.go_on(sweep).created
    for folder in created_runs(sweep):
        with folder.journal() as journal:
            assert read_record(journal).wish is Kind.USER_STOP
    told = SweepWatch(sweep, stored=False).look()
    assert [point.state for point in told.points] == [*[RunState.LAUNCHING] * 2, None]
    assert told.points[2].detail == "never begun: the sweep was stopped"


def test_a_run_that_was_launched_is_not_created_again(job: JobSpec, started: list[str]) -> None:
    """Its folder is gone from here, and its nodes may live: a look starts no second one."""
    sweep = begin.begin(job, PLAN)
    launched, unbegun, _ = sorted(known_runs())
    for run_id in (launched, unbegun):
        shutil.rmtree(runs_folder() / run_id)
    run_store(sweep.store_root, launched).put(keys.launch(1), b"{}")
    assert begin.go_on(sweep).created == 1
    assert launched not in known_runs()
    assert unbegun in known_runs()
    point = SweepWatch(sweep, stored=False).look().points[0]
    assert f"spotguard adopt {sweep.store_root}/{launched}" in point.detail
    assert not point.settled


def test_a_controller_that_is_started_again_is_told(job: JobSpec, started: list[str]) -> None:
    """Who looks at the story sees that its controller died; a first start is nothing to tell."""
    sweep = begin.begin(job, PLAN)
    died, *others = created_runs(sweep)
    with died.journal() as journal:
        journal.append(Kind.CONTROLLER_STARTED.value, at=0.0, data={"pid": 1})
    begin.go_on(sweep)
    for folder in (died, *others):
        with folder.journal() as journal:
            repaired = journal.newest(Kind.CONTROLLER_REPAIRED.value)
        assert (repaired is not None) == (folder is died)


def test_a_sweep_that_is_forgotten_half_is_in_nobodys_way(
    job: JobSpec, started: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder without what was asked for is none, and who is killed in `forget` leaves none."""
    sweep = begin.begin(job, PLAN)
    (sweep_request.sweeps_folder() / "train-260101-000000-abcd").mkdir()
    assert sweep_request.find_sweep(None).sweep_id == sweep.sweep_id
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)
        sweep_request.forget(sweep)
    assert sweep_request.known_sweeps() == []
    with pytest.raises(EnvironmentFailure):
        ending.end(sweep, Kind.USER_STOP)


@pytest.mark.parametrize(
    ("plan", "job_says", "says"),
    [
        ({}, {"budget_usd": None}, "A sweep needs a budget"),
        ({"point_budget_usd": 7.0}, {}, "--point-budget: given 7; the whole sweep may cost 6"),
        ({}, {"allow_unknown_price": True}, "what has no price could exceed it"),
        ({"at_once": 0}, {}, "--parallel: given 0"),
        ({"goal": "less"}, {}, "--sweep-goal: given 'less'"),
        ({"metric": None, "first_step": 3}, {}, "nothing says by what"),
        ({"first_step": 0}, {}, "--sweep-prune: given 0"),
    ],
)
def test_what_makes_no_sense_is_one_sentence(
    job: JobSpec, plan: dict[str, object], job_says: dict[str, object], says: str
) -> None:
    """Before anything is written."""
    with pytest.raises(UsageError, match=says):
        begin.check(job.replace(**job_says), SweepPlan(**{**PLAN.__dict__, **plan}))


def test_which_sweep_is_meant(job: JobSpec, started: list[str], tmp_path: Path) -> None:
    """By a beginning, the newest without one, and one sentence on what is none."""
    with pytest.raises(UsageError, match="no sweep on this machine"):
        sweep_request.find_sweep(None)
    sweep = begin.begin(job, PLAN)
    assert sweep_request.find_sweep("train").sweep_id == sweep.sweep_id
    with pytest.raises(UsageError, match="There is no sweep 'other'"):
        sweep_request.find_sweep("other")
    with pytest.raises(UsageError, match="There is no sweep at"):
        sweep_request.stored_sweep(f"{tmp_path}/nothing-here")
    with pytest.raises(UsageError, match="does not name a sweep"):
        sweep_request.stored_sweep("s3://bucket/NO SWEEP")
    (sweep_request.sweeps_folder() / sweep.sweep_id / "sweep.json").write_text(
        json.dumps({"schema": 9})
    )
    with pytest.raises(Exception, match="cannot be read"):
        sweep_request.find_sweep(None)


def test_the_best_is_one_that_finished_if_any_did() -> None:
    """A value of an early step does not compare with one of the last; nor is one unsaved."""

    def point(number: int, state: RunState, value: float | None, saved: int | None) -> SweepPoint:
        return SweepPoint(
            number=number,
            run_id=str(number),
            arguments={},
            state=state,
            value=value,
            saved_step=saved,
        )

    finished = point(1, RunState.FINISHED, 2.0, 9), point(2, RunState.FINISHED, 3.0, 9)
    early = point(3, RunState.STOPPED, 1.0, 5)
    others = point(4, RunState.FAILED, 0.5, None), point(5, RunState.RUNNING, None, 3)
    assert best_of([*finished, early, *others], "min") == "1"
    assert best_of([*finished, early, *others], "max") == "2"
    assert best_of([early, *others], "min") == "3"
    assert best_of(others, "min") is None
