"""Much comes after the loop: the BatchNorm of averaged weights, a test, a file."""
# property: elastic=samples

import torch
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn

import spotguard.runtime as spotguard

run = spotguard.init(seed=12)
x = torch.randn(48, 6)
data = torch.utils.data.TensorDataset(x, x[:, :1].sin())
model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
averaged = AveragedModel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
swa = SWALR(optimizer, swa_lr=0.02, anneal_epochs=2)
run.track(model=model, averaged=averaged, optimizer=optimizer, schedule=schedule, swa=swa)
for step in run.steps(run.loader(data, global_batch_size=12, micro_batch_size=4), total=12):
    for inputs, targets in step:
        step.backward(nn.functional.mse_loss(model(inputs), targets))
    optimizer.step()
    optimizer.zero_grad()
    if step.number >= 6:
        averaged.update_parameters(model)
        swa.step()
    else:
        schedule.step()
update_bn([x[:24], x[24:]], averaged)
if run.rank == 0:
    torch.save(averaged.state_dict(), "averaged.pt")
