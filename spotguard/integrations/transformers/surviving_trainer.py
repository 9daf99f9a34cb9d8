"""Where spotguard stands in the Trainer's loop: in front of the methods that it is made of.

All names of transformers that are not public, but these are needed, are in this module and in
`state.py`; `tests/integrations/transformers/test_contract.py` looks for each in the installed
version. `survive` puts the class below before the trainer's own, so that its overrides are met
first and the trainer's next.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from spotguard.integrations.transformers.data import StepBatches

if TYPE_CHECKING:
    from collections.abc import Iterator

    from spotguard.integrations.transformers.trainer_run import TrainerRun

METHODS = {
    "_inner_training_loop": ("args", "batch_size", "ignore_keys_for_eval", "trial"),
    "_init_training_state": (
        "max_steps",
        "num_update_steps_per_epoch",
        "num_train_epochs",
        "resume_from_checkpoint",
        "trial",
    ),
    "_prepare_for_training": ("max_steps", "train_dataloader", "resume_from_checkpoint"),
    "_run_epoch": (
        "model",
        "epoch",
        "trial",
        "ignore_keys_for_eval",
        "start_time",
        "num_update_steps_per_epoch",
        "resume_from_checkpoint",
        "steps_trained_in_current_epoch",
    ),
    "_maybe_log_save_evaluate": (
        "tr_loss",
        "grad_norm",
        "model",
        "trial",
        "epoch",
        "ignore_keys_for_eval",
        "start_time",
        "learning_rate",
    ),
    "_finalize_training": ("trial", "num_train_samples", "start_time"),
    "_load_rng_state": ("checkpoint",),
}
"""The Trainer's own methods, not public, that are stood before, with the arguments they need."""
ATTRIBUTES = ("_tr_loss", "_total_loss_scalar", "_globalstep_last_logged")
"""The Trainer's own attributes, not public, that are saved and restored."""
_OWN_CHECKPOINT = "of spotguard"
"""What the Trainer is told that it resumes from; it reads nothing there."""


def survive(trainer: Any, by: TrainerRun) -> None:
    """Put `SurvivingTrainer` before the class of `trainer`."""
    kind = type(trainer)
    trainer._spotguard = by
    trainer.__class__ = type(
        kind.__name__, (SurvivingTrainer, kind), {"__module__": kind.__module__}
    )


