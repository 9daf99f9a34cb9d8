"""Four generators of the script's own."""

import random

import numpy as np
import torch
from torch import nn

import spotguard.runtime as spotguard

run = spotguard.init(seed=63)
noise, dice, die = np.random.default_rng(11), random.Random(5), torch.Generator().manual_seed(9)
old = np.random.RandomState(4)
x = torch.randn(40, 6)
data = torch.utils.data.TensorDataset(x, x[:, :1])
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
run.track(model=model, optimizer=optimizer, noise=noise, dice=dice, die=die)
run.track(old={"drawn": 0})
for step in run.steps(run.loader(data, global_batch_size=12, micro_batch_size=5), total=12):
    jitter = noise.normal(0.0, 0.05) + dice.gauss(0.0, 0.05) + float(torch.rand((), generator=die))
    for inputs, targets in step:
        step.backward(nn.functional.mse_loss(model(inputs + 0.1 * jitter), targets))
    optimizer.step()
    optimizer.zero_grad()
