"""An evaluation at the top of a step's body, and another one of the new weights at its end."""

import torch
from torch import nn

import spotguard.runtime as spotguard

run = spotguard.init(seed=5)
x = torch.randn(45, 5)
data = torch.utils.data.TensorDataset(x, x[:, :1])
model = nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.2), nn.ReLU(), nn.Linear(7, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, eps=1e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
run.track(model=model, optimizer=optimizer, scheduler=scheduler)


def validate():
    model.eval()
    total = 0.0
    with torch.no_grad():
        for start in run.evaluate(range(0, 45, 15)):
            total += float(
                nn.functional.mse_loss(model(x[start : start + 15]), x[start : start + 15, :1])
            )
    model.train()
    return total


for step in run.steps(run.loader(data, global_batch_size=16, micro_batch_size=5), total=12):
    if step.number % 4 == 2:
        validate()
    for inputs, targets in step:
        step.backward(nn.functional.mse_loss(model(inputs), targets))
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    run.end_step()
    if step.number % 5 == 4:
        validate()
