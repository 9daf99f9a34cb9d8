"""How this rank leaves its attempt: it notices the cause, and does what `ways_out.py` says.

Three threads may begin it. The main thread does when it reaches the agreed step, or when the script
ends. The watcher's does when the main thread is late. The ring's does when another rank is gone.
`EndWriter` lets only the first of them write how the attempt ended.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
import traceback
from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING

from spotguard.errors import SpotguardError
from spotguard.events.event import JobEvent
from spotguard.events.states import EXIT_CODE_OF_JOB_TOLD_TO_STOP, EndReason
from spotguard.runtime.checkpoint.captured import WithoutOthers
from spotguard.runtime.checkpoint.save_time import last_save_s
from spotguard.runtime.distributed.rendezvous import Alone
from spotguard.runtime.ending.late_save import LateRank, patience_for_others_s, save_by_few
from spotguard.runtime.ending.ways_out import WAYS_OUT, Cause, Ends, Saves, cause_of
from spotguard.runtime.preemption.stop_consensus import BEFORE_LOOP, StopRequest
from spotguard.runtime.process import clock
from spotguard.runtime.process.surroundings import (
    at_prompt,
    exit_now,
    exit_soon,
    free_device,
    place_in_script,
    sentence,
    speaks_of_peers,
)
from spotguard.shared.node_locks import say_left

if TYPE_CHECKING:
    from contextlib import ExitStack
    from types import TracebackType
    from typing import NoReturn

    from spotguard.runtime.checkpoint.training_state import Keeper
    from spotguard.runtime.distributed.rendezvous import Coordinator
    from spotguard.runtime.ending.end_writer import EndWriter
    from spotguard.runtime.preemption.exit_hooks import ExitWatch
    from spotguard.runtime.preemption.stop_consensus import StopWatch
    from spotguard.runtime.preemption.stop_sources import Listener
    from spotguard.runtime.reporting.node_reports import Reporter

log = logging.getLogger("spotguard")

EXIT_PATIENCE_S = 10.0
"""How long the script's own clean-up, or one of our threads, may take when the process ends."""
HUNG_SAVE_S = 60.0
_LOOK_UP_S = 0.05
_SHUTDOWNS = (EndReason.PREEMPTED, EndReason.TERMINATED)
_SHUTDOWN_S = 600.0
"""A machine of which a cloud says that it goes so soon may have begun to shut down."""
_SOLO_PATIENCE = 0.2  # of the time in which all should have left
_USUAL_PEER_TIMEOUT_S = 10.0
_OF_OTHER_THREADS = (Cause.TOLD_AND_LATE,)
"""Causes by which the main thread does not leave."""


class Phase(Enum):
    """Where the script is."""

    SETUP = "setup"
    TRAINING = "training"
    AFTER = "after"


