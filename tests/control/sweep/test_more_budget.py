"""A sweep's budget that is raised: who paused for want of money goes on, and nobody else."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from spotguard.control.controller import start
from spotguard.control.journal.fold import read_record
from spotguard.control.journal.record import Kind
from spotguard.control.journal.team.budget import TeamBudget, Word
from spotguard.control.sweep import begin
from spotguard.control.sweep.more_budget import raise_budget
from spotguard.control.sweep.sweep_request import SweepPlan, stopped_mark
from spotguard.control.sweep.table import SweepWatch
from spotguard.control.sweep.where import created_runs
from spotguard.errors import BudgetExhausted, UsageError
from spotguard.events import keys
from spotguard.shared.units import SystemClock
from spotguard.storage import PrefixedStore, open_store

if TYPE_CHECKING:
    from spotguard.control.run_folder import RunFolder
    from spotguard.spec.model import JobSpec

PLAN = SweepPlan(points=tuple({"lr": value} for value in ("1", "2", "3", "4")), at_once=4)


def settle(folder: RunFolder, state: str, exit_code: int) -> None:
    """Have a run come to rest."""
    data = {"state": state, "detail": state, "exit_code": exit_code}
    with folder.journal() as journal:
        journal.append(Kind.SETTLED.value, at=folder.clock().now(), data=data)


def test_who_paused_for_want_of_money_goes_on_with_a_larger_part(
    job: JobSpec, started: list[str]
) -> None:
    """All else stays as it is: who is done, who was stopped, who goes on, what is promised."""
    sweep = begin.begin(job, PLAN)
    poor, done, failed, living = created_runs(sweep)
    settle(poor, "paused", BudgetExhausted.exit_code)
    settle(done, "finished", 0)
    settle(failed, "failed", 1)
    part = next(iter(sweep.parts()))
    of_sweep = PrefixedStore(open_store(sweep.store_root), keys.sweep(sweep.sweep_id))
    books = TeamBudget(of_sweep, SystemClock(), living.run_id, cap=part.cap)
    full = Word(spent=0.0, most=6.0, living=False)
    assert not books.ask(full)
    started.clear()

    for again in ([poor.run_id], []):
        raised = raise_budget(sweep, 12.0)
        assert (raised.resumed, raised.problems) == (again, {})
        assert SweepWatch(sweep, stored=False).look().budget_usd == 12.0
    assert poor.run_id in started
    assert not {done.run_id, failed.run_id} & set(started)
    with poor.journal() as journal:
        record = read_record(journal)
    assert (record.settled, record.limits.budget_usd) == (None, 3.0)
    other = TeamBudget(of_sweep, SystemClock(), poor.run_id, cap=part.cap)
    assert other.ask(Word(spent=0.0, most=6.1, living=False)), "what was promised before still is"
    assert not other.ask(Word(spent=0.0, most=6.0, living=False))


@pytest.mark.parametrize("usd", [1.0, 11.0])
def test_a_budget_is_never_lowered(job: JobSpec, started: list[str], usd: float) -> None:
    """Neither below what it was begun with nor below what it is: nothing is written then."""
    sweep = begin.begin(job, PLAN)
    raise_budget(sweep, 12.0)
    with pytest.raises(UsageError, match="--budget"):
        raise_budget(sweep, usd)
    assert SweepWatch(sweep, stored=True).look().budget_usd == 12.0


def test_who_was_refused_for_the_sweeps_money_gets_what_there_is_now(
    job: JobSpec, started: list[str]
) -> None:
    """A part that grew beyond what is left would be refused again, and the money lie idle."""
    sweep = begin.begin(job, replace(PLAN, point_budget_usd=4.0))
    poor, rich, *_ = created_runs(sweep)
    part = next(iter(sweep.parts()))
    of_sweep = PrefixedStore(open_store(sweep.store_root), keys.sweep(sweep.sweep_id))
    whole = part.cap.usd
    spender = TeamBudget(of_sweep, SystemClock(), rich.run_id, cap=part.cap)
    assert not spender.ask(Word(spent=0.0, most=whole - 1.0, living=False))
    settle(poor, "paused", BudgetExhausted.exit_code)
    raised = raise_budget(sweep, whole + 3.0)
    assert raised.resumed == [poor.run_id]
    with poor.journal() as journal:
        limit = read_record(journal).limits.budget_usd
    assert limit == 4.0
    books = TeamBudget(of_sweep, SystemClock(), poor.run_id, cap=part.cap)
    assert not books.ask(Word(spent=0.0, most=limit, living=False))


def test_broken_off_before_its_controller_starts_it_may_be_repeated(
    job: JobSpec, started: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run was let go on in its journal; the next try finds that nobody controls it."""
    sweep = begin.begin(job, PLAN)
    poor = created_runs(sweep)[0]
    settle(poor, "paused", BudgetExhausted.exit_code)
    with monkeypatch.context() as broken:
        broken.setattr(start, "start", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            raise_budget(sweep, 12.0)
    started.clear()
    raise_budget(sweep, 12.0)
    assert poor.run_id in started


def test_a_stopped_sweep_spends_no_more(job: JobSpec, started: list[str]) -> None:
    """Who stopped it meant all of it."""
    sweep = begin.begin(job, PLAN)
    settle(created_runs(sweep)[0], "paused", BudgetExhausted.exit_code)
    stopped_mark(sweep).touch()
    with pytest.raises(UsageError, match="was stopped"):
        raise_budget(sweep, 12.0)


def test_a_point_that_goes_on_is_seen_by_who_looks_already(
    job: JobSpec, started: list[str]
) -> None:
    """Else it would end with the pause of one that trains and costs money."""
    sweep = begin.begin(job, PLAN)
    for folder in created_runs(sweep):
        settle(folder, "paused", BudgetExhausted.exit_code)
    watch = SweepWatch(sweep, stored=False)
    assert watch.look().settled
    raise_budget(sweep, 12.0)
    assert not watch.look().settled
