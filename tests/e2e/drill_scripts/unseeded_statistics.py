"""A good script: it seeds nothing itself, and its model keeps running statistics."""

import torch
from torch import nn

import spotguard.runtime as spotguard

run = spotguard.init()
x = torch.randn(600, 8)
y = x @ torch.randn(8, 1)
data, held_out = torch.utils.data.random_split(torch.utils.data.TensorDataset(x, y), [512, 88])
model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
run.track(model=model, optimizer=optimizer)
loader = run.loader(data, global_batch_size=24, micro_batch_size=8)  # 3 on 2 nodes: 2 and 1
for step in run.steps(loader, total=60):
    for inputs, targets in step:
        step.backward(nn.functional.mse_loss(model(inputs), targets))
    optimizer.step()
    optimizer.zero_grad()
