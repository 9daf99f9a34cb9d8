"""A mean over tokens, of which micro-batches have unequal numbers."""

import torch
from torch import nn

import spotguard.runtime as spotguard

run = spotguard.init(seed=82)
x = torch.randint(1, 13, (44, 6))
y = x.roll(1, 1).masked_fill(torch.rand(44, 6) < 0.4, -100)
model = nn.Sequential(nn.Embedding(13, 8), nn.Linear(8, 13))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
run.track(model=model, optimizer=optimizer)
data = torch.utils.data.TensorDataset(x, y)
for step in run.steps(run.loader(data, global_batch_size=13, micro_batch_size=3), total=12):
    for inputs, labels in step:
        losses = nn.functional.cross_entropy(
            model(inputs).flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
        )
        count = (labels != -100).sum()
        step.backward(losses / count.clamp(min=1), weight=count)
    optimizer.step()
    optimizer.zero_grad()
