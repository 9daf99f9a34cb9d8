"""LoRA by hand: a frozen base that is stored once, and two thin matrices that learn."""

import torch
from torch import nn

import spotguard.runtime as spotguard


class Adapted(nn.Module):
    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) * 0.3)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        return self.base(x) + x @ self.down.T @ self.up.T


run = spotguard.init(seed=66)
x = torch.randn(40, 16)
model = nn.Sequential(Adapted(nn.Linear(16, 16)), nn.Tanh(), Adapted(nn.Linear(16, 16)))
learns = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(learns, lr=0.01, eps=1e-3)
run.track(model=model, frozen="skip")
run.track(optimizer=optimizer)
for step in run.steps(run.loader(x, global_batch_size=13, micro_batch_size=4), total=12):
    for inputs in step:
        step.backward((model(inputs) - inputs.roll(1, 1)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
