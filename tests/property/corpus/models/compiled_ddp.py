"""torch.compile around DDP."""
# property: server=compiled

import torch
from torch import nn

import spotguard.runtime as spotguard

run = spotguard.init(seed=90)
torch.manual_seed(5)
x = torch.randn(45, 6)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True).sin())
model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 1))
if run.world_size > 1:
    model = nn.parallel.DistributedDataParallel(model)
model = torch.compile(model, backend="eager")
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
run.track(model=model, optimizer=optimizer, scheduler=scheduler)
for step in run.steps(run.loader(data, global_batch_size=15, micro_batch_size=4), total=10):
    for inputs, targets in step:
        step.backward(nn.functional.mse_loss(model(inputs), targets))
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
