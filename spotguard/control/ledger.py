"""The ledger: the journal and the record folded from it, always in step."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from spotguard.control.fold import apply, read_record
from spotguard.control.news import journal_data
from spotguard.control.record import JOB_PREFIX

if TYPE_CHECKING:
    from spotguard.control.journal import Journal
    from spotguard.control.record import Kind, RunRecord
    from spotguard.events.event import Event
    from spotguard.units import Clock

log = logging.getLogger(__name__)


class Ledger:
    """Writes events down; `record` is what all of them say, also those that others wrote."""

    def __init__(self, journal: Journal, clock: Clock) -> None:
        self._journal = journal
        self._clock = clock
        self.record: RunRecord = read_record(journal)

    def write(
        self, kind: Kind, data: dict[str, Any] | None = None, *, attempt: int | None = None
    ) -> None:
        """Write one event down, durably."""
        self._journal.append(kind.value, at=self._clock.now(), attempt=attempt, data=data)
        log.info("%s attempt=%s %.300s", kind.value, attempt, data or "")
        self.catch_up()

    def copy(self, key: str, event: Event) -> None:
        """Write down what the job reported."""
        data = journal_data(key, event, seen_at=self._clock.now())
        self._journal.append(JOB_PREFIX + event.kind, at=event.at, attempt=event.attempt, data=data)
        self.catch_up()

    def catch_up(self) -> None:
        """Fold in what was written since, by us or by a command of the user."""
        for entry in self._journal.events(self.record.seq):
            self.record = apply(self.record, entry)

    def copied_keys(self) -> set[str]:
        """Return the store keys of all job events in the journal."""
        return {entry.data["key"] for entry in self._journal.events() if "key" in entry.data}
