"""Snapshots: the folded record inside the journal, so that a long one is read from near its end.

A snapshot is an event like any other that says nothing new; the events before it stay the truth.
One of another version of the fold, or a damaged one, is passed over, and all events are folded.
"""

from __future__ import annotations

import hashlib
import json
import types
from dataclasses import fields, is_dataclass
from enum import Enum, EnumMeta
from functools import cache
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin, get_type_hints

from spotguard.control.journal.record import Kind, RunRecord
from spotguard.events.states import Market

if TYPE_CHECKING:
    from spotguard.control.journal.journal import Entry, Journal

_VERSION = 2
"""To be raised when the fold makes something else of the same events."""
_EVERY = 2000
"""Entries between snapshots, while they are small."""
_NAMES = {"Market": Market}
"""What the modules of the record's parts import for the type checker only."""
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
    body = json.dumps(_plain(record), sort_keys=True)
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
    record = _made(RunRecord, json.loads(body))
    return record if isinstance(record, RunRecord) and record.seq < entry.seq else None


@cache
def fingerprint() -> str:
    """Return what tells a record's form from that of any other version."""
    return f"{_VERSION}-{_digest(_form(RunRecord))[:16]}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _size(entry: Entry) -> int:
    return len(str(entry.data.get("record", "")))


def _form(kind: Any) -> str:
    """Return a text that changes with every field of a dataclass and of those in it."""
    if isinstance(kind, type) and is_dataclass(kind):
        inner = (f"{name}:{_form(each)}" for name, each in _hints(kind).items())
        return f"{kind.__qualname__}({','.join(inner)})"
    if get_args(kind):
        return f"{get_origin(kind)}[{','.join(map(_form, get_args(kind)))}]"
    return str(kind)


def _plain(value: Any) -> Any:
    """Return a record, or part of one, as JSON has it."""
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value.value if isinstance(value, Enum) else value


def _made(kind: Any, value: Any) -> Any:
    """Return what `_plain` was given, of the type `kind`."""
    if value is None or kind is Any:
        return value
    if isinstance(kind, type) and is_dataclass(kind):
        hints = _hints(kind)
        return kind(**{name: _made(hints[name], each) for name, each in value.items()})
    args = get_args(kind)
    if get_origin(kind) in (Union, types.UnionType):
        return _made(next(each for each in args if each is not type(None)), value)
    if get_origin(kind) is tuple:
        if args[-1] is Ellipsis:
            return tuple(_made(args[0], item) for item in value)
        return tuple(_made(each, item) for each, item in zip(args, value, strict=True))
    return kind(value) if isinstance(kind, EnumMeta) else value


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind, localns=_NAMES)
