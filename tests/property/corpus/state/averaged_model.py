"""torch's AveragedModel as an EMA, with its counter."""

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import spotguard.runtime as spotguard

run = spotguard.init(seed=62)
x = torch.randn(45, 6)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
run.track(model=model, ema=ema, optimizer=optimizer)
for step in run.steps(run.loader(x, global_batch_size=15, micro_batch_size=4), total=12):
    for inputs in step:
        step.backward((model(inputs) - inputs).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    ema.update_parameters(model)
