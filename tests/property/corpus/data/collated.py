"""Texts of unequal lengths are padded by a function of the script's own."""

import torch
from torch import nn

import spotguard.runtime as spotguard


class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, index):
        return torch.full((2 + index % 5,), 0.1 * (index % 7)), float(index % 3)


def padded(samples):
    texts, labels = zip(*samples, strict=True)
    longest = max(map(len, texts))
    rows = [nn.functional.pad(text, (0, longest - len(text))) for text in texts]
    inputs = nn.functional.pad(torch.stack(rows), (0, 6 - longest))
    return inputs, torch.tensor(labels)[:, None]


run = spotguard.init(seed=70)
x = torch.randn(48, 6)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True).sin())
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
run.track(model=model, optimizer=optimizer)
loader = run.loader(Texts(), global_batch_size=15, micro_batch_size=4, collate_fn=padded)
for step in run.steps(loader, total=12):
    for inputs, targets in step:
        step.backward(nn.functional.mse_loss(model(inputs), targets))
    optimizer.step()
    optimizer.zero_grad()
