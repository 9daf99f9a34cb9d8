"""A stream that cannot be found again."""
# property: refused=state worlds=1-3

import torch
from torch import nn

import spotguard.runtime as spotguard


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield from torch.randn(40, 4)


run = spotguard.init(seed=112)
model = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.track(model=model, optimizer=optimizer)
for step in run.steps(run.loader(Stream(), global_batch_size=12, micro_batch_size=4), total=8):
    for inputs in step:
        step.backward((model(inputs) - inputs).square().mean())
    optimizer.step()
    optimizer.zero_grad()
