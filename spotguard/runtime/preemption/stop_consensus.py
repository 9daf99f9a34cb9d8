"""Being told to stop, and all ranks leaving at the same step.

Nothing is asked per step but one local comparison. The agreement runs once, when a stop is
requested: each rank's watcher takes the lock that the per-step check takes, so its main thread
cannot enter another step; publishes how many steps it has entered; reads everybody's numbers;
and sets the stop after the largest of them. A rank that is behind trains on to that step.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import threading
import time
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from spotguard.events.states import EndReason
from spotguard.runtime.process import clock

if TYPE_CHECKING:
    from collections.abc import Callable

    from spotguard.runtime.distributed.rendezvous import Coordinator

log = logging.getLogger("spotguard")

_POLL_S = 0.05
_HEARSAY_S = 0.3
_FAILING_S = 2.0
"""How long a rank that is about to fail waits for an answer."""
_REQUEST = "stop/request"


@dataclass(frozen=True, kw_only=True)
class StopRequest:
    """Why and until when to stop."""

    reason: EndReason
    message: str
    warned_at: float | None = None
    """Epoch seconds of the first word of it."""
    deadline_at: float | None = None
    """Epoch seconds at which the process may be dead; None if nobody is in a hurry."""
    source: str = ""
    """Which source of notices has said so, and may take it back; empty if it is none."""
    solo: bool = False
    """True if the other ranks did not answer: this rank saves what it has."""

    def to_json(self) -> str:
        """Return the request as one JSON line."""
        return json.dumps({**asdict(self), "reason": str(self.reason)})

    @classmethod
    def from_json(cls, text: str) -> StopRequest:
        """Return the request that `to_json` wrote."""
        body: dict[str, Any] = json.loads(text)
        return cls(**{**body, "reason": EndReason(body["reason"])})


_Position = tuple[int, int]
"""Steps entered, and batches entered of an evaluation between that step and the next."""
BEFORE_LOOP = -1
"""The steps that a rank in set-up has entered; the stop of ranks that are all in set-up."""


class StopGate:
    """The one check of the training loop, and the lock of the agreement."""

    def __init__(self, until: int | None = None) -> None:
        """With `until`, no rank enters a step once so many are done, whatever is agreed."""
        self._until = math.inf if until is None else until
        self._lock = threading.Lock()
        self._entered: _Position = (BEFORE_LOOP, 0)
        self._stop_at: _Position | None = None

    def start(self, finished: int) -> bool:
        """Say where the loop begins; False if it must not, as all ranks leave from set-up."""
        with self._lock:
            self._entered = (finished, 0)
            return self._stop_at is None or self._stop_at[0] > BEFORE_LOOP

    def passes(self, finished: int, *, evaluated: bool = False) -> bool:
        """Return True to go on after `finished` steps, False to leave; nothing is entered yet.

        `evaluated`: this rank has done its evaluation after these steps, and has no more batches
        to join others for.
        """
        position = (finished, math.inf if evaluated else 0)
        return finished < self._until and (self._stop_at is None or position < self._stop_at)

    def enter(self, finished: int) -> bool:
        """Return True to train one more step, False to leave with `finished` steps done."""
        with self._lock:
            if self._stop_at is not None and finished >= self._stop_at[0]:
                return False
            if finished >= self._until:
                return False
            self._entered = (finished + 1, 0)
            return True

    def enter_evaluation(self, finished: int, batch: int) -> bool:
        """Return True to evaluate batch `batch` (from 0) between two steps, False to leave."""
        with self._lock:
            if self._stop_at is not None and (finished, batch) >= self._stop_at:
                return False
            self._entered = (finished, batch + 1)
            return True

    def agree(
        self, coordinator: Coordinator, rank: int, world_size: int, timeout_s: float
    ) -> tuple[int, bool]:
        """Fix the step to stop after; return it and whether all ranks answered in time.

        It is `BEFORE_LOOP` if no rank's loop has begun. If one has, those in set-up go on until
        they have joined it: it needs them for its step, and for the save.
        Blocks the training loop at its next step while it waits, `timeout_s` at most.
        """
        with self._lock:
            everybody = True
            last = self._entered
            try:
                coordinator.set(f"stop/entered/{rank}", json.dumps(last))
                end = time.monotonic() + timeout_s
                for peer in range(world_size):
                    word = coordinator.get(f"stop/entered/{peer}", end - time.monotonic())
                    everybody = everybody and word is not None
                    if word is not None:
                        steps, batches = json.loads(word)
                        last = max(last, (steps, batches))
            except ConnectionError:
                everybody = False
            # Without the others no further step can finish: stop at the next boundary.
            self._stop_at = last if everybody else self._entered
            return self._stop_at[0], everybody

    def close(self) -> int:
        """Let the loop enter nothing more; return the step that it stops after."""
        with self._lock:
            self._stop_at = self._entered
            return self._stop_at[0]


class StopWatch:
    """A thread that turns the first due request, of any rank, into an agreed stop."""

    def __init__(
        self,
        *,
        gate: StopGate,
        coordinator: Coordinator,
        rank: int,
        world_size: int,
        reserve_s: Callable[[], float],
        on_agreed: Callable[[StopRequest, int], None],
        agree_timeout_s: float = 5.0,
    ) -> None:
        self._gate = gate
        self._coordinator = coordinator
        self._rank = rank
        self._world_size = world_size
        self._ask_reserve_s = reserve_s
        self._reserved_s = 0.0
        self._is_troubled = False
        """True once a look has failed: that is told once."""
        self._on_agreed = on_agreed
        self._agree_timeout_s = agree_timeout_s
        self._pending: list[StopRequest] = []
        self._changed = threading.Condition()
        self._closed = False
        self._settling = False
        self.agreed: StopRequest | None = None
        """The request in force, once all (answering) ranks know the step to stop after."""
        self._thread = threading.Thread(target=self._watch, name="spotguard-stop", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    @property
    def is_asked(self) -> bool:
        """True once this rank has heard that it is to stop, at once or in a while."""
        return self.agreed is not None or bool(self._pending)

    def request(self, request: StopRequest) -> None:
        """Ask all ranks to stop; safe from any thread, may be repeated."""
        with self._changed:
            if request.warned_at is None:
                request = replace(request, warned_at=clock.now())
            self._pending.append(request)
            self._changed.notify_all()

    def stop_alone(self, request: StopRequest) -> bool:
        """Stop this rank without asking the others, for one of them is gone.

        Calls `on_agreed` in this thread. False if a stop is agreed, or about to be: nothing is
        done then.
        """
        if not self._begin_to_settle():
            return False
        stop_after = self._gate.close()
        self.agreed = replace(request, solo=True)
        self._on_agreed(self.agreed, stop_after)
        return True

    def nearest(self, request: StopRequest) -> StopRequest:
        """Return `request` with the nearest deadline that this rank has heard of."""
        with self._changed:
            deadlines = [r.deadline_at for r in (request, *self._pending)]
        return replace(request, deadline_at=min((d for d in deadlines if d), default=None))

    def heard(self, within_s: float) -> StopRequest | None:
        """Return a cloud's word that comes true so soon, or what another rank has asked for.

        Blocks for a moment: a rank that uses what another node's shutdown has ended may fail before
        it hears of that.
        """
        with self._changed:
            pending = [r for r in self._pending if r.reason is EndReason.PREEMPTED]
        for request in pending:
            if request.deadline_at and request.deadline_at - clock.now() < within_s:
                return request
        if self._world_size == 1:
            return None
        try:
            self._coordinator.hurry(_FAILING_S)
            word = self._coordinator.get(_REQUEST, _HEARSAY_S)
        except ConnectionError:
            return None
        return StopRequest.from_json(word) if word else None

    def withdraw(self, source: str) -> None:
        """Take back what this source of notices has asked for, unless it is due already."""
        with self._changed:
            self._pending = [r for r in self._pending if r.source != source]

    def close(self, timeout_s: float = 0.0) -> None:
        """Stop watching; blocks until the thread has ended, `timeout_s` at most."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _watch(self) -> None:
        try:
            coordinator = self._coordinator.connect()
        except ConnectionError:  # a request of our own must be heard all the same
            coordinator = self._coordinator
        while not self._closed:
            request = self._looked(coordinator)
            if request is not None:
                self._settle(request, coordinator)
                return
            with self._changed:
                self._changed.wait(_POLL_S)

    def _looked(self, coordinator: Coordinator) -> StopRequest | None:
        """Return what `_due` does; a look that fails is made again, and ends the watch of none."""
        try:
            return self._due(coordinator)
        except (RuntimeError, LookupError, TypeError, ValueError) as problem:
            if not self._is_troubled:
                self._is_troubled = True
                log.warning("could not look whether to stop, and looks again: %r", problem)
            return None

    def _due(self, coordinator: Coordinator) -> StopRequest | None:
        """Return the request of any rank that must be acted on now."""
        mine = self._mine_due()
        try:
            if mine is not None:
                coordinator.hurry(self._timeout_s(mine))
                return StopRequest.from_json(coordinator.first(_REQUEST, mine.to_json()))
            word = coordinator.peek(_REQUEST) if self._world_size > 1 else None
            return StopRequest.from_json(word) if word else None
        except ConnectionError:
            # The store lives with the first node. Its end is found by the collectives too; a
            # request of our own still counts.
            return replace(mine, solo=True) if mine else None

    def _mine_due(self) -> StopRequest | None:
        """Return my own request once its time has come: a cloud's notice leaves time to train."""
        with self._changed:
            pending = list(self._pending)
        if not pending:
            return None
        deadlines = [r.deadline_at for r in pending if r.reason is EndReason.PREEMPTED]
        urgent = [r for r in pending if r.reason is not EndReason.PREEMPTED or not r.deadline_at]
        late = [d for d in deadlines if d and clock.now() >= d - self._reserve_s()]
        if not urgent and not late:
            return None
        # The cloud's own word says more than the SIGTERM that follows it, but may be later.
        noticed = [r for r in pending if r.reason is EndReason.PREEMPTED]
        return self.nearest((noticed or urgent)[0])

    def _reserve_s(self) -> float:
        """Return the reserve as it is, or was: the script may change what it is reckoned from."""
        with contextlib.suppress(RuntimeError):  # "dictionary changed size during iteration"
            self._reserved_s = self._ask_reserve_s()
        return self._reserved_s

    def _begin_to_settle(self) -> bool:
        """Return True once: what makes the process stop is decided in one place."""
        with self._changed:
            first = not self._settling
            self._settling = True
            return first

    def _settle(self, request: StopRequest, coordinator: Coordinator) -> None:
        if not self._begin_to_settle():
            return
        timeout_s = self._timeout_s(request)
        coordinator.hurry(timeout_s)  # whoever has asked: the loop waits at its gate meanwhile
        stop_after, everybody = self._gate.agree(
            coordinator, self._rank, self._world_size, timeout_s
        )
        self.agreed = request if everybody else replace(request, solo=True)
        self._on_agreed(self.agreed, stop_after)

    def _timeout_s(self, request: StopRequest) -> float:
        if request.deadline_at is None:
            return self._agree_timeout_s
        left = request.deadline_at - clock.now() - self._reserve_s()
        return min(self._agree_timeout_s, max(left / 2, 0.5))
