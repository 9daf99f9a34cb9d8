"""Looking at a run again and again, at the price of what is new."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spotguard.control.journal.fold import read_record
from spotguard.control.journal.fold_attempt import progress_of
from spotguard.control.journal.journal import making_sense
from spotguard.control.status.history_words import Teller, by_time, newest_lines
from spotguard.control.status.make_view import run_summary, run_view
from spotguard.control.status.view import Look, RunSummary
from spotguard.events.states import RunState
from spotguard.events.untrusted import integer, needed, parse_object, seconds
from spotguard.storage.urls import below

if TYPE_CHECKING:
    from spotguard.control.journal.record import RunRecord, StepProgress
    from spotguard.control.run_folder import RunFolder
    from spotguard.control.status.view import HistoryLine, RunView

NEWEST = 100
"""Lines of the story that are told at first: a run of months has a million of them."""


class Watch:
    """Remembers what all events said that it has seen, and reads on from there."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._teller = Teller()
        self._file: int | None = None
        """Which file it was: `adopt` puts a new one in the place of a damaged one."""

    @property
    def record(self) -> RunRecord:
        """What all events say that were seen at the last look."""
        assert self._teller.record is not None
        return self._teller.record

    def look(self) -> Look:
        """Return how the run stands, and what happened since the last look.

        Raises:
            JournalDamaged: what is new in the journal cannot be read or makes no sense.
        """
        controlled = self._folder.is_controlled()
        news, earlier = self._read()
        assert self._teller.record is not None
        view = picture(self._folder, self._teller.record, controlled=controlled)
        return Look(view=view, news=tuple(news), earlier=earlier)

    def _read(self) -> tuple[list[HistoryLine], int]:
        file = self._folder.identity()
        known, self._file = file is not None and file == self._file, file
        with self._folder.journal(again=known) as journal, making_sense(journal.path):
            if known and self._teller.record is not None:
                entries = journal.read(self._teller.record.seq)
                return by_time(self._teller.tell_all(entries)), 0
            record = read_record(journal)
            self._teller = Teller(record)
            return newest_lines(journal, NEWEST, until=record.seq)


def picture(folder: RunFolder, record: RunRecord, *, controlled: bool) -> RunView:
    """Return how a run stands now; `controlled` if its controller lived before it was read.

    Raises:
        JournalDamaged: what its journal says makes no sense.
    """
    with making_sense(folder.journal_path):
        return run_view(
            record,
            live=_live(folder, record),
            now=folder.clock().now(),
            controller_alive=controlled,
            store_url=below(record.store_root, folder.run_id),
            looked_at=folder.looked_at(),
        )


def summary(folder: RunFolder, record: RunRecord) -> RunSummary:
    """Return one line on how a run stands now; `JournalDamaged` as for `picture`."""
    with making_sense(folder.journal_path):
        return run_summary(record, now=folder.clock().now(), live=_live(folder, record))


def lost_run(folder: RunFolder, problem: str | None = None) -> RunSummary:
    """Return the line of a run whose journal, or store, cannot be read; `problem` says why."""
    return RunSummary(
        run_id=folder.run_id,
        name=folder.run_id,
        state=RunState.CONTACT_LOST,
        created_at=folder.path.stat().st_mtime,
        spent_usd=None,
        problem=problem,
    )


def _live(folder: RunFolder, record: RunRecord) -> StepProgress | None:
    """Return the newest progress of the current attempt, if the controller left it."""
    current = record.current
    try:
        body = parse_object(folder.live_path.read_text(), "the live file")
        at = needed(seconds(body, "at"), "instant")
    except (OSError, ValueError):
        return None
    mine = current is not None and integer(body, "attempt") == current.number
    return progress_of(body, at) if mine else None
