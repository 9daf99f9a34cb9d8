"""Gradients are clipped, the rate falls at milestones, losses are kept in a list."""

import torch
from torch import nn

import spotguard.runtime as spotguard

run = spotguard.init(seed=3)
torch.manual_seed(3)
x = torch.randn(55, 5)
y = (x.sum(1) > 0).long()
model = nn.Sequential(nn.Linear(5, 10), nn.ReLU(), nn.Linear(10, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [4, 9], gamma=0.3)
losses = {"sum": 0.0, "steps": 0}
run.track(model=model, optimizer=optimizer, scheduler=scheduler, losses=losses)
loader = run.loader(torch.utils.data.TensorDataset(x, y), global_batch_size=13, micro_batch_size=3)
for step in run.steps(loader, epochs=3):
    for inputs, labels in step:
        step.backward(nn.functional.cross_entropy(model(inputs), labels))
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad(set_to_none=True)
    losses["steps"] += 1
