"""A triangle, momentum against it."""

import torch
from torch import nn

import spotguard.runtime as spotguard

run = spotguard.init(seed=4)
x = torch.randn(47, 6)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True).sin())
model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
scheduler = torch.optim.lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, step_size_up=3)
run.track(model=model, optimizer=optimizer, scheduler=scheduler)
for step in run.steps(run.loader(data, global_batch_size=15, micro_batch_size=4), total=14):
    for inputs, targets in step:
        step.backward(nn.functional.mse_loss(model(inputs), targets))
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
