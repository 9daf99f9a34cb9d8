"""This rank of this attempt: wires together what saves, listens, watches, reports and leaves.

The parts are made in the order in which they need each other, and started when all are there.
"""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING, Any

from spotguard.checkpoint.lineage import read_claim
from spotguard.events.event import Heartbeat, JobEvent
from spotguard.events.profile import DATA
from spotguard.events.states import EXIT_CODE_OF_JOB_TOLD_TO_STOP, EndReason
from spotguard.runtime.checkpoint.local_copy import LocalCopy
from spotguard.runtime.checkpoint.training_state import Keeper
from spotguard.runtime.data.first_attempt import FirstAttempt, claimed_sizes
from spotguard.runtime.distributed.rendezvous import Alone, Coordinator, Rendezvous
from spotguard.runtime.distributed.stall_report import StillWatch
from spotguard.runtime.ending.end_writer import EndWriter
from spotguard.runtime.ending.leaving import EXIT_PATIENCE_S, HUNG_SAVE_S, Leaving, Phase
from spotguard.runtime.preemption.exit_hooks import ExitWatch
from spotguard.runtime.preemption.peer_monitor import join_ring
from spotguard.runtime.preemption.stop_consensus import StopGate, StopRequest, StopWatch
from spotguard.runtime.preemption.stop_sources import Listener
from spotguard.runtime.process import clock
from spotguard.runtime.process.device_number import number_of
from spotguard.runtime.process.finite import LossWatch
from spotguard.runtime.process.identity import identify
from spotguard.runtime.process.surroundings import (
    ProgressFile,
    cancel_exits,
    destroy_group,
    device_of,
    ensure_process_group,
    exit_now,
    exit_soon,
    leave_garbage,
    leave_group,
    log_to_stderr,
)
from spotguard.runtime.reporting.metrics import Metrics
from spotguard.runtime.reporting.node_reports import Reporter
from spotguard.runtime.reporting.profiling import Profiling, Progress, RankPlace
from spotguard.shared.node_locks import live
from spotguard.shared.units import to_iso
from spotguard.storage import PrefixedStore, open_store

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from spotguard.runtime.checkpoint.restore import Restored
    from spotguard.runtime.preemption.peer_monitor import Peers
    from spotguard.runtime.process.settings import Settings
    from spotguard.runtime.step import Step

log = logging.getLogger("spotguard")

_ANSWER_S = 300.0  # the first rank reads the store


