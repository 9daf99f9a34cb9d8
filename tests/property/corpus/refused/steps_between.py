"""The optimizer steps after each micro-batch."""
# property: refused=step worlds=1-1

import torch
from torch import nn

import spotguard.runtime as spotguard

run = spotguard.init(seed=111)
model = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
run.track(model=model, optimizer=optimizer)
for step in run.steps(
    run.loader(torch.randn(40, 4), global_batch_size=12, micro_batch_size=4), total=8
):
    for inputs in step:
        step.backward((model(inputs) - inputs).square().mean())
        optimizer.step()
        optimizer.zero_grad()
