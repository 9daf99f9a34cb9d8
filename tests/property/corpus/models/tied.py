"""Two layers share their weight, and one is scaled by a parameter of its own."""

import torch
from torch import nn

import spotguard.runtime as spotguard

run = spotguard.init(seed=90)
torch.manual_seed(5)
x = torch.randn(45, 6)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True).sin())


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.scale * self.second(self.first(x).tanh()).mean(1, keepdim=True)


model = Tied()
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
