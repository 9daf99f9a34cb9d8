"""A script with a mistake: it splits its data before `init`, another way in each attempt."""

import torch
from torch import nn

import spotguard.runtime as spotguard

x = torch.randn(600, 8)
data, held_out = torch.utils.data.random_split(
    torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), [512, 88]
)
run = spotguard.init(seed=2)
model = nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
run.track(model=model, optimizer=optimizer)
loader = run.loader(data, global_batch_size=32, micro_batch_size=8)
for step in run.steps(loader, total=60):
    for inputs, targets in step:
        step.backward(nn.functional.mse_loss(model(inputs), targets))
    optimizer.step()
    optimizer.zero_grad()
