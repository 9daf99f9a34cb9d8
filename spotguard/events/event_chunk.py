"""Chunks: many old events of one writer in one object, so that a long run stays short to list.

A chunk is made of JSON Lines, `{"key": ..., "event": {...}}`, where the key is the one under which
the event was stored alone before. By it readers know an event that they have seen: while events
are merged, some stand in two objects for a moment, or for ever if the writer dies.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from spotguard.events.event import Event
from spotguard.events.keys import writer_of
from spotguard.events.untrusted import Refused, an_object, needed, parse_object, text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

MERGED_AT_ONCE = 16
"""Twice as many stand alone before the older half is merged; so the newest always stand alone."""
LARGEST_CHUNK = 256
"""A chunk of so many events is left as it is, and the next one begun. The first chunk, which tells
how the attempt began, stays small: who rebuilds a journal reads it of every attempt."""
MOST_BYTES = 64 << 20
"""Of a chunk that is read; ours have some hundred kilobytes."""
_MOST_LINES = 4 * LARGEST_CHUNK


def pack(events: Iterable[tuple[str, bytes]]) -> bytes:
    """Return the chunk of events that were stored under these keys, as `Event.to_json` wrote them.

    They are merged as they are, one on each line.
    """
    return b"".join(
        b'{"key": %s, "event": %s}\n' % (json.dumps(key).encode(), raw) for key, raw in events
    )


def unpack(raw: bytes) -> Iterator[tuple[str | None, Event | Refused]]:
    """Yield (key, event) of each line; of a damaged one (None, what is wrong)."""
    lines = raw.split(b"\n", _MOST_LINES)
    for line in filter(None, lines[:_MOST_LINES]):
        try:
            body = parse_object(line, "the line")
            key = needed(text(body, "key"), "key")
            if not writer_of(key):
                raise Refused("its key is none of an event")
            event = Event.from_body(an_object(body.get("event"), "its event"))
        except Refused as problem:
            yield None, problem
        else:
            yield key, event
    if lines[_MOST_LINES:]:
        yield None, Refused(f"it has more than {_MOST_LINES} lines")
