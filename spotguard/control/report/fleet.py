"""All runs of this machine, and of stores, looked at again and again at the price of what is new.

A run costs a look at its files; only one whose journal has grown is read, and then only what is
new. A journal of a million events is read from its last snapshot, and one at rest is read once.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from spotguard.control.journal.fold import fold, read_record
from spotguard.control.journal.journal import making_sense
from spotguard.control.report.follow import RunFollower
from spotguard.control.report.numbers_at_rest import Signs, keep, kept, numbers_of, signs_of
from spotguard.control.run_folder import RunFolder, known_runs, runs_folder
from spotguard.control.status.watch import lost_run, summary
from spotguard.errors import SpotguardError, StoreError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from spotguard.control.journal.record import RunRecord
    from spotguard.control.report.measures import RunMeasures
    from spotguard.control.report.mirror import Mirror
    from spotguard.control.status.view import RunSummary

log = logging.getLogger(__name__)

_TELL_EVERY_S = 1.0


@dataclass(kw_only=True)
class _Known:
    """What is remembered of one run."""

    folder: RunFolder
    is_ours: bool
    """False for one that is only looked at in a store."""
    signs: Signs = ()
    file: int | None = None
    record: RunRecord | None = None
    """Of a run that goes on; None if its journal cannot be read."""
    at_rest: RunMeasures | None = None
    """Of one that has settled: they stay as they are until something is new."""
    problem: str | None = None
    """Why its journal, or what its store has that is new, cannot be read."""
    stored_problem: str | None = None

    def summary(self) -> RunSummary:
        """Return one line on the run."""
        if self.at_rest is not None:
            told = self.at_rest.summary
            return replace(told, problem=self.problem or told.problem)
        if self.record is None:
            return lost_run(self.folder, self.problem)
        return replace(summary(self.folder, self.record), problem=self.problem)

    def measures(self) -> RunMeasures | None:
        """Return its numbers; None if its journal cannot be read."""
        if self.at_rest is not None or self.record is None:
            return self.at_rest
        return numbers_of(self.folder, self.record)


class Fleet:
    """Remembers all runs. Not thread-safe; methods block."""

    def __init__(
        self, mirrors: Sequence[Mirror] = (), tell: Callable[[str], None] = lambda _: None
    ) -> None:
        """`tell` hears what a first look, which may take a while, is at."""
        self._mirrors = tuple(mirrors)
        self._runs: dict[str, _Known] = {}
        self._tell = tell

    def refresh(self) -> bool:
        """Look at what is new; return whether anything is."""
        found = {run_id: (RunFolder(runs_folder() / run_id), True) for run_id in known_runs()}
        problems: dict[str, str] = {}
        for mirror in self._mirrors:
            for folder in self._mirrored(mirror, frozenset(found)):
                if found.setdefault(folder.run_id, (folder, False))[0] is folder:
                    problems |= _problem_of(mirror, folder)
        changed = found.keys() != self._runs.keys()
        self._runs = {
            run_id: self._runs.get(run_id) or _Known(folder=folder, is_ours=is_ours)
            for run_id, (folder, is_ours) in found.items()
        }
        told_at = time.monotonic()
        for number, known in enumerate(self._runs.values(), start=1):
            changed = _read(known, problems.get(known.folder.run_id)) or changed
            if time.monotonic() - told_at > _TELL_EVERY_S:
                told_at = time.monotonic()
                self._tell(f"reading runs: {number} of {len(self._runs)}")
        return changed

    def _mirrored(self, mirror: Mirror, ours: frozenset[str]) -> Sequence[RunFolder]:
        try:
            return mirror.folders(without=ours, tell=self._tell)
        except StoreError as problem:
            log.warning("%s cannot be read now: %s", mirror.url, problem)
            return mirror.known()

    def summaries(self) -> list[RunSummary]:
        """Return one line on each run: this machine's first, each newest first."""
        return [known.summary() for known in self._runs.values()]

    def measures(self) -> list[RunMeasures]:
        """Return the numbers of each run whose journal can be read."""
        found = (known.measures() for known in self._runs.values())
        return [measures for measures in found if measures is not None]

    def is_ours(self, run_id: str) -> bool:
        """Return whether this machine has the run, and so may stop it.

        Raises:
            UsageError: no such run was seen.
        """
        return self._known(run_id).is_ours

    def follower(self, run_id: str) -> RunFollower:
        """Return what looks at one run again and again; `UsageError` if it was not seen."""
        known = self._known(run_id)
        if not known.folder.journal_path.exists() and known.problem is not None:
            raise UsageError(known.problem)
        return RunFollower(known.folder)

    def _known(self, run_id: str) -> _Known:
        known = self._runs.get(run_id)
        if known is None:
            raise UsageError(f"There is no run {run_id!r} here.", hint="look at the list of runs")
        return known


def _problem_of(mirror: Mirror, folder: RunFolder) -> dict[str, str]:
    problem = mirror.problems.get(folder.run_id)
    return {} if problem is None else {folder.run_id: problem}


def _read(known: _Known, stored_problem: str | None) -> bool:
    """Read what is new of a run; return whether anything is.

    `stored_problem` says why its store could not be read.
    """
    folder = known.folder
    signs = signs_of(folder)
    if signs == known.signs and stored_problem == known.stored_problem:
        return False
    known.problem = known.stored_problem = stored_problem
    if not folder.journal_path.exists() and stored_problem is not None:
        known.signs, known.record = signs, None
        return True
    known.signs, known.at_rest = signs, kept(folder, signs)
    if known.at_rest is not None:
        known.record = None
        return True
    file = folder.identity()
    again = known.record is not None and file == known.file
    known.file = file
    try:
        with folder.journal(again=again) as journal, making_sense(journal.path):
            if again and known.record is not None:
                known.record = fold(journal.read(known.record.seq), known.record)
            else:
                known.record = read_record(journal)
        if known.record.settled is not None:
            known.at_rest, known.record = keep(folder, known.record, signs), None
        else:
            numbers_of(folder, known.record)  # of what makes no sense, nothing is shown
    except SpotguardError as problem:
        log.warning("%s", problem)
        known.record, known.problem = None, problem.message
    return True
