"""The report of a run again and again, at the price of what is new."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from spotguard.control.journal.journal import making_sense
from spotguard.control.report.document import assemble
from spotguard.control.report.reading import StoreReader
from spotguard.control.report.series import MOST_POINTS, read_losses, thinned
from spotguard.control.status.watch import Watch

if TYPE_CHECKING:
    from spotguard.control.report.document import ReportDocument
    from spotguard.control.report.series import Point
    from spotguard.control.run_folder import RunFolder
    from spotguard.control.status.view import HistoryLine

LINES = 200
"""Happenings that a live page shows."""


class RunFollower:
    """Remembers what it has read of a run. Not thread-safe; methods block."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._watch = Watch(folder)
        self._lines: deque[HistoryLine] = deque(maxlen=LINES)
        self._told = 0
        self._losses: list[Point] = []
        self._file: int | None = None
        self._read_to = 0
        self._stored = StoreReader()

    def look(self) -> ReportDocument:
        """Return the report as it is now.

        Raises:
            JournalDamaged: what is new in the journal cannot be read or makes no sense.
        """
        if self._folder.identity() != self._file:  # another journal took its place
            self._file, self._read_to = self._folder.identity(), 0
            self._losses.clear()
            self._lines.clear()
            self._told = 0
            self._watch = Watch(self._folder)
        look = self._watch.look()
        record = self._watch.record
        self._told += look.earlier + len(look.news)
        self._lines.extend(look.news)
        with self._folder.journal(again=True) as journal, making_sense(journal.path):
            self._losses += read_losses(journal, after_seq=self._read_to)
        if len(self._losses) > 2 * MOST_POINTS:
            self._losses = thinned(self._losses)
        self._read_to = record.seq
        with making_sense(self._folder.journal_path):
            return assemble(
                record,
                look.view,
                now=self._folder.clock().now(),
                stored=self._stored.read(
                    record, self._losses, controlled=look.view.controller_alive
                ),
                lines=tuple(self._lines),
                earlier=self._told - len(self._lines),
            )
