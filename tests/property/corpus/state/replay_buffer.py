"""A ring of what was seen, from which each step draws again."""

import torch
from torch import nn

import spotguard.runtime as spotguard

run = spotguard.init(seed=67)
x = torch.randn(40, 4)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
ring = {"items": torch.zeros(16, 4), "at": 0}
run.track(model=model, optimizer=optimizer, ring=ring)
for step in run.steps(run.loader(x, global_batch_size=10, micro_batch_size=3), total=12):
    old = ring["items"].mean()
    for inputs in step:
        step.backward((model(inputs) - inputs + old).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    ring["items"][ring["at"] % 16] = float(step.number) / 10
    ring["at"] += 1
