"""The training loop's side of spotguard: `Run`, which `init` makes."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from spotguard.errors import SpotguardError, UsageError
from spotguard.runtime.checkpoint import restore as restoring
from spotguard.runtime.data.loader import Loader
from spotguard.runtime.data.sample_log import SampleTrace
from spotguard.runtime.distributed.collectives import ProcessGroup
from spotguard.runtime.ending.leaving import Phase
from spotguard.runtime.loop.epochs import Epoch, epochs_of
from spotguard.runtime.loop.evaluation import Evaluation
from spotguard.runtime.loop.training import Circumstances, Training
from spotguard.runtime.process.outside_loop import outside_loop
from spotguard.runtime.run_data import RunData
from spotguard.runtime.state.tracked import check_storable, tracked, tracked_slot, words_on_frozen

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from contextlib import AbstractContextManager
    from types import FrameType

    from spotguard.runtime.job import Job
    from spotguard.runtime.reporting.trackers import Tracker
    from spotguard.runtime.state.best import BestState
    from spotguard.runtime.state.tracked import Tracked
    from spotguard.runtime.step import Step

log = logging.getLogger("spotguard")

_EVALUATED_IN_SMOKE = 2
"""Batches of an evaluation: enough to see that it works."""

_Batch = TypeVar("_Batch")
_Item = TypeVar("_Item")


@dataclass
class Taken:
    """What a run has taken of its process and of the script's objects, until `reset`."""

    in_loop: bool = False
    """True while the script holds the iterator of `run.steps`."""
    gives_back: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    """Closed, it takes back hooks on models and optimizers, and closes files."""


