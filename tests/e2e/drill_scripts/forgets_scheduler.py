"""A script with a mistake: its scheduler is not tracked, so a resume starts the warm-up again."""

import torch
from torch import nn

import spotguard.runtime as spotguard

run = spotguard.init(seed=2)
torch.manual_seed(0)
x = torch.randn(512, 8)
y = x @ torch.randn(8, 1)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60)
run.track(model=model, optimizer=optimizer)
loader = run.loader(torch.utils.data.TensorDataset(x, y), global_batch_size=32, micro_batch_size=8)
for step in run.steps(loader, total=60):
    for inputs, targets in step:
        step.backward(nn.functional.mse_loss(model(inputs), targets))
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
