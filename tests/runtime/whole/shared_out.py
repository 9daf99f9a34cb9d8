"""Trains by an optimizer that shares out its state over the ranks; `HURT` as in `shapes`.

As the Muon of nanochat and of modded-nanogpt: of each parameter one rank keeps the momentum, makes
the update and gives it to the others.
"""

# ruff: noqa: T201
from __future__ import annotations

import os
import signal
from typing import Any

import torch
import torch.distributed as dist

import spotguard.runtime as spotguard

run = spotguard.init(save_every="4 steps")


class SharedOut(torch.optim.Optimizer):
    """Momentum of which each rank has a part."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05, "momentum": 0.9})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update this rank's parameters, and take the others' from their ranks."""
        group = self.param_groups[0]
        for number, p in enumerate(group["params"]):
            owner = number % run.world_size
            if run.rank == owner:
                state = self.state[p]
                kept = state.setdefault("momentum_buffer", torch.zeros_like(p.grad))
                kept.mul_(group["momentum"]).add_(p.grad)
                p.add_(kept, alpha=-group["lr"])
            if run.world_size > 1:
                dist.broadcast(p, owner)


data = torch.utils.data.TensorDataset(torch.randn(26, 3), torch.randn(26, 1))
model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
optimizer = SharedOut(model.parameters())
run.track(model=model, optimizer=optimizer)
loader = run.loader(data, global_batch_size=6, micro_batch_size=1)

for step in run.steps(loader, total=9):
    for x, y in step:
        step.backward(torch.nn.functional.mse_loss(model(x), y))
    optimizer.step()
    optimizer.zero_grad()
    print(
        "weights", step.number, float(sum(p.double().sum() for p in model.parameters())), flush=True
    )
    if os.environ.get("HURT") == str(step.number):
        if run.rank == run.world_size - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        while run._job.watch.agreed is None:
            signal.sigtimedwait([], 0.01)
