"""The survival matrix's job for Lightning with our callback: nothing else is added."""

from __future__ import annotations

import os
from typing import Any

import lightning.pytorch as pl
import torch

from benchmarks.survival import lightning_job
from benchmarks.survival import model as survival_model
from spotguard.integrations.lightning import SpotguardCallback


def main() -> None:
    """Train until told to stop."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    workers = survival_model.workers()
    pl.seed_everything(3, verbose=False)
    module = lightning_job.Module()
    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False}
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        max_steps=survival_model.total_steps(),
        max_epochs=-1,
        callbacks=[SpotguardCallback()],
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    loader = torch.utils.data.DataLoader(
        survival_model.dataset(),
        batch_size=survival_model.GLOBAL_BATCH // 2,
        shuffle=True,
        num_workers=workers,
        persistent_workers=workers > 0,
    )
    trainer.fit(module, loader)


if __name__ == "__main__":
    main()
