"""A script with a mistake: its average of the weights is not tracked; the weights look right."""

import torch
from torch import nn

import spotguard.runtime as spotguard


class Average:
    """An exponential moving average of a model's weights."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}

    def update(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            self.shadow[name].lerp_(parameter.detach(), 1 - self.decay)


def train() -> None:
    run = spotguard.init(seed=2)
    torch.manual_seed(0)
    x = torch.randn(512, 8)
    y = x @ torch.randn(8, 1)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60)
    average = Average(model, 0.9)
    run.track(model=model, optimizer=optimizer, scheduler=scheduler)
    loader = run.loader(
        torch.utils.data.TensorDataset(x, y), global_batch_size=32, micro_batch_size=8
    )
    for step in run.steps(loader, total=60):
        for inputs, targets in step:
            step.backward(nn.functional.mse_loss(model(inputs), targets))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        average.update(model)


train()
