"""What a node says into the run store: events, heartbeats; and what it hears: `stop.json`.

One background thread per reporting rank, so that a slow store never slows a step.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from typing import TYPE_CHECKING, Any

from spotguard.errors import StoreError
from spotguard.events import keys
from spotguard.events.event import Event, Heartbeat, JobEvent
from spotguard.events.states import EndReason
from spotguard.runtime.event_log import EventLog
from spotguard.runtime.stopping import StopRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from spotguard.storage.base import ObjectStore

log = logging.getLogger("spotguard")

_HURRIED = frozenset({JobEvent.NOTICE.value, JobEvent.AGREED.value, JobEvent.ENDED.value})
"""After these the next event must not wait for anything that can be done another time."""
_CALM = frozenset({JobEvent.WITHDRAWN.value})


class Reporter:
    """Writes this rank's events in order and its node's heartbeat; looks for `stop.json`."""

    def __init__(
        self,
        store: ObjectStore,
        *,
        attempt: int,
        node: int,
        rank: int,
        heartbeat_s: float,
        heartbeat: Callable[[], Heartbeat] | None,
        on_stop: Callable[[StopRequest], None],
    ) -> None:
        self._store = store
        self._attempt = attempt
        self._node = node
        self._rank = rank
        self._heartbeat_s = heartbeat_s
        self._heartbeat = heartbeat
        self._on_stop = on_stop
        self._heard_stop = False
        self._log = EventLog(store, attempt=attempt, node=node, rank=rank)
        self._calm = True
        self._events: queue.SimpleQueue[Event | threading.Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="spotguard-report", daemon=True)

    def start(self) -> None:
        """Begin to write; what was queued before is not lost."""
        self._thread.start()

    def event(self, kind: JobEvent, **data: Any) -> None:
        """Queue an event; returns at once."""
        self._events.put(
            Event(
                kind=kind.value,
                at=time.time(),
                attempt=self._attempt,
                node=self._node,
                rank=self._rank,
                data=data,
            )
        )

    def flush(self, timeout_s: float) -> bool:
        """Block until all queued events are stored, `timeout_s` at most; True if they are."""
        done = threading.Event()
        self._events.put(done)
        return done.wait(timeout_s)

    def close(self, timeout_s: float) -> None:
        """Write what is queued and end the thread; blocks `timeout_s` at most."""
        self._events.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        next_beat = time.monotonic()
        while True:
            wait = max(next_beat - time.monotonic(), 0.001)
            try:
                item = self._events.get(timeout=wait)
            except queue.Empty:
                self._beat()
                next_beat = time.monotonic() + self._heartbeat_s
                continue
            if item is None:
                return
            if isinstance(item, threading.Event):
                item.set()
            else:
                self._write(item)

    def _write(self, event: Event) -> None:
        self._calm = event.kind not in _HURRIED and (self._calm or event.kind in _CALM)
        try:
            self._log.write(event)
            if self._calm:
                self._log.tidy(self._events.empty)
        except StoreError as problem:
            log.warning("could not report %s: %s", event.kind, problem)

    def _beat(self) -> None:
        if self._heartbeat is None:
            return
        try:
            beat = self._heartbeat()
            self._store.put(keys.heartbeat(self._attempt, self._node), beat.to_json())
            self._look_for_stop()
        except StoreError as problem:
            log.warning("no heartbeat: %s", problem)

    def _look_for_stop(self) -> None:
        key = keys.stop(self._attempt)
        if self._heard_stop or self._store.head(key) is None:
            return
        self._heard_stop = True
        self._on_stop(parse_stop(self._store.get(key)))


def parse_stop(raw: bytes) -> StopRequest:
    """Return the controller's request; one that cannot be read still means: stop."""
    try:
        body = json.loads(raw)
        return StopRequest(reason=EndReason(body["reason"]), message=str(body.get("message", "")))
    except (ValueError, KeyError, TypeError):
        return StopRequest(reason=EndReason.STOPPED, message="asked to stop")
