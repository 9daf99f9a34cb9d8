"""What the job wrote into the run store, as far as the controller has not read it yet.

Old events stand merged in chunks (`events.event_chunk`). While they are merged, an event can be
found alone and in one or two chunks, or be gone between a listing and its reading: each one is told
by its key, and what is gone is looked for again.
"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from spotguard.errors import NotFound
from spotguard.events import keys
from spotguard.events.event import Event, Heartbeat, JobEvent
from spotguard.events.event_chunk import MOST_BYTES as CHUNK_BYTES
from spotguard.events.event_chunk import unpack
from spotguard.events.untrusted import MOST_BYTES, Refused
from spotguard.storage.small_objects import get_small

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from spotguard.storage.base import ObjectInfo, ObjectStore

log = logging.getLogger(__name__)

_LOOK_BACK_S = 60.0
"""Events are listed by the time in their key, but a slow store or another node's clock can make
an older key appear after a newer one. Whatever comes later still than this is read at the end."""
_READS = 16
"""Objects that are read side by side when many are wanted at once."""


class Memory(Protocol):
    """What has been read, by keys: outlives the controller, and takes no memory of its process."""

    def knows(self, key: str) -> bool:
        """Tell whether this event, or all of this chunk, has been read or set aside."""
        ...

    def set_aside(self, attempt: int, key: str, problem: str) -> None:
        """Remember, and tell once, that what has this key makes no sense."""
        ...

    def note_chunk(self, attempt: int, key: str) -> None:
        """Remember that all events of the chunk have been read."""
        ...


class JobNews:
    """Reads each event of an attempt once. Methods block and raise `StoreError`."""

    def __init__(self, store: ObjectStore, memory: Memory) -> None:
        """`memory` must know each event by the time at which the next one is asked for."""
        self._store = store
        self._memory = memory
        self._newest_at: dict[int, float] = {}

    def events(self, attempt: int, *, all_of_them: bool) -> Iterator[tuple[str, Event]]:
        """Yield (key, event) of the events not read before, by time, merged ones together.

        Args:
            attempt: its number.
            all_of_them: look at every key instead of the recent ones; for the end of an attempt.
        """
        start_after = "" if all_of_them else self._start_after(attempt)
        gone = True
        while gone:
            gone = False
            for info in self._store.list(keys.events(attempt), start_after=start_after):
                if self._memory.knows(info.key):
                    continue
                try:
                    yield from self._new_in(attempt, info)
                except NotFound:  # merged a moment ago
                    gone = True

    def _new_in(self, attempt: int, info: ObjectInfo) -> Iterator[tuple[str, Event]]:
        """Yield what an object holds and was not read before; then remember the object."""
        is_chunk, newest_at = keys.is_chunk(info.key), self._newest_at.get(attempt, 0.0)
        for key, event in _events_of(self._store, info):
            if isinstance(event, Refused):
                self._memory.set_aside(attempt, key, str(event))
            elif event.attempt != attempt:
                self._memory.set_aside(attempt, key, f"it is of attempt {event.attempt}")
            else:
                if not (is_chunk and self._memory.knows(key)):
                    yield key, event
                newest_at = max(newest_at, event.at)
        # What was stored before the store's own "now" is not of the future, whatever it says.
        self._newest_at[attempt] = min(newest_at, info.modified_at or newest_at)
        if is_chunk:
            self._memory.note_chunk(attempt, info.key)

    def beats(self, attempt: int, nodes: Iterable[int]) -> list[Heartbeat]:
        """Return the last sign of life of each of these nodes, by one request for each."""
        refuse = partial(self._memory.set_aside, attempt)
        return _beats_at(self._store, [keys.heartbeat(attempt, node) for node in nodes], refuse)

    def _start_after(self, attempt: int) -> str:
        newest_at = self._newest_at.get(attempt)
        if newest_at is None:
            return ""
        return keys.event(attempt, at=max(0.0, newest_at - _LOOK_BACK_S), node=0, rank=0, count=0)


def read_beats(store: ObjectStore, attempt: int) -> list[Heartbeat]:
    """Return the last sign of life of each node, for who does not know how many there are."""
    found = [info.key for info in store.list(keys.heartbeats(attempt))]
    return _beats_at(store, found, _log_refused)


def _beats_at(
    store: ObjectStore, wanted: Sequence[str], refuse: Callable[[str, str], None]
) -> list[Heartbeat]:
    """Return the signs of life at these keys; `refuse` gets key and problem of other things."""
    beats = []
    for key in wanted:
        try:
            beats.append(Heartbeat.from_json(get_small(store, key)))
        except NotFound:
            continue
        except Refused as problem:
            refuse(key, str(problem))
    return beats


def _log_refused(key: str, problem: str) -> None:
    log.warning("passed over %s: %s", key, problem)


def newest_events(store: ObjectStore, attempt: int) -> list[Event]:
    """Return the events that are not merged, by time: of each writer at least the last 16."""
    found = [info for info in store.list(keys.events(attempt)) if not keys.is_chunk(info.key)]
    return [event for _, event in _read(store, found)]


@dataclass(frozen=True, kw_only=True)
class Past:
    """What an attempt's events tell to somebody who has read none of them."""

    events: list[tuple[str, Event]]
    """(key, event), by time."""
    chunks: list[str]
    """Keys of all chunks."""
    left: int
    """How many of the chunks were not read."""