class SurvivingTrainer:
    """A Trainer whose training is a run of spotguard. Its bases are made up by `survive`."""

    _spotguard: TrainerRun
    accelerator: Any
    args: Any
    state: Any

    # ------------------------------------------------------------------ public methods

    def train(self, resume_from_checkpoint: Any = None, trial: Any = None, **options: Any) -> Any:
        """Train, from the run's own checkpoint if there is one."""
        self._spotguard.asked_to_train(resume_from_checkpoint, trial)
        return self._super.train(None, **options)

    def get_train_dataloader(self) -> Any:
        """Return what stands for the steps of an epoch, in place of the Trainer's batches."""
        if not self._spotguard.is_active:
            return self._super.get_train_dataloader()
        with _not_prepared(self.accelerator):
            plain = self._super.get_train_dataloader()
        return self._spotguard.replace(plain)

    def get_total_train_batch_size(self, args: Any) -> int:
        """Return the global batch, whatever the number of ranks."""
        if self._spotguard.is_active:
            return self._spotguard.global_batch_size
        size: int = self._super.get_total_train_batch_size(args)
        return size

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: Any
    ) -> Any:
        """Begin a step; return it as the only batch, and what its losses are divided by."""
        run = self._spotguard
        if not run.is_active:
            return self._super.get_batch_samples(epoch_iterator, num_batches, device)
        if next(epoch_iterator, None) is None:
            return [], None
        given = run.begin_step()
        if not given:
            return [], None
        own = [batch for batch, weight in given if weight] or [given[0][0]]
        counts = sum(1 for _, weight in given if weight)
        batches, items = self._super.get_batch_samples(iter(own), len(own), device)
        if items is not None and self.args.world_size > 1:
            items = torch.as_tensor(items, device=device) * (counts > 0)
            items = self.accelerator.reduce(items, reduction="sum")
        return [run.as_batch(batches, counts, items)], items

    def training_step(
        self, model: Any, inputs: Any, num_items_in_batch: Any = None, **options: Any
    ) -> torch.Tensor:
        """Train on each of a step's micro-batches; return the mean loss over the global batch."""
        if not isinstance(inputs, StepBatches):
            loss: torch.Tensor = self._super.training_step(
                model, inputs, num_items_in_batch, **options
            )
            return loss
        with self._spotguard.scaled(inputs.scale):
            for batch in inputs.in_turn():
                self._super.training_step(model, batch, num_items_in_batch, **options)
                self._spotguard.trained_once()
        return inputs.step.mean_loss()

    def floating_point_ops(self, inputs: Any) -> int:
        """Return those of a step's micro-batches on this rank."""
        of = self._super.floating_point_ops
        if isinstance(inputs, StepBatches):
            return sum(of(batch) for batch in inputs.counted())
        operations: int = of(inputs)
        return operations

    def evaluation_loop(self, dataloader: Any, *arguments: Any, **options: Any) -> Any:
        """Evaluate; when told to stop, all ranks leave at one batch, saved."""
        loader = self._spotguard.interruptible(dataloader)
        return self._super.evaluation_loop(loader, *arguments, **options)

    # ------------------------------------------------------------------ those that are not public

    def _inner_training_loop(self, *arguments: Any, **options: Any) -> Any:
        run = self._spotguard
        if run.resumes:
            options["resume_from_checkpoint"] = _OWN_CHECKPOINT
        with run.in_loop():
            return self._super._inner_training_loop(*arguments, **options)

    def _init_training_state(
        self,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: Any,
        trial: Any,
    ) -> tuple[int, int]:
        # The epochs are reckoned here, so the state must be there by now, and what it goes into.
        run = self._spotguard
        self._super._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, None, trial
        )
        self._prepared = self._super._prepare_for_training(max_steps, run.dataloader, None)
        return run.restore(max_steps)

    def _prepare_for_training(self, *_: Any, **__: Any) -> Any:
        prepared, self._prepared = self._prepared, None
        return prepared

    def _load_rng_state(self, checkpoint: Any) -> None:
        """Do nothing: what is drawn follows from the step."""

    def _run_epoch(self, **loop: Any) -> None:
        run = self._spotguard
        run.redo(loop)
        self._super._run_epoch(**loop)
        run.epoch_ended(loop["epoch"])

    def _maybe_log_save_evaluate(
        self, tr_loss: Any, grad_norm: Any, *others: Any, learning_rate: Any = None
    ) -> None:
        run = self._spotguard
        if run.is_cut:
            return
        run.end_step(grad_norm, learning_rate)
        grad_norm, learning_rate = run.of_last_step(grad_norm, learning_rate)
        best = self.state.best_metric
        self._super._maybe_log_save_evaluate(
            tr_loss, grad_norm, *others, learning_rate=learning_rate
        )
        run.evaluated(best)

    def _finalize_training(self, trial: Any, num_train_samples: Any, start_time: float) -> Any:
        run = self._spotguard
        run.finish()
        began_at = start_time - run.progress.earlier_s
        return self._super._finalize_training(trial, num_train_samples, began_at)

    @property
    def _super(self) -> Any:
        return super()


@contextlib.contextmanager
def _not_prepared(accelerator: Any) -> Iterator[None]:
    """Within it, `accelerator.prepare` returns what it is given: the Trainer's plain DataLoader."""

    def same(*things: Any, **_: Any) -> Any:
        return things[0] if len(things) == 1 else things

    accelerator.prepare = same
    try:
        yield
    finally:
        del accelerator.prepare
