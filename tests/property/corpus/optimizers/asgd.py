"""Averaged SGD: an average beside the weights."""

import torch
from torch import nn

import spotguard.runtime as spotguard

run = spotguard.init(seed=46)
x = torch.randn(42, 6)
data = torch.utils.data.TensorDataset(x, x[:, :2].tanh())
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
optimizer = torch.optim.ASGD(model.parameters(), lr=0.05, t0=4)
run.track(model=model, optimizer=optimizer)
for step in run.steps(run.loader(data, global_batch_size=14, micro_batch_size=3), total=12):
    for inputs, targets in step:
        step.backward(nn.functional.mse_loss(model(inputs), targets))
    optimizer.step()
    optimizer.zero_grad()
