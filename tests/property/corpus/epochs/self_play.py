"""An older copy of the model is the opponent; it is replaced at an epoch's end."""

import copy

import torch
from torch import nn

import spotguard.runtime as spotguard

run = spotguard.init(seed=77)
x = torch.randn(39, 5)
model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 2))
opponent = copy.deepcopy(model).requires_grad_(False)
optimizer = torch.optim.RMSprop(model.parameters(), lr=0.005)
run.track(model=model, opponent=opponent, optimizer=optimizer)
for epoch in run.epochs(run.loader(x, global_batch_size=13, micro_batch_size=3), total=4):
    for step in epoch:
        for inputs in step:
            step.backward((model(inputs) - 0.5 * opponent(inputs)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        for mine, theirs in zip(opponent.parameters(), model.parameters(), strict=True):
            mine.copy_(theirs)
