"""One Trainer and the run of spotguard that it is part of: its steps, its data, its state."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Any

import torch
from accelerate.optimizer import AcceleratedOptimizer

from spotguard.errors import CheckpointError
from spotguard.integrations.transformers.arguments import uses_argument
from spotguard.integrations.transformers.beside import Attached
from spotguard.integrations.transformers.data import (
    LossScale,
    StepBatches,
    batch_size_of,
    elastic_loader,
    is_stream,
    steps_of_an_epoch,
)
from spotguard.integrations.transformers.overrides import (
    RolloutCheck,
    Rollouts,
    doubts,
    is_another,
    rollouts_of,
    script_class,
)
from spotguard.integrations.transformers.refusals import ignored_checkpoint, refuse_to_train
from spotguard.integrations.transformers.state import FLAGS, Pending, TrainerProgress

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.utils.data import DataLoader

    from spotguard.runtime import Run, Step
    from spotguard.runtime.data.loader import Loader

log = logging.getLogger("spotguard")

_DONE_AFTER_A_STEP = ("should_log", "should_evaluate", "should_save")
"""Flags by which the Trainer, and callbacks and methods of the script, do something after a step.

After any other step the next one begins at once, and the boundary that was taken at its end stands.
"""
_COUNT = "num_items_in_batch"
_MEET_OTHERS = ("compute_loss", "training_step", "get_batch_samples", "_prepare_inputs")
"""Methods of which another one may hold collectives: then all ranks go forward equally often."""


class TrainerRun:
    """What stands between a Trainer's loop and the runtime; made before its training begins."""

    def __init__(self, trainer: Any, run: Run, *, global_batch_size: int | None) -> None:
        self._trainer = trainer
        self._run = run
        self._global_batch_size = global_batch_size
        self._loader: Loader | None = None
        self._step: Step | None = None
        """The step under way."""
        self._items: Any = None
        """Of it: what its losses are divided by already, None if each is a mean."""
        self._redone: Pending | None = None
        """What this attempt began with: what follows the last step of the one before it."""
        self._undisturbed = False
        """True if nothing but the Trainer's own loop has run since the last boundary."""
        self._trained = False
        self._active = False
        self._is_cut = False
        self._scale = LossScale()
        self._rollouts: Rollouts | None = None
        self._rollout_check: RolloutCheck | None = None
        self._attached: Attached | None = None
        self._arguments: dict[str, Any] = {}
        self._count_is_used = uses_argument(trainer.compute_loss, _COUNT)
        self.progress = TrainerProgress(trainer)
        self.dataloader: DataLoader[Any] | None = None
        """What the Trainer iterates over."""

    # ------------------------------------------------------------------ before the loop

    @property
    def is_active(self) -> bool:
        """True while the Trainer's loop is that of the run."""
        return self._active

    @property
    def is_cut(self) -> bool:
        """True if the run had no more steps in the middle of an epoch, which then has no end."""
        return self._is_cut

    @property
    def resumes(self) -> bool:
        """True if there may be a checkpoint to go on from."""
        return self._run.attempt > 1

    def asked_to_train(self, resume_from_checkpoint: Any, trial: Any) -> None:
        """Return if `trainer.train` may begin with these arguments.

        Raises:
            UsageError: it may not; the message says why.
        """
        refuse_to_train(trains_again=self._trained, trial=trial)
        self._trained = True
        if resume_from_checkpoint:
            told = ignored_checkpoint(resume_from_checkpoint, self._run.attempt)
            if self._run.rank == 0:
                log.info("%s", told)

    @contextlib.contextmanager
    def in_loop(self) -> Iterator[None]:
        """Within it, the Trainer's loop is that of the run."""
        accelerator = self._trainer.accelerator
        plain = accelerator.backward

        def backward(loss: torch.Tensor, **options: Any) -> None:
            if self._step is None:
                plain(loss, **options)
                return
            share = self._scale.share
            if share is not None and share != 1:
                loss = loss * share
            reduction = "mean" if share is None else "part"
            with self._step.weighted(loss, reduction=reduction) as weighted:
                plain(weighted, **options)

        self._active = True
        accelerator.backward = backward
        try:
            yield
        finally:
            self._active = False
            del accelerator.backward
            for name, value in self._arguments.items():
                setattr(self._trainer.args, name, value)

    def replace(self, plain: Any) -> DataLoader[Any]:
        """Return what the Trainer iterates over in place of `plain`, its own DataLoader."""
        args = self._trainer.args
        size = batch_size_of(plain)
        accumulation, run = args.gradient_accumulation_steps, self._run
        self._rollouts = rollouts_of(self._trainer, size, accumulation, run)
        if self._rollouts is not None:
            self._rollout_check = RolloutCheck(self._trainer, self._rollouts)
        # With split_batches a batch of the loader is that of all ranks, each of which has a part.
        ranks, is_whole = run.reference_world_size, bool(self._trainer.accelerator.split_batches)
        even = "dealt" if self._rollouts is not None else "even"
        self._loader = loader = elastic_loader(
            plain,
            run,
            global_batch_size=self._global_batch_size
            or size * accumulation * (1 if is_whole else ranks),
            micro_batch_size=max(1, size // ranks) if is_whole else size,
            per_rank=even if self._meets_others() else None,
        )
        self._arrange()
        self._tell(loader, size)
        # A stream's end is nobody's to know: one epoch of as many steps as there shall be.
        steps = args.max_steps if is_stream(plain.dataset) else loader.first_step_of(1)
        self.dataloader = steps_of_an_epoch(plain.dataset, steps)
        return self.dataloader

    def _arrange(self) -> None:
        """Set arguments for a loop whose batches are whole steps; `in_loop` puts them back.

        Micro-batches are added up, and what their losses are divided by is counted, here.
        """
        for name, value in (
            ("gradient_accumulation_steps", 1),
            ("average_tokens_across_devices", False),
            ("ignore_data_skip", False),
        ):
            self._arrange_one(name, value)

    def _arrange_one(self, name: str, value: Any) -> None:
        self._arguments.setdefault(name, getattr(self._trainer.args, name))
        setattr(self._trainer.args, name, value)

    def _tell(self, loader: Loader, size: int) -> None:
        """Say what the batches are, and what a resume may not keep."""
        if self._run.rank:
            return
        for doubt in doubts(self._trainer):
            log.warning("%s", doubt)
        asked_for = self._trainer.args.per_device_train_batch_size
        if size != asked_for:
            log.info(
                "get_train_dataloader makes batches of %d samples: that counts, and not "
                "per_device_train_batch_size=%d",
                size,
                asked_for,
            )
        counts = sorted({len(mine) for mine in loader.ranges(0)})
        each = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        log.info(
            "a global batch of %d samples in micro-batches of %d: %s accumulated on each of %d "
            "ranks",
            loader.global_batch_size,
            loader.micro_batch_size,
            each,
            self._run.world_size,
        )

    @property
    def global_batch_size(self) -> int:
        """Return the samples of a step, over all ranks."""
        assert self._loader is not None
        return self._loader.global_batch_size

    def restore(self, max_steps: int) -> tuple[int, int]:
        """Restore all that is tracked, and return the epochs done and the steps of the next one.

        The Trainer's model, optimizer and schedule are what it trains with: wrapped, and prepared.
        """
        trainer, run = self._trainer, self._run
        scaler, optimizer = trainer.accelerator.scaler, bare_optimizer(trainer.optimizer)
        self._attached = attached = Attached(trainer, optimizer, run.tracked_modules)
        run.track(
            model=trainer.model,
            optimizer=optimizer,
            scheduler=trainer.lr_scheduler,
            trainer=self.progress,
            **({} if scaler is None else {"scaler": scaler}),
            **attached.to_track(),
        )
        assert self._loader is not None
        done = run.restore(self._loader, total=max_steps)
        attached.watch()
        if done:
            self._arrange_one("eval_on_start", False)  # it was done when the run began
            self._extend(done, max_steps)
        return self.progress.epochs_done, self.progress.steps_in_epoch

    def _extend(self, done: int, max_steps: int) -> None:
        """Go on beyond the steps that the training had when its checkpoint was made, if it may."""
        before = self.progress.planned_steps
        self.progress.planned_steps = max_steps
        if before in (None, max_steps) or done >= max_steps:
            return
        assert self.dataloader is not None
        self.progress.go_on(done, len(self.dataloader))
        rates = self.progress.reschedule()
        if self._run.rank == 0:
            log.info(
                "this training goes on to step %d: it had %s steps when the checkpoint of step %d "
                "was made; %s",
                max_steps,
                before,
                done,
                rates,
            )

    def _meets_others(self) -> bool:
        return any(self._is_another(name) for name in _MEET_OTHERS)

    def _is_another(self, name: str) -> bool:
        return is_another(script_class(self._trainer), name)

    def train_begins(self) -> None:
        """Go on with what the Trainer has just set to its beginning."""
        if self._active:
            self.progress.train_begins()

    # ------------------------------------------------------------------ a step

    def begin_step(self) -> list[tuple[Any, float]]:
        """Begin the next step, and return this rank's micro-batches, each with its weight.

        Empty if there is none: all steps are done. Leaves, saved, when told to stop.
        """
        at_once, self._undisturbed = self._undisturbed, False
        if not at_once:
            self.progress.pending = None
        self._step = self._run.begin_step(at_once=at_once, reads_next=True)
        if self._step is None:
            self._is_cut = self._trainer.control.should_training_stop = True
            return []
        return self._step.read_ahead()

    def as_batch(self, batches: list[Any], own: int, items: Any) -> StepBatches:
        """Return the step under way as the Trainer sees it: one batch."""
        assert self._step is not None
        self._items = items
        self._scale = self._scale_of(self._step)
        if self._rollout_check is not None:
            self._rollout_check.step_began()
        return StepBatches(self._step, batches, own, self._scale)

    def _scale_of(self, step: Step) -> LossScale:
        """Return how the losses of a step's micro-batches are divided, and what they count then.

        By default each is a mean, of which the step knows the weight. A loss that is divided by a
        count over the whole step is its part of the mean; what it adds for each micro-batch, as a
        loss of a router, is divided by how many there are. And a Trainer that says that its loss is
        scaled reckons as under plain DDP, which takes the mean over the ranks.
        """
        is_scaled = getattr(self._trainer, "loss_is_scaled_for_ga", None)
        if not is_scaled and not self._is_divided:
            argument = 1 if self._rollouts is None else self._rollouts.accumulation
            return LossScale(argument=argument)
        assert self._loader is not None
        passes = sum(map(len, self._loader.ranges(step.number)))
        if not is_scaled:
            return LossScale(accumulation=passes, share=1)
        ranks = self._run.world_size
        each: float = passes // ranks if passes % ranks == 0 else passes / ranks
        rolls = self._rollouts
        said = each if rolls is None else rolls.accumulation
        return LossScale(accumulation=each, argument=said, share=1 / ranks)

    @contextlib.contextmanager
    def scaled(self, scale: LossScale) -> Iterator[None]:
        """Within it, the Trainer divides its losses by what is true for the step under way."""
        trainer = self._trainer
        trainer.current_gradient_accumulation_steps = scale.accumulation
        if scale.argument == 1:
            yield
            return
        trainer.args.gradient_accumulation_steps = scale.argument
        try:
            yield
        finally:
            trainer.args.gradient_accumulation_steps = 1

    def trained_once(self) -> None:
        """Take note that a micro-batch was trained on."""
        if self._rollout_check is not None:
            self._rollout_check.trained_once()

    @property
    def _is_divided(self) -> bool:
        """True if a loss is its part of the mean over the whole step already, as with tokens."""
        trainer = self._trainer
        if getattr(trainer, "loss_is_scaled_for_ga", None) is not None:
            return False
        takes_count = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
        return self._items is not None and takes_count and self._count_is_used

    def end_step(self, grad_norm: Any, learning_rate: float | None) -> None:
        """Take the state as it is for that of the boundary, if a step is under way."""
        if self._step is None:
            return
        self._step, self._items = None, None
        if self._attached is not None:
            self._attached.check()
            self._attached.drop_gradients()
        control = self._trainer.control
        flags = {name: bool(getattr(control, name)) for name in FLAGS}
        plain = grad_norm is None or type(grad_norm) is torch.Tensor
        norm = grad_norm if plain else float(grad_norm)
        self.progress.pending = Pending(flags, norm, learning_rate)
        self.progress.steps_in_epoch += 1
        does_more = any(flags[name] for name in _DONE_AFTER_A_STEP)
        self._undisturbed = not (does_more or self._is_another("_maybe_log_save_evaluate"))
        self._run.end_step()

    def of_last_step(self, grad_norm: Any, learning_rate: float | None) -> tuple[Any, float | None]:
        """Return what is to be logged of the last step.

        The Trainer knows nothing of it at the end of an epoch of which an earlier attempt has done
        all steps.
        """
        if learning_rate is None and self._redone is not None:
            return self._redone.grad_norm, self._redone.learning_rate
        return grad_norm, learning_rate

    def evaluated(self, best_before: float | None) -> None:
        """Have the state kept if the evaluation that has just ended was the best so far."""
        now = self._trainer.state.best_metric
        if now is not None and now != best_before:
            mode = "max" if self._trainer.args.greater_is_better else "min"
            self._run.best(float(now), mode=mode)

    def interruptible(self, loader: Any) -> Any:
        """Return `loader` for an evaluation that ends when the run is told to stop."""
        between_steps = self._active and self._step is None
        return self._run.evaluate(loader) if between_steps else loader

    # ------------------------------------------------------------------ epochs, and the end

    def redo(self, loop: dict[str, Any]) -> None:
        """Log, evaluate and save what an interruption cut off; `loop`: what the epoch is given."""
        pending, self.progress.pending = self.progress.pending, None
        trainer = self._trainer
        if pending is None:
            return
        self._redone = pending
        for name, value in pending.flags.items():
            setattr(trainer.control, name, value)
        trainer._maybe_log_save_evaluate(
            trainer._tr_loss,
            pending.grad_norm,
            loop["model"],
            loop["trial"],
            loop["epoch"],
            loop["ignore_keys_for_eval"],
            loop["start_time"],
            learning_rate=pending.learning_rate,
        )
        if trainer.control.should_training_stop or trainer.control.should_epoch_stop:
            loop["steps_trained_in_current_epoch"] = loop["num_update_steps_per_epoch"]

    def epoch_ended(self, epoch: int) -> None:
        """Take note that all of an epoch is done, with what comes at its end."""
        self.progress.epochs_done, self.progress.steps_in_epoch = epoch + 1, 0
        self._undisturbed = False

    def finish(self) -> None:
        """End the run's training: save its final state, before anything else becomes of it."""
        trainer = self._trainer
        early = trainer.state.global_step < trainer.state.max_steps
        if not early:
            self.progress.pending = None  # it was done: a longer training does not repeat it
        self._run.finish("the Trainer stopped early" if early else None)
        best = trainer.state.best_global_step
        if trainer.args.load_best_model_at_end and best:
            # From the run's own: a folder of the Trainer's is on one node, which may be gone.
            if best != trainer.state.global_step:
                try:
                    self._run.read_back(best, "model")
                except CheckpointError:  # its save came to nothing: the best that there is
                    best = self._run.restore_best("model")
                log.info("loaded the best weights, of step %d", best)
            self._arrange_one("load_best_model_at_end", False)


def bare_optimizer(optimizer: Any) -> Any:
    """Return the optimizer that steps, inside what Accelerate wraps around it."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer
