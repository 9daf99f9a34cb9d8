"""What a node says into the run store: events, heartbeats; and what it hears: `stop.json`.

Each rank looks there for profiles that somebody asks for, too.

One background thread per reporting rank, so that a slow store never slows a step.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from spotguard.errors import StoreError
from spotguard.events import keys
from spotguard.events.event import Event, Heartbeat, JobEvent
from spotguard.events.states import EndReason
from spotguard.events.untrusted import Refused, needed, parse_object, text
from spotguard.runtime.preemption.stop_consensus import StopRequest
from spotguard.runtime.process import clock
from spotguard.runtime.reporting.event_log import EventLog
from spotguard.storage.deadline import give_up_after
from spotguard.storage.small_objects import get_small

if TYPE_CHECKING:
    from collections.abc import Callable

    from spotguard.runtime.reporting.metrics import Metrics
    from spotguard.storage.base import ObjectStore

log = logging.getLogger("spotguard")

_HURRIED = frozenset({JobEvent.NOTICE.value, JobEvent.AGREED.value, JobEvent.ENDED.value})
"""After these the next event must not wait for anything that can be done another time."""
_CALM = frozenset({JobEvent.WITHDRAWN.value})
_PROBLEMS = (StoreError, OSError)
"""What a store raises, and one that breaks its promise: an error that ended the thread would be the
end of all that is heard of the job."""
_OF_MACHINES = (RuntimeError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
_TROUBLES = (*_PROBLEMS, *_OF_MACHINES)
"""What may come of looking at a machine whose GPU or driver fails; events are told all the same."""
_METRICS_S = 2.0
_LAST_WORD_S = 2.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 5.0
"""Before what could not be stored is tried again, and again."""


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
        metrics: Metrics | None = None,
        look: Callable[[], None] | None = None,
    ) -> None:
        """`look` is called with each heartbeat, also on ranks that write none."""
        self._store = store
        self._attempt = attempt
        self._node = node
        self._rank = rank
        self._heartbeat_s = heartbeat_s
        self._heartbeat = heartbeat
        self._on_stop = on_stop
        self._metrics = metrics
        self._look = look
        self._heard_stop = False
        self._log = EventLog(store, attempt=attempt, node=node, rank=rank)
        self._calm = True
        self._owed: deque[Event | threading.Event] = deque()
        """Events to store, in order, and who waits for those before him."""
        self._pause_s = _FIRST_PAUSE_S
        self._again_at = math.inf
        self._events: queue.SimpleQueue[Event | threading.Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="spotguard-report", daemon=True)

    def start(self) -> None:
        """Begin to write; what was queued before is not lost."""
        self._thread.start()

    def event(self, kind: JobEvent, **data: Any) -> None:
        """Queue an event; returns at once."""
        if self._metrics is not None and kind in (JobEvent.NOTICE, JobEvent.AGREED):
            self._metrics.told_to_stop()
        self._events.put(
            Event(
                kind=kind.value,
                at=clock.now(),
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
        """Write what is queued, or try to, and end the thread; blocks `timeout_s` at most."""
        self._events.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        next_beat = time.monotonic()
        while True:
            wait = max(min(next_beat, self._again_at) - time.monotonic(), 0.001)
            try:
                item = self._events.get(timeout=wait)
            except queue.Empty:
                if time.monotonic() >= self._again_at:
                    self._store_owed()
                if time.monotonic() >= next_beat:
                    self._store_metrics(measure=True)
                    self._beat()
                    next_beat = time.monotonic() + self._heartbeat_s
                continue
            if item is not None:
                self._owed.append(item)
            if item is None or self._again_at == math.inf:
                self._store_owed()
            if item is None:
                self._store_metrics()
                self._last_beat()
                return

    def _store_owed(self) -> None:
        """Store what is owed, up to what the store refuses: that, and all behind it, comes later.

        The controller decides by what it reads: an end that a hiccup swallowed would be a failure.
        """
        while self._owed:
            item = self._owed[0]
            if isinstance(item, threading.Event):
                item.set()
            elif not self._write(item):
                self._again_at = time.monotonic() + self._pause_s
                self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
                return
            self._owed.popleft()
        self._pause_s, self._again_at = _FIRST_PAUSE_S, math.inf

    def _write(self, event: Event) -> bool:
        """Store an event and return whether it is; then, if nobody hurries, merge older ones."""
        self._calm = event.kind not in _HURRIED and (self._calm or event.kind in _CALM)
        try:
            self._log.write(event)
        except _PROBLEMS as problem:
            if self._again_at == math.inf:
                log.warning("could not report %s yet: %s", event.kind, problem)
            return False
        try:
            if self._calm:
                self._log.tidy(lambda: self._events.empty() and len(self._owed) == 1)
        except _PROBLEMS as problem:
            log.warning("older events stay as they are for now: %s", problem)
        return True

    def _store_metrics(self, *, measure: bool = False) -> None:
        """Store what was logged; for a short time only, as the heartbeat waits for it."""
        if self._metrics is None:
            return
        try:
            if measure:
                self._metrics.measure()
            with give_up_after(_METRICS_S):
                self._metrics.flush()
        except _TROUBLES as problem:
            log.warning("metrics could not be stored yet: %s", problem)

    def _last_beat(self) -> None:
        """Show what was logged last, unless that would take long."""
        if self._heartbeat is None or self._metrics is None:
            return
        try:
            with give_up_after(_METRICS_S):
                beat = self._heartbeat()
                self._store.put(keys.heartbeat(self._attempt, self._node), beat.to_json())
        except _TROUBLES as problem:
            log.warning("no heartbeat: %s", problem)

    def _beat(self) -> None:
        try:
            if self._heartbeat is not None:
                beat = self._heartbeat()
                self._store.put(keys.heartbeat(self._attempt, self._node), beat.to_json())
                self._look_for_stop()
            if self._look is not None:
                self._look()
        except _TROUBLES as problem:
            if self._heartbeat is not None:  # one rank of a node says so
                log.warning("no heartbeat: %s", problem)

    def _look_for_stop(self) -> None:
        key = keys.stop(self._attempt)
        if self._heard_stop or self._store.head(key) is None:
            return
        try:
            raw = get_small(self._store, key)
        except Refused:
            raw = b""
        self._heard_stop = True
        self._on_stop(parse_stop(raw))


def parse_stop(raw: bytes) -> StopRequest:
    """Return the controller's request; one that cannot be read still means: stop."""
    try:
        body = parse_object(raw, "the request")
        told = needed(text(body, "reason"), "reason")
        exact = text(body, "exact_reason")
        known = {each.value for each in EndReason}
        reason = EndReason(exact if exact is not None and exact in known else told)
        return StopRequest(reason=reason, message=text(body, "message") or "")
    except ValueError:
        return StopRequest(reason=EndReason.STOPPED, message="asked to stop")


def last_word_s(deadline_at: float | None, most_s: float) -> float:
    """Return how long a store may refuse the end: who is killed meanwhile leaves no exit code."""
    return (
        most_s if deadline_at is None else min(max(deadline_at - clock.now(), _LAST_WORD_S), most_s)
    )
