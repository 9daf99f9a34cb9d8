"""The process's part in its attempt: who it is, what it hears, and how it leaves.

Every way out of a job ends here: finished, told to stop, a peer lost, the script's own failure.
Each is written down as one `ended` event, because the exit code alone cannot be trusted:
torchrun returns 1 even after a clean save.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
import time
import traceback
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from spotguard.checkpoint.retention import Retention
from spotguard.errors import Fenced, SpotguardError, StoreError
from spotguard.events.event import Heartbeat, JobEvent
from spotguard.events.states import (
    EXIT_CODE_OF_JOB_TOLD_TO_STOP,
    CheckpointKind,
    EndReason,
)
from spotguard.runtime import estimate
from spotguard.runtime.best import Best
from spotguard.runtime.coordination import Alone, Coordinator, Rendezvous
from spotguard.runtime.identity import identify
from spotguard.runtime.listening import Listener
from spotguard.runtime.local_copy import LocalCopy
from spotguard.runtime.process import (
    Progress,
    device_of,
    ensure_process_group,
    exit_now,
    exit_soon,
    log_to_stderr,
    place_in_script,
    sentence,
    speaks_of_peers,
)
from spotguard.runtime.reporting import Reporter
from spotguard.runtime.saving import Capture, Saved, Saver
from spotguard.runtime.shadow import BufferShadow, ObjectShadow, StepShadow
from spotguard.runtime.sharding import is_sharded
from spotguard.runtime.stopping import StopGate, StopRequest, StopWatch
from spotguard.runtime.tracked import Tracked, TrackedModule
from spotguard.storage import PrefixedStore, open_store
from spotguard.units import format_bytes, format_duration, to_iso

if TYPE_CHECKING:
    from types import TracebackType

    from spotguard.runtime.loader import Loader
    from spotguard.runtime.restoring import Restored
    from spotguard.runtime.run import Step
    from spotguard.runtime.settings import Settings

log = logging.getLogger("spotguard")

_EXIT_PATIENCE_S = 10.0
_FAILED_SAVES_BEFORE_STOP = 3


class Phase(Enum):
    """Where the script is."""

    SETUP = "setup"
    TRAINING = "training"
    AFTER = "after"


class Job:
    """This rank of this attempt."""

    def __init__(self, settings: Settings, *, backend: str | None, save_random: bool) -> None:
        log_to_stderr()
        self.settings = settings
        self.rank = settings.rank
        self.world_size = settings.world_size
        self.phase = Phase.SETUP
        self.objects: dict[str, Tracked] = {}
        self.device = device_of(settings.local_rank)
        self._owns_group = ensure_process_group(settings, backend)
        self.coordinator: Coordinator = (
            Rendezvous.from_environment() if self.world_size > 1 else Alone()
        )
        self.run_id, self.attempt = identify(settings, self.coordinator)
        self.store = PrefixedStore(open_store(settings.store_url), self.run_id)
        self.local_copy = LocalCopy.at(settings.local_copy, self.run_id)
        self.finished = 0
        self.total: int | None = None
        self.train_s = 0.0
        self.step_s = 0.0
        self.epoch = 0
        self._step: Step | None = None
        self._started_at = time.monotonic()
        self._first_step = 0
        self._loader: Loader
        self.best = Best()
        self._failed_saves = 0
        self._first_save = True
        self._state_lock = threading.Lock()
        self._changing = False
        """True between an optimizer's step and the next boundary: the state is neither."""
        self._save_random = save_random
        self._left = threading.Event()
        self._ended = False
        self._failure: BaseException | None = None
        self._shadow = StepShadow()
        self.gate = StopGate()
        self.reporter = Reporter(
            self.store,
            attempt=self.attempt,
            node=settings.node,
            rank=self.rank,
            heartbeat_s=settings.heartbeat_s,
            heartbeat=self._heartbeat if settings.local_rank == 0 else None,
            on_stop=lambda request: self.watch.request(request),
        )
        self.saver = Saver(
            self.store,
            run_id=self.run_id,
            attempt=self.attempt,
            rank=self.rank,
            world_size=self.world_size,
            coordinator=self.coordinator,
            retention=Retention(keep_last=settings.keep_last),
            save_random=save_random,
            local_copy=self.local_copy,
            on_saved=self._on_saved,
            on_failed=self._on_save_failed,
        )
        self.watch = StopWatch(
            gate=self.gate,
            coordinator=self.coordinator,
            rank=self.rank,
            world_size=self.world_size,
            reserve_s=self.reserve_s,
            on_agreed=self._see_it_through,
        )
        self._progress = Progress(settings.progress_path if settings.local_rank == 0 else None)
        self.watch.start()
        self.reporter.start()
        self._listener = Listener(settings, self.watch, self.reporter)
        self._previous_hook = sys.excepthook
        sys.excepthook = self._on_exception
        atexit.register(self._at_exit)
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

    @property
    def last_stall_s(self) -> float:
        """Return how long the last finished save held up the loop, in seconds."""
        return self.saver.last.stall_s if self.saver.last else self._stall_s

    @property
    def last_duration_s(self) -> float:
        """Return how long the last finished save took to commit, in seconds."""
        return self.saver.last.duration_s if self.saver.last else 4 * self._stall_s

    _stall_s = 0.0

    def watch_optimizers(self, optimizers: list[torch.optim.Optimizer]) -> None:
        """Notice when the weights begin to change, so that no save reads them meanwhile."""

        def before_step(*_: Any) -> None:
            self.saver.wait_copied()
            with self._state_lock:  # held for ever by a save that abandons this step
                self._changing = True

        for optimizer in optimizers:
            optimizer.register_step_pre_hook(before_step)

    def restored(self, restored: Restored, total: int, loader: Loader) -> None:
        """Write down what this attempt starts from."""
        manifest = restored.manifest
        self.saver.parent = restored.prefix
        self._loader = loader
        first = manifest.step if manifest else 0
        self.best = Best(manifest.counters.get("best") if manifest else None)
        if self.rank == 0:
            restored.tell(log)
            for difference in restored.differences:
                self.reporter.event(JobEvent.WARNING, message=f"restored in part: {difference}")
        if self.rank == 0:
            self.reporter.event(
                JobEvent.STARTED,
                world_size=self.world_size,
                nodes=self.settings.claim.get("nodes"),
                resumed_from=restored.prefix,
                resumed_step=first,
                total_steps=total,
                notice_source=self.settings.metadata.partition("=")[0],
                skipped=[{"checkpoint": p, "problem": w} for p, w in restored.skipped],
            )

    def begin_training(self, first: int, total: int) -> None:
        """Say that the loop begins with `first` of `total` steps done."""
        modules = [i.bare for i in self.objects.values() if isinstance(i, TrackedModule)]
        self._shadow = StepShadow(
            BufferShadow(m for m in modules if not is_sharded(m)),
            ObjectShadow(self.objects, with_random=self._save_random),
        )
        self.finished = self._first_step = first
        self.total = total
        self.gate.start(first)
        self._progress.write(first, total)
        self._shadow.take()
        with self._state_lock:
            self.phase = Phase.TRAINING

    def finished_step(self, finished: int, seconds: float, epoch: int, step: Step) -> None:
        """Take note of a finished step: from here on it is the state to save."""
        self.train_s += seconds
        self.step_s = seconds if not self.step_s else 0.8 * self.step_s + 0.2 * seconds
        self.epoch = epoch
        self._step = step
        self._shadow.take()
        with self._state_lock:
            self.finished = finished
            self._changing = False
        self._progress.write(finished, self.total or 0)
        if finished == self._first_step + 1:  # an optimizer's state is there after its first step
            self.saver.warm(self.objects)
        if self._failed_saves >= _FAILED_SAVES_BEFORE_STOP:
            raise StoreError(
                f"{self._failed_saves} saves in a row failed; stopping, as nothing would be kept"
            )

    def hold(self, finished: int) -> None:
        """Wait where a drill says so, until told to stop; not where this attempt began."""
        seconds = self.settings.holds.get(finished)
        if seconds is None or finished == self._first_step:
            return
        end = time.monotonic() + seconds
        while self.watch.agreed is None and time.monotonic() < end:
            time.sleep(0.01)

    def save_in_background(self) -> None:
        """Begin a save of the state at this boundary: periodic, or of the best so far."""
        started = time.monotonic()
        kind = CheckpointKind.BEST if self.best.is_new else CheckpointKind.PERIODIC
        self.saver.save_in_background(self._capture(kind), overlap=True)
        self.best.is_new = False
        self._stall_s = time.monotonic() - started

    def finish_loop(self, why: str | None) -> None:
        """Save the final state; the script may go on after its loop."""
        self.saver.wait()
        if self.finished > self._first_step or self.saver.parent is None:
            self.saver.save_now(self._capture(CheckpointKind.FINAL))
        self.phase = Phase.AFTER
        if why and self.rank == 0:
            log.info("finished at step %d: %s", self.finished, why)

    def leave(self) -> None:
        """Save at the agreed step and leave the process, by SystemExit with code 75."""
        while self.watch.agreed is None:  # the gate closes a moment before the word is there
            time.sleep(0.001)
        request = self.watch.agreed
        self._left.set()
        problem = self._save_for(request)
        self._write_ended(request, problem)
        exit_soon(_EXIT_PATIENCE_S)
        raise SystemExit(EXIT_CODE_OF_JOB_TOLD_TO_STOP)

    def fail_saving_or_state(self, problem: SpotguardError) -> None:
        """Write down an error of ours and leave with its exit code, in one sentence."""
        self._failure = problem
        if isinstance(problem, Fenced):
            self._end(EndReason.FENCED, message=str(problem))
        elif isinstance(problem, StoreError):
            self._end(EndReason.STORE_FAILED, message=str(problem))
        else:
            self._end(EndReason.FAILED, message=sentence(problem), trace=traceback.format_exc())
        self._say_failure()
        log.error("%s", sentence(problem))
        exit_soon(_EXIT_PATIENCE_S)
        raise SystemExit(problem.exit_code)

    # ------------------------------------------------------------------ saving

    def reserve_s(self) -> float:
        """Return the seconds before a deadline at which the loop must stop."""
        return 1.5 * self.emergency_s() + 2 * self.step_s + estimate.MARGIN_S

    def emergency_s(self) -> float:
        """Return the expected seconds of an emergency save, from the rate measured so far."""
        return estimate.emergency_s(self.saver.last, self.objects.values())

    def _capture(
        self, kind: CheckpointKind, *, solo: bool = False, halfway: bool = False
    ) -> Capture:
        """Return the state to save; `halfway` through a step, that of the boundary before it."""
        counters = {
            "train_s": self.train_s,
            "epoch": self.epoch,
            "total_steps": self.total,
            "loader": self._loader.identity(),
            "place": self._loader.shared,
            "best": self.best.value,
        }
        return self.saver.capture(
            self.finished,
            kind,
            self._shadow.boundary(self.objects) if halfway else self.objects,
            counters,
            solo=solo,
            random_states=self._shadow.random_states if halfway else None,
            place=self._loader.own,
        )

    def _save_for(self, request: StopRequest, *, halfway: bool = False) -> SpotguardError | None:
        """Make the emergency save that `request` leaves time for; return what went wrong."""
        if self.finished == self._first_step and self.saver.parent is not None:
            return None  # nothing new since the checkpoint that it came from
        timeout_s = 60.0
        if request.deadline_at is not None:
            timeout_s = max(request.deadline_at - time.time() - 0.2, 0.5)
        try:
            self.saver.save_now(
                self._capture(CheckpointKind.EMERGENCY, solo=request.solo, halfway=halfway),
                solo=request.solo,
                timeout_s=timeout_s,
            )
        except SpotguardError as problem:
            self.reporter.event(JobEvent.SAVE_FAILED, step=self.finished, problem=str(problem))
            log.error("the emergency save failed: %s", problem)
            return problem
        return None

    def _say_if_it_fits(self, saved: Saved) -> None:
        """After the first save, when the rate is known: would an emergency save be in time?"""
        found = estimate.fit(saved, self.settings.metadata, self.settings.grace_s)
        log.log(logging.INFO if found.fits else logging.WARNING, "%s", found.message)
        self.reporter.event(
            JobEvent.FITS if found.fits else JobEvent.WARNING,
            emergency_s=found.emergency_s,
            grace_s=found.grace_s,
            fits=found.fits,
            message=found.message,
        )

    def _on_saved(self, saved: Saved, counters: dict[str, Any]) -> None:
        if self._first_save:
            self._first_save = False
            self._say_if_it_fits(saved)
        self._failed_saves = 0
        self.reporter.event(
            JobEvent.SAVED,
            step=saved.step,
            checkpoint=saved.checkpoint,
            checkpoint_kind=str(saved.kind),
            size_bytes=saved.size_bytes,
            stall_s=round(saved.stall_s, 6),
            duration_s=round(saved.duration_s, 6),
            train_s=counters["train_s"],
        )
        log.info(
            "saved step %d (%s, %s, %s)",
            saved.step,
            saved.kind.label,
            format_bytes(saved.size_bytes),
            format_duration(saved.duration_s),
        )

    def _on_save_failed(self, step: int, problem: SpotguardError) -> None:
        self._failed_saves += 1
        self.reporter.event(JobEvent.SAVE_FAILED, step=step, problem=str(problem))
        log.error("%s; training goes on, the next save may do", problem)
        if isinstance(problem, Fenced):
            self.watch.request(StopRequest(reason=EndReason.FENCED, message=str(problem)))

    # ------------------------------------------------------------------ ways out

    def _see_it_through(self, request: StopRequest, stop_after: int) -> None:
        """Watcher's thread, after the agreement: make sure that the process leaves in time."""
        if self.rank == 0:
            self.reporter.event(
                JobEvent.AGREED,
                reason=str(request.reason),
                stop_step=stop_after,
                solo=request.solo,
            )
        with self._state_lock:
            in_setup = self.phase is Phase.SETUP
            if in_setup:  # the lock is kept: the loop must not begin any more
                self._write_ended(request, None)
                exit_now()
        if self._left.wait(self._patience_s(request)):
            return
        if self.phase is Phase.AFTER:
            self._write_ended(request, None)
            exit_now()
        self._abandon_step(request)

    def _patience_s(self, request: StopRequest) -> float | None:
        """Return how long the main thread may take to its boundary; None: as long as it likes."""
        limits = []
        if request.deadline_at is not None:
            need_s = 1.2 * self.emergency_s() + 0.5
            limits.append(max(request.deadline_at - time.time() - need_s, 0.0))
        if request.solo:  # it may hang in a collective with a peer that is gone
            limits.append(max(3 * self.step_s, 3.0))
        if self.phase is Phase.AFTER:
            limits.append(_EXIT_PATIENCE_S)
        return min(limits) if limits else None

    def _abandon_step(self, request: StopRequest) -> None:
        """Give up the step that the main thread hangs in, and save the last finished one.

        The weights of the last finished step are intact until an optimizer begins to change
        them; the lock keeps it from beginning.
        """
        while not self._left.is_set():
            self._state_lock.acquire()
            if not self._changing:
                break
            self._state_lock.release()  # an optimizer step is short: wait for the boundary
            time.sleep(0.005)
        if self._left.is_set():
            return
        log.warning("step %d takes too long and is given up", self.finished + 1)
        sharded = self._loader.has_own_state or any(
            is_sharded(i.bare) for i in self.objects.values() if isinstance(i, TrackedModule)
        )
        problem = self._save_for(
            request if sharded else StopRequest(**{**request.__dict__, "solo": True}),
            halfway=True,
        )
        self._write_ended(request, problem)
        exit_now()

    def _on_exception(
        self,
        kind: type[BaseException],
        error: BaseException,
        trace: TracebackType | None,
    ) -> None:
        """Tell a lost peer, Ctrl-C and the script's own failure apart; save if it can be."""
        if isinstance(error, SpotguardError):
            log.error("%s%s", place_in_script(trace), sentence(error))
        else:
            with contextlib.suppress(OSError):  # the log pipe may be dead already
                self._previous_hook(kind, error, trace)
        self._failure = error
        if self._ended:
            return
        if issubclass(kind, KeyboardInterrupt):
            self._survive(StopRequest(reason=EndReason.STOPPED, message="Ctrl-C"))
        elif self.world_size > 1 and speaks_of_peers(error) and not self._someone_failed():
            self.reporter.event(
                JobEvent.PEER_LOST, problem=str(error).split(". ")[0][:200], step=self.finished
            )
            agreed = self.watch.agreed
            self._survive(
                agreed
                or StopRequest(
                    reason=EndReason.NODE_LOST, message="another rank vanished", solo=True
                )
            )
        elif self._say_failure():
            self.saver.wait(_EXIT_PATIENCE_S)  # a save in flight is still good
            text = "".join(traceback.format_exception(kind, error, trace))
            self._end(EndReason.FAILED, message=f"{kind.__name__}: {error}", trace=text)
        if isinstance(error, SpotguardError):
            raise SystemExit(error.exit_code)

    def _survive(self, request: StopRequest) -> None:
        """Save what this rank holds, by itself, and leave with code 75."""
        request = StopRequest(
            **{**request.__dict__, "solo": True, "warned_at": request.warned_at or time.time()}
        )
        self._left.set()
        problem = None
        if self.phase is Phase.TRAINING and not self._changing:
            problem = self._save_for(request, halfway=True)
        else:
            self.saver.wait(_EXIT_PATIENCE_S)  # one in flight is the newest there can be
        self._write_ended(request, problem)
        exit_now()

    def _someone_failed(self) -> bool:
        """Return True if another rank said that the script itself failed there."""
        try:
            return self.coordinator.get("failure", 1.0) is not None
        except ConnectionError:
            return False

    def _say_failure(self) -> bool:
        """Tell the other ranks that the script failed; True if we are the first."""
        try:
            return self.coordinator.first("failure", str(self.rank)) == str(self.rank)
        except ConnectionError:
            return True

    def _at_exit(self) -> None:
        self._listener.close()
        if not self._ended and self._failure is None and self.phase is not Phase.SETUP:
            if self.phase is Phase.TRAINING:  # `break`: the loop was left early, on purpose
                try:
                    self.finish_loop("the loop was left early")
                except SpotguardError as problem:
                    log.error("%s", problem)
                    self._end(EndReason.STORE_FAILED, message=str(problem))
            if self.rank == 0:
                told = self.watch.agreed  # while it was finishing
                self._end(EndReason.FINISHED, message="all steps done", request=told)
        # A thread in torch's C++ code when the interpreter ends would abort the whole process.
        self._left.set()
        self.watch.close(_EXIT_PATIENCE_S)
        self.reporter.close(_EXIT_PATIENCE_S)
        undisturbed = self._failure is None and self.watch.agreed is None
        if self._owns_group and undisturbed and dist.is_initialized():
            dist.destroy_process_group()  # else the peers may be gone: no collectives

    def _write_ended(self, request: StopRequest, problem: SpotguardError | None) -> None:
        reason, message = request.reason, request.message
        if problem is not None:
            message = f"{message}; the last save failed: {problem}"
            if not reason.retried:
                reason = EndReason.STORE_FAILED
        if self.rank == 0 or request.solo:
            self._end(reason, message=message, request=request)
        else:  # the first rank writes; it must not lose its rendezvous before it has
            try:
                self.coordinator.get("ended", 5.0)
            except ConnectionError:
                log.debug("the rendezvous ended first")
            self._ended = True

    def _end(
        self,
        reason: EndReason,
        *,
        message: str,
        trace: str | None = None,
        request: StopRequest | None = None,
    ) -> None:
        if self._ended:
            return
        self._ended = True
        last = self.saver.last
        warned_at = request.warned_at if request else None
        deadline_at = request.deadline_at if request else None
        self.reporter.event(
            JobEvent.ENDED,
            reason=str(reason),
            step=self.finished,
            saved_step=last.step if last else None,
            saved_at=to_iso(last.at) if last else None,
            checkpoint=last.checkpoint if last else self.saver.parent,
            train_s=self.train_s,
            warned_at=warned_at and to_iso(warned_at),
            deadline_at=deadline_at and to_iso(deadline_at),
            message=message,
            traceback=trace,
        )
        self.reporter.flush(_EXIT_PATIENCE_S)
        log.info("ended at step %d: %s", self.finished, reason.label)
        try:
            self.coordinator.set("ended", "1")
        except ConnectionError:
            log.debug("the rendezvous ended first")

    def _heartbeat(self) -> Heartbeat:
        last = self.saver.last
        loss = self._step.loss if self._step else None
        return Heartbeat(
            at=time.time(),
            attempt=self.attempt,
            node=self.settings.node,
            step=self.finished,
            total_steps=self.total,
            epoch=self.epoch,
            train_s=self.train_s,
            step_s=self.step_s or None,
            loss=None if loss is None else float(loss) * self.world_size,
            saved_step=last.step if last else None,
            saved_at=last.at if last else None,
        )
