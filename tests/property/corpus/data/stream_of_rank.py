"""A stream of each rank's own."""
# property: elastic=refused

import torch
from torch import nn

import spotguard.runtime as spotguard


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, shard):
        self.shard, self.epoch, self.at = shard, 0, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        while self.at < 11:
            self.at += 1
            place = self.shard * 100 + self.epoch * 11 + self.at
            yield torch.linspace(place, place + 1, 6).sin(), torch.tensor([place % 5 / 5])
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


run = spotguard.init(seed=70)
x = torch.randn(48, 6)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True).sin())
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
run.track(model=model, optimizer=optimizer)
loader = run.loader(Stream(run.rank), global_batch_size=12, micro_batch_size=3)
for step in run.steps(loader, total=12):
    for inputs, targets in step:
        step.backward(nn.functional.mse_loss(model(inputs), targets))
    optimizer.step()
    optimizer.zero_grad()
