"""What both contestants of `benchmarks.recovery` train; `--plain` without spotguard.

The plain one loads and saves as SkyPilot's guide for managed jobs teaches: the newest file of a
shared folder, every few steps. It is more careful than the guide: a file is whole or not there.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable

BATCH = 32
_LIFE = f"{time.time_ns()}"


def trace(path: Path, step: int) -> None:
    """Append a line on a finished step."""
    line = {"at": time.time(), "step": step, "life": _LIFE, "node": os.uname().nodename}
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def model_and_data() -> tuple[nn.Module, torch.optim.Optimizer, torch.utils.data.TensorDataset]:
    """Return the same small model and samples each time."""
    torch.manual_seed(0)
    x = torch.randn(4096, 16)
    model = nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    return model, optimizer, torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))


def ours(steps: int, done: Callable[[int], None]) -> None:
    """Train under spotguard, which restores and saves by itself."""
    import spotguard.runtime as spotguard

    run = spotguard.init(seed=0)
    model, optimizer, data = model_and_data()
    run.track(model=model, optimizer=optimizer)
    loader = run.loader(data, global_batch_size=BATCH, micro_batch_size=BATCH)
    for step in run.steps(loader, total=steps):
        for x, y in step:
            step.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        done(step.number + 1)


def plain(steps: int, done: Callable[[int], None], checkpoint: Path, save_every: int) -> None:
    """Train with `torch.save` and `torch.load`."""
    model, optimizer, data = model_and_data()
    finished = 0
    if checkpoint.exists():
        state = torch.load(checkpoint)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        finished = state["step"]
    while finished < steps:
        begin = finished * BATCH % len(data)
        x, y = data[begin : begin + BATCH]
        loss = nn.functional.mse_loss(model(x), y)
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        finished += 1
        done(finished)
        if finished % save_every == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "step": finished}, checkpoint.with_suffix(".new"))
            checkpoint.with_suffix(".new").replace(checkpoint)


def main() -> None:
    """Train, and leave a word of each step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("trace", type=Path)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--pause", type=float, default=0.25, help="seconds that a step takes")
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--plain", type=Path, metavar="CHECKPOINT")
    given = parser.parse_args()

    def done(step: int) -> None:
        time.sleep(given.pause)
        trace(given.trace, step)

    train = (
        ours
        if given.plain is None
        else partial(plain, checkpoint=given.plain, save_every=given.save_every)
    )
    train(given.steps, done)


if __name__ == "__main__":
    main()
