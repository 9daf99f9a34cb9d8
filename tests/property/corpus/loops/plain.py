"""The loop of a first tutorial."""

import torch
from torch import nn

import spotguard.runtime as spotguard

run = spotguard.init(seed=1)
x = torch.randn(60, 6)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True).sin())
model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Dropout(0.1), nn.Linear(12, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
run.track(model=model, optimizer=optimizer)
loader = run.loader(data, global_batch_size=15, micro_batch_size=4)
for step in run.steps(loader, total=12):
    for inputs, targets in step:
        step.backward(nn.functional.mse_loss(model(inputs), targets))
    optimizer.step()
    optimizer.zero_grad()
