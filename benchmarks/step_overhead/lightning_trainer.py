"""What our callback adds to a step of Lightning's Trainer, beside the bare one in the same process.

    python -m benchmarks.step_overhead.lightning_trainer --steps 2000

The two take turns, step by step, and the processor time of their threads is compared. The model is
small, so what is seen is bookkeeping: it is told in microseconds, and as a part of 20 ms.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from functools import partial
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from torch import nn

import spotguard.runtime as spotguard
from benchmarks.step_overhead.added import Side, compare, enough_steps
from spotguard.integrations.lightning import SpotguardCallback

if TYPE_CHECKING:
    from collections.abc import Sequence


class Module(pl.LightningModule):
    """Two layers, and a schedule that follows the steps."""

    def __init__(self, side: Side) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))
        self._side = side

    def training_step(self, batch: Any, _: int) -> Any:
        """Return the loss; let the other training do a step first."""
        self._side.step_ended()
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        """Return AdamW and its schedule."""
        optimizer = torch.optim.AdamW(self.parameters(), 1e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10_000)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def train(side: Side, *, steps: int, store: str | None) -> None:
    """Train once, with the callback if there is a store."""
    callbacks = [SpotguardCallback(store=store, save_every="100000 steps")] if store else []
    x = torch.randn(6400, 32)
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
    )
    loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True)
    trainer.fit(Module(side), loader)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print one row."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=enough_steps, default=2000)
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        one = partial(train, steps=options.steps)
        print(compare(partial(one, store=None), partial(one, store=folder)))
        spotguard.reset()


if __name__ == "__main__":
    main()
