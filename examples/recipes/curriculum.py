# /// script
# dependencies = ["torch>=2.6", "numpy"]
# ///
"""Easy samples first: a sampler whose order follows from the epoch, so a resume has it too.

python examples/recipes/curriculum.py            # or with --all: shuffled, to compare with
spotguard up examples/recipes/curriculum.py --yes
"""

import sys

import torch
from torch import nn

import spotguard.runtime as spotguard


class Curriculum(torch.utils.data.Sampler[int]):
    """The easiest part of the data, which grows from epoch to epoch, in random order."""

    def __init__(self, difficulty: torch.Tensor, epochs: int) -> None:
        self.by_difficulty = difficulty.argsort()
        self.epochs = epochs
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.by_difficulty)

    def __iter__(self):
        part = max(1, len(self) * min(self.epoch + 1, self.epochs) // self.epochs)
        allowed = self.by_difficulty[:part]
        # As many draws in each epoch: spotguard seeds torch for each, on every rank alike.
        yield from allowed[torch.randint(part, (len(self),))].tolist()


def main() -> None:
    run = spotguard.init(seed=5)
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(512, 8, generator=draw)
    noise = torch.linspace(0, 3, 512)  # the more, the harder
    y = x.sum(1) + noise * torch.randn(512, generator=draw)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.track(model=model, optimizer=optimizer)
    loader = run.loader(
        torch.utils.data.TensorDataset(x, y),
        global_batch_size=64,
        sampler=Curriculum(noise, epochs=1 if "--all" in sys.argv else 4),
    )
    for step in run.steps(loader, epochs=6):
        for inputs, target in step:
            step.backward((model(inputs).squeeze(1) - target).square().mean())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step.ends_epoch:
            with torch.no_grad():
                error = (model(x).squeeze(1) - x.sum(1)).square().mean().item()
            run.log(error=error)
    with torch.no_grad():
        error = (model(x).squeeze(1) - x.sum(1)).square().mean().item()
    print(f"error {error:.3f}")


if __name__ == "__main__":
    main()
