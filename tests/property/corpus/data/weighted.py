"""Samples are drawn by weights, with replacement."""

import torch
from torch import nn

import spotguard.runtime as spotguard

run = spotguard.init(seed=70)
x = torch.randn(48, 6)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True).sin())
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
run.track(model=model, optimizer=optimizer)
loader = run.loader(
    data, global_batch_size=13, micro_batch_size=3, weights=torch.arange(1, 49).float()
)
for step in run.steps(loader, total=12):
    for inputs, targets in step:
        step.backward(nn.functional.mse_loss(model(inputs), targets))
    optimizer.step()
    optimizer.zero_grad()
