"""One rank's events in the run store: each an object of its own at first, merged when it is old.

A run of months writes a million events; as a million objects they would take minutes to list. So
the writer, who still has them in memory, puts its older ones into a few chunks and then deletes
what it merged. Nobody else touches its objects: there is nothing to agree on. At every moment each
event stands in at least one object, whenever the writer dies.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from spotguard.errors import AlreadyExists
from spotguard.events import event_chunk, keys
from spotguard.events.event_chunk import LARGEST_CHUNK, MERGED_AT_ONCE

if TYPE_CHECKING:
    from collections.abc import Callable

    from spotguard.events.event import Event
    from spotguard.storage.base import ObjectStore

_LARGEST_CHUNK_BYTES = 1 << 20

_Stored = list[tuple[str, bytes]]
"""(key, bytes) of events, oldest first."""


class EventLog:
    """Writes events in order. Not thread-safe; everything blocks and raises `StoreError`."""

    def __init__(self, store: ObjectStore, *, attempt: int, node: int, rank: int) -> None:
        self._store = store
        self._attempt = attempt
        self._node = node
        self._rank = rank
        self._count = 0
        self._alone: _Stored = []
        self._merged: _Stored = []
        """What the newest chunk holds, as long as more shall be added."""
        self._merged_key: str | None = None
        self._has_first = False
        self._doomed: list[str] = []
        """Keys of what stands in a chunk, too."""

    def write(self, event: Event) -> None:
        """Store one event; after a failure the same one may be written again."""
        key = keys.event(
            self._attempt, at=event.at, node=self._node, rank=self._rank, count=self._count + 1
        )
        raw = event.to_json()
        with contextlib.suppress(AlreadyExists):  # by ourselves, when the answer was lost
            self._store.put(key, raw, if_absent=True)
        self._count += 1
        self._alone.append((key, raw))

    def tidy(self, go_on: Callable[[], bool]) -> None:
        """Merge old events if there are many, and delete what was merged while `go_on` says so."""
        if len(self._alone) >= 2 * MERGED_AT_ONCE:
            self._merge()
        while self._doomed and go_on():
            self._store.delete(self._doomed[0])
            del self._doomed[0]

    def _merge(self) -> None:
        older = self._alone[:MERGED_AT_ONCE]
        merged = [*self._merged, *older]
        key, raw = keys.chunk(older[-1][0]), event_chunk.pack(merged)
        with contextlib.suppress(AlreadyExists):  # by ourselves, when the answer was lost
            self._store.put(key, raw, if_absent=True)
        # Only now, and oldest first: a reader that finds one gone finds the chunk in its place.
        self._doomed += [stored for stored, _ in older]
        self._doomed += [self._merged_key] if self._merged_key else []
        self._alone = self._alone[MERGED_AT_ONCE:]
        is_full = len(merged) >= LARGEST_CHUNK or len(raw) >= _LARGEST_CHUNK_BYTES
        is_done = is_full or not self._has_first
        self._merged, self._merged_key = ([], None) if is_done else (merged, key)
        self._has_first = True
