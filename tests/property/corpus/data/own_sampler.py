"""A sampler of the script's own, by the epoch."""
# property: elastic=samples

import torch
from torch import nn

import spotguard.runtime as spotguard


class Halves(torch.utils.data.Sampler):
    def __init__(self, count):
        self.count, self.epoch = count, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.count

    def __iter__(self):
        order = torch.randperm(self.count // 2).tolist()
        yield from [(self.epoch + 1) * each % self.count for each in order]
        yield from range(self.count // 2, self.count)


run = spotguard.init(seed=70)
x = torch.randn(48, 6)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True).sin())
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
run.track(model=model, optimizer=optimizer)
loader = run.loader(data, global_batch_size=12, micro_batch_size=5, sampler=Halves(48))
for step in run.steps(loader, total=12):
    for inputs, targets in step:
        step.backward(nn.functional.mse_loss(model(inputs), targets))
    optimizer.step()
    optimizer.zero_grad()