class Run(RunData):
    """This process's part of a run. Made by `init`; all methods are for the main thread."""

    def __init__(self, job: Job, taken: Taken, *, reseed: bool, bitwise: bool) -> None:
        super().__init__(job, reseed=reseed, bitwise=bitwise)
        self._taken = taken
        if bitwise:
            # Threads share out a sum or a product by their number, which ranks differ in.
            taken.gives_back.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(1)
        self._ranks = ProcessGroup(job.rank, job.world_size)
        job.metrics.communicated_s = lambda: self._ranks.waited_s
        self._training: Training | None = None
        settings = job.settings
        self._trace = (
            SampleTrace(
                settings.trace_path,
                attempt=job.attempt,
                rank=job.rank,
                world_size=job.world_size,
            )
            if settings.trace_path
            else None
        )
        if self._trace is not None:
            taken.gives_back.callback(self._trace.close)
        self._probe = None
        if settings.probe_path:
            from spotguard.runtime.checks.fingerprint import Probe

            self._probe = Probe(settings.probe_path, job, bitwise=bitwise)
            taken.gives_back.callback(self._probe.close)

    def track(self, *, frozen: Any = None, base: Any = None, **objects: Any) -> None:
        """Name what belongs to the training state; all of it is saved and restored.

        Modules, optimizers, anything with `state_dict()` and `load_state_dict()`, random
        generators (`random.Random`, `numpy.random.Generator`, `torch.Generator`), and dicts of
        plain values and tensors (which are filled in place). Models may be in DDP, FSDP2
        (`fully_shard`) and `torch.compile`, in any order, also within a module: they are saved
        under their own names, so that a compiled run goes on uncompiled, and the other way round.

            run.track(model=lora_model, frozen="skip")  # saves of megabytes
            run.track(model=lora_model, base="base.safetensors")  # which is stored nowhere else

        Args:
            frozen: `skip`: parameters of these modules that have no gradient when the loop begins
                are stored once, and later checkpoints refer to them. One that changes after all is
                noticed, and saved from then on. Models that PEFT has adapted (LoRA) are tracked
                like that by default. (An object called `frozen` is tracked as such.)
            base: The safetensors file of these modules' frozen base, a list of such, or a folder of
                them. Implies `skip`; what is bit by bit in there, under any name, is not stored,
                but referred to by its hash: keep the files as long as the checkpoints. (An object
                called `base` is tracked as such.)
            **objects: The objects, by the names under which they are saved.

        Raises:
            UnsupportedState: something cannot be stored safely; the message says what.
            UsageError: called after the loop has begun, a name is taken, or a word makes no sense.
        """
        skips_frozen, files = words_on_frozen(objects, frozen, base)
        for name, value in objects.items():
            item = tracked(name, value, skips_frozen=skips_frozen, base=files)
            self._track("run.track", name, item)

    def track_values(self, holder: Any, *names: str) -> None:
        """Name plain values that belong to the training state: counters, a best loss.

        They are saved as they are at the step's boundary, and set again before the first step:

            run.track_values(globals(), "best_val_loss", "tokens")  # variables of the script
            run.track_values(self, "best_loss", "history")          # attributes of an object

        A function's own variables cannot be set from outside: use a `Box`, or attributes of an
        object such as `types.SimpleNamespace`.

        Args:
            holder: An object that has the attributes, or a dict that has the keys.
            *names: Numbers, strings, booleans, None, and lists, tuples and dicts of them.

        Raises:
            UnsupportedState: one is no plain value; the message says what to do.
            UsageError: it does not exist, a name is taken, or the loop has begun.
        """
        for name in names:
            self._track("run.track_values", name, tracked_slot(holder, name))

    def _track(self, caller: str, name: str, item: Tracked) -> None:
        if self._job.phase is not Phase.SETUP:
            raise UsageError(f"{caller}() must come before run.steps()")
        if name in self._job.keeper.objects:
            raise UsageError(f"{caller}: {name} is tracked already")
        check_storable(caller, name, item)  # now, not at the notice
        self._job.keeper.objects[name] = item

    def warm_up(self) -> AbstractContextManager[None]:
        """Within it optimizer steps before the loop are no training of the run.

        A launched job whose optimizers go on to step outside of a loop of ours is told so, and
        ended after five minutes: it could not be resumed. A learning-rate finder, a linear probe
        or a tokenizer's training before the loop is done within `with run.warm_up():`.
        """
        return outside_loop.warm_up()

    def end(self, reason: str = "ended early") -> None:
        """Finish the run at the end of this step, as if all steps were done (early stopping).

        All ranks must call it in the same step. It is a part of the training state: where what
        follows the loop is interrupted, the next attempt begins there. Started again with a larger
        `total` or `epochs`, the run trains on.
        """
        self._job.keeper.early_end.why = reason

    def best(
        self,
        value: float,
        *,
        mode: str = "min",
        patience: int | None = None,
        min_delta: float = 0.0,
    ) -> bool:
        """Keep the state of this step's end if `value` is the best of the run so far.

        Such a checkpoint (kind `best`) stays until there is a better one, whatever retention
        deletes. The best value is part of the training state. All ranks must call it in the same
        step with the same value: reduce a metric over the ranks first.

        Args:
            value: The metric; NaN and infinite values are never the best.
            mode: `min` if less is better (a loss), `max` if more is (an accuracy).
            patience: Finish the run, as `end` does, when so many values in a row were no better.
                The count is part of the training state. The ranks then agree: the first one's
                value counts, for which the others wait.
            min_delta: By how much a value must be better to count as progress for `patience`.

        Returns:
            True if it is the best.

        Raises:
            UsageError: another mode, a number that makes no sense, or not called within a step.
        """
        if mode not in ("min", "max"):
            raise UsageError(f"run.best: mode is {mode!r}; allowed: min, max")
        if patience is not None:
            _check_count("run.best", patience, "values of patience")
        if not 0 <= min_delta < math.inf:
            raise UsageError(f"run.best: min_delta is {min_delta!r}, but must be a number from 0")
        if self._job.phase is not Phase.TRAINING:
            raise UsageError("run.best() belongs into the loop over run.steps()")
        best, value = self._job.keeper.best, float(value)
        if patience is None:
            return best.offer(value, mode, min_delta=min_delta)
        is_best = best.offer(self._of_first_rank(value), mode, min_delta=min_delta)
        if best.now.since >= patience:
            self.end(_stopped_early(best.now, min_delta))
        return is_best

    def _of_first_rank(self, value: float) -> float:
        """Return the first rank's value; blocks until all ranks have called it."""
        told = torch.tensor([value], dtype=torch.float64, device=self.device)
        if self.world_size > 1:
            self._ranks.broadcast(told)
        return float(told)

    def restore_best(self, *names: str) -> int:
        """Give tracked objects the values of the best state that `best` was told of.

        For what comes after the training: a test, an export. Blocks until they are read, each
        rank's by itself; all must call it.

        Args:
            *names: As given to `track`; all modules unless any are given.

        Returns:
            The steps done by then.

        Raises:
            UsageError: the training has not ended, `best` was never called, or a name is not
                tracked.
            CheckpointError: the best state is not kept, or damaged.
        """
        if self._job.phase is not Phase.AFTER:
            raise UsageError("run.restore_best() comes after the training has ended")
        best = self._job.keeper.best.now
        if best.value is None:
            raise UsageError("run.restore_best: run.best() was never told a value")
        objects = self._job.keeper.objects
        modules = [n for n, item in objects.items() if isinstance(item.value, torch.nn.Module)]
        self._job.keeper.saver.wait()
        # A best state of the last step is the final one, which is saved once.
        last = self.finished_steps if best.is_new else None
        step = restoring.best_step(self._job.store, best.value) if last is None else last
        self.read_back(step, *(names or modules))
        return step

    def log(self, step: int | None = None, **metrics: Any) -> None:
        """Note numbers for a step: `run.log(loss=loss, accuracy=0.9)`. Returns at once.

        They are stored with the heartbeats and before each checkpoint, and `spotguard status`
        shows the newest ones. Over all attempts there is one value for each step and name, the
        last that counts: what was logged after the checkpoint from which a later attempt went on
        is superseded by what that attempt logs.

        The first rank's are kept; other ranks may call it, too, which changes nothing. A value
        that differs between ranks is to be reduced first: `run.log(loss=step.mean_loss())`.

        Args:
            step: The step that they belong to, `step.number` of the one under way unless given.
            **metrics: Numbers, also NaN and infinite ones; NumPy's; tensors of one element, of
                which a GPU's is fetched later. For names that are no Python names:
                `run.log(**{"val/loss": 1.0})`.

        Raises:
            UsageError: something is not a number, or no name for a metric.
        """
        self._job.metrics.log(step, metrics)

    def report_to(self, tracker: Tracker) -> None:
        """Pass on what is logged to a tracker, such as those of `spotguard.integrations.tracking`.

        Call it before the loop, on all ranks; only the first one's has anything to do.

        Raises:
            UsageError: called after the loop has begun.
        """
        if self._job.phase is not Phase.SETUP:
            raise UsageError("run.report_to() must come before run.steps()")
        if self._job.settings.smoke_samples is not None:  # no experiment of anybody's
            return
        self._job.metrics.report_to(tracker)

    def evaluate(self, batches: Iterable[_Batch]) -> Evaluation[_Batch]:
        """Return `batches` to loop over; when told to stop, the loop is left between two, saved.

        For evaluations in the training loop, before the step's own micro-batches: there the state
        is that of a step boundary, and after a resume it begins anew. All ranks leave at the same
        batch, so it may hold collectives. With other weights in the model's place, as averaged
        ones, nothing is saved. What is returned has what the loader has, for functions of loaders.

        Raises:
            UsageError: in a loop over it after the step has begun: its rest would be lost.
        """
        if self._training is not None:
            self._job.keeper.watch_weights()  # before the script may exchange them
        return Evaluation(batches, self._evaluated)

    def _evaluated(self, batches: Iterable[_Batch]) -> Iterator[_Batch]:
        training = self._training
        if self._job.settings.smoke_samples:
            batches = itertools.islice(batches, _EVALUATED_IN_SMOKE)
        if training is not None and self._job.phase is Phase.TRAINING:
            batches = training.evaluate(batches)
        yield from batches

    def steps(
        self,
        loader: Loader,
        *,
        total: int | None = None,
        epochs: int | None = None,
        strict: bool = True,
    ) -> Iterator[Step]:
        """Yield the optimizer steps that are still to do; restores first, saves on the way.

        Leaves by `SystemExit` with code 75, saved, when told to stop. `break` ends the run early;
        `sys.exit` with an error fails it.

        Args:
            loader: From `run.loader`.
            total: Optimizer steps in all, or
            epochs: passes over the dataset. How many steps they take depends on the numbers of
                ranks, if the global batch follows them.
            strict: Refuse a checkpoint whose names or shapes are not the script's. False restores
                what fits and says what it left as the script made it: for a changed model.

        Raises:
            UsageError: neither or both of `total` and `epochs`, or nothing is tracked.
            StateMismatch: the script does not fit the checkpoint.
        """
        training = self._prepare("run.steps", loader, total, epochs)

        def loop() -> Iterator[Step]:
            training.start(total, epochs, strict=strict)
            at_once = True
            while (step := training.begin(at_once=at_once)) is not None:
                yield step
                at_once = training.step is not None  # else the script has ended it
                if at_once:
                    training.end()

        yield from self._held(training, loop())

    def epochs(
        self,
        loader: Loader,
        *,
        total: int,
        steps_per_epoch: int | None = None,
        strict: bool = True,
    ) -> Iterator[Epoch]:
        """Yield the epochs that are still to do, each a loop over its steps; resumes and saves.

            for epoch in run.epochs(loader, total=90):
                for step in epoch:
                    for x, y in step:
                        step.backward(loss_fn(model(x), y))
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)
                accuracy = evaluate(run.evaluate(test_batches))  # the end of the epoch
                scheduler.step()

        What comes after an epoch's steps is done once for each: if the run is interrupted there,
        the next attempt yields that epoch again, with no step left, and does it from its beginning,
        with the state that it began with. It may change anything that is tracked but weights. So
        may what comes before the steps: it comes again in each attempt that resumes within the
        epoch, finds what it found the first time, and what it changes counts once.

        Leaves by `SystemExit` with code 75, saved, when told to stop. `break` out of the outer loop
        ends the run early, as does `run.end` in either. An epoch's own loop cannot be left early.

        Args:
            loader: From `run.loader`, `run.draws` or `run.episodes`.
            total: Epochs in all.
            steps_per_epoch: Optimizer steps of an epoch; needed where the data have no length. By
                default an epoch is one pass over the dataset.
            strict: As for `steps`.

        Raises:
            UsageError: a number makes no sense, or nothing is tracked.
            StateMismatch: the script does not fit the checkpoint.
        """
        steps: int | None = None
        passes: int | None = total
        if steps_per_epoch is not None:
            _check_count("run.epochs", steps_per_epoch, "steps an epoch")
            _check_count("run.epochs", total, "epochs")
            steps, passes = total * steps_per_epoch, None
        training = self._prepare("run.epochs", loader, steps, passes)

        def loop() -> Iterator[Epoch]:
            training.start(steps, passes, strict=strict)
            yield from epochs_of(training, total, steps_per_epoch)

        yield from self._held(training, loop())

    def _held(self, training: Training, loop: Iterator[_Item]) -> Iterator[_Item]:
        """Yield from a loop of ours while the script holds it, and see how it is left."""
        self._taken.in_loop = True
        try:
            yield from loop
        except GeneratorExit:
            training.left()
            self._job.exits.loop_left(_frame_of_script())
            raise
        except SpotguardError as problem:
            self._job.leaving.by_problem(problem)
        finally:
            self._taken.in_loop = False
            training.close()

    # ------------------------------------------------------------------ loops of others

    def restore(
        self,
        loader: Loader,
        *,
        total: int | None = None,
        epochs: int | None = None,
        strict: bool = True,
    ) -> int:
        """Restore the training state, begin to train, and return how many steps are done already.

        For loops that are not ours, such as a framework's: after it come `begin_step`, `end_step`
        and `finish`, of which `steps` is made, too. Blocks until all ranks have restored.

            done = run.restore(loader, total=20_000)
            while (step := run.begin_step()) is not None:
                for x, y in step:
                    step.backward(loss_fn(model(x), y))
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                run.end_step()

        Args:
            loader: As for `steps`.
            total: As for `steps`.
            epochs: As for `steps`.
            strict: As for `steps`.

        Raises:
            UsageError: as `steps`.
            SystemExit: the checkpoint does not fit, told in one sentence; the code says why.
        """
        return self._prepare("run.restore", loader, total, epochs).start(
            total, epochs, strict=strict
        )

    def begin_step(self, *, at_once: bool = False, reads_next: bool = False) -> Step | None:
        """Return the next optimizer step to do; None once there is none, all saved by then.

        Before it comes what the script or framework does between two steps: a learning rate that
        follows, an evaluation through `evaluate`, a log. What of that is tracked belongs to the
        boundary from here on. A framework may read its items ahead, but begins a step only when
        the one before has ended, and before it asks for the first micro-batch.

        Draw all micro-batches of the step: by a loop over it, or one by one from `iter(step)`.

        Args:
            at_once: True if nothing has changed since `end_step`, which is then not looked for.
            reads_next: True if nothing is drawn at random before the first micro-batch is asked
                for, so that the global generators need not be seeded twice.

        Raises:
            UsageError: `restore` was not called, or a step is under way.
            SystemExit: with code 75, saved: the process was told to stop.
        """
        return self._trained("run.begin_step").begin(at_once=at_once, reads_next=reads_next)

    def end_step(self) -> None:
        """Say that the weights of the step under way are final: this is the state to save.

        Its micro-batches were trained on, and its optimizers have stepped. Within a loop over
        `steps` it may be called, too, for an evaluation of the new weights in the same body.

        Raises:
            UsageError: no step is under way.
            SystemExit: something went wrong, told in one sentence; the code says what.
        """
        self._trained("run.end_step").end()

    def finish(self, reason: str | None = None) -> None:
        """End the training where it is, and save its final state. Called again, it does nothing.

        For frameworks that do not ask for the step after the last one, or that stop before it. A
        step under way counts if its optimizer has stepped. All ranks must call it at the same step.

        Args:
            reason: Why it ended before its last step; told in the log. With one, it has ended for
                good, as by `end`: the next attempt has no step to do.
        """
        self._trained("run.finish").finish(reason)

    def read_back(self, step: int, *names: str) -> None:
        """Give tracked objects the values of the checkpoint of `step`, such as the best one's.

        For the weights to go on with after the training has ended. Blocks until they are read,
        each rank's by itself; all must call it.

        Args:
            step: Steps done by then. Only what is kept can be read: the best (`best`), the newest.
            *names: As given to `track`.

        Raises:
            UsageError: the training has not ended, or a name is not tracked.
            CheckpointError: there is no such checkpoint, or it is damaged.
        """
        if self._job.phase is not Phase.AFTER:
            raise UsageError("run.read_back() comes after the training has ended: run.finish()")
        unknown = [name for name in names if name not in self._job.keeper.objects]
        if unknown or not names:
            raise UsageError(f"run.read_back: not tracked: {', '.join(unknown) or 'no name given'}")
        objects = {name: self._job.keeper.objects[name] for name in names}
        job = self._job
        restoring.read_back(job.store, step, objects, job.rank, job.world_size)

    @property
    def evaluation_was_cut(self) -> bool:
        """True if this attempt resumed from a checkpoint taken within an evaluation between steps.

        Then do that evaluation again, before the next step. Where `evaluate` stands at the
        beginning of the loop's body, or at the end of an epoch, it comes again by itself.
        """
        return self._training is not None and self._training.evaluation_was_cut

    def _trained(self, caller: str) -> Training:
        if self._training is None:
            raise UsageError(
                f"{caller}() came before run.restore()",
                hint="done = run.restore(loader, total=...) restores the state and begins",
            )
        return self._training

    def _prepare(self, caller: str, loader: Any, total: int | None, epochs: int | None) -> Training:
        self._check(caller, loader, total, epochs)
        self._training = Training(
            Circumstances(
                job=self._job,
                ranks=self._ranks,
                reseed=self._reseed,
                bitwise=self._bitwise,
                trace=self._trace,
                probe=self._probe,
                gives_back=self._taken.gives_back,
            ),
            loader,
        )
        return self._training

    def _check(self, caller: str, loader: Any, total: int | None, epochs: int | None) -> None:
        if not isinstance(loader, Loader):
            raise UsageError(
                f"{caller} needs a loader from run.loader(...), not a {type(loader).__name__}",
                hint="loader = run.loader(dataset, global_batch_size=..., micro_batch_size=...)",
            )
        if (total is None) == (epochs is None):
            raise UsageError(f"{caller}: give either total= (steps) or epochs=")
        if epochs is not None:
            loader.first_step_of(0)  # a stream refuses
        _check_count(caller, *((total, "steps") if epochs is None else (epochs, "epochs")))
        if not self._job.keeper.objects:
            raise UsageError(
                f"{caller}: nothing is tracked, so nothing could be resumed",
                hint="call run.track(model=model, optimizer=optimizer) first",
            )
        if self._job.phase is not Phase.SETUP:
            raise UsageError(
                f"{caller}() can be used once per process",
                hint="spotguard.reset() ends the run; then spotguard.init() begins another one",
            )


def _stopped_early(best: BestState, min_delta: float) -> str:
    """Return why a run ends for which no better value came."""
    by = f" by more than {min_delta:g}" if min_delta else ""
    shown = "" if best.mark is None else f" than {best.mark:.6g}"
    return f"stopped early: {best.since} values in a row were no better{shown}{by}"


def _check_count(caller: str, count: Any, unit: str) -> None:
    """Raise `UsageError` unless `count` is a whole number above 0."""
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise UsageError(f"{caller}: {count!r} {unit} in all, but must be 1 or more")


def _frame_of_script() -> FrameType | None:
    """Return the frame that the innermost call of ours came from."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") == __name__:
        frame = frame.f_back
    return frame
