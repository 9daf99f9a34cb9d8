"""Scripts on Accelerate as safe as our own loop, by a few lines.

from spotguard.integrations.accelerate import SpotguardDataLoader

train_dataloader = SpotguardDataLoader(accelerator, train_dataloader)  # before prepare
model, optimizer, train_dataloader = accelerator.prepare(model, optimizer, train_dataloader)
for epoch in train_dataloader.epochs(num_train_epochs):
    for batch in train_dataloader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import LRScheduler

import spotguard.runtime as spotguard
from spotguard.errors import UsageError
from spotguard.integrations.accelerate_schedule import (
    Schedule,
    step_once,
)
from spotguard.integrations.installed import check_installed
from spotguard.integrations.torch_data import make_loader
from spotguard.integrations.trained_beside import trained_beside
from spotguard.runtime.checks.schedules_beside import schedules_beside
from spotguard.runtime.state.rng import kept_random_states

check_installed("accelerate", accelerate="1.1")

from accelerate.utils import send_to_device  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from accelerate import Accelerator

    from spotguard.runtime import Step
    from spotguard.runtime.loop.evaluation import Evaluation

log = logging.getLogger("spotguard")

_NAME = "SpotguardDataLoader"
_BATCHES_A_STEP = 2
"""What Accelerate is told; it divides losses by it. A power of two, which rounds nothing."""
_OF_HOOKS = (
    f"{_NAME}: accelerator.save_state is not called, so what its hooks would save is not saved; "
    "of averaged weights, for example, call accelerator.register_for_checkpointing(ema)"
)


class SpotguardDataLoader:
    """Stands in the place of the training DataLoader: its batches are the micro-batches of steps.

    The global batch is what `batch_size`, the Accelerator's `gradient_accumulation_steps` and the
    ranks of the run's first attempt come to, and stays so on any number of ranks; with
    `split_batches` a batch is of all ranks already. How many micro-batches of it a rank has follows
    from that; `accelerator.accumulate` and `backward` know.

    What `accelerator.prepare` and `register_for_checkpointing` were given is saved and restored.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        dataloader: torch.utils.data.DataLoader[Any],
        *,
        global_batch_size: int | None = None,
        strict: bool = True,
        **options: Any,
    ) -> None:
        """Begin the run of this process, unless `spotguard.init` did, and take the data.

        Args:
            accelerator: The script's own; only replicas (DDP) or one process.
            dataloader: What to train on, before `accelerator.prepare` got it.
            global_batch_size: Samples per optimizer step, over all ranks.
            strict: As for `run.steps`.
            **options: Of `spotguard.init`, such as `run_id`, `store` and `seed`.

        Raises:
            UsageError: the data cannot be read in global batches, or a setting makes no sense.
            StoreError: the store cannot be used.
        """
        _refuse_sharded(accelerator)
        with kept_random_states():
            self._run = spotguard.init(**options)
        if accelerator.num_processes != self._run.world_size:
            raise UsageError(
                f"{_NAME}: the Accelerator has {accelerator.num_processes} processes, but "
                f"{self._run.world_size} were launched",
                hint="start several with torchrun or spotguard up; without GPUs set "
                "ACCELERATE_USE_CPU=true",
            )
        self._accelerator = accelerator
        self._strict = strict
        self._accumulated = accelerator.gradient_accumulation_steps
        self._loader, steps = make_loader(
            self._run,
            dataloader,
            caller=_NAME,
            global_batch_size=global_batch_size,
            accumulated=self._accumulated,
            splits_batches=accelerator.split_batches,
        )
        if steps is None:
            raise UsageError(
                f"{_NAME}: a stream has no length, and so no epochs",
                hint="use run.steps(loader, total=...) of spotguard.runtime for it",
            )
        self._steps_per_epoch = steps
        self._step: Step | None = None
        self._epoch: Iterable[Step] = ()
        self.dataset = dataloader.dataset
        self.batch_size = dataloader.batch_size

    def __len__(self) -> int:
        """Return the batches in an epoch, those accumulated each, as a script counts on them.

        Before `accelerator.prepare` that is of all processes together, after it of each: schedules
        are made before it, and stepped once for each process. With `split_batches` a batch is of
        all processes, and a schedule is stepped once.
        """
        accelerator: Any = self._accelerator
        whole = accelerator._models or accelerator.split_batches
        processes: int = 1 if whole else self._run.reference_world_size
        return int(self._steps_per_epoch * self._accumulated * processes)

    @property
    def completed_steps(self) -> int:
        """Return the optimizer steps done, in all attempts."""
        return self._run.finished_steps

    def epochs(self, total: int) -> Iterator[int]:
        """Yield the numbers of the epochs that are still to do; restores first, saves at the end.

        An epoch's loop over the batches is the inner one; what comes after it, such as an
        evaluation, is done again if the run is interrupted there.

        Args:
            total: Epochs in all.

        Raises:
            SystemExit: with code 75, saved: the process was told to stop.
        """
        self._take(total * self._steps_per_epoch)
        for epoch in self._run.epochs(self._loader, total=total, strict=self._strict):
            self._epoch = epoch
            yield epoch.number
            if epoch.is_last and not epoch.is_over:
                self._run.end("the script left its last epoch")
        self._epoch = ()

    def __iter__(self) -> Iterator[Any]:
        for step in self._epoch:
            self._step = step
            try:
                yield from self._micro_batches(step)
            except GeneratorExit:  # the script left its loop, by `break` or by an error
                # Where a backward pass failed, because another rank is gone, nothing was trained.
                if step.is_complete and (
                    step.has_changed_weights or self._accelerator.optimizer_step_was_skipped
                ):
                    self._run.end_step()
                raise

    def _micro_batches(self, step: Step) -> Iterator[Any]:
        for number, batch in enumerate(step, 1):
            # `accumulate` adds one, and synchronises with each second batch.
            self._accelerator.step = int(number == len(step))
            yield send_to_device(batch, self._accelerator.device)

    def evaluate(self, batches: Iterable[Any]) -> Evaluation[Any]:
        """Return `batches` to loop over in an evaluation; when told to stop, leave between two.

        All ranks leave at the same batch, so the evaluation may hold collectives.
        """
        return self._run.evaluate(batches)

    def _take(self, steps: int) -> None:
        """Track what the Accelerator prepared, and have losses weighted by their share.

        `steps` are those of all epochs.
        """
        accelerator: Any = self._accelerator
        parts: dict[str, Any] = {}
        for number, model in enumerate(accelerator._models):
            parts[f"model{number or ''}"] = accelerator.unwrap_model(model)
        for number, optimizer in enumerate(accelerator._optimizers):
            parts[f"optimizer{number or ''}"] = optimizer.optimizer
        for number, scheduler in enumerate(accelerator._schedulers):
            parts[f"scheduler{number or ''}"] = Schedule(
                scheduler, accelerator.num_processes, steps
            )
        for number, scheduler in enumerate(self._stepped_by_script()):
            parts[f"own_scheduler{number or ''}"] = scheduler
        for number, thing in enumerate(accelerator._custom_objects):
            parts[f"registered{number or ''}"] = thing
        if accelerator.scaler is not None:
            parts["scaler"] = accelerator.scaler
        optimizers = [optimizer.optimizer for optimizer in accelerator._optimizers]
        modules = [part for part in parts.values() if isinstance(part, torch.nn.Module)]
        parts |= trained_beside(optimizers, modules)
        if not accelerator._models or not accelerator._optimizers:
            raise UsageError(
                f"{_NAME}: accelerator.prepare was given no model, or no optimizer, to train",
                hint="call accelerator.prepare(model, optimizer, ...) before the loop over epochs",
            )
        self._run.track(**parts)
        if self._run.rank == 0 and _hooks_may_keep_more(accelerator):
            log.warning("%s", _OF_HOOKS)
        accelerator.gradient_accumulation_steps = _BATCHES_A_STEP
        own_backward = accelerator.backward

        def backward(loss: torch.Tensor, **kwargs: Any) -> None:
            if self._step is None or self._step.is_complete:
                raise UsageError(
                    f"{_NAME}: accelerator.backward came without a batch of the training data",
                    hint="call it once for each batch of the loop over the loader",
                )
            with self._step.weighted(loss) as weighted:
                own_backward(weighted * _BATCHES_A_STEP, **kwargs)

        accelerator.backward = backward

    def _stepped_by_script(self) -> list[Any]:
        """Return the schedules that no other part has; those that the script steps, it steps once.

        Which are these, too, that are prepared, but not to be stepped with the optimizer.
        """
        accelerator: Any = self._accelerator
        optimizers = [optimizer.optimizer for optimizer in accelerator._optimizers]
        prepared = [
            getattr(s.scheduler, "_scheduler", s.scheduler) for s in accelerator._schedulers
        ]
        own = schedules_beside(optimizers, [*prepared, *accelerator._custom_objects])
        by_hand = [s.scheduler for s in accelerator._schedulers if not s.step_with_optimizer]
        registered = [each for each in accelerator._custom_objects if isinstance(each, LRScheduler)]
        for schedule in (*own, *by_hand, *registered):
            step_once(schedule, self._is_at_end_of_step, self._accumulated)
        return own

    def _is_at_end_of_step(self) -> bool:
        return self._step is None or self._step.is_complete


def _hooks_may_keep_more(accelerator: Any) -> bool:
    """Return True if hooks save something, as diffusers' scripts do, and nothing is registered."""
    return bool(accelerator._save_model_state_pre_hook) and not accelerator._custom_objects


def _refuse_sharded(accelerator: Accelerator) -> None:
    kind = str(accelerator.distributed_type).rpartition(".")[2]
    if kind not in ("NO", "MULTI_CPU", "MULTI_GPU"):
        raise UsageError(
            f"{_NAME}: {kind} keeps the training state in a way of its own",
            hint="use Accelerate's DDP, or a loop of your own with FSDP2: docs/coming-from.md",
        )
