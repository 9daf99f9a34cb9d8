"""Worker processes read ahead, and draw noise of their own."""

import torch
from torch import nn

import spotguard.runtime as spotguard


class Noisy(torch.utils.data.Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, index):
        x = torch.linspace(0, index % 5, 6).cos() + 0.1 * torch.rand(6)
        return x, torch.tensor([float(index % 3)])


run = spotguard.init(seed=70)
x = torch.randn(48, 6)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True).sin())
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
run.track(model=model, optimizer=optimizer)
loader = run.loader(Noisy(), global_batch_size=12, micro_batch_size=4, num_workers=2)
for step in run.steps(loader, total=12):
    for inputs, targets in step:
        step.backward(nn.functional.mse_loss(model(inputs), targets))
    optimizer.step()
    optimizer.zero_grad()
