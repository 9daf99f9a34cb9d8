"""Draws noise from a generator that each rank has seeded for itself; `HURT` as in `shapes`."""

# ruff: noqa: T201
from __future__ import annotations

import os
import signal

import torch

import spotguard.runtime as spotguard

run = spotguard.init(save_every="4 steps")
data = torch.utils.data.TensorDataset(torch.randn(26, 3), torch.randn(26, 1))
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
noise = torch.Generator().manual_seed(100 + run.rank)
run.track(model=model, optimizer=optimizer, noise=noise)
loader = run.loader(data, global_batch_size=6, micro_batch_size=1)

for step in run.steps(loader, total=9):
    for x, y in step:
        step.backward(torch.nn.functional.mse_loss(model(x), y))
    optimizer.step()
    optimizer.zero_grad()
    print("noise", step.number, float(torch.rand((), generator=noise)), flush=True)
    if os.environ.get("HURT") == str(step.number):
        if run.rank == run.world_size - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        while run._job.watch.agreed is None:
            signal.sigtimedwait([], 0.01)
