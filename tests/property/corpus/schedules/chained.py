"""Two schedules that both count."""

import torch
from torch import nn

import spotguard.runtime as spotguard

run = spotguard.init(seed=6)
x = torch.randn(47, 6)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True).sin())
model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.ChainedScheduler(
    [
        torch.optim.lr_scheduler.ConstantLR(optimizer, 0.5, total_iters=5),
        torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
    ]
)
run.track(model=model, optimizer=optimizer, scheduler=scheduler)
for step in run.steps(run.loader(data, global_batch_size=15, micro_batch_size=4), total=14):
    for inputs, targets in step:
        step.backward(nn.functional.mse_loss(model(inputs), targets))
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
