"""An average of the weights that the script keeps in a dict, and evaluates in their place."""

import torch
from torch import nn

import spotguard.runtime as spotguard

run = spotguard.init(seed=61)
x = torch.randn(45, 6)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True).sin())
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
shadow = {name: p.detach().clone() for name, p in model.named_parameters()}
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
run.track(model=model, optimizer=optimizer, shadow=shadow)
for step in run.steps(run.loader(data, global_batch_size=15, micro_batch_size=4), total=12):
    for inputs, targets in step:
        step.backward(nn.functional.mse_loss(model(inputs), targets))
    optimizer.step()
    optimizer.zero_grad()
    for name, parameter in model.named_parameters():
        shadow[name].lerp_(parameter.detach(), 0.1)
