"""One `Trainer.fit` as a training of ours: its steps, its evaluations, and its end."""

from __future__ import annotations

import contextlib
import inspect
import itertools
from typing import TYPE_CHECKING, Any

from lightning.pytorch.strategies import DDPStrategy

from spotguard.errors import UsageError
from spotguard.integrations.lightning import private_names, state
from spotguard.integrations.lightning.loader import StepLoader
from spotguard.integrations.torch_data import make_loader
from spotguard.integrations.trained_beside import trained_beside
from spotguard.runtime.checks.schedules_beside import schedules_beside

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    import lightning.pytorch as pl
    import torch

    from spotguard.runtime import Run, Step
    from spotguard.runtime.data.loader import Loader
    from spotguard.runtime.loop.evaluation import Evaluation

_ENDLESS = 1 << 40
"""Steps of a Trainer that has no limit of its own."""


class TrainerFit:
    """The steps of one `Trainer.fit`, between Lightning's loop and our run."""

    def __init__(
        self,
        run: Run,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        *,
        global_batch_size: int | None,
    ) -> None:
        self._run = run
        self._trainer = trainer
        self._module = module
        self.is_manual = not module.automatic_optimization
        self._global_batch_size = global_batch_size
        self._accumulated = trainer.accumulate_grad_batches
        self._limit = _limit_of(trainer)
        self._loader: Loader
        self._steps_per_epoch = 0
        self._micro_batches: Iterator[Any] = iter(())
        self._drawn = 0
        self._evaluation: Evaluation[int] | None = None
        self.step: Step | None = None
        """The step under way."""
        self.is_cut = False
        """True once the run had no more steps in the middle of an epoch, as in a drill."""
        self.beside_batch: tuple[Any, ...] = ()
        """What `training_step` gets beside a batch: the batch's number, if the script asks."""
        self._place = state.LoopPlace(trainer, private_names.LoopCounters(trainer))
        self._plateaus: state.Plateaus
        self._metrics = state.LoggedMetrics(trainer)

    @property
    def is_fitting(self) -> bool:
        """True within `Trainer.fit`, not in a validation or test of its own."""
        return bool(self._trainer.state.fn == "fit")

    def set_up(self) -> None:
        """Have the Trainer count steps instead of batches, and read its data through our loader."""
        trainer = self._trainer
        _refuse_what_changes_data(trainer)
        _refuse_own_reading(self._module)
        trainer.accumulate_grad_batches = 1
        trainer.limit_train_batches = 1.0
        trainer.val_check_interval = _in_steps(trainer.val_check_interval, self._accumulated)
        private_names.replace_train_loader(trainer, self._our_loader)
        private_names.leave_signals_alone(trainer)

    def _our_loader(self, given: Any) -> StepLoader:
        trainer = self._trainer
        self._loader, steps = make_loader(
            self._run,
            given,
            caller="SpotguardCallback",
            global_batch_size=self._global_batch_size,
            accumulated=self._accumulated,
            per_rank="one" if self.is_manual else "even",
            limit=self._limit,
            in_order=bool(trainer.overfit_batches),
        )
        if steps is None:
            steps = trainer.max_steps
            if steps < 1:
                raise UsageError(
                    "SpotguardCallback: a stream has no length, so the Trainer needs max_steps",
                    hint="Trainer(max_steps=...)",
                )
        self._steps_per_epoch = self._place.steps_per_epoch = steps
        return StepLoader(self._loader, steps, given.dataset, self.next_batch)

    # ------------------------------------------------------------------ restoring

    def restore(self, *, strict: bool) -> None:
        """Restore whatever belongs to the training state, and begin; blocks until all ranks did."""
        trainer, module = self._trainer, self._module
        trainer.fit_loop.setup_data()
        if not self._steps_per_epoch:
            raise UsageError(
                "SpotguardCallback: the Trainer has no data to train on",
                hint="give Trainer.fit a DataLoader, or the module a train_dataloader()",
            )
        self._plateaus = state.Plateaus(trainer)
        self._run.track(module=module, **self._parts())
        hooks = state.HookStates(trainer, module)
        if hooks.are_there:
            self._run.track(hooks=hooks)
        self._run.track(place=self._place)  # last: it has the others' counts put right
        total = self._total()
        done = self._run.restore(self._loader, total=total, strict=strict)
        if done < total and self._run.ended_early is None:
            self._place.go_on()
        self._plateaus.keep()

    def _parts(self) -> dict[str, Any]:
        trainer = self._trainer
        parts: dict[str, Any] = dict(trained_beside(trainer.optimizers, [self._module]))
        for number, optimizer in enumerate(trainer.optimizers):
            parts[f"optimizer{number or ''}"] = optimizer
        for number, config in enumerate(trainer.lr_scheduler_configs):
            parts[f"scheduler{number or ''}"] = config.scheduler
        known = [config.scheduler for config in trainer.lr_scheduler_configs]
        for number, scheduler in enumerate(schedules_beside(trainer.optimizers, known)):
            parts[f"own_scheduler{number or ''}"] = scheduler
        if trainer.precision_plugin.state_dict():
            parts["precision"] = trainer.precision_plugin
        datamodule: Any = trainer.datamodule  # type: ignore[attr-defined]
        if datamodule is not None and datamodule.state_dict():
            parts["datamodule"] = datamodule
        parts["metrics"] = self._metrics
        parts["callbacks"] = state.CallbackStates(trainer.callbacks)  # type: ignore[attr-defined]
        return parts

    def _total(self) -> int:
        """Return the optimizer steps in all, as far as the Trainer's limits tell."""
        trainer = self._trainer
        epochs = trainer.fit_loop.max_epochs
        by_epochs = _ENDLESS if epochs in (None, -1) else epochs * self._steps_per_epoch
        by_steps = _ENDLESS
        if trainer.max_steps != -1 and not self.is_manual:
            by_steps = trainer.max_steps
        return max(1, min(by_epochs, by_steps))

    # ------------------------------------------------------------------ step by step

    def next_batch(self) -> Any:
        """Begin the next step and return its first micro-batch.

        Raises:
            StopIteration: the epoch is over, or there is no step to do.
        """
        at_once = self.step is not None
        self.end_step(state.STEP)
        self._place.settle(state.STEP)
        self._plateaus.put_back()
        if self._trainer.fit_loop.batch_idx + 1 >= self._steps_per_epoch:
            raise StopIteration
        self._place.next = state.STEP
        self.step = self._run.begin_step(at_once=at_once, reads_next=True)
        if self.step is None:
            self.is_cut = self._trainer.should_stop = True
            raise StopIteration
        self._micro_batches = iter(self.step)
        self._drawn = 0
        return self._draw()

    def _draw(self) -> Any:
        self._drawn += 1
        return next(self._micro_batches)

    @property
    def on_last_micro_batch(self) -> bool:
        """True if the micro-batch that was drawn last is this rank's last of the step."""
        return self.step is None or self._drawn >= len(self.step)

    def train_on_next_micro_batch(self) -> Any:
        """Return what the script's `training_step` gives for the step's next micro-batch."""
        return private_names.train_on(self._trainer, self._draw(), *self.beside_batch)

    def logging_as_it_counts(self) -> AbstractContextManager[None]:
        """Have `self.log` leave a micro-batch out of means that comes again so that ranks meet."""
        if self.step is None or self.step.counts:
            return contextlib.nullcontext()
        return private_names.logged_in_no_mean(self._trainer)

    def weighted(self, loss: torch.Tensor) -> AbstractContextManager[torch.Tensor]:
        """Give the loss as it is to go backward."""
        assert self.step is not None
        return self.step.weighted(loss)

    def end_step(self, place: str) -> None:
        """Take the state as it is for that after the step under way, if there is one."""
        if self.step is None:
            return
        self._place.next = place
        self.step = None
        self._run.end_step()

    # ------------------------------------------------------------------ between two steps

    def begin_validation(self) -> None:
        """Begin what may be left, saved, between two of its batches."""
        self.end_step(state.VALIDATION)
        self._place.settle(state.VALIDATION)
        self._plateaus.put_back()  # used up: what steps them after this validation is to last
        self._evaluation = self._run.evaluate(itertools.count())

    def next_validation_batch(self) -> None:
        """Leave, saved, if all ranks agreed to stop before this batch."""
        if self._evaluation is not None:
            next(self._evaluation)

    def end_validation(self) -> None:
        """End it; what follows belongs to the same boundary until the next step begins."""
        if self._evaluation is not None:
            self._evaluation.close()
            self._evaluation = None
        self._metrics.keep()

    def end_epoch(self) -> None:
        """End the step before what the script does at the epoch's end, which may take long."""
        self.end_step(state.EPOCH_END)

    def finish(self) -> None:
        """Save the final state."""
        self.end_step(state.END)
        self._place.next = state.END
        self._run.finish("the Trainer has stopped" if self._trainer.should_stop else None)


