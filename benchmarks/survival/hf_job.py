"""The survival matrix's job for the Trainer of Hugging Face, alone or with spotguard's line."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from benchmarks.survival import model as survival_model

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState

OUTPUT = "SURVIVAL_OUTPUT"
WITH_SPOTGUARD = "SURVIVAL_WITH_SPOTGUARD"
"""Set: the Trainer gets `SpotguardCallback` in place of its own checkpoint on SIGTERM."""


class WithLoss(nn.Module):
    """The model as the Trainer wants it: the loss comes from `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.model = survival_model.Model()

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss."""
        return {"loss": nn.functional.mse_loss(self.model(inputs), labels)}


class NoteProgress(TrainerCallback):
    """Leaves word of each finished step."""

    def __init__(self) -> None:
        self._progress = survival_model.Progress()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Note the step that is done."""
        self._progress.note(state.global_step)


def collate(samples: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return a batch under the names of `WithLoss.forward`."""
    inputs, labels = torch.utils.data.default_collate(samples)
    return {"inputs": inputs, "labels": labels}


def main() -> None:
    """Train until told to stop."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    workers = survival_model.workers()
    with_spotguard = WITH_SPOTGUARD in os.environ
    callbacks: list[TrainerCallback] = [NoteProgress()]
    if with_spotguard:
        from spotguard.integrations.transformers import SpotguardCallback

        callbacks.append(SpotguardCallback())
    model = WithLoss()
    optimizers: Any = survival_model.optimizer_of(model)  # typed for one kind of schedule
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=os.environ[OUTPUT],
            enable_jit_checkpoint=not with_spotguard,
            max_steps=survival_model.total_steps(),
            # With spotguard the run goes on with the global batch of the ranks that it began with.
            per_device_train_batch_size=survival_model.GLOBAL_BATCH
            // (survival_model.RANKS if with_spotguard else ranks),
            dataloader_num_workers=workers,
            dataloader_persistent_workers=workers > 0,
            dataloader_pin_memory=False,
            remove_unused_columns=False,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            ddp_backend="gloo" if ranks > 1 else None,
            ddp_find_unused_parameters=False,
            seed=3,
        ),
        train_dataset=survival_model.dataset(),
        data_collator=collate,
        optimizers=optimizers,
        callbacks=callbacks,
    )
    trainer.train(resume_from_checkpoint=os.environ.get(survival_model.RESUME))


if __name__ == "__main__":
    main()
