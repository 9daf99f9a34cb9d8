"""Trackers, such as W&B or MLflow: fed by a thread, so that none of them can hold up a step."""

from __future__ import annotations

import logging
import queue
import threading
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from spotguard.errors import SpotguardError
from spotguard.events.metric import OWN

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from spotguard.events.metric import MetricLine

log = logging.getLogger("spotguard")

_MOST_WAITING = 100_000
"""Steps that wait for a tracker which is slow; what is logged beyond them, it is not told."""


class TrackerProblem(SpotguardError):
    """A tracker could not be told something. The run goes on, and its own store has it."""


class Tracker(Protocol):
    """What shows a run elsewhere. All is called by one thread; a failure is a `TrackerProblem`."""

    def begin(self, first: int) -> None:
        """Go on with the run as it is after `first` steps: what it says of later ones is void."""

    def log(self, step: int, values: dict[str, float], at: float) -> None:
        """Take values of a step, logged at an instant. Steps come in the order of their logging."""

    def preempting(self) -> None:
        """Take note that this attempt is about to be taken, and another will follow."""

    def flush(self) -> None:
        """Make what was logged safe from this node's end."""

    def close(self, *, finished: bool) -> None:
        """End; `finished` if the whole run is, and not only this attempt of it."""


class TrackerFeed:
    """The thread of one tracker. Its methods return at once, but for `wait` and `close`.

    A tracker is code of others: whatever it raises is said once and costs nothing else, and one
    that is late is waited for once, not at each save.
    """

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._failed = self._is_full = False
        self._has_all: threading.Event | None = None
        """Set once it has all that was taken when `wait` was called last."""
        self._thread = threading.Thread(target=self._run, name="spotguard-tracker", daemon=True)
        self._thread.start()

    def begin(self, first: int) -> None:
        """Have the tracker go on after `first` steps."""
        self._queue.put(lambda: self._tracker.begin(first))

    def take(self, lines: Sequence[MetricLine]) -> None:
        """Pass on what was logged, step by step; what nodes use is left out: trackers look, too."""
        by_step: dict[int, tuple[dict[str, float], float]] = {}
        for line in lines:
            if line.name.startswith(f"{OWN}node"):
                continue
            for step, at, value in zip(line.steps, line.at, line.values, strict=True):
                by_step.setdefault(step, ({}, at))[0][line.name] = value
        for step in sorted(by_step):
            if self._queue.qsize() >= _MOST_WAITING:
                self._say_that_it_is_full(step)
                return
            values, at = by_step[step]
            self._queue.put(partial(self._tracker.log, step, values, at))

    def _say_that_it_is_full(self, step: int) -> None:
        if not self._is_full:
            log.warning(
                "%s is %d steps behind: from step %d on it is told only what it has time for; "
                "the run's own store has all",
                type(self._tracker).__name__,
                _MOST_WAITING,
                step,
            )
        self._is_full = True

    def preempting(self) -> None:
        """Tell the tracker that the node is about to be taken."""
        self._queue.put(self._tracker.preempting)

    def wait(self, timeout_s: float) -> bool:
        """Block until the tracker has all that was taken, `timeout_s` at most; True if it has.

        One that was late the last time, and still is, is not waited for.
        """
        if self._has_all is not None and not self._has_all.is_set():
            return False
        self._has_all = done = threading.Event()
        self._queue.put(self._tracker.flush)
        self._queue.put(done.set)
        return done.wait(max(0.0, timeout_s))

    def close(self, *, finished: bool, timeout_s: float) -> None:
        """End the tracker and the thread; blocks `timeout_s` at most."""
        self._queue.put(lambda: self._tracker.close(finished=finished))
        self._queue.put(None)
        self._thread.join(max(0.0, timeout_s))

    def _run(self) -> None:
        while True:
            call: Any = self._queue.get()
            if call is None:
                return
            try:
                call()
            except TrackerProblem as problem:
                self._say_that_it_fails(str(problem))
            except Exception as problem:  # noqa: BLE001 - foreign code at the top of a thread
                name = type(self._tracker).__name__
                self._say_that_it_fails(f"{name}: {type(problem).__name__}: {problem}")

    def _say_that_it_fails(self, words: str) -> None:
        """Say it once: a server that is away is away for each step."""
        if not self._failed:
            log.warning("%s", words)
        self._failed = True
