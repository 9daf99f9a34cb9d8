"""The ledger: the journal and the record folded from it, always in step."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from spotguard.control.journal.fold import apply, read_record
from spotguard.control.journal.job_events import journal_data
from spotguard.control.journal.record import JOB_PREFIX, Kind
from spotguard.control.journal.snapshot import keep_snapshot

if TYPE_CHECKING:
    from spotguard.control.journal.journal import Entry, Journal
    from spotguard.control.journal.record import RunRecord
    from spotguard.events.event import Event
    from spotguard.shared.units import Clock

log = logging.getLogger(__name__)


class Ledger:
    """Writes events down; `record` is what all of them say, also those that others wrote."""

    def __init__(self, journal: Journal, clock: Clock) -> None:
        self._journal = journal
        self._clock = clock
        journal.index_keys()
        self.record: RunRecord = read_record(journal)
        self._last_snapshot: Entry | None = None
        self._keep_snapshot()

    def write(
        self, kind: Kind, data: dict[str, Any] | None = None, *, attempt: int | None = None
    ) -> None:
        """Write one event down, durably."""
        self._journal.append(kind.value, at=self._clock.now(), attempt=attempt, data=data)
        log.info("%s attempt=%s %.300s", kind.value, attempt, data or "")
        self.catch_up()

    def copy(self, key: str, event: Event) -> None:
        """Write down what the job reported."""
        seen_at = self._clock.now()
        data = journal_data(key, event, seen_at=seen_at)
        at = self._believable(event, seen_at)
        self._journal.append(JOB_PREFIX + event.kind, at=at, attempt=event.attempt, data=data)
        self.catch_up()

    def set_aside(self, attempt: int, key: str, problem: str) -> None:
        """Write down that what has this key makes no sense, unless that is known already."""
        if not self.knows(key):
            self.write(Kind.SET_ASIDE, {"key": key, "problem": problem}, attempt=attempt)

    def _believable(self, event: Event, seen_at: float) -> float:
        """Return when it happened: not after it was read, nor before its attempt was launched.

        A job corrects its own times; where one could not, hours that never were must not count.
        """
        begun = [each.intended_at for each in self.record.attempts if each.number == event.attempt]
        return min(max(event.at, *begun, 0.0), seen_at)

    def catch_up(self) -> None:
        """Fold in what was written since, by us or by a command of the user."""
        for entry in self._journal.events(self.record.seq):
            self.record = apply(self.record, entry)
        self._keep_snapshot()

    def knows(self, key: str) -> bool:
        """Tell whether the job event or the chunk of this store key is in the journal."""
        return self._journal.knows(key)

    def note_chunk(self, attempt: int, key: str) -> None:
        """Write down that all events of a chunk are in the journal."""
        self.write(Kind.CHUNK_READ, {"key": key}, attempt=attempt)

    def _keep_snapshot(self) -> None:
        self._last_snapshot = keep_snapshot(
            self._journal, self.record, self._last_snapshot, now=self._clock.now()
        )
