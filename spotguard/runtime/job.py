"""The process's part in its attempt: who it is, what it hears, and how it leaves.

Every way out of a job ends here: finished, told to stop, a peer lost, the script's own failure.
Each is written down as one `ended` event, because the exit code alone cannot be trusted:
torchrun returns 1 even after a clean save.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
import traceback
from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from spotguard.errors import Fenced, SpotguardError, StoreError
from spotguard.events.event import JobEvent
from spotguard.events.states import EXIT_CODE_OF_JOB_TOLD_TO_STOP, EndReason
from spotguard.runtime.checkpoint.local_copy import LocalCopy
from spotguard.runtime.checkpoint.training_state import Keeper
from spotguard.runtime.distributed.rendezvous import Alone, Coordinator, Rendezvous
from spotguard.runtime.distributed.stall_report import StillWatch
from spotguard.runtime.preemption.exit_hooks import ExitWatch
from spotguard.runtime.preemption.peer_monitor import join_ring
from spotguard.runtime.preemption.stop_consensus import (
    BEFORE_LOOP,
    StopGate,
    StopRequest,
    StopWatch,
)
from spotguard.runtime.preemption.stop_sources import Listener
from spotguard.runtime.process import clock
from spotguard.runtime.process.identity import identify
from spotguard.runtime.process.surroundings import (
    ProgressFile,
    at_prompt,
    cancel_exits,
    destroy_group,
    device_of,
    ensure_process_group,
    exit_now,
    exit_soon,
    free_device,
    leave_group,
    log_to_stderr,
    place_in_script,
    sentence,
    speaks_of_peers,
)
from spotguard.runtime.reporting.end_writer import EndWriter
from spotguard.runtime.reporting.node_reports import Reporter
from spotguard.storage import PrefixedStore, open_store
from spotguard.units import to_iso

if TYPE_CHECKING:
    from types import TracebackType

    from spotguard.runtime.checkpoint.restore import Restored
    from spotguard.runtime.preemption.peer_monitor import Peers
    from spotguard.runtime.process.settings import Settings
    from spotguard.runtime.step import Step

log = logging.getLogger("spotguard")

_EXIT_PATIENCE_S = 10.0
_HUNG_SAVE_S = 60.0
_LOOK_UP_S = 0.05
_SOLO_PATIENCE = 0.2  # of the time in which all should have left


class Phase(Enum):
    """Where the script is."""

    SETUP = "setup"
    TRAINING = "training"
    AFTER = "after"


class Job:
    """This rank of this attempt."""

    def __init__(self, settings: Settings, *, backend: str | None, save_random: bool) -> None:
        self._started_at = time.monotonic()
        log_to_stderr()
        self.settings = settings
        self.rank = settings.rank
        self.world_size = settings.world_size
        self.phase = Phase.SETUP
        self.device = device_of(settings.local_rank)
        self._owns_group = ensure_process_group(settings, backend)
        self.coordinator: Coordinator = (
            Rendezvous.from_environment() if self.world_size > 1 else Alone()
        )
        self.run_id, self.attempt = identify(settings, self.coordinator)
        self.store = PrefixedStore(open_store(settings.store_url), self.run_id)
        self.local_copy = LocalCopy.at(settings.local_copy, self.run_id)
        told = clock.compare_with_controller(self.store, settings, self.attempt)
        self._init_at = clock.now() - self.age_s
        self._pid = os.getpid()
        self._left = threading.Event()
        self._failure: BaseException | None = None
        self._goes_on = False
        """True once the run is to end and the process is not: `reset`."""
        self.gate = StopGate()
        self.reporter = Reporter(
            self.store,
            attempt=self.attempt,
            node=settings.node,
            rank=self.rank,
            heartbeat_s=settings.heartbeat_s,
            heartbeat=(lambda: self.keeper.heartbeat()) if settings.local_rank == 0 else None,
            on_stop=lambda request: self.watch.request(request),
        )
        self.keeper = Keeper(
            settings,
            store=self.store,
            run_id=self.run_id,
            attempt=self.attempt,
            coordinator=self.coordinator,
            local_copy=self.local_copy,
            reporter=self.reporter,
            save_random=save_random,
            on_fenced=lambda problem: self.watch.request(
                StopRequest(reason=EndReason.FENCED, message=str(problem))
            ),
        )
        self.end = EndWriter(self.rank, self.coordinator, self.keeper, self.reporter)
        self.watch = StopWatch(
            gate=self.gate,
            coordinator=self.coordinator,
            rank=self.rank,
            world_size=self.world_size,
            reserve_s=self.keeper.reserve_s,
            on_agreed=self._see_it_through,
        )
        self._progress = ProgressFile(settings.progress_path if settings.local_rank == 0 else None)
        self._peers = self._join_peers()
        self._still = self._look_for_stillness()
        self.watch.start()
        self.reporter.start()
        if told:
            self.reporter.event(JobEvent.WARNING, message=told)
        self._listener = Listener(settings, self.watch, self.reporter)
        self.exits = ExitWatch(self._on_exception, self._at_exit)
        if self.rank == 0 and not settings.launched:
            log.info("run %s, saves in %s", self.run_id, self.store.url)

    def claim_extra(self) -> dict[str, Any]:
        """Return what the claim tells beside its number: place, price, ranks, host."""
        return {**self.settings.claim, "world_size": self.world_size, "host": os.uname().nodename}

    # ------------------------------------------------------------------ the loop's calls

    @property
    def age_s(self) -> float:
        """Return the seconds since this process joined its attempt."""
        return time.monotonic() - self._started_at

    def restored(self, restored: Restored, total: int) -> None:
        """Write down what this attempt starts from."""
        if self.rank:
            return
        restored.tell(log)
        for difference in restored.differences:
            self.reporter.event(JobEvent.WARNING, message=f"restored in part: {difference}")
        self.reporter.event(
            JobEvent.STARTED,
            world_size=self.world_size,
            nodes=self.settings.claim.get("nodes"),
            resumed_from=restored.prefix,
            resumed_step=restored.manifest.step if restored.manifest else 0,
            total_steps=total,
            notice_source=self.settings.metadata.partition("=")[0],
            node_up_at=clock.told_at(self.settings.node_up_at),
            init_at=to_iso(self._init_at),
            skipped=[{"checkpoint": p, "problem": w} for p, w in restored.skipped],
        )

    def begin_training(self, first: int, total: int) -> None:
        """Say that the loop begins with `first` of `total` steps done."""
        self.exits.forget()
        self.keeper.begin(first, total)
        if not self.gate.start(first):  # the watcher is about to end the process
            exit_soon(_HUNG_SAVE_S)
            self._left.wait()
        self._progress.write(first, total)
        self.phase = Phase.TRAINING
        if self._peers is not None:
            self._peers.train()
        if self._still is not None:
            self._still.start()

    def finished_step(self, finished: int, seconds: float, step: Step) -> None:
        """Take note of a finished step: from here on it is the state to save."""
        self.exits.forget()
        self.keeper.finished_step(finished, seconds, step)
        self._progress.write(finished, self.keeper.total or 0)
        if finished == self.keeper.first_step + 1 and self.rank == 0:
            self.reporter.event(JobEvent.FIRST_STEP, step=finished)

    def hold(self, finished: int) -> None:
        """Wait where a drill says so, until told to stop; not where this attempt began."""
        seconds = self.settings.holds.get(finished)
        if seconds is None or finished == self.keeper.first_step:
            return
        end = time.monotonic() + seconds
        while self.watch.agreed is None and time.monotonic() < end:
            time.sleep(0.01)

    def finish_loop(self, why: str | None, *, left_early: bool = False) -> None:
        """Save the final state; the script may go on after its loop."""
        if self._still is not None:
            self._still.close(0.0)
        if left_early:
            self.keeper.left_early()
        self.keeper.save_final(halfway=left_early)
        self.phase = Phase.AFTER
        if why and self.rank == 0:
            log.info("finished at step %d: %s", self.keeper.finished, why)

    def leave(self, *, halfway: bool = False) -> None:
        """Save at the agreed step and leave the process, by SystemExit with code 75.

        `halfway`: called from the loop's body, which may have drawn and counted since the boundary.
        """
        while self.watch.agreed is None:  # the gate closes a moment before the word is there
            time.sleep(0.001)
        request = self.watch.nearest(self.watch.agreed)
        self._left.set()
        problem = self.keeper.save_for(request, halfway=halfway)
        self.end.write_told(request, problem)
        exit_soon(_EXIT_PATIENCE_S)
        raise SystemExit(EXIT_CODE_OF_JOB_TOLD_TO_STOP)

    def fail_saving_or_state(self, problem: SpotguardError) -> None:
        """Write down an error of ours and leave with its exit code, in one sentence."""
        self._end_by_problem(problem)
        if at_prompt():
            raise problem
        exit_soon(_EXIT_PATIENCE_S, problem.exit_code)
        raise SystemExit(problem.exit_code)

    def _end_by_problem(self, problem: SpotguardError) -> None:
        self._failure = problem
        if isinstance(problem, Fenced):
            self.end.write(EndReason.FENCED, message=str(problem))
        elif isinstance(problem, StoreError):
            self.end.write(EndReason.STORE_FAILED, message=str(problem))
        else:
            self.end.write(
                EndReason.FAILED, message=sentence(problem), trace=traceback.format_exc()
            )
        self.end.say_failure()
        log.error("%s", sentence(problem))

    # ------------------------------------------------------------------ peers

    def _join_peers(self) -> Peers | None:
        """Begin to look after the other ranks, if there are any."""
        timeout_s = self.settings.peer_timeout_s
        if self.world_size == 1 or timeout_s is None:
            return None
        who = self.rank, self.world_size
        return join_ring(self.coordinator, *who, timeout_s=timeout_s, on_lost=self._on_peer_lost)

    def _look_for_stillness(self) -> StillWatch | None:
        """Return what tells of ranks that wait for each other, if there are any that may."""
        if self._peers is None or self.settings.peer_timeout_s is None:
            return None
        return StillWatch(
            self.rank,
            self.world_size,
            peer_timeout_s=self.settings.peer_timeout_s,
            connect=self.coordinator.connect,
            progress=self.keeper.progress,
            step_s=lambda: self.keeper.step_s,
            tell=self._tell_stillness,
        )

    def _tell_stillness(self, message: str) -> None:
        log.warning("%s", message)
        self.reporter.event(JobEvent.WARNING, message=message)

    @property
    def _solo_patience_s(self) -> float:
        """Return how long a step may still take when another rank is gone: it probably hangs."""
        return _SOLO_PATIENCE * (self.settings.peer_timeout_s or 10.0)

    def _on_peer_lost(self, words: Coordinator, peer: int, why: str) -> None:
        """Ring's thread: leave, saved if this rank can do so, however the main thread hangs."""
        if self.end.begun or self.phase is Phase.AFTER:
            return
        if self.end.someone_failed(words, 0.2):
            return
        log.warning("rank %d is gone: %s", peer, why)
        self.keeper.saver.alone.set()
        self.reporter.event(
            JobEvent.PEER_LOST, problem=f"rank {peer}: {why}", step=self.keeper.finished
        )
        message = f"rank {peer} is gone: {why}"
        request = StopRequest(
            reason=EndReason.NODE_LOST, message=message, warned_at=clock.now(), solo=True
        )
        if self.watch.stop_alone(request):
            return
        while self.watch.agreed is None:
            time.sleep(0.01)
        if not self.watch.agreed.solo:  # else its own patience is as short
            self._leave_in_time(replace(self.watch.agreed, solo=True))

    # ------------------------------------------------------------------ ways out

    def _see_it_through(self, request: StopRequest, stop_after: int) -> None:
        """Watcher's thread, after the agreement: make sure that the process leaves in time."""
        if self.rank == 0:
            self.reporter.event(
                JobEvent.AGREED,
                reason=str(request.reason),
                stop_step=max(stop_after, 0),
                solo=request.solo,
            )
        if stop_after == BEFORE_LOOP:
            self._end_at_once(request, None)
        self._leave_in_time(request)

    def _leave_in_time(self, request: StopRequest) -> None:
        """Wait for the main thread to leave; when it takes too long, leave without it."""
        leave_at = math.inf
        while time.monotonic() < leave_at:
            if self._left.wait(_LOOK_UP_S):
                return
            # A nearer deadline may come, and the loop may end and what is after it begin.
            request = self.watch.nearest(request)
            leave_at = min(leave_at, time.monotonic() + self._patience_s(request))
        if self.phase is Phase.TRAINING:
            self._abandon_step(request)
        else:
            self._end_at_once(request, None)

    def _patience_s(self, request: StopRequest) -> float:
        """Return how long the main thread may still take to leave."""
        limits = [math.inf]
        if request.deadline_at is not None:
            need_s = 1.2 * self.keeper.emergency_s() + 0.5
            limits.append(max(request.deadline_at - clock.now() - need_s, 0.0))
        if request.solo:  # it may hang in a collective with a peer that is gone
            limits.append(min(max(3 * self.keeper.step_s, 1.0), self._solo_patience_s))
        if self.phase is Phase.AFTER:
            limits.append(_EXIT_PATIENCE_S)
        return min(limits)

    def _abandon_step(self, request: StopRequest) -> None:
        """Give up the step that the main thread hangs in, and save the last finished one."""
        self.keeper.freeze(self._left, self._change_patience_s(request))
        if self._left.is_set():
            return
        log.warning("step %d takes too long and is given up", self.keeper.finished + 1)
        if request.solo:
            free_device()
            # Should the save hang all the same:
            exit_soon(max(_HUNG_SAVE_S, 3 * self.keeper.emergency_s()))
        self._end_at_once(request, self.keeper.save_boundary(self._alone_if_whole(request)))

    def _change_patience_s(self, request: StopRequest) -> float:
        """Return how long weights that are changing may take to be those of a boundary."""
        if request.solo or request.deadline_at is None:
            return self._patience_s(request)
        return max(request.deadline_at - time.time() - 0.5, 0.0)

    def _alone_if_whole(self, request: StopRequest) -> StopRequest:
        """Return the request as one for this rank alone, if it holds all of the state."""
        return request if self.keeper.needs_all_ranks else replace(request, solo=True)

    def _on_exception(
        self,
        kind: type[BaseException],
        error: BaseException,
        trace: TracebackType | None,
    ) -> None:
        """Show what the script did not catch, and end by it."""
        if self.is_fork or self._goes_on:
            self.exits.previous_hook(kind, error, trace)
            return
        if isinstance(error, SpotguardError):
            log.error("%s%s", place_in_script(trace), sentence(error))
        else:
            with contextlib.suppress(OSError):  # the log pipe may be dead already
                self.exits.previous_hook(kind, error, trace)
        self._end_by_error(error)
        if isinstance(error, SpotguardError) and not at_prompt():
            raise SystemExit(error.exit_code)

    def _end_by_error(self, error: BaseException) -> None:
        """Tell a lost peer, Ctrl-C and the script's own failure apart; save if it can be."""
        self._failure = error
        if self.end.begun:
            return
        if isinstance(error, KeyboardInterrupt):
            self._survive(StopRequest(reason=EndReason.STOPPED, message="Ctrl-C", solo=True))
        elif (
            self.world_size > 1
            and speaks_of_peers(error)
            and not self.end.someone_failed(self.coordinator, 1.0)
        ):
            self.reporter.event(
                JobEvent.PEER_LOST,
                problem=str(error).split(". ")[0][:200],
                step=self.keeper.finished,
            )
            lost = StopRequest(reason=EndReason.NODE_LOST, message="another rank vanished")
            self._survive(replace(self.watch.agreed or lost, solo=True))
        elif self.end.say_failure():
            self.keeper.saver.wait(_EXIT_PATIENCE_S)  # a save in flight is still good
            text = "".join(traceback.format_exception(error))
            self.end.write(EndReason.FAILED, message=f"{type(error).__name__}: {error}", trace=text)

    def _survive(self, request: StopRequest) -> None:
        """Save what this rank holds, if it is a boundary's, and leave with code 75."""
        request = self.watch.nearest(request)
        request = replace(request, warned_at=request.warned_at or clock.now())
        self._left.set()
        problem = None
        if self.phase is Phase.TRAINING:
            problem = self.keeper.save_boundary(self._alone_if_whole(request))
        else:
            self.keeper.saver.wait(_EXIT_PATIENCE_S)
        self._end_at_once(request, problem)

    def _at_exit(self) -> None:
        if self.is_fork:
            return
        self._listener.drain()  # the script's own handler of a signal may be what ended it
        code = self._end_as_the_script_did()
        self._close(leaving=True)
        undisturbed = self._failure is None and self.watch.agreed is None
        if self._owns_group and undisturbed:
            destroy_group()  # else the peers may be gone: no collectives
        if code is not None:
            exit_now(code)

    def reset(self) -> None:
        """End the run as the end of the script would, and give back all that was taken.

        Raises:
            SpotguardError: the last save failed. The run is over all the same.
            SystemExit: the process was told to stop.
        """
        self.keeper.saver.wait()
        self._goes_on = True
        self._listener.drain()
        try:
            code = self._end_as_the_script_did()
        finally:
            self._close(leaving=False)
            self._give_back()
        if self.watch.agreed or self._listener.sigterm:
            exit_soon(_EXIT_PATIENCE_S)
            raise SystemExit(EXIT_CODE_OF_JOB_TOLD_TO_STOP)
        if code is not None:
            assert self._failure is not None
            raise self._failure

    def _give_back(self) -> None:
        self.phase = Phase.AFTER
        self.coordinator.close(_EXIT_PATIENCE_S)
        self.exits.close()
        cancel_exits()
        if self._owns_group:
            leave_group(self.world_size)

    def _close(self, *, leaving: bool) -> None:
        """End what listens, watches and reports."""
        self._listener.close(leaving=leaving)
        # A thread in torch's C++ code when the interpreter ends would abort the whole process.
        self._left.set()
        if self._peers is not None:
            self._peers.close(_EXIT_PATIENCE_S)
        if self._still is not None:
            self._still.close(_EXIT_PATIENCE_S)
        self.watch.close(_EXIT_PATIENCE_S)
        self.reporter.close(_EXIT_PATIENCE_S)

    @property
    def is_fork(self) -> bool:
        """True in a process that the script forked: nothing here is its own, least the weights."""
        return os.getpid() != self._pid

    def _end_as_the_script_did(self) -> int | None:
        """Write how the script ended, if it is not written; return the exit code if not its own."""
        if self.end.begun or self._failure is not None or self.phase is Phase.SETUP:
            return None
        if self.phase is Phase.TRAINING:
            told = self.watch.agreed or self._listener.sigterm
            if told is not None:
                return self._leave_as_told(told)
            if self.exits.error is not None:
                self._end_by_error(self.exits.error)
                return None
            try:  # `break`, or an exit without an error: the loop was left early, on purpose
                self.finish_loop("the loop was left early", left_early=True)
            except SpotguardError as problem:
                self._end_by_problem(problem)
                return problem.exit_code
        if self.rank == 0 or self.end.is_alone(None):
            told = self.watch.agreed  # while it was finishing
            self.end.write(EndReason.FINISHED, message="all steps done", request=told)
        return None

    def _leave_as_told(self, told: StopRequest) -> int:
        """Save and end for a script that left its loop when it was told to; return the exit code.

        Where it left by `break` is the boundary; an exit may have cut an optimizer short.
        """
        if not self.exits.called:
            self.keeper.left_early()
        self._survive(told)
        return EXIT_CODE_OF_JOB_TOLD_TO_STOP

    def _end_at_once(self, request: StopRequest, problem: SpotguardError | None) -> None:
        """Write how it ended, and end the process; a thread that has begun to is not cut short."""
        if self.end.write_told(request, problem):
            if self._goes_on and request.reason is EndReason.STOPPED:  # by Ctrl-C
                return
            exit_now()
        exit_soon(_HUNG_SAVE_S)
