"""The script leaves no generator to us: dropout and noise go on where they were."""
# property: elastic=samples

import random

import numpy as np
import torch
from torch import nn

import spotguard.runtime as spotguard

run = spotguard.init(seed=2, reseed=False)
random.seed(1)
np.random.seed(1)
torch.manual_seed(1)
x = torch.randn(44, 6)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
run.track(model=model, optimizer=optimizer)
for step in run.steps(run.loader(data, global_batch_size=12, micro_batch_size=4), total=12):
    noise = 0.01 * (random.random() + float(np.random.rand()) + float(torch.rand(())))
    for inputs, targets in step:
        step.backward(nn.functional.mse_loss(model(inputs + noise), targets))
    optimizer.step()
    optimizer.zero_grad()
