"""The rate falls where the validation does not get better; patience ends the run."""

import torch
from torch import nn

import spotguard.runtime as spotguard

run = spotguard.init(seed=2)
x = torch.randn(33, 4)
data = torch.utils.data.TensorDataset(x, x[:, :1])
model = nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, eps=1e-3)
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
run.track(model=model, optimizer=optimizer, plateau=plateau)
for epoch in run.epochs(run.loader(data, global_batch_size=8, micro_batch_size=3), total=6):
    for step in epoch:
        for inputs, targets in step:
            step.backward(nn.functional.mse_loss(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()
    value = 0.0
    for part in run.evaluate(range(4)):
        value += 1.0 + (part + epoch.number) % 3 + float(torch.rand(()))
    plateau.step(value)
    if run.best(value, patience=3):
        torch.save(model.state_dict(), f"best-{run.rank}.pt")
