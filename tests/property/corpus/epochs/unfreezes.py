"""The head is trained first; from the second epoch on the trunk comes in by a group of its own."""

import torch
from torch import nn

import spotguard.runtime as spotguard

run = spotguard.init(seed=13)
x = torch.randn(36, 5)
data = torch.utils.data.TensorDataset(x, x[:, :1].cos())
trunk, head = nn.Linear(5, 6), nn.Linear(6, 1)
model = nn.Sequential(trunk, nn.Tanh(), head)
trunk.requires_grad_(False)
optimizer = torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.9)
run.track(model=model, optimizer=optimizer)
for epoch in run.epochs(run.loader(data, global_batch_size=12, micro_batch_size=5), total=4):
    if epoch.number == 1:
        trunk.requires_grad_(True)
        if len(optimizer.param_groups) == 1:
            optimizer.add_param_group({"params": trunk.parameters(), "lr": 0.01})
    for step in epoch:
        for inputs, targets in step:
            step.backward(nn.functional.mse_loss(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()
