"""The survival matrix's job for Lightning."""

from __future__ import annotations

import os
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from benchmarks.survival import model as survival_model

OUTPUT = "SURVIVAL_OUTPUT"


class Module(pl.LightningModule):
    """The model as Lightning wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.model = survival_model.Model()
        self._notes = survival_model.Progress()

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        """Return the loss."""
        inputs, labels = batch
        return nn.functional.mse_loss(self.model(inputs), labels)

    def configure_optimizers(self) -> dict[str, Any]:
        """Return optimizer and schedule, stepped together."""
        optimizer, scheduler = survival_model.optimizer_of(self)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def on_train_batch_end(self, *_: Any) -> None:
        """Leave word of each finished step."""
        self._notes.note(self.trainer.global_step)


def main() -> None:
    """Train until told to stop."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    workers = survival_model.workers()
    pl.seed_everything(3, verbose=False)
    module = Module()
    save_when_told = ModelCheckpoint(
        dirpath=os.environ[OUTPUT],
        filename="{step}",
        save_on_exception=True,
        every_n_train_steps=10**9,
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        max_steps=survival_model.total_steps(),
        max_epochs=-1,
        callbacks=[save_when_told],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=os.environ[OUTPUT],
    )
    loader = torch.utils.data.DataLoader(
        survival_model.dataset(),
        batch_size=survival_model.GLOBAL_BATCH // ranks,
        shuffle=True,
        num_workers=workers,
        persistent_workers=workers > 0,
    )
    trainer.fit(module, loader, ckpt_path=os.environ.get(survival_model.RESUME))


if __name__ == "__main__":
    main()
