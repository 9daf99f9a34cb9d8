"""The training state at the last step boundary: what belongs to it, and how it is saved.

Weights are the boundary's until an optimizer begins to change them; the rest of the state is
shadowed, so that a save in the middle of a step can still store the boundary before it.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from spotguard.checkpoint.retention import Retention
from spotguard.errors import Fenced, SpotguardError, StoreUnavailable
from spotguard.events.event import JobEvent
from spotguard.events.states import CheckpointKind
from spotguard.runtime.checkpoint import left_loop, save_time
from spotguard.runtime.checkpoint.captured import Between, Declined
from spotguard.runtime.checkpoint.early_end import EarlyEnd
from spotguard.runtime.checkpoint.left_loop import LeftLoop
from spotguard.runtime.checkpoint.own_state import EpochBegun
from spotguard.runtime.checkpoint.saver import Saver
from spotguard.runtime.process.failed_saves import FailedSaves
from spotguard.runtime.state.best import Best, BestState
from spotguard.runtime.state.boundary_copy import BoundaryState, ObjectShadow, StepShadow
from spotguard.runtime.state.sharding import is_sharded
from spotguard.runtime.state.tracked import Tracked, TrackedModule
from spotguard.runtime.state.tracked_optimizer import TrackedOptimizer
from spotguard.runtime.state.tree import Packed
from spotguard.runtime.state.weight_witness import WeightWitness

if TYPE_CHECKING:
    from collections.abc import Callable

    from spotguard.runtime.checkpoint.captured import Capture, Held, Saved
    from spotguard.runtime.checkpoint.local_copy import LocalCopy
    from spotguard.runtime.checkpoint.restore import Restored
    from spotguard.runtime.data.loader import Loader
    from spotguard.runtime.distributed.rendezvous import Coordinator
    from spotguard.runtime.preemption.stop_consensus import StopRequest
    from spotguard.runtime.process.settings import Settings
    from spotguard.runtime.reporting.metrics import Metrics
    from spotguard.runtime.reporting.node_reports import Reporter
    from spotguard.runtime.state.changed_setup import SetUp
    from spotguard.runtime.step import Step
    from spotguard.storage.base import ObjectStore

log = logging.getLogger("spotguard")

_LAST_SAVE_S = 10.0


class Keeper:
    """This rank's training state: tracked objects, counters, and the saves of both."""

    def __init__(
        self,
        settings: Settings,
        *,
        store: ObjectStore,
        run_id: str,
        attempt: int,
        coordinator: Coordinator,
        local_copy: LocalCopy | None,
        reporter: Reporter,
        metrics: Metrics,
        save_random: bool,
        on_fenced: Callable[[Fenced], None],
        leaves_at: Callable[[int], bool] = lambda step: False,
    ) -> None:
        self.objects: dict[str, Tracked] = {}
        self.finished = self.first_step = 0
        self.total: int | None = None
        self.train_s = self.step_s = 0.0
        self.epoch = 0
        self.best = Best()
        self.early_end = EarlyEnd()
        self.step: Step | None = None
        """The last finished one."""
        self.current: Step | None = None
        """The one that the loop was given last."""
        self.at = Between()
        """What the script has come to since the last boundary, as a checkpoint of it says."""
        self.resumed = Between()
        """What was under way at the boundary that this attempt began with."""
        self._was_open = self._evaluates = False
        """True if the script has evaluated between two steps, in this attempt or before it."""
        self._witness: WeightWitness | None = None
        """What notices that weights were exchanged, of a script that evaluates."""
        self._left: LeftLoop | None = None
        self.lock = threading.Lock()
        """Held while the state changes from one boundary to the next."""
        self.changing = False
        """True from where weights may change until the next boundary: the state is neither."""
        self._changed = False
        """True between an optimizer's step and the next boundary."""
        self._settings, self._reporter = settings, reporter
        self._save_random, self._on_fenced = save_random, on_fenced
        self._loader: Loader
        self._shadow = StepShadow()
        self._everything: ObjectShadow | None = None
        """What copies of a whole boundary are taken with, if they are asked for."""
        self._copy: BoundaryState | None = None
        """The last boundary, for when weights have changed."""
        self.set_up: SetUp
        """What the script had set up when it was to be restored."""
        self._failed = FailedSaves(settings.store_patience_s)
        self._failed_at_end = False
        self._optimizers: dict[str, TrackedOptimizer] = {}
        self._kept: list[int] = []
        """How many parameters each optimizer keeps something of."""
        self._first_save = True
        self._best_at: int | None = None
        """Boundary of the newest save of a best state."""
        self._stall_s = 0.0
        self.stalled_s = 0.0
        """How long all saves so far have held up the loop, in seconds."""
        self.saver = Saver(
            store,
            run_id=run_id,
            attempt=attempt,
            rank=settings.rank,
            world_size=settings.world_size,
            coordinator=coordinator,
            retention=Retention(keep_last=settings.keep_last),
            save_random=save_random,
            local_copy=local_copy,
            saving_file=settings.saving_file,
            leaves_here=lambda: leaves_at(self.finished),
            before_commit=metrics.before_commit,
            on_saved=self._on_saved,
            on_failed=self._on_save_failed,
        )

    # ------------------------------------------------------------------ from boundary to boundary

    def begin_to_change(self, *, done: bool = True) -> None:
        """Take note that weights may change from here on, so that no save reads them meanwhile.

        `done`: by an optimizer, so that a step which is left from here on counts.
        """
        self._shadow.look()
        self.stalled_s += self.saver.wait_copied()
        with self.lock:  # held for ever by a save that abandons this step
            self.changing = True
            self._changed = self._changed or done

    def restored(self, restored: Restored, loader: Loader) -> None:
        """Take note of what this attempt starts from."""
        manifest = restored.manifest
        self._loader = loader
        self.saver.parent = restored.prefix
        self.saver.parts.adopt(manifest)
        self.saver.take_base(self.objects, restored.bases)
        counters = manifest.counters if manifest else {}
        # An emergency save may have come before the save of the best state, at the same step.
        self.best = Best(BestState.of(counters))
        self.resumed = Between.of(counters, EpochBegun.of(manifest, self._settings.rank))
        self.at = self.resumed._replace(evaluating=False)
        self._evaluates = counters.get("evaluates") is True
        self._was_open = self.resumed.comes_again

    def begin(self, first: int, total: int, *, warn: Callable[[str], None] | None = None) -> None:
        """Take `first` of `total` steps done as the first boundary; `warn` hears of the script."""
        self._warn = warn or log.warning
        self._shadow = StepShadow.of(self.objects, with_random=self._save_random, warn=warn)
        self._optimizers = {
            name: item for name, item in self.objects.items() if isinstance(item, TrackedOptimizer)
        }
        self.finished = self.first_step = first
        self.total = total
        if self._evaluates:
            self.watch_weights()
        self._take_boundary()

    def finished_step(
        self, finished: int, seconds: float, step: Step, *, ends_epoch: bool = False
    ) -> None:
        """Take note of a finished step: from here on it is the state to save."""
        self.train_s += seconds
        self.step_s = seconds if not self.step_s else 0.8 * self.step_s + 0.2 * seconds
        self._take_boundary()
        self._pass_boundary(finished, step, ends_epoch=ends_epoch)
        done = finished - self.first_step
        self.saver.parts.after_step(done, self.objects, self._warn)
        if done == 1:
            self.saver.warm(self.objects)
        self._look_at_new_state()
        self._failed.check(self.saver.last)

    def _look_at_new_state(self) -> None:
        """Refuse what cannot be stored when an optimizer begins to keep it, not at the notice."""
        kept = [len(item.value.state) for item in self._optimizers.values()]
        if kept != self._kept:
            self._kept = kept
            for name, item in self._optimizers.items():
                item.pack(name, Packed())

    def _take_boundary(self) -> None:
        """Keep what a step that is given up has to go back to."""
        self.best.take()
        self._shadow.take()
        self.set_up.take()
        self._loader.settings.take()
        if self._witness is not None:
            self._witness.take()

    def watch_weights(self) -> None:
        """From here on notice weights that the script exchanges after a boundary, to evaluate."""
        self._evaluates = True
        self._call_witness()

    def _call_witness(self) -> None:
        if self._witness is None and self._optimizers:
            self._witness = WeightWitness.of(self.objects.values())
            self._witness.take()

    @property
    def has_left(self) -> bool:
        """True once the script has left the loop: what it does then is no part of a step."""
        return self._left is not None

    def begin_at_epoch_end(self) -> None:
        """Begin this attempt with what the script does at the end of an epoch."""
        self._was_open = True
        self.at, self.resumed = (at._replace(epoch_end=True) for at in (self.at, self.resumed))

    def keep_copies(self) -> None:
        """Copy all small state at each boundary: forward passes go on after weights change."""
        if self._everything is None:
            self._everything = ObjectShadow(
                self.objects, with_random=self._save_random, all_kinds=True
            )

    @property
    def has_changed(self) -> bool:
        """True if an optimizer has stepped since the last boundary, or has begun to."""
        return self._changed

    @property
    def has_boundary(self) -> bool:
        """True if the state of the last boundary can be saved."""
        return not self.changing or self._copy is not None or self._held() is not None

    def _copied(self) -> BoundaryState | None:
        """Return a copy of the state as it is, if that was asked for and it is small."""
        everything = self._everything
        if everything is None or not everything.take_whole():
            return None
        objects = everything.over(self.objects)
        return replace(self._at_boundary(), objects=objects, random_states=everything.random_states)

    def take_boundary_again(self, begun: EpochBegun | None = None) -> None:
        """Take the state as it is now for that of the last boundary: what came after it is over."""
        self._take_boundary()
        self._is_between(Between(epoch_begun=begun), self._copied())

    def _is_between(self, at: Between, copy: BoundaryState | None) -> None:
        """Take it that what the script has done since the last step belongs to the boundary."""
        with self.lock:
            self._copy = copy
            self.early_end.take()
            self.at = at
        self.resumed = Between()

    def _pass_boundary(
        self, finished: int, step: Step, *, ends_epoch: bool = False, copies: bool = True
    ) -> None:
        """Take the state as it is, or as it was last taken, for that after `finished` steps.

        Without `copies` the script has gone on since then, and the state may be another one.
        """
        self.epoch = step.epoch
        self.step = step
        copy = self._copied() if copies else None
        with self.lock:
            self._copy = copy
            self.finished = finished
            self.early_end.take()
            self.at = self.at._replace(epoch_end=ends_epoch)
            self.changing = self._changed = False

    def progress(self) -> tuple[int, int]:
        """Return the steps finished, and the micro-batches done of the one under way."""
        return self.finished, self.current.done if self.current is not None else 0

    def freeze(
        self,
        left: threading.Event,
        patience_s: float,
        *,
        by_error: Callable[[], bool] = lambda: False,
    ) -> None:
        """Keep the state as it is, unless the job left.

        The weights of the last step are intact until something begins to change them; the lock,
        which is kept, keeps it from beginning. Where a loop was left on purpose, not `by_error`, is
        a boundary, too, whatever comes after it. Blocks while an optimizer is at it, `patience_s`
        at most: its step is short, unless it waits for other ranks, in a closure or a later phase.
        """
        end = time.monotonic() + patience_s
        while not left.is_set():
            # In this order: an error is handled in the loop's generator, and then told. While the
            # state is copied there, it is handled, too: so the copy is whole before it is used.
            if self.has_left and not left_loop.script_handles_error() and not by_error():
                self.left_early()
            self.lock.acquire()
            if self.has_boundary or time.monotonic() > end:
                return
            self.lock.release()
            time.sleep(0.005)

    # ------------------------------------------------------------------ saving

    @property
    def last_stall_s(self) -> float:
        """Return how long the last finished save held up the loop, in seconds."""
        return self.saver.last.stall_s if self.saver.last else self._stall_s

    @property
    def last_duration_s(self) -> float:
        """Return how long the last finished save took to commit, in seconds."""
        return self.saver.last.duration_s if self.saver.last else 4 * self._stall_s

    @property
    def node(self) -> int:
        """The number of the machine that this rank is on."""
        return self._settings.node

    @property
    def needs_all_ranks(self) -> bool:
        """True if no rank alone holds what a checkpoint must have."""
        if self.saver.parts.names or self._loader.has_own_state:
            return True
        modules = (item for item in self.objects.values() if isinstance(item, TrackedModule))
        return any(is_sharded(item.bare) for item in modules)

    @property
    def is_saved(self) -> bool | None:
        """True if the boundary is what this rank's last save holds, or what it came from.

        None if no step was done and nothing was to be saved.
        """
        last = self.saver.last
        if last is None:
            if self.finished == 0 and not self._failed_at_end:
                return None
            return self.finished == self.first_step and not self._failed_at_end
        return last.step == self.finished

    @property
    def _is_as_restored(self) -> bool:
        """True if there is nothing new since the checkpoint that this attempt came from."""
        if self.saver.parent is None or self.finished != self.first_step:
            return False
        return not self._was_open or self.resumed.comes_again

    @property
    def _can_save_alone(self) -> bool:
        """True if another rank is gone and this one has all of the state, as a replica has."""
        return self.saver.alone.is_set() and not self.needs_all_ranks

    def reserve_s(self) -> float:
        """Return the seconds before a deadline at which the loop must stop."""
        return 1.5 * self.emergency_s() + 2 * self.step_s + save_time.MARGIN_S

    def emergency_s(self) -> float:
        """Return the expected seconds of an emergency save, from the rate measured so far."""
        return save_time.emergency_s(self.saver.last, list(self.objects.values()))

    def may_save(self) -> bool:
        """Return whether a save due here is to begin, on all ranks; a best state can't wait."""
        may = self.saver.may_save(self.finished)
        if may or not self.best.is_new or not self.saver.turns.is_stuck:
            return may or self.best.is_new
        self.best.is_lost()
        self._on_save_failed(self.finished, StoreUnavailable("the best state is not kept"))
        return False

    def save_in_background(self) -> None:
        """Begin a save of the state at this boundary: periodic, or of the best so far."""
        started = time.monotonic()
        kind = CheckpointKind.BEST if self.best.is_new else CheckpointKind.PERIODIC
        self.saver.save_in_background(self._capture(kind), overlap=True)
        if kind is CheckpointKind.BEST:
            self._best_at = self.finished
        self.best.is_being_saved()
        self._stall_s = time.monotonic() - started
        self.stalled_s += self._stall_s

    def loop_left(self, *, copies: bool = False, between: Between | None = None) -> LeftLoop:
        """Take note that the loop was left: by `break`, or by an error.

        A step that changed the weights is done. Nothing is decided yet: if it was an error, the
        last save stands. With `copies` the state is copied, since the script goes on with it.
        `between` two steps it is the state as it is, with all that the script did since the last.
        """
        done = self._changed and between is None
        self.early_end.loop_left()
        if done:
            self._loader.keep(self.finished + 1)
            self._take_boundary()
        self._left = left = LeftLoop(self.finished + done, between=between)
        if copies and (done or between or not (self.changing or self._is_as_restored)):
            held = left_loop.copied(self.saver, lambda: self._capture_where_left(left))
            self._left = left._replace(held=held)
        return self._left

    def _capture_where_left(self, left: LeftLoop) -> Capture | None:
        done = left.finished > self.finished
        as_it_is = done or left.between is not None
        if not as_it_is and self._copy is None and self.weights_are_exchanged:
            return None  # an average is in their place, or the best ones: no boundary's weights
        self._call_witness()  # for a rank that will have no copy
        of = left.finished, self.current.epoch if done and self.current is not None else self.epoch
        return self._capture(CheckpointKind.FINAL, halfway=not as_it_is, of=of, at=left.between)

    def left_early(self) -> None:
        """Take the place at which the loop was left, on purpose, for the last boundary.

        Two threads may do so: what is told to stop after it, and the script's end.
        """
        was_left = self.has_left
        left = self._left or self.loop_left()  # the script may hold the loop's iterator
        if left.finished > self.finished and self.current is not None:
            self._pass_boundary(left.finished, self.current, copies=not was_left)
        if left.between is not None and left.held is not None:  # else what it was at comes again
            self._left = left._replace(between=None)
            self._is_between(left.between, self._copy)
        self.early_end.left_on_purpose()

    def _held(self, *, solo: bool = False) -> Held | None:
        """Return the copy of this boundary, if there is one; alone, of what this rank has whole."""
        left = self._left if not solo or not self._settings.rank else None
        return left.held_for(self.finished) if left is not None else None

    @property
    def _first_rank_holds_it(self) -> bool:
        """True if where the loop was left was copied, but of whole weights by the first rank."""
        copied = self._copy is not None or self._held(solo=True) is not None
        return not copied and self._held() is not None and not self.needs_all_ranks

    @property
    def may_be_elected(self) -> bool:
        """True if this rank may save the last boundary for all others, which wait for it."""
        return self.has_boundary and not self._first_rank_holds_it

    def save_final(self, *, halfway: bool = False) -> None:
        """Save the state after the last step, unless it is what this attempt began with."""
        self.saver.wait()
        if self._is_as_restored:
            return

        def save() -> None:
            try:
                self._save_final(halfway=halfway)
            except SpotguardError:
                if not self._can_save_alone:
                    raise
                self._save_final(solo=True, halfway=halfway)

        self._failed.despite(save, again=self.saver.turns.try_anew)

    def _save_final(self, *, solo: bool = False, halfway: bool = False) -> None:
        state, held = self._to_save(CheckpointKind.FINAL, solo=solo, halfway=halfway)
        # A rank that stores no weights need not have them: the others' save is not its to refuse.
        if halfway and state.leaves and self.weights_are_exchanged:
            if held is None:
                self.saver.decline(self.finished, CheckpointKind.FINAL, left_loop.NOT_COPIED)
                self._say_not_saved(left_loop.NOT_COPIED, "final")
                return
            log.info("the weights are saved as they were where the loop was left")
        try:
            self.early_end.saved(self.saver.save_now(state, solo=solo, held=held))
        except Declined as problem:  # the rank that did so has told it
            self._failed_at_end = True
            log.info("%s", problem)

    def _to_save(
        self, kind: CheckpointKind, *, solo: bool, halfway: bool
    ) -> tuple[Capture, Held | None]:
        """Return the state to save at the end, and the copy of it if there is one."""
        held = self._held(solo=solo) if halfway else None
        if held is not None:
            counters = {**held.capture.counters, **self.early_end.counters()}
            return replace(held.capture, kind=kind, counters=counters), held
        return self._capture(kind, solo=solo, halfway=halfway), None

    def save_for(self, request: StopRequest, *, halfway: bool = False) -> SpotguardError | None:
        """Make the emergency save that `request` leaves time for; return what went wrong."""
        if self._is_as_restored:
            return None
        if request.solo and self._first_rank_holds_it and not self.saver.alone.is_set():
            log.info("the first rank holds the weights from where the loop was left")
            return None  # which told what became of them
        copied = self._copy is not None or self._held(solo=request.solo) is not None
        changed_after_loop = self.has_left and self.changing
        if halfway and not copied and (changed_after_loop or self.weights_are_exchanged):
            self.saver.wait(_LAST_SAVE_S)  # one in flight is the newest there can be
            self._say_not_saved(left_loop.OTHER_WEIGHTS)
            return None  # which is no fault of the store's
        timeout_s, solo = save_time.last_save_s(request.deadline_at), request.solo
        try:
            state, held = self._to_save(CheckpointKind.EMERGENCY, solo=solo, halfway=halfway)
            saved = self.saver.save_now(state, solo=solo, timeout_s=timeout_s, held=held)
            self.early_end.saved(saved)
        except SpotguardError as problem:
            if self._can_save_alone and not request.solo:
                return self.save_for(replace(request, solo=True), halfway=halfway)
            self._say_not_saved(str(problem))
            return problem
        return None

    def _say_not_saved(self, problem: str, kind: str = "emergency") -> None:
        self._failed_at_end = True
        self._reporter.event(JobEvent.SAVE_FAILED, step=self.finished, problem=problem)
        log.error("the %s save failed: %s", kind, problem)

    @property
    def weights_are_exchanged(self) -> bool:
        """True if some weights are others than at the last boundary, and no step has begun."""
        return not self.changing and self._witness is not None and self._witness.differs()

    def save_boundary(self, request: StopRequest) -> SpotguardError | None:
        """Save the last boundary, within a step, if it is there; return what went wrong."""
        if self.has_boundary:
            return self.save_for(request, halfway=True)
        log.warning("some weights have changed since the last step: the last save counts")
        self.saver.wait(_LAST_SAVE_S)  # one in flight is the newest there can be
        return None

    def _capture(
        self,
        kind: CheckpointKind,
        *,
        solo: bool = False,
        halfway: bool = False,
        of: tuple[int, int] | None = None,
        at: Between | None = None,
    ) -> Capture:
        """Return the state to save; `halfway` through a step, that of the boundary before it.

        `of`: how many steps are done in it, and its epoch; by default, those of the last boundary.
        """
        now = self._halfway() if halfway else self._at_boundary()
        step, epoch = of or (self.finished, self.epoch)
        at = at or self.at._replace(epoch_end=self.at.epoch_end and step == self.finished)
        best_is_new = kind is not CheckpointKind.BEST and (now.best.is_new or self._best_owed(step))
        counters = {
            "train_s": self.train_s,
            "epoch": epoch,
            "total_steps": self.total,
            "loader": self._loader.identity(),
            "micro_batch": self._loader.remembered,
            "place": now.shared,
            "evaluates": self._evaluates,
            **at.counters(),
            **now.best._replace(is_new=best_is_new).counters(),
            **self.early_end.counters(),
            **self.set_up.counters(halfway=halfway),
            "dataset": self._loader.settings.changes(halfway=halfway),
        }
        own = {"random_states": now.random_states, "place": now.own, "begun": at.epoch_begun}
        own["buffers"] = now.buffers
        return self.saver.capture(step, kind, now.objects, counters, solo=solo, **own)

    def _at_boundary(self) -> BoundaryState:
        """Return the state as it is: nothing has happened since the boundary."""
        places = self._loader.shared, self._loader.own
        return BoundaryState(self.objects, None, self.best.now, *places)

    def _halfway(self) -> BoundaryState:
        """Return the state of the last boundary, in the midst of a step."""
        if self._copy is not None and (self.changing or self.weights_are_exchanged):
            return self._copy
        objects = self._shadow.boundary(self.objects)
        places = self._loader.shared, self._loader.own
        shadow, best = self._shadow, self.best.at_boundary
        return BoundaryState(objects, shadow.random_states, best, *places, shadow.buffers)

    def _best_owed(self, step: int) -> bool:
        """Return whether the save of the best state, of this very boundary, gave way to it."""
        last = self.saver.last
        saved = last is not None and (last.step, last.kind) == (step, CheckpointKind.BEST)
        return self._best_at == step and not saved

    def _on_saved(self, saved: Saved, counters: dict[str, Any]) -> None:
        if self._first_save:
            self._first_save = False
            save_time.tell_fit(saved, self._settings, self._reporter)
        save_time.tell_saved(saved, counters["train_s"], self._reporter)

    def _on_save_failed(self, step: int, problem: SpotguardError) -> None:
        told = self._failed.note(problem, self.saver.last, self.finished, self.first_step)
        self._reporter.event(JobEvent.SAVE_FAILED, step=step, problem=told)
        log.error("%s", told)
        if isinstance(problem, Fenced):
            self._on_fenced(problem)
