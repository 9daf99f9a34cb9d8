"""A stream without a state is read again up to its place."""

import torch
from torch import nn

import spotguard.runtime as spotguard


class Plain(torch.utils.data.IterableDataset):
    def __init__(self, shard):
        self.shard = shard

    def __iter__(self):
        for at in range(9):
            place = self.shard * 10 + at
            yield torch.linspace(place, place + 1, 6).sin(), torch.tensor([place % 5 / 5])


run = spotguard.init(seed=70)
x = torch.randn(48, 6)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True).sin())
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
run.track(model=model, optimizer=optimizer)
loader = run.loader(
    lambda shard, shards: Plain(shard), replay=True, global_batch_size=12, micro_batch_size=3
)
for step in run.steps(loader, total=12):
    for inputs, targets in step:
        step.backward(nn.functional.mse_loss(model(inputs), targets))
    optimizer.step()
    optimizer.zero_grad()
