# /// script
# dependencies = ["torch>=2.6", "numpy", "scikit-learn"]
# [tool.spotguard]
# save_every = "100 steps"
# ///
"""Classify scikit-learn's digits, with augmentation, an EMA of the weights, and early stopping.

python examples/train_digits.py
spotguard up examples/train_digits.py --yes
"""

import random

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import spotguard.runtime as spotguard

PATIENCE = 4  # evaluations without a better accuracy


class Shifted(torch.utils.data.Dataset):
    """Images, each moved by up to a pixel; the draw depends on the step, not on the rank."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        move = (random.randint(-1, 1), random.randint(-1, 1))
        return torch.roll(self.images[index], move, dims=(-2, -1)), self.labels[index]


def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    model.eval()
    with torch.no_grad():
        right = (model(images).argmax(1) == labels).float().mean().item()
    model.train()
    return right


def main() -> None:
    run = spotguard.init(seed=7)
    torch.manual_seed(7)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    train, test = slice(0, 1500), slice(1500, None)

    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 600)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.98), use_buffers=True)
    best = {"accuracy": 0.0, "worse": 0}

    loader = run.loader(
        Shifted(images[train], labels[train]), global_batch_size=60, micro_batch_size=20
    )
    run.track(model=model, optimizer=optimizer, scheduler=scheduler, ema=ema, best=best)

    for step in run.steps(loader, epochs=24):
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        ema.update_parameters(model)
        if (step.number + 1) % 50 == 0:
            right = accuracy(ema, images[test], labels[test])
            best["worse"] = 0 if right > best["accuracy"] else best["worse"] + 1
            best["accuracy"] = max(best["accuracy"], right)
            if best["worse"] >= PATIENCE:
                run.end(f"no better than {best['accuracy']:.3f} for {PATIENCE} evaluations")

    if run.rank == 0:
        print(f"best accuracy {best['accuracy']:.3f}")


if __name__ == "__main__":
    main()