class Leaving:
    """Takes this rank out of its attempt, by one of the ways of the table."""

    def __init__(
        self,
        *,
        coordinator: Coordinator,
        keeper: Keeper,
        reporter: Reporter,
        end: EndWriter,
        peer_timeout_s: float | None,
    ) -> None:
        self._coordinator = coordinator
        self._keeper = keeper
        self._reporter = reporter
        self._end = end
        self._solo_patience_s = _SOLO_PATIENCE * (peer_timeout_s or _USUAL_PEER_TIMEOUT_S)
        self._watch: StopWatch
        self._listener: Listener
        self._exits: ExitWatch
        self.phase = Phase.SETUP
        self.begun = threading.Event()
        """Set once the main thread leaves."""
        self.failure: BaseException | None = None
        self._failed_in_thread = False
        """Python goes on after that, and would end with 0."""
        self._finished_why = "all steps done"
        """By what the script failed, if it did."""
        self.process_goes_on = False
        """True once the run is to end and the process is not: `reset`."""

    def obey(self, watch: StopWatch) -> None:
        """Take what agrees on a stop; before it, or what looks after other ranks, is started."""
        self._watch = watch

    def listen_to(self, listener: Listener, exits: ExitWatch) -> None:
        """Take what knows how the script was told to end, and did; before it can end."""
        self._listener, self._exits = listener, exits

    # ------------------------------------------------------------------ told to stop

    def at_agreed_step(self, *, halfway: bool = False) -> NoReturn:
        """Save at the agreed step and leave the process, by SystemExit with code 75.

        `halfway`: called from the loop's body, which may have drawn and counted since the boundary.
        """
        while self._watch.agreed is None:  # the gate closes a moment before the word is there
            time.sleep(0.001)
        self._take(Cause.TOLD, self._watch.nearest(self._watch.agreed), halfway=halfway)
        _end_process(EXIT_CODE_OF_JOB_TOLD_TO_STOP)

    def in_time(self, request: StopRequest, stop_after: int) -> None:
        """Watcher's thread, after the agreement: make sure that the process leaves in time."""
        self._end.agreed(request, max(stop_after, 0))
        if stop_after == BEFORE_LOOP:
            self._take(Cause.TOLD_AND_LATE, request)
        self._wait_for_main_thread(request)

    def _wait_for_main_thread(self, request: StopRequest) -> None:
        """Wait for the main thread to leave; when it takes too long, leave without it."""
        leave_at = math.inf
        while time.monotonic() < leave_at:
            if self.begun.wait(_LOOK_UP_S):
                return
            # A nearer deadline may come, and the loop may end and what is after it begin.
            request = self._watch.nearest(request)
            leave_at = min(leave_at, time.monotonic() + self._patience_s(request))
        in_loop = self.phase is Phase.TRAINING
        if in_loop and not self._give_up_step(request):
            return
        self._take(Cause.TOLD_AND_LATE, request, in_loop=in_loop)

    @property
    def _save_needs_s(self) -> float:
        """The time that an emergency save is given: somewhat more than the ones before took."""
        return 1.2 * self._keeper.emergency_s()

    def _patience_s(self, request: StopRequest) -> float:
        """Return how long the main thread may still take to leave."""
        limits = [math.inf]
        if request.deadline_at is not None:
            left_s = request.deadline_at - clock.now()
            limits.append(max(left_s - self._save_needs_s - 0.5, 0.0))
        if request.solo:  # it may hang in a collective with a peer that is gone
            limits.append(min(max(3 * self._keeper.step_s, 1.0), self._solo_patience_s))
        if self.phase is Phase.AFTER:
            limits.append(EXIT_PATIENCE_S)
        return min(limits)

    def _give_up_step(self, request: StopRequest) -> bool:
        """Give up the step that the main thread hangs in; False if it has left by itself."""
        patience_s = self._change_patience_s(request)
        self._keeper.early_end.told(request)
        self._keeper.freeze(self.begun, patience_s, by_error=self._may_be_left_by_error)
        if self.begun.is_set():
            return False
        if self._keeper.has_left:
            log.warning("what comes after the loop takes too long and is given up")
        else:
            log.warning("step %d takes too long and is given up", self._keeper.finished + 1)
        if request.solo:
            free_device()
            # Should the save hang all the same:
            exit_soon(max(HUNG_SAVE_S, 3 * self._keeper.emergency_s()))
        return True

    def _may_be_left_by_error(self) -> bool:
        """Return whether the script ended itself, or an error has come to its hook, which may last.

        Nothing handles the error there, so that the loop would look like one left by `break`.
        """
        exits = self._exits
        return self.failure is not None or exits.called or exits.error is not None

    def _change_patience_s(self, request: StopRequest) -> float:
        """Return how long weights that are changing may take to be those of a boundary."""
        if request.solo or request.deadline_at is None:
            return self._patience_s(request)
        return max(request.deadline_at - clock.now() - 0.5, 0.0)

    # ------------------------------------------------------------------ another rank is gone

    def peer_lost(self, words: Coordinator, peer: int, why: str) -> None:
        """Ring's thread: leave, saved if this rank can do so, however the main thread hangs."""
        if self._end.begun or self.phase is Phase.AFTER:
            return
        if self._end.someone_failed(words, 0.2):
            return
        log.warning("rank %d is gone: %s", peer, why)
        self._keeper.saver.alone.set()
        self._tell_peer_lost(f"rank {peer}: {why}")
        request = StopRequest(
            reason=EndReason.NODE_LOST,
            message=f"rank {peer} is gone: {why}",
            warned_at=clock.now(),
            solo=True,
        )
        if self._watch.stop_alone(request):
            return
        while self._watch.agreed is None:
            time.sleep(0.01)
        if not self._watch.agreed.solo:  # else its own patience is as short
            self._wait_for_main_thread(replace(self._watch.agreed, solo=True))

    def _tell_peer_lost(self, problem: str) -> None:
        self._reporter.event(JobEvent.PEER_LOST, problem=problem, step=self._keeper.finished)

    # ------------------------------------------------------------------ the script ends

    def by_exception(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """Show what the script did not catch, and end by it."""
        self.failure = error  # first: to show it takes a moment, in which another thread may leave
        self._failed_in_thread = threading.current_thread() is not threading.main_thread()
        try:
            if isinstance(error, SpotguardError):
                log.error("%s%s", place_in_script(trace), sentence(error))
            else:
                with contextlib.suppress(OSError):  # the log pipe may be dead already
                    self._exits.previous_hook(kind, error, trace)
        finally:  # a hook of the script's may fail, and a second Ctrl-C break it off
            self._by_error(error)
        if isinstance(error, SpotguardError) and not at_prompt():
            _end_process(error.exit_code)

    def _by_error(self, error: BaseException) -> None:
        """Tell a lost peer, Ctrl-C and the script's own failure apart; save if it can be."""
        self.failure = error
        if self._end.begun:
            return
        ctrl_c = isinstance(error, KeyboardInterrupt)
        if not ctrl_c and self._is_loss_of_peer(error):
            self._tell_peer_lost(str(error).split(". ")[0][:200])
            self._keeper.saver.alone.set()  # the ring may not have told yet
            lost = self._request_of(Cause.PEER_LOST, "another rank vanished")
            self._take(Cause.PEER_LOST, replace(self._watch.agreed or lost, solo=True))
        elif (told := self._told_before(error)) is not None:
            also = f"{told.message}; then the script failed: {_words_of(error)}"
            self._take(Cause.TOLD_AND_FAILED, replace(told, message=also))
        elif ctrl_c:
            self._take(Cause.CTRL_C, self._request_of(Cause.CTRL_C, "Ctrl-C"))
        elif self._end.say_failure():
            self._save(self._saves(Cause.SCRIPT_FAILED))
            text = "".join(traceback.format_exception(error))
            self._write(Cause.SCRIPT_FAILED, _words_of(error), trace=text)

    def _told_before(self, error: BaseException) -> StopRequest | None:
        """Return the request to stop that came before an error which may be due to it.

        A machine that shuts down ends a script's helpers and connections before the script. If it
        is a mistake of the script's all the same, the next attempt meets with it again.
        """
        if isinstance(error, SpotguardError):
            return None
        self._listener.drain()
        told = self._watch.agreed
        if told is None or told.reason not in _SHUTDOWNS:  # by others nothing of the script's ends
            told = self._listener.sigterm
        if told is None and not isinstance(error, KeyboardInterrupt):
            told = self._watch.heard(_SHUTDOWN_S)
        return told if told is not None and told.reason in _SHUTDOWNS else None

    def _is_loss_of_peer(self, error: BaseException) -> bool:
        others = not isinstance(self._coordinator, Alone)
        return (
            others
            and (self._is_save_without_lost(error) or speaks_of_peers(error))
            and not self._end.someone_failed(self._coordinator, 1.0)
        )

    def _is_save_without_lost(self, error: BaseException) -> bool:
        """Return whether a save failed because a rank is gone; one that is only silent may be slow.

        What is slow, or has left its loop alone, would be as slow in every attempt.
        """
        return isinstance(error, WithoutOthers) and self._keeper.saver.alone.is_set()

    @staticmethod
    def _request_of(cause: Cause, message: str) -> StopRequest:
        """Return what nobody asked for in the words of a request, for this rank alone."""
        reason = WAYS_OUT[cause].reason
        assert reason is not None
        return StopRequest(reason=reason, message=message, solo=True)

    def by_problem(self, problem: SpotguardError) -> NoReturn:
        """Write down an error of ours and leave with its exit code, in one sentence."""
        self._write_problem(problem)
        if at_prompt():
            raise problem
        exit_soon(EXIT_PATIENCE_S, problem.exit_code)
        _end_process(problem.exit_code)

    def _write_problem(self, problem: SpotguardError) -> None:
        if self._is_save_without_lost(problem):
            log.error("%s", sentence(problem))
            self._by_error(problem)
            return
        self.failure = problem
        cause = cause_of(problem)
        if cause is Cause.STATE_REFUSED:
            self._write(cause, sentence(problem), trace=traceback.format_exc())
        else:
            self._write(cause, str(problem))
        self._end.say_failure()
        log.error("%s", sentence(problem))

    def finish_loop(self, why: str | None, *, left_early: bool = False) -> None:
        """Save the final state; the script may go on after its loop."""
        if left_early:
            self._keeper.left_early()
        self._keeper.save_final(halfway=left_early)
        self.phase = Phase.AFTER
        self._finished_why = why or "all steps done"
        if why and self._end.is_first:
            log.info("finished at step %d: %s", self._keeper.finished, why)

    def as_the_script_did(self) -> int | None:
        """Write how the script ended, if it is not written; return the exit code if not its own."""
        if self.failure is not None and self._failed_in_thread:
            return 1
        if self._end.begun or self.failure is not None or self.phase is Phase.SETUP:
            return None
        cause = Cause.ALL_STEPS_DONE
        if self.phase is Phase.TRAINING:
            cause = Cause.LOOP_LEFT
            told = self._watch.agreed or self._listener.sigterm
            if told is not None:
                return self._left_when_told(told)
            if self._exits.error is not None:
                self._by_error(self._exits.error)
                return None
            try:  # `break`, or an exit without an error: the loop was left early, on purpose
                self.finish_loop("the loop was left early", left_early=True)
            except SpotguardError as problem:
                self._write_problem(problem)
                return problem.exit_code
        if self._end.is_first or self._end.is_alone(None):
            told = self._watch.agreed  # while it was finishing
            self._write(cause, self._finished_why, request=told)
        return None

    def _left_when_told(self, told: StopRequest) -> int:
        """Save and end for a script that left its loop when it was told to; return the exit code.

        Where it left by `break` is the boundary; an exit may have cut an optimizer short.
        """
        if not self._exits.called:
            self._keeper.early_end.told(told)
            self._keeper.left_early()
        self._take(Cause.TOLD_AND_LEFT, told)
        return EXIT_CODE_OF_JOB_TOLD_TO_STOP

    # ------------------------------------------------------------------ what the table says

    def _take(
        self,
        cause: Cause,
        request: StopRequest,
        *,
        halfway: bool = False,
        in_loop: bool | None = None,
    ) -> None:
        """Save, write how it ended, and end the process if the cause's way out does so at once.

        Returns where `SystemExit` is to follow, where another thread is at it already, and where
        the process goes on after its run.
        """
        if cause not in _OF_OTHER_THREADS:
            self._listener.hold()
            self.begun.set()
            request = self._watch.nearest(request)
            request = replace(request, warned_at=request.warned_at or clock.now())
        problem = self._save(self._saves(cause, in_loop), request, halfway=halfway)
        first = self._end.write_told(request, problem)
        say_left()
        if WAYS_OUT[cause].ends is Ends.BY_SYSTEM_EXIT:
            exit_soon(EXIT_PATIENCE_S)
        elif not first:  # the thread that writes the end is not cut short
            exit_soon(HUNG_SAVE_S)
        elif not (self.process_goes_on and self._is_told_by_reset(cause)):
            exit_now()

    def _is_told_by_reset(self, cause: Cause) -> bool:
        """Return whether `reset` raises what happened, or the user did it: the process stays."""
        of_a_cell = cause in (Cause.CTRL_C, Cause.TOLD_AND_FAILED)
        return of_a_cell or isinstance(self.failure, SpotguardError)

    def _saves(self, cause: Cause, in_loop: bool | None = None) -> Saves:
        way = WAYS_OUT[cause]
        if in_loop is None:
            in_loop = self.phase is Phase.TRAINING
        return way.in_loop if in_loop else way.outside

    def _save(
        self, saves: Saves, request: StopRequest | None = None, *, halfway: bool = False
    ) -> SpotguardError | None:
        """Save what the table says; return what went wrong."""
        if saves is Saves.IN_FLIGHT:
            self._keeper.saver.wait(EXIT_PATIENCE_S)
        if request is None or saves in (Saves.IN_FLIGHT, Saves.NOTHING):
            return None
        if saves is Saves.AGREED_STEP:
            return self._keeper.save_for(request, halfway=halfway)
        if self._keeper.needs_all_ranks:
            return self._keeper.save_boundary(request)
        alone = replace(request, solo=True)
        if request.solo or self._keeper.saver.alone.is_set():
            return self._keeper.save_boundary(alone)
        keeper = self._keeper
        left_s = last_save_s(request.deadline_at)
        return save_by_few(
            self._coordinator,
            keeper.saver,
            lambda: keeper.save_boundary(alone),
            of=LateRank(self._end.rank, keeper.node, keeper.may_be_elected),
            step=keeper.finished,
            patience_s=patience_for_others_s(left_s, self._save_needs_s),
        )

    def _write(
        self,
        cause: Cause,
        message: str,
        *,
        trace: str | None = None,
        request: StopRequest | None = None,
    ) -> None:
        reason = WAYS_OUT[cause].reason
        assert reason is not None
        self._end.write(reason, message=message, trace=trace, request=request)


def _end_process(code: int) -> NoReturn:
    """End the process so that the script's own clean-up runs; at once where it trains in a thread.

    There `SystemExit` would end the thread alone, and the script go on as after its training.
    """
    if threading.current_thread() is threading.main_thread():
        raise SystemExit(code)
    exit_now(code)


def _words_of(error: BaseException) -> str:
    """Return an error in one sentence."""
    return (
        sentence(error) if isinstance(error, SpotguardError) else f"{type(error).__name__}: {error}"
    )


class ErrorsEndIt:
    """Within it, an error of ours ends the job in one sentence; after any, no data are read."""

    def __init__(self, reading: ExitStack, leaving: Leaving) -> None:
        self._reading = reading
        self._leaving = leaving

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, problem: BaseException | None, trace: object) -> None:
        if problem is not None:
            self._reading.close()
        if isinstance(problem, SpotguardError):
            self._leaving.by_problem(problem)
