"""A small job that holds all that has to survive: dropout, a schedule, an EMA, its own dice."""

import argparse
import os
import random
import resource
import signal
import time
from pathlib import Path

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import spotguard.runtime as spotguard


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--pause", type=float, default=0.05, help="seconds that a step takes")
    parser.add_argument("--crash-at", type=int, default=-1)
    parser.add_argument("--hang-at", type=int, default=-1)
    parser.add_argument("--freeze-at", type=int, default=-1)
    parser.add_argument("--full-at", type=int, default=-1, help="no room, while ./full exists")
    parser.add_argument("--width", type=int, default=32)
    options = parser.parse_args()

    run = spotguard.init(seed=3)
    torch.manual_seed(3)
    x = torch.randn(500, 8)  # 16 steps an epoch, the last one smaller
    y = torch.sin(x).sum(1, keepdim=True)
    width = options.width
    model = nn.Sequential(
        nn.Linear(8, width),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Linear(width, width),
        nn.Linear(width, 1),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
    average = get_ema_multi_avg_fn(0.9)  # type: ignore[no-untyped-call]
    ema = AveragedModel(model, multi_avg_fn=average)
    dice = random.Random(5)
    seen = {"noise": 0.0}
    run.track(model=model, optimizer=optimizer, scheduler=scheduler, ema=ema, dice=dice, seen=seen)
    loader = run.loader(
        torch.utils.data.TensorDataset(x, y), global_batch_size=32, micro_batch_size=8
    )
    for step in run.steps(loader, epochs=options.epochs):
        noise = dice.gauss(0.0, 0.01)
        for inputs, targets in step:
            step.backward(nn.functional.mse_loss(model(inputs + noise), targets))
        if step.number == options.crash_at:
            raise RuntimeError("the learning rate is on fire")
        if step.number == options.full_at and Path("full").exists():
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        while step.number == options.hang_at:
            pass  # deaf to everything: signals only set flags that nobody reads
        if step.number == options.freeze_at:
            os.kill(os.getpid(), signal.SIGSTOP)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        ema.update_parameters(model)
        seen["noise"] += noise
        time.sleep(options.pause)


if __name__ == "__main__":
    main()