def recall(store: ObjectStore, attempt: int) -> Past:
    """Return an attempt's events: all of a short one's.

    Of a writer with many chunks the first is read, which has its start, and the last, unless a
    save stands alone. In between are saves that newer ones made obsolete.
    """
    found = {info.key: info for info in store.list(keys.events(attempt))}
    chunks = [key for key in found if keys.is_chunk(key)]
    events = dict(_read(store, [found[key] for key in found if not keys.is_chunk(key)]))
    saved = JobEvent.SAVED.value
    with_save = {keys.writer_of(key) for key, event in events.items() if event.kind == saved}
    first = {keys.writer_of(key): key for key in reversed(chunks)}
    last = {keys.writer_of(key): key for key in chunks if keys.writer_of(key) not in with_save}
    wanted = sorted({*first.values(), *last.values()})
    events |= dict(_read(store, [found[key] for key in wanted]))
    return Past(
        events=sorted(events.items(), key=lambda pair: pair[1].at),
        chunks=chunks,
        left=len(chunks) - len(wanted),
    )


def _read(store: ObjectStore, stored: Sequence[ObjectInfo]) -> Iterator[tuple[str, Event]]:
    """Yield (key, event) of all that these objects hold; what is gone stands elsewhere."""

    def get(info: ObjectInfo) -> list[tuple[str, Event | Refused]]:
        try:
            return list(_events_of(store, info))
        except NotFound:
            return []

    with ThreadPoolExecutor(_READS, thread_name_prefix="spotguard-news") as crew:
        for found in crew.map(get, stored):
            for key, event in found:
                if isinstance(event, Event):
                    yield key, event
                else:
                    _log_refused(key, str(event))


def _events_of(store: ObjectStore, info: ObjectInfo) -> Iterator[tuple[str, Event | Refused]]:
    """Yield (key, event) of what an object holds; of what makes no sense, a key and why."""
    is_chunk = keys.is_chunk(info.key)
    most_bytes = CHUNK_BYTES if is_chunk else MOST_BYTES
    try:
        raw = get_small(store, info.key, most_bytes=most_bytes)
        found = unpack(raw) if is_chunk else iter([(info.key, Event.from_json(raw))])
    except Refused as problem:
        found = iter([(info.key, problem)])
    for number, (key, event) in enumerate(found, start=1):
        yield key or f"{info.key}, line {number}", event


def journal_data(key: str, event: Event, *, seen_at: float) -> dict[str, Any]:
    """Return an event's data as the journal keeps it."""
    return {
        **event.data,
        "key": key,
        "node": event.node,
        "rank": event.rank,
        "seen_at": seen_at,
    }
