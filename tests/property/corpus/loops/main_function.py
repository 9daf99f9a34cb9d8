"""Everything within a function, with a counter in a Box and a best value."""

import torch
from torch import nn

import spotguard.runtime as spotguard


class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, index):
        x = torch.linspace(index, index + 1, 4).cos() + 0.05 * torch.rand(4)
        return {"x": x, "y": torch.tensor([float(index % 7) / 7])}


def main():
    run = spotguard.init(seed=9, save_every="2 steps")
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    seen, best = spotguard.Box(0), spotguard.Box(float("inf"))
    run.track(model=model, optimizer=optimizer, seen=seen, best=best)
    loader = run.loader(Squares(), global_batch_size=12, micro_batch_size=5)
    for step in run.steps(loader, total=11):
        for batch in step:
            step.backward(nn.functional.mse_loss(model(batch["x"]), batch["y"]))
        optimizer.step()
        optimizer.zero_grad()
        seen.value += 12
        best.value = min(best.value, 1.0 / (step.number + 1))


if __name__ == "__main__":
    main()
