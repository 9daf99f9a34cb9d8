"""A good script: L-BFGS, which evaluates its closure several times a step."""

from functools import partial
from typing import Any

import torch
from torch import nn

import spotguard.runtime as spotguard


def closure(step: spotguard.Step) -> torch.Tensor | None:
    optimizer.zero_grad()
    with step.phase("closure"):
        for inputs, targets in step:
            step.backward(nn.functional.mse_loss(model(inputs), targets))
    return step.loss


run = spotguard.init(seed=2, exact="bitwise")  # L-BFGS makes much of the last bits
torch.manual_seed(0)
x = torch.randn(512, 8)
y = x @ torch.randn(8, 1)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer: Any = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, history_size=5)
run.track(model=model, optimizer=optimizer)
loader = run.loader(torch.utils.data.TensorDataset(x, y), global_batch_size=28, micro_batch_size=4)
for step in run.steps(loader, total=60):
    optimizer.step(partial(closure, step))
