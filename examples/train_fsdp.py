# /// script
# dependencies = ["torch>=2.6", "numpy"]
# [tool.spotguard]
# nproc_per_node = 2
# save_every = "25 steps"
# ///
"""Train with FSDP2: parameters and optimizer state live in parts on the ranks.

Each rank saves its own parts, and any number of ranks restores from any other.

    torchrun --nproc-per-node 2 examples/train_fsdp.py
    spotguard up examples/train_fsdp.py --nproc-per-node 2 --yes
"""

import argparse

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import spotguard.runtime as spotguard


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=120)
    options = parser.parse_args()

    run = spotguard.init(seed=5)
    torch.manual_seed(5)
    x = torch.rand(4096, 8) * 4 - 2
    y = torch.sin(x).prod(1, keepdim=True) + 0.1 * x.sum(1, keepdim=True)

    layers: list[nn.Module] = [nn.Linear(8, 64), nn.Tanh()]
    for _ in range(3):
        layers += [nn.Linear(64, 64), nn.Tanh()]
    model = nn.Sequential(*layers, nn.Linear(64, 1)).to(run.device)
    mesh = init_device_mesh(run.device.type, (run.world_size,))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, options.steps)
    run.track(model=model, optimizer=optimizer, scheduler=scheduler)
    loader = run.loader(
        torch.utils.data.TensorDataset(x, y), global_batch_size=256, micro_batch_size=32
    )

    for step in run.steps(loader, total=options.steps):
        for inputs, targets in step:
            outputs = model(inputs.to(run.device))
            step.backward(F.mse_loss(outputs, targets.to(run.device)))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)


if __name__ == "__main__":
    main()
