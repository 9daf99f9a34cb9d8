"""A small job whose weights are the same, to the last bit, on every processor.

Gradients are sums of small multiples of a power of two, so they are exact in whatever order they
are added up; and no operation of the optimizer rounds more than once.

The runs of earlier versions beside this folder were begun with it: it must stay as it is.
"""

import argparse
import random
import time

import torch
from torch import nn

import spotguard.runtime as spotguard


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--pause", type=float, default=0.0, help="seconds that a step takes")
    options = parser.parse_args()

    run = spotguard.init(seed=3)
    x = torch.arange(160 * 4).reshape(160, 4).remainder(17.0) - 8.0  # 10 steps an epoch
    model = nn.Linear(4, 1, bias=False)
    nn.init.constant_(model.weight, 0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-6, momentum=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=12, gamma=0.5)
    dice = random.Random(5)
    seen = {"noise": 0}
    run.track(model=model, optimizer=optimizer, scheduler=scheduler, dice=dice, seen=seen)
    loader = run.loader(torch.utils.data.TensorDataset(x), global_batch_size=16, micro_batch_size=4)
    for step in run.steps(loader, epochs=4):
        noise = dice.randrange(-4, 5)
        for (inputs,) in step:
            step.backward(model(inputs * (step.number % 3 + noise)).mean())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        seen["noise"] += noise
        time.sleep(options.pause)


if __name__ == "__main__":
    main()
