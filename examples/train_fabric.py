"""Train with Lightning's Fabric, which owns no loop: ours goes around it.

    spotguard up examples/train_fabric.py --nodes 2

Needs `pip install 'spotguard[lightning]'`.
"""

import os

import torch
from lightning.fabric import Fabric
from torch import nn

import spotguard.runtime as spotguard

STEPS = 60


def main() -> None:
    run = spotguard.init(save_every="20 steps")
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    fabric = Fabric(
        accelerator="auto",
        devices=local,
        num_nodes=run.world_size // local,
        strategy="ddp" if run.world_size > 1 else "auto",
    )
    fabric.launch()
    x = torch.randn(480, 16, generator=torch.Generator().manual_seed(0))
    samples = torch.utils.data.TensorDataset(x, x.square().sum(1, keepdim=True))
    net = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.1), nn.GELU(), nn.Linear(64, 1))
    adam = torch.optim.AdamW(net.parameters(), lr=1e-2)
    model, optimizer = fabric.setup(net, adam)

    run.track(model=net, optimizer=adam)  # what went in, not what wraps it
    loader = run.loader(samples, global_batch_size=48, micro_batch_size=16)
    for step in run.steps(loader, total=STEPS):
        for batch in step:
            inputs, targets = fabric.to_device(batch)
            with step.weighted(nn.functional.mse_loss(model(inputs), targets)) as loss:
                fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if step.number % 20 == 19:
            fabric.print(f"step {step.number + 1} loss {step.mean_loss():.4f}")


if __name__ == "__main__":
    main()
