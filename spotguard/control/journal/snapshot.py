"""Snapshots: the folded record inside the journal, so that a long one is read from near its end.

A snapshot is an event like any other that says nothing new; the events before it stay the truth.
One of another version of the fold, or a damaged one, is passed over, and all events are folded.
"""

from __future__ import annotations

import hashlib
from functools import cache
from typing import TYPE_CHECKING

from spotguard.control.journal.record import Kind, RunRecord
from spotguard.events.states import Market
from spotguard.shared.typed_json import TypedJson

if TYPE_CHECKING:
    from spotguard.control.journal.journal import Entry, Journal

_VERSION = 4
"""To be raised when the fold makes something else of the same events."""
_EVERY = 2000
"""Entries between snapshots, while they are small."""
_RECORD = TypedJson(RunRecord, {"Market": Market})
_BYTES_PER_ENTRY = 100
"""A large record is kept less often: snapshots are a small part of the journal's size."""


def keep_snapshot(
    journal: Journal, record: RunRecord, last: Entry | None, *, now: float
) -> Entry | None:
    """Write a snapshot if the last one is old; return the newest (found, if `last` is None)."""
    if last is None and record.seq < _EVERY:
        return None
    last = last or journal.newest(Kind.SNAPSHOT.value)
    if last is not None and record.seq - last.seq < max(_EVERY, _size(last) // _BYTES_PER_ENTRY):
        return last
    body = _RECORD.text(record)
    data = {"fold": fingerprint(), "record": body, "sha256": _digest(body)}
    journal.append(Kind.SNAPSHOT.value, at=now, data=data)
    return journal.newest(Kind.SNAPSHOT.value)


def newest_snapshot(journal: Journal) -> RunRecord | None:
    """Return the record of the newest snapshot; None if there is none that can be used."""
    return _record_in(journal.newest(Kind.SNAPSHOT.value))


def snapshot_before(journal: Journal, number: int) -> RunRecord | None:
    """Return the same of the newest one before an event."""
    return _record_in(journal.newest(Kind.SNAPSHOT.value, before=number))


def _record_in(entry: Entry | None) -> RunRecord | None:
    if entry is None or entry.data.get("fold") != fingerprint():
        return None
    body = entry.data.get("record")
    if not isinstance(body, str) or _digest(body) != entry.data.get("sha256"):
        return None
    record = _RECORD.read(body)
    return record if record.seq < entry.seq else None


@cache
def fingerprint() -> str:
    """Return what tells a record's form from that of any other version."""
    return f"{_VERSION}-{_digest(_RECORD.form)[:16]}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _size(entry: Entry) -> int:
    return len(str(entry.data.get("record", "")))
