"""A function for each group."""

import torch
from torch import nn

import spotguard.runtime as spotguard

run = spotguard.init(seed=8)
x = torch.randn(47, 6)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True).sin())
model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 1))
optimizer = torch.optim.SGD(
    [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2].parameters()}], lr=0.03
)
scheduler = torch.optim.lr_scheduler.LambdaLR(
    optimizer, [lambda step: 1 / (1 + step), lambda step: 0.95**step]
)
run.track(model=model, optimizer=optimizer, scheduler=scheduler)
for step in run.steps(run.loader(data, global_batch_size=15, micro_batch_size=4), total=14):
    for inputs, targets in step:
        step.backward(nn.functional.mse_loss(model(inputs), targets))
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
