"""A small job whose final weights are the same, to the last bit, on any number of nodes."""

import argparse
import os
import time
from pathlib import Path

import torch
from torch import nn

import spotguard.runtime as spotguard


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds that a step takes")
    parser.add_argument("--while", dest="slow", type=Path, help="pause only while this is there")
    parser.add_argument("--until-attempt", type=int, help="pause only in attempts before it")
    options = parser.parse_args()
    attempt = int(os.environ.get("SPOTGUARD_ATTEMPT", "1"))
    hurries = options.until_attempt is not None and attempt >= options.until_attempt

    run = spotguard.init(seed=3, exact="bitwise")
    torch.manual_seed(3)
    x = torch.randn(512, 8)  # 16 steps an epoch
    y = torch.sin(x).sum(1, keepdim=True)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.track(model=model, optimizer=optimizer)
    loader = run.loader(
        torch.utils.data.TensorDataset(x, y), global_batch_size=32, micro_batch_size=8
    )
    for step in run.steps(loader, epochs=options.epochs):
        for inputs, targets in step:
            step.backward(nn.functional.mse_loss(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()
        if not hurries and (options.slow is None or options.slow.exists()):
            time.sleep(options.pause)


if __name__ == "__main__":
    main()
