"""Patience: the run ends when the best has not come for a while, and the best weights are taken."""

import torch
from torch import nn

import spotguard.runtime as spotguard

run = spotguard.init(seed=6)
x = torch.randn(50, 4)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
run.track(model=model, optimizer=optimizer)
for step in run.steps(run.loader(data, global_batch_size=12, micro_batch_size=4), total=40):
    for inputs, targets in step:
        step.backward(nn.functional.mse_loss(model(inputs), targets))
    optimizer.step()
    optimizer.zero_grad()
    run.best(abs(step.number - 6.0), patience=5)
run.restore_best()
