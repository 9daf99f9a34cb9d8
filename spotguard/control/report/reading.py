"""What of a run lies in its store and nowhere else: checkpoints, what it logged and printed."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from spotguard.control.checkpoints.commands import list_checkpoints
from spotguard.control.checkpoints.find import OpenedRun
from spotguard.control.journal.stored.logs import LogQuery, StoredLog
from spotguard.control.report.series import LOSS, all_series, series, thinned
from spotguard.control.status.metrics import SeriesReader
from spotguard.control.status.view import LogDocument
from spotguard.errors import SpotguardError
from spotguard.storage import PrefixedStore, open_store
from spotguard.storage.urls import is_folder

if TYPE_CHECKING:
    from spotguard.control.checkpoints.commands import CheckpointRow
    from spotguard.control.journal.record import RunRecord
    from spotguard.control.report.series import PlottedSeries, Point
    from spotguard.storage.base import ObjectStore

NEWEST_CHECKPOINTS = 50
NEWEST_PRINTED = 200
_EVERY_S, _BUCKET_EVERY_S = 2.0, 30.0
"""The store is read so often while somebody looks: each look at a bucket costs money."""


@dataclass(frozen=True, kw_only=True)
class Stored:
    """What the store has."""

    series: tuple[PlottedSeries, ...]
    checkpoints: tuple[CheckpointRow, ...] = ()
    log: tuple[LogDocument, ...] = ()
    problem: str | None = None
    """Why it could not be read; None if it was."""


class StoreReader:
    """Reads a run's store again and again, at the price of what is new. Methods block."""

    def __init__(self) -> None:
        self._store: ObjectStore | None = None
        self._metrics: SeriesReader | None = None
        self._log: StoredLog | None = None
        self._attempt = 0
        self._printed: deque[LogDocument] = deque(maxlen=NEWEST_PRINTED)
        self._stored: Stored | None = None
        self._read_at = float("-inf")

    def read(self, record: RunRecord, losses: list[Point], *, controlled: bool) -> Stored:
        """Return what the store has, or had a moment ago; `losses` are those of the journal."""
        every_s = _EVERY_S if is_folder(record.store_root) else _BUCKET_EVERY_S
        known = self._stored
        if known is None or time.monotonic() - self._read_at >= every_s:
            known = self._stored = self._now(record, losses, controlled=controlled)
            self._read_at = time.monotonic()
        return known

    def _now(self, record: RunRecord, losses: list[Point], *, controlled: bool) -> Stored:
        told = Stored(series=(series(LOSS, thinned(losses), record),))
        try:
            if self._store is None:
                self._store = PrefixedStore(open_store(record.store_root), record.run_id)
                self._metrics = SeriesReader(self._store)
            told = replace(told, series=all_series(self._metrics, record, losses))
            at_rest = record.settled is not None and not controlled
            opened = OpenedRun(run_id=record.run_id, store=self._store, at_rest=at_rest)
            rows = list_checkpoints(opened, newest=NEWEST_CHECKPOINTS)
            told = replace(told, checkpoints=tuple(rows))
            return replace(told, log=self._newest_printed(self._store, record))
        except SpotguardError as problem:
            return replace(told, problem=problem.message)

    def _newest_printed(self, store: ObjectStore, record: RunRecord) -> tuple[LogDocument, ...]:
        if not record.attempts:
            return ()
        newest = record.attempts[-1]
        if self._log is None or newest.number != self._attempt:
            self._log = StoredLog(store, newest.number, LogQuery(tail=NEWEST_PRINTED))
            self._attempt = newest.number
            self._printed.clear()
        over = newest.end is not None
        for line in self._log.lines(failed=False, final=over):
            self._printed.append(
                LogDocument(
                    attempt=line.attempt,
                    node=line.node or 0,
                    rank=line.rank,
                    at=line.at,
                    stream=line.stream,
                    text=line.text,
                )
            )
        return tuple(self._printed)
