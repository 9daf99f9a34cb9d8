"""A sampler whose order follows from what it was told, so it has a state."""

import torch
from torch import nn

import spotguard.runtime as spotguard


class Focus(torch.utils.data.Sampler):
    def __init__(self, count):
        self.count, self.passes = count, 0

    def __len__(self):
        return self.count

    def __iter__(self):
        self.passes += 1
        first = self.passes * 7 % self.count
        return iter([*range(first, self.count), *range(first)])

    def state_dict(self):
        return {"passes": self.passes}

    def load_state_dict(self, state):
        self.passes = state["passes"]


run = spotguard.init(seed=70)
x = torch.randn(48, 6)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True).sin())
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
run.track(model=model, optimizer=optimizer)
loader = run.loader(data, global_batch_size=12, micro_batch_size=4, sampler=Focus(48))
for step in run.steps(loader, total=12):
    for inputs, targets in step:
        step.backward(nn.functional.mse_loss(model(inputs), targets))
    optimizer.step()
    optimizer.zero_grad()
