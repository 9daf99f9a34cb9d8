"""Ending a sweep: each of its runs is asked, wherever it is, and whatever is wrong with another."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from spotguard.control.handover import through_store
from spotguard.control.journal.fold import read_record
from spotguard.control.journal.stored.controller_nodes import place_in
from spotguard.control.report.stored import StoredRun
from spotguard.control.sweep.begin import start_controllers
from spotguard.control.sweep.sweep_request import alone, mark_stopped, place_of
from spotguard.control.sweep.where import folder_here, look_at, was_launched
from spotguard.errors import EnvironmentFailure, SpotguardError, UsageError

if TYPE_CHECKING:
    from spotguard.control.journal.record import Kind
    from spotguard.control.sweep.sweep_request import SweepRecord

_SIDE_BY_SIDE = 8
"""Runs on other machines that are asked at a time: who does not hear is given up after minutes."""


@dataclass
class _Asking:
    """Who was asked, and who could not be."""

    wish: Kind
    asked: int = 0
    away: list[str] = field(default_factory=list)
    """Places of runs that other machines control."""
    problems: dict[str, SpotguardError] = field(default_factory=dict)
    """Why not, by what names the run."""

    def here(self, sweep: SweepRecord, run_id: str) -> None:
        """Ask a run by its journal, or note where it is."""
        folder = folder_here(run_id)
        try:
            if folder is None:
                if was_launched(sweep, run_id):
                    self.away.append(place_of(sweep, run_id))
                return
            with folder.journal() as journal:
                record = read_record(journal)
                if record.is_away:
                    self.away.append(place_in(record))
                elif record.settled is None:
                    journal.append(self.wish.value, at=folder.clock().now())
                    self.asked += 1
        except SpotguardError as problem:
            self.problems[run_id if folder else place_of(sweep, run_id)] = problem

    def there(self, place: str) -> bool:
        """Ask a run that another machine controls, through its store; False if it is at rest."""
        try:
            run = StoredRun(place)
            seen, _ = look_at(run.folder)
            return through_store.ask_to_end(run.url, self.wish, seen)
        except SpotguardError as problem:
            self.problems[place] = problem
            return False


def end(sweep: SweepRecord, wish: Kind) -> int:
    """Ask all its runs to stop, or to release their nodes at once; return how many were asked.

    What is not created yet never is. Blocks for minutes if another machine does not hear.

    Raises:
        EnvironmentFailure: some could not be asked; names them and the way out. All others were.
    """
    with alone(sweep):
        mark_stopped(sweep)
    asking = _Asking(wish)
    for part in sweep.parts():
        asking.here(sweep, part.run_id)
    asking.problems.update(start_controllers(sweep).problems)
    with ThreadPoolExecutor(_SIDE_BY_SIDE, thread_name_prefix="spotguard-sweep") as crew:
        asking.asked += sum(crew.map(asking.there, asking.away))
    if asking.problems:
        raise _unasked(asking)
    return asking.asked


def _unasked(asking: _Asking) -> EnvironmentFailure:
    """Return what names the runs that may go on and cost money."""
    whys = "; ".join(f"{run}: {problem.message}" for run, problem in asking.problems.items())
    ways = [_way_out(run, problem) for run, problem in asking.problems.items()]
    return EnvironmentFailure(
        f"{asking.asked} runs were asked; {len(asking.problems)} could not be reached, and may go "
        f"on and cost money: {whys}",
        hint=f"end each by itself: {'; '.join(dict.fromkeys(ways))}",
    )


def _way_out(run: str, problem: SpotguardError) -> str:
    """Return what ends a run: one that nobody hears for is to be taken over first."""
    adopts = isinstance(problem, UsageError) and bool(problem.hint)
    return problem.hint if adopts else f"spotguard down {run}"
