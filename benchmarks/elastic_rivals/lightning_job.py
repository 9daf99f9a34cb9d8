"""One rank of a Lightning job that writes down which samples it read, step by step.

torchrun --nproc-per-node=4 -m benchmarks.elastic_rivals.lightning_job '{...}'
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from benchmarks.elastic_rivals.ways import SAMPLES, stateful_loader


class Module(pl.LightningModule):
    """As little of a model as can be trained."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.read: list[list[int]] = []

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        """Write down the samples; any loss will do."""
        self.read.append(batch.tolist())
        loss: torch.Tensor = self.layer(batch[:, None].float() / SAMPLES).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return an optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


def main() -> None:
    """Train one epoch, or `steps` of it, and write what was read to `folder`."""
    job: dict[str, Any] = json.loads(sys.argv[1])
    folder = Path(job["folder"])
    pl.seed_everything(0, verbose=False)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=job["ranks"],
        strategy="ddp",
        max_epochs=1,
        max_steps=job["steps"] or -1,
        callbacks=[
            ModelCheckpoint(folder, filename="saved", every_n_train_steps=job["steps"] or 10**9)
        ],
        use_distributed_sampler=not job["stateful"],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    loader: Any = DataLoader(range(SAMPLES), batch_size=job["batch"], shuffle=True)  # type: ignore[arg-type]
    if job["stateful"]:
        loader = stateful_loader(trainer.global_rank, job["ranks"], job["batch"])
    module = Module()
    trainer.fit(module, loader, ckpt_path=job["resume"])
    said = folder / f"read-{trainer.global_rank}.json"
    said.write_text(json.dumps(module.read), encoding="utf-8")


if __name__ == "__main__":
    main()
