"""The same bits on any number of ranks."""
# property: elastic=bits

import torch
from torch import nn

import spotguard.runtime as spotguard

run = spotguard.init(seed=7, exact="bitwise")
torch.manual_seed(0)
x = torch.randn(50, 8)
data = torch.utils.data.TensorDataset(x, x @ torch.randn(8, 1))
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
run.track(model=model, optimizer=optimizer)
for step in run.steps(run.loader(data, global_batch_size=14, micro_batch_size=2), total=10):
    for inputs, targets in step:
        step.backward(nn.functional.mse_loss(model(inputs), targets))
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