class Job:
    """This rank of this attempt."""

    def __init__(
        self,
        settings: Settings,
        *,
        backend: str | None,
        save_random: bool,
        script_values: bool = False,
    ) -> None:
        self._started_at = time.monotonic()
        log_to_stderr()
        self.settings = settings
        self.script_values = script_values
        """True if what the script sets up otherwise than before counts, not the checkpoint."""
        self.rank = settings.rank
        self.world_size = settings.world_size
        self.device = device_of(settings.local_rank)
        self._owns_group = ensure_process_group(settings, backend)
        self.coordinator: Coordinator = (
            Rendezvous.from_environment() if self.world_size > 1 else Alone()
        )
        settings.make_default_store()
        self.run_id, self.attempt = identify(settings, self.coordinator)
        self.store = PrefixedStore(open_store(settings.store_url), self.run_id)
        self.local_copy = LocalCopy.at(settings.local_copy, self.run_id)
        told = clock.compare_with_controller(self.store, settings, self.attempt)
        self._init_at = clock.now() - self.age_s
        self._pid = os.getpid()
        self.gate = StopGate(settings.until_step)
        self.metrics = Metrics(
            self.store,
            attempt=self.attempt,
            node=settings.node,
            local_rank=settings.local_rank,
            rank=self.rank,
        )
        self._losses = LossWatch(self.warn_of_script)
        self.metrics.losses = self._losses
        self.profiling = self._make_profiling()
        self.reporter = Reporter(
            self.store,
            attempt=self.attempt,
            node=settings.node,
            rank=self.rank,
            heartbeat_s=settings.heartbeat_s,
            heartbeat=self._heartbeat if settings.local_rank == 0 else None,
            on_stop=lambda request: self.watch.request(request),
            metrics=self.metrics,
            look=self.profiling.look,
        )
        self.keeper = Keeper(
            settings,
            store=self.store,
            run_id=self.run_id,
            attempt=self.attempt,
            coordinator=self.coordinator,
            local_copy=self.local_copy,
            reporter=self.reporter,
            metrics=self.metrics,
            save_random=save_random,
            on_fenced=lambda problem: self.watch.request(
                StopRequest(reason=EndReason.FENCED, message=str(problem))
            ),
            leaves_at=lambda step: not self.gate.passes(step),
        )
        end = EndWriter(self.rank, self.world_size, self.coordinator, self.keeper, self.reporter)
        self.leaving = Leaving(
            coordinator=self.coordinator,
            keeper=self.keeper,
            reporter=self.reporter,
            end=end,
            peer_timeout_s=settings.peer_timeout_s,
        )
        self.watch = StopWatch(
            gate=self.gate,
            coordinator=self.coordinator,
            rank=self.rank,
            world_size=self.world_size,
            reserve_s=self.keeper.reserve_s,
            on_agreed=self.leaving.in_time,
        )
        self._progress = ProgressFile(settings.progress_path if settings.local_rank == 0 else None)
        self.leaving.obey(self.watch)
        self._peers = self._join_peers()
        self._still = self._look_for_stillness()
        self.exits = ExitWatch(self._on_exception, self._at_exit)
        live(settings.rank_file)
        self._listener = Listener(settings, self.watch, self.reporter)
        self.leaving.listen_to(self._listener, self.exits)
        self.watch.start()
        self.reporter.start()
        if told:
            self.reporter.event(JobEvent.WARNING, message=told)
        if self._listener.is_deaf:
            self.warn(
                "spotguard.init() was called in another thread than the main one, where Python "
                "allows no signal handlers: SIGTERM would kill this process without a last save; "
                "call init() in the main thread, and train in any"
            )
        self.exits.start()
        if self.rank == 0 and not settings.launched:
            log.info("run %s, saves in %s", self.run_id, self.store.url)

    def _make_profiling(self) -> Profiling:
        settings = self.settings
        place = RankPlace(
            attempt=self.attempt,
            node=settings.node,
            rank=self.rank,
            local_rank=settings.local_rank,
            world_size=self.world_size,
            heartbeat_s=settings.heartbeat_s,
            saving_file=settings.saving_file,
        )

        def progress() -> Progress:
            return Progress(self.keeper.finished, self.keeper.total, self.keeper.step_s)

        made = Profiling(
            self.store, place, progress=progress, told_to_stop=lambda: self.watch.is_asked
        )
        self.metrics.waits_for_data = lambda: made.mark(DATA)
        return made

    def _heartbeat(self) -> Heartbeat:
        """Return how far this rank is, and what it has saved."""
        keeper, last = self.keeper, self.keeper.saver.last
        step = keeper.finished
        loss = number_of(lambda: keeper.step.own_loss if keeper.step else None)
        self._losses.look("the loss", step, loss)
        return Heartbeat(
            at=clock.now(),
            attempt=self.attempt,
            node=self.settings.node,
            step=step,
            total_steps=keeper.total,
            epoch=keeper.epoch,
            train_s=keeper.train_s,
            step_s=keeper.step_s or None,
            loss=loss,
            saved_step=last.step if last else None,
            saved_at=last.at if last else None,
            metrics=self.metrics.newest(),
        )

    def claim_extra(self, loader: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the claim tells beside its number: place, price, ranks, host, batch sizes."""
        ranks, batch = self.world_size, claimed_sizes(loader)
        told = {"world_size": ranks, "host": os.uname().nodename, "batch": batch}
        return {**self.settings.claim, **told}

    def first_attempt(self) -> FirstAttempt:
        """Return the sizes of the first attempt that claimed its number; blocks for reads."""
        earlier = range(1, self.attempt) if self.rank == 0 else ()  # some may have claimed nothing
        claims = filter(None, (read_claim(self.store, attempt) for attempt in earlier))
        told = (FirstAttempt.told_by(claim.extra) for claim in claims)
        mine = next(filter(None, told), FirstAttempt(self.world_size))
        if self.world_size == 1:
            return mine
        if self.rank == 0:
            self.coordinator.set("first_attempt", mine.to_text())
        said = self.coordinator.get("first_attempt", _ANSWER_S)
        return FirstAttempt.of_text(said) if said else FirstAttempt(self.world_size)

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
        self.exits.trains_here()
        self.keeper.begin(first, total, warn=self.warn_of_script)
        self.metrics.begin(first)
        if not self.gate.start(first):  # the watcher is about to end the process
            exit_soon(HUNG_SAVE_S)
            self.leaving.begun.wait()
        self._progress.write(first, total)
        self._listener.hold()
        self.leaving.phase = Phase.TRAINING
        if self._peers is not None:
            self._peers.train()
        if self._still is not None:
            self._still.start()

    @property
    def phase(self) -> Phase:
        """Where the script is."""
        return self.leaving.phase

    def finished_step(
        self, finished: int, seconds: float, step: Step, *, ends_epoch: bool = False
    ) -> None:
        """Take note of a finished step: from here on it is the state to save."""
        self.exits.forget()
        self.keeper.finished_step(finished, seconds, step, ends_epoch=ends_epoch)
        saved = self.keeper.saver.last
        self.metrics.finished_step(finished, self.keeper.stalled_s, saved.step if saved else None)
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

    def end_phase(self, finished: int) -> None:
        """Ask for the stop that ends the run's phase, if its steps are done; all ranks do alike.

        A stop that another rank or a cloud asks for at the same time says why they leave.
        """
        until = self.settings.until_step
        if until is not None and finished >= until and self.watch.agreed is None:
            message = f"the phase ends at step {until}"
            self.watch.request(StopRequest(reason=EndReason.PHASE_DONE, message=message))

    def finish_loop(self, why: str | None, *, left_early: bool = False) -> None:
        """Save the final state; the script may go on after its loop."""
        self._stop_looking_for_stillness()
        self.profiling.loop_ended(self.keeper.finished)
        self.leaving.finish_loop(why, left_early=left_early)
        self._listener.hold(loop=False)

    def _stop_looking_for_stillness(self, patience_s: float = 0.0) -> None:
        if self._still is not None:
            self._still.close(patience_s)

    def _join_peers(self) -> Peers | None:
        """Begin to look after the other ranks, if there are any."""
        timeout_s = self.settings.peer_timeout_s
        if self.world_size == 1 or timeout_s is None:
            return None
        return join_ring(
            self.coordinator,
            self.rank,
            self.world_size,
            timeout_s=timeout_s,
            on_lost=self.leaving.peer_lost,
        )

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
            tell=self.warn,
        )

    def warn(self, message: str) -> None:
        """Tell what is wrong, in the log and in the run store."""
        log.warning("%s", message)
        self.reporter.event(JobEvent.WARNING, message=message)

    def warn_of_script(self, message: str) -> None:
        """Tell what is wrong with the script, once: it is the same on all ranks."""
        if self.rank == 0:
            self.warn(message)

    def _on_exception(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if self.is_fork or self.leaving.process_goes_on:
            self.exits.previous_hook(kind, error, trace)
        else:
            self.leaving.by_exception(kind, error, trace)

    def _at_exit(self) -> None:
        if self.is_fork:
            return
        code = self._end_as_the_script_did()
        self._close(leaving=True)
        undisturbed = self.leaving.failure is None and self.watch.agreed is None
        if self._owns_group and undisturbed:
            destroy_group()  # else the peers may be gone: no collectives
        if code is not None:
            exit_now(code)
        if self.watch.agreed is not None:
            leave_garbage()

    def reset(self) -> None:
        """End the run as the end of the script would, and give back all that was taken.

        Raises:
            SpotguardError: the last save failed. The run is over all the same.
            SystemExit: the process was told to stop.
        """
        self.keeper.saver.wait()
        self.leaving.process_goes_on = True
        try:
            code = self._end_as_the_script_did()
        finally:
            self._close(leaving=False)
            self._give_back()
        if self.watch.agreed or self._listener.sigterm:
            exit_soon(EXIT_PATIENCE_S)
            raise SystemExit(EXIT_CODE_OF_JOB_TOLD_TO_STOP)
        if code is not None:
            assert self.leaving.failure is not None
            raise self.leaving.failure

    def _end_as_the_script_did(self) -> int | None:
        """Write how the script ended; return the exit code if it is not the script's own."""
        self._listener.drain()  # the script's own handler of a signal may be what ended it
        self._stop_looking_for_stillness()
        return self.leaving.as_the_script_did()

    def _give_back(self) -> None:
        self.leaving.phase = Phase.AFTER
        self.coordinator.close(EXIT_PATIENCE_S)
        self.exits.close()
        cancel_exits()
        if self._owns_group:
            leave_group(self.world_size)

    def _close(self, *, leaving: bool) -> None:
        """End what listens, watches and reports."""
        self._listener.close(leaving=leaving)
        # A thread in torch's C++ code when the interpreter ends would abort the whole process.
        self.leaving.begun.set()
        if self._peers is not None:
            self._peers.close(EXIT_PATIENCE_S)
        self._stop_looking_for_stillness(EXIT_PATIENCE_S)
        self.watch.close(EXIT_PATIENCE_S)
        self.profiling.close(EXIT_PATIENCE_S)
        self.reporter.close(EXIT_PATIENCE_S)
        done = self.leaving.phase is Phase.AFTER and self.leaving.failure is None
        self.metrics.close(finished=done, timeout_s=EXIT_PATIENCE_S)

    @property
    def is_fork(self) -> bool:
        """True in a process that the script forked: nothing here is its own, least the weights."""
        return os.getpid() != self._pid
