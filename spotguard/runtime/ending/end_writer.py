"""How an attempt ended, written down once: by the first rank, or by each that is left alone."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from spotguard.events.event import JobEvent
from spotguard.events.states import EndReason
from spotguard.runtime.checkpoint.captured import WithoutOthers
from spotguard.runtime.reporting.node_reports import last_word_s
from spotguard.shared.units import to_iso

if TYPE_CHECKING:
    from spotguard.errors import SpotguardError
    from spotguard.runtime.checkpoint.training_state import Keeper
    from spotguard.runtime.distributed.rendezvous import Coordinator
    from spotguard.runtime.preemption.stop_consensus import StopRequest
    from spotguard.runtime.reporting.node_reports import Reporter

log = logging.getLogger("spotguard")

LAST_WORD_S = 10.0
_OTHERS_S = 2.0
"""How long the first rank lets the others hear of the end before it leaves."""


class EndWriter:
    """Writes the attempt's `ended` event, and tells the other ranks of the script's failure."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        coordinator: Coordinator,
        keeper: Keeper,
        reporter: Reporter,
    ) -> None:
        self.rank = rank
        self._world_size = world_size
        self._coordinator = coordinator
        self._keeper = keeper
        self._reporter = reporter
        self._lock = threading.Lock()  # taken for good by the thread that writes the end

    @property
    def begun(self) -> bool:
        """Return True once a thread writes the end, or has."""
        return self._lock.locked()

    @property
    def is_first(self) -> bool:
        """Return True on the rank that writes for all, while all are there."""
        return self.rank == 0

    def agreed(self, request: StopRequest, stop_step: int) -> None:
        """Write down what all ranks agreed on; the first rank does."""
        if self.is_first:
            self._reporter.event(
                JobEvent.AGREED,
                reason=str(request.reason),
                stop_step=stop_step,
                solo=request.solo,
            )

    def write_told(self, request: StopRequest, problem: SpotguardError | None) -> bool:
        """Write the end of a job that was told to stop; False if another thread writes one."""
        reason, message = request.reason, request.message
        if problem is not None:
            message = f"{message}; the last save failed: {problem}"
            if not reason.retried and not isinstance(problem, WithoutOthers):
                reason = EndReason.STORE_FAILED
        if self.is_first or self.is_alone(request):
            written = self.write(reason, message=message, request=request)
            if written and not self.is_alone(request):
                self._let_others_leave(last_word_s(request.deadline_at, _OTHERS_S))
            return written
        if not self._lock.acquire(blocking=False):
            return False
        try:  # the first rank writes; it must not lose its rendezvous before it has
            self._coordinator.set(f"leaves/{self.rank}", "1")
            self._coordinator.get("ended", 5.0)
        except ConnectionError:
            log.debug("the rendezvous ended first")
        return True

    def _let_others_leave(self, timeout_s: float) -> None:
        """Wait until the other ranks leave, too: who has not heard of the end would take it that
        the first rank has died, and write an end of its own."""
        end = time.monotonic() + timeout_s
        try:
            for peer in range(1, self._world_size):
                self._coordinator.get(f"leaves/{peer}", max(end - time.monotonic(), 0.0))
        except ConnectionError:
            log.debug("the rendezvous ended first")

    def write(
        self,
        reason: EndReason,
        *,
        message: str,
        trace: str | None = None,
        request: StopRequest | None = None,
    ) -> bool:
        """Write how this attempt ended, once; False if another thread does or has."""
        if not self._lock.acquire(blocking=False):
            return False
        last = self._keeper.saver.last
        warned_at = request.warned_at if request else None
        deadline_at = request.deadline_at if request else None
        self._reporter.event(
            JobEvent.ENDED,
            reason=str(reason),
            step=self._keeper.finished,
            saved_step=last.step if last else None,
            saved_at=to_iso(last.at) if last else None,
            checkpoint=last.checkpoint if last else self._keeper.saver.parent,
            train_s=self._keeper.train_s,
            warned_at=warned_at and to_iso(warned_at),
            deadline_at=deadline_at and to_iso(deadline_at),
            resumed_step=self._keeper.first_step,
            solo=self.is_alone(request),
            saved=self._keeper.is_saved,
            message=message,
            traceback=trace,
        )
        self._reporter.flush(last_word_s(deadline_at, LAST_WORD_S))
        log.info("ended at step %d: %s", self._keeper.finished, reason.told(self._keeper.is_saved))
        if self.is_alone(request):
            return True  # the rendezvous may be frozen with its node; nobody waits for the word
        try:
            self._coordinator.set("ended", "1")
        except ConnectionError:
            log.debug("the rendezvous ended first")
        return True

    def is_alone(self, request: StopRequest | None) -> bool:
        """Return True if no other rank is reckoned with: each that is left writes its own end."""
        return self._keeper.saver.alone.is_set() or (request is not None and request.solo)

    def someone_failed(self, words: Coordinator, timeout_s: float) -> bool:
        """Return True if another rank said that the script itself failed there."""
        words.hurry(timeout_s)
        try:
            return words.get("failure", timeout_s) is not None
        except ConnectionError:
            return False

    def say_failure(self) -> bool:
        """Tell the other ranks that the script failed; True if we are the first."""
        try:
            return self._coordinator.first("failure", str(self.rank)) == str(self.rank)
        except ConnectionError:
            return True
