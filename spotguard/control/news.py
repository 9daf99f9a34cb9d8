"""What the job wrote into the run store, as far as the controller has not read it yet."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from spotguard.errors import NotFound
from spotguard.events import keys
from spotguard.events.event import Event, Heartbeat

if TYPE_CHECKING:
    from collections.abc import Iterator

    from spotguard.storage.base import ObjectStore

log = logging.getLogger(__name__)

_LOOK_BACK_S = 60.0
"""Events are listed by the time in their key, but a slow store or another node's clock can make
an older key appear after a newer one. Whatever comes later still than this is read at the end."""


class JobNews:
    """Reads each event of an attempt once. Methods block and raise `StoreError`."""

    def __init__(self, store: ObjectStore, seen_keys: set[str]) -> None:
        """`seen_keys` are the events that an earlier controller has read; it is added to."""
        self._store = store
        self._seen = seen_keys
        self._newest_at: dict[int, float] = {}

    def events(self, attempt: int, *, all_of_them: bool) -> Iterator[tuple[str, Event]]:
        """Yield (key, event) of the events not yielded before, by time.

        Args:
            attempt: its number.
            all_of_them: look at every key instead of the recent ones; for the end of an attempt.
        """
        for info in self._store.list(
            keys.events(attempt), start_after="" if all_of_them else self._start_after(attempt)
        ):
            if info.key in self._seen:
                continue
            try:
                event = Event.from_json(self._store.get(info.key))
            except ValueError as problem:
                log.warning("passed over %s: %s", info.key, problem)
                self._seen.add(info.key)
                continue
            yield info.key, event
            self._seen.add(info.key)
            self._newest_at[attempt] = max(self._newest_at.get(attempt, 0.0), event.at)

    def beats(self, attempt: int) -> list[Heartbeat]:
        """Return the last sign of life of each node."""
        beats = []
        for info in self._store.list(keys.heartbeats(attempt)):
            try:
                beat = Heartbeat.from_json(self._store.get(info.key))
            except NotFound:
                continue
            except ValueError as problem:
                log.warning("passed over %s: %s", info.key, problem)
                continue
            if isinstance(beat.step, int) and isinstance(beat.at, (int, float)):
                beats.append(beat)
        return beats

    def _start_after(self, attempt: int) -> str:
        newest_at = self._newest_at.get(attempt)
        if newest_at is None:
            return ""
        return keys.event(attempt, at=max(0.0, newest_at - _LOOK_BACK_S), node=0, rank=0, count=0)


def journal_data(key: str, event: Event, *, seen_at: float) -> dict[str, Any]:
    """Return an event's data as the journal keeps it."""
    return {
        **event.data,
        "key": key,
        "node": event.node,
        "rank": event.rank,
        "seen_at": seen_at,
    }
