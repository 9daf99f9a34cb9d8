"""The job of the survival matrix: a small model with BatchNorm and dropout, endless steps."""

import os
import time

import torch
from torch import nn

import spotguard.runtime as spotguard

run = spotguard.init(seed=3)
torch.manual_seed(0)
x = torch.randn(4096, 16)
dataset = torch.utils.data.TensorDataset(x, x @ torch.randn(16, 1))
model = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Dropout(0.1), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10_000)
run.track(model=model, optimizer=optimizer, scheduler=scheduler)
loader = run.loader(
    dataset,
    global_batch_size=64,
    micro_batch_size=16,
    num_workers=int(os.environ.get("WORKERS", "0")),
)
for step in run.steps(loader, total=100_000):
    for inputs, targets in step:
        step.backward(nn.functional.mse_loss(model(inputs), targets))
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    time.sleep(0.005)
