"""The one line: a callback that makes each of the Trainer's batches a step of ours."""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

import spotguard.runtime as spotguard
from spotguard.errors import UsageError
from spotguard.integrations.lightning.fit import TrainerFit
from spotguard.integrations.lightning.launch import follow_launcher
from spotguard.integrations.lightning.private_names import pass_over_idle_hooks
from spotguard.integrations.lightning.strategy import extend
from spotguard.runtime.state.rng import kept_random_states

if TYPE_CHECKING:
    import lightning.pytorch as pl

_NAME = "SpotguardCallback"


class SpotguardCallback(Callback):
    """Saves, restores and leaves in time, on any number of ranks with the same global batch.

        trainer = Trainer(max_epochs=10, callbacks=[SpotguardCallback()])
        trainer.fit(model, train_loader, val_loader)

    Make it before the Trainer: it begins to listen for notices and signals, and creates the process
    group. Under torchrun the Trainer has as many ranks as were launched.

    Each batch of the Trainer becomes one optimizer step: its global batch is what the DataLoader's
    `batch_size`, `accumulate_grad_batches` and the ranks of the run's first attempt come to, and
    stays so when the ranks become fewer or more. A rank that has several micro-batches of a step
    goes through `training_step` for each. With manual optimisation it has one, as large as its
    part of the step, since a `training_step` that steps its optimizers cannot be divided.
    """

    def __init__(
        self,
        *,
        global_batch_size: int | None = None,
        monitor: str | None = None,
        mode: str = "min",
        strict: bool = True,
        seed: int | None = None,
        **options: Any,
    ) -> None:
        """Begin the run of this process.

        Args:
            global_batch_size: Samples per optimizer step, over all ranks.
            monitor: Name of a logged validation metric: the state in which it was best is kept,
                whatever retention deletes. Default: what the first ModelCheckpoint monitors.
            mode: `min` if less is better, `max` if more is.
            strict: As for `run.steps`.
            seed: As for `spotguard.init`; default that of `seed_everything`.
            **options: Further options of `spotguard.init`, such as `run_id` and `store`.

        Raises:
            UsageError: a setting makes no sense.
            StoreError: the store cannot be used.
        """
        self._global_batch_size = global_batch_size
        self._monitor = monitor
        self._mode = mode
        self._strict = strict
        follow_launcher(SpotguardCallback)
        self._run = _begin(seed, options)
        self._fit: TrainerFit | None = None
        self._on_sigterm: Any = None
        self._finished = False
        pass_over_idle_hooks(self)

    # ------------------------------------------------------------------ before the loop

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Take the Trainer's data and strategy, before optimizers are made."""
        if stage != "fit":
            return
        if trainer.world_size != self._run.world_size:
            raise UsageError(
                f"{_NAME}: the Trainer has {trainer.world_size} ranks, but "
                f"{self._run.world_size} were launched",
                hint="start several ranks with torchrun or spotguard up, and give the Trainer the "
                "callback when you make it: Trainer(callbacks=[SpotguardCallback()])",
            )
        if self._fit is not None:
            raise UsageError(
                f"{_NAME}: Trainer.fit was called a second time in one run",
                hint="give each training a run, and a process, of its own",
            )
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        callbacks.remove(self)  # what other callbacks do belongs to the step, so ours come first
        callbacks.insert(0, self)
        if self._monitor is None:
            self._take_monitor_of(callbacks)
        self._fit = TrainerFit(
            self._run, trainer, pl_module, global_batch_size=self._global_batch_size
        )
        extend(trainer.strategy, self._fit)
        self._fit.set_up()

    def _take_monitor_of(self, callbacks: list[Callback]) -> None:
        for each in callbacks:
            if isinstance(each, ModelCheckpoint) and each.monitor is not None:
                self._monitor, self._mode = each.monitor, each.mode
                return

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Restore, now that model, optimizers and data are there."""
        assert self._fit is not None
        self._on_sigterm = signal.getsignal(signal.SIGTERM)
        self._fit.restore(strict=self._strict)

    def on_sanity_check_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take SIGTERM back from Lightning, whose handler waits for other ranks."""
        self._take_sigterm_back()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take SIGTERM back from Lightning, whose handler waits for other ranks."""
        self._take_sigterm_back()

    def _take_sigterm_back(self) -> None:
        if threading.current_thread() is threading.main_thread() and self._on_sigterm is not None:
            signal.signal(signal.SIGTERM, self._on_sigterm)

    # ------------------------------------------------------------------ between two steps

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """End the step before its validation, which may be interrupted."""
        if self._fit is not None and _is_in_training(trainer):
            self._fit.begin_validation()

    def on_validation_batch_start(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Leave, saved, at the same batch on all ranks, if told to stop."""
        if self._fit is not None:
            self._fit.next_validation_batch()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Keep the state if it is the best one."""
        if self._fit is None or not _is_in_training(trainer):
            return
        self._fit.end_validation()
        value = trainer.callback_metrics.get(self._monitor or "")
        if value is not None:
            mean: Any = trainer.strategy.reduce(torch.as_tensor(value).float(), reduce_op="mean")
            self._run.best(float(mean), mode=self._mode)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """End the step before what comes at an epoch's end.

        Raises:
            StopIteration: the run had no more steps in the middle of the epoch, which has no end
                then: nothing was validated that other callbacks may look for.
        """
        if self._fit is not None:
            if self._fit.is_cut:
                raise StopIteration  # Lightning's loop over the epochs ends by it
            self._fit.end_epoch()

    # ------------------------------------------------------------------ the end

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save the final state."""
        self._finish()

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """End a run that had nothing left to do."""
        self._finish()

    def _finish(self) -> None:
        if self._fit is not None and not self._finished:
            self._finished = True
            self._fit.finish()

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Let Ctrl-C end the process as it ends one of ours: saved."""
        if isinstance(exception, KeyboardInterrupt):
            raise exception


def _is_in_training(trainer: pl.Trainer) -> bool:
    return trainer.state.fn == "fit" and not trainer.sanity_checking


def _begin(seed: int | None, options: dict[str, Any]) -> spotguard.Run:
    """Begin the run; what `seed_everything` seeded stays as it is."""
    given = os.environ.get("PL_GLOBAL_SEED")
    if given is None:
        return spotguard.init(seed=seed, **options)
    with kept_random_states():
        return spotguard.init(seed=int(given) if seed is None else seed, **options)
