"""What `SpotguardCallback` adds to a step of HF's Trainer, beside the same Trainer without it.

    python -m benchmarks.step_overhead.trainer --steps 2000

One process, in which the two take turns, step by step. The model is so small that a step is the
Trainer's own work. The processor time of the two threads is compared; a share is what is added over
a step of 20 ms. What our other threads do, they do by the second, not by the step.
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

import spotguard.runtime as spotguard
from benchmarks.step_overhead.added import Side, compare, enough_steps
from spotguard.integrations.transformers import SpotguardCallback

if TYPE_CHECKING:
    from collections.abc import Sequence


class Model(nn.Module):
    """Two layers; the loss comes from `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 1))

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss."""
        return {"loss": nn.functional.mse_loss(self.net(inputs), labels)}


class Turns(TrainerCallback):
    """Tells a side that a step has ended."""

    def __init__(self, side: Side) -> None:
        self._side = side

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Let the other training do a step."""
        self._side.step_ended()


def train(side: Side, *, steps: int, folder: Path, with_spotguard: bool) -> None:
    """Train once."""
    callbacks: list[TrainerCallback] = [Turns(side)]
    if with_spotguard:
        run = spotguard.init(store=str(folder / "store"), save_every="100000 steps")
        callbacks.append(SpotguardCallback(run))
    inputs, labels = torch.randn(4 * steps, 16), torch.randn(4 * steps, 1)
    trainer = Trainer(
        Model(),
        TrainingArguments(
            output_dir=str(folder / "out"),
            use_cpu=True,
            max_steps=steps,
            per_device_train_batch_size=4,
            save_strategy="no",
            logging_steps=10,
            report_to="none",
            disable_tqdm=True,
            log_level="error",
        ),
        train_dataset=[{"inputs": x, "labels": y} for x, y in zip(inputs, labels, strict=True)],
        callbacks=callbacks,
    )
    for callback in list(trainer.callback_handler.callbacks):
        if type(callback).__name__ == "PrinterCallback":
            trainer.remove_callback(callback)
    trainer.train()


def main(arguments: Sequence[str] | None = None) -> None:
    """Print one row."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=enough_steps, default=2000)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        one = partial(train, steps=options.steps, folder=Path(name))
        print(compare(partial(one, with_spotguard=False), partial(one, with_spotguard=True)))
        spotguard.reset()


if __name__ == "__main__":
    main()
