"""Weights and biases are trained by two optimizers of two kinds, with a schedule each."""

import torch
from torch import nn

import spotguard.runtime as spotguard

run = spotguard.init(seed=52)
x = torch.randn(42, 6)
data = torch.utils.data.TensorDataset(x, x[:, :2].tanh())
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
matrices = [p for p in model.parameters() if p.ndim == 2]
vectors = [p for p in model.parameters() if p.ndim == 1]
optimizers = [
    torch.optim.SGD(matrices, lr=0.05, momentum=0.95, nesterov=True),
    torch.optim.AdamW(vectors, lr=0.01, eps=1e-3),
]
schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(o, 12) for o in optimizers]
run.track(model=model)
for number, (optimizer, scheduler) in enumerate(zip(optimizers, schedulers, strict=True)):
    run.track(**{f"optimizer{number}": optimizer, f"scheduler{number}": scheduler})
for step in run.steps(run.loader(data, global_batch_size=14, micro_batch_size=3), total=12):
    for inputs, targets in step:
        step.backward(nn.functional.mse_loss(model(inputs), targets))
    for optimizer in optimizers:
        optimizer.step()
    for scheduler in schedulers:
        scheduler.step()
    model.zero_grad()