def _limit_of(trainer: pl.Trainer) -> float | None:
    limit = trainer.limit_train_batches
    return None if isinstance(limit, float) and limit == 1.0 else limit


def _in_steps(interval: Any, accumulated: int) -> Any:
    """Return an interval in optimizer steps that was given in batches; fractions stay."""
    if not isinstance(interval, int) or accumulated == 1:
        return interval
    return max(1, interval // accumulated)


def _refuse_own_reading(module: pl.LightningModule) -> None:
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        raise UsageError(
            "SpotguardCallback: training_step(dataloader_iter) reads as many batches as it likes, "
            "and a step has those of its global batch",
            hint="take one batch: training_step(self, batch, batch_idx)",
        )


def _refuse_what_changes_data(trainer: pl.Trainer) -> None:
    from lightning.pytorch.callbacks import (
        BatchSizeFinder,
        GradientAccumulationScheduler,
        LearningRateFinder,
        StochasticWeightAveraging,
    )

    if trainer.reload_dataloaders_every_n_epochs:
        raise UsageError(
            "SpotguardCallback: reload_dataloaders_every_n_epochs may change the data in mid-run",
            hint="leave it out; each epoch is shuffled anew all the same",
        )
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    for finder in (c for c in callbacks if isinstance(c, (BatchSizeFinder, LearningRateFinder))):
        raise UsageError(
            f"SpotguardCallback: {type(finder).__name__} trains within fit, by steps that are none "
            "of the run's",
            hint="find the value in a script of its own, and give the module what it has found",
        )
    if any(isinstance(c, StochasticWeightAveraging) for c in callbacks):
        raise UsageError(
            "SpotguardCallback: StochasticWeightAveraging puts a schedule of its own in place, "
            "which Lightning does not restore in mid-epoch",
            hint="use lightning.pytorch.callbacks.WeightAveraging, which is restored",
        )
    if any(isinstance(c, GradientAccumulationScheduler) for c in callbacks):
        raise UsageError(
            "SpotguardCallback: GradientAccumulationScheduler changes the global batch in mid-run",
            hint="leave it out; SpotguardCallback(global_batch_size=...) is for the whole run",
        )
    strategy = trainer.strategy
    if isinstance(strategy, DDPStrategy) and strategy._model_averager is not None:
        raise UsageError(
            "SpotguardCallback: averaging models in place of gradients lets the ranks train apart",
            hint="leave model_averaging_period out",
        )
