"""What stands at the top of an epoch comes again after a resume, and counts once."""

import torch
from torch import nn

import spotguard.runtime as spotguard

run = spotguard.init(seed=21)
x = torch.randn(40, 4)
model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)
counts = {"tops": 0, "ends": 0}
run.track(model=model, optimizer=optimizer, scheduler=scheduler, counts=counts)
for epoch in run.epochs(run.loader(x, global_batch_size=9, micro_batch_size=2), total=3):
    scheduler.step()
    counts["tops"] += 1
    factors = torch.rand(len(epoch)) + 0.5
    for number, step in enumerate(epoch, epoch.done):
        for inputs in step:
            step.backward(factors[number] * (model(inputs) - inputs).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    counts["ends"] += 1
