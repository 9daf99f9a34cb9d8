"""The script says itself when it is good enough."""

import torch
from torch import nn

import spotguard.runtime as spotguard

run = spotguard.init(seed=8)
x = torch.randn(36, 3)
model = nn.Linear(3, 3)
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
solved = {"streak": 0}
run.track(model=model, optimizer=optimizer, solved=solved)
for step in run.steps(run.loader(x, global_batch_size=9, micro_batch_size=2), total=50):
    for inputs in step:
        step.backward((model(inputs) - inputs).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    solved["streak"] += 1
    if solved["streak"] == 11:
        run.end("solved")
