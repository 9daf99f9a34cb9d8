"""What `SpotguardCallback` adds to a step of HF's Trainer, beside the same Trainer without it.

    python -m benchmarks.step_overhead.trainer --rounds 9 --steps 300

One process, the two in turn, each round a training of its own. The model is so small that a step
is the Trainer's own work. The main thread's processor time is compared, since others' load hardly
shows in it; a share is what is added over a step of 20 ms. What other threads do, they do by the
second, not by the step: theirs is the share of a core that they take.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

import spotguard.runtime as spotguard
from spotguard.integrations.transformers import SpotguardCallback

if TYPE_CHECKING:
    from collections.abc import Sequence

_STEP_S = 0.02
_WARM_UP_STEPS = 40
_STRETCH = 20
"""Steps over which the clock is read; a multiple of those between two logs."""


class Model(nn.Module):
    """Two layers; the loss comes from `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 1))

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss."""
        return {"loss": nn.functional.mse_loss(self.net(inputs), labels)}


class Clock(TrainerCallback):
    """Takes the time from the end of the warm-up to the end of the training."""

    def __init__(self) -> None:
        self._from = (0.0, 0.0)
        self._at: list[float] = []
        self.aside = 0.0
        """Share of a core that other threads took."""

    @property
    def step_cpu_s(self) -> float:
        """The main thread's processor seconds of a step: the median over stretches."""
        at = self._at[_WARM_UP_STEPS::_STRETCH]
        return statistics.median(b - a for a, b in itertools.pairwise(at)) / _STRETCH

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Look at the clocks."""
        self._at.append(time.thread_time())
        now = (time.process_time() - self._at[-1], time.perf_counter())
        if state.global_step == _WARM_UP_STEPS:
            self._from = now
        elif state.global_step == state.max_steps:
            others_s, wall_s = (b - a for a, b in zip(self._from, now, strict=True))
            self.aside = others_s / wall_s


def train(steps: int, folder: Path, *, with_spotguard: bool) -> Clock:
    """Train once; return what a step took."""
    clock = Clock()
    callbacks: list[TrainerCallback] = [clock]
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
    spotguard.reset()
    return clock


def main(arguments: Sequence[str] | None = None) -> None:
    """Print one row."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    bare, ours = [], []
    with tempfile.TemporaryDirectory() as name:
        for _ in range(options.rounds):
            bare.append(train(options.steps, Path(name), with_spotguard=False))
            ours.append(train(options.steps, Path(name), with_spotguard=True))
    added = sorted(o.step_cpu_s - b.step_cpu_s for b, o in zip(bare, ours, strict=True))
    middle = statistics.median(added)
    aside = statistics.median(o.aside for o in ours) - statistics.median(b.aside for b in bare)
    print(
        f"a step of the bare Trainer: {1e6 * statistics.median(b.step_cpu_s for b in bare):.0f} us "
        f"of processor time; added: {1e6 * middle:.0f} us "
        f"[{1e6 * added[0]:.0f}..{1e6 * added[-1]:.0f}], {middle / _STEP_S:.2%} of a step of 20 ms "
        f"[{added[0] / _STEP_S:.2%}..{added[-1] / _STEP_S:.2%}]; other threads take {aside:.2%} of "
        f"a core more; {options.rounds} rounds of {options.steps} steps, load "
        f"{os.getloadavg()[0]:.1f}"
    )


if __name__ == "__main__":
    main()
