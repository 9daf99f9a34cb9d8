"""Batch and rate follow the ranks."""
# property: elastic=once

import torch
from torch import nn

import spotguard.runtime as spotguard

run = spotguard.init(seed=80)
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
run.track(model=model, optimizer=optimizer, scheduler=scheduler)
loader = run.loader(
    torch.randn(50, 8),
    global_batch_size=8,
    micro_batch_size=2,
    lr_scaling="linear",
    reference_world_size=2,
    lr_warmup_steps=3,
)
for step in run.steps(loader, epochs=3):
    for x in step:
        step.backward(0.01 * model(x).square().mean())
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
