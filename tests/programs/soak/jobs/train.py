"""Trains what `SOAK` asks for, and leaves the final state in `final-<run>-<rank>.npz`.

A script as a user would write it: nothing here knows when it will be interrupted, but for a
mistake of its own (`raise_after`) that a life may be asked to make.
"""

import json
import os
import sys
import time
from typing import Any

import numpy as np
import torch
from torch import nn

import spotguard.runtime as spotguard

ASKED = json.loads(os.environ["SOAK"])


class Waves(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return int(ASKED["samples"])

    def __getitem__(self, index: int) -> Any:
        x = torch.linspace(index, index + 1, 6).sin() + 0.1 * torch.rand(6)
        return x, torch.tensor([float(index % 5) / 5])


def network() -> nn.Module:
    layers: list[nn.Module] = [nn.Linear(6, 12, bias=not ASKED["batch_norm"])]
    if ASKED["batch_norm"]:
        layers.append(nn.BatchNorm1d(12))
    layers.append(nn.Tanh())
    if ASKED["dropout"]:
        layers.append(nn.Dropout(0.2))
    return nn.Sequential(*layers, nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 1))


def wrapped(model: nn.Module, world_size: int) -> nn.Module:
    if ASKED["wrap"] == "ddp":
        return nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.0005)  # several buckets
    if ASKED["wrap"] == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    return model


def made(model: nn.Module) -> torch.optim.Optimizer:
    if ASKED["optimizer"] == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def whole(tensor: torch.Tensor) -> Any:
    full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach().clone().numpy()


def final_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, others: dict[str, float]
) -> dict[str, Any]:
    state = {f"weight {n}": whole(p) for n, p in enumerate(model.parameters())}
    state |= {f"buffer {n}": whole(b) for n, b in enumerate(model.buffers())}
    for number, kept in optimizer.state_dict()["state"].items():
        tensors = {name: value for name, value in kept.items() if torch.is_tensor(value)}
        state |= {f"moment {number} {name}": whole(value) for name, value in tensors.items()}
    return state | {name: np.array(value) for name, value in others.items()}


def main() -> None:
    run = spotguard.init(
        seed=ASKED["seed"],
        exact=ASKED["exact"],
        save_every=ASKED["save_every"],
        reseed=ASKED["reseed"],
    )
    torch.manual_seed(ASKED["seed"])
    model = wrapped(network(), run.world_size)
    optimizer = made(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.9)
    counts = {"steps": 0, "turns": 1.0}
    run.track(model=model, optimizer=optimizer, scheduler=scheduler, counts=counts)
    loader = run.loader(
        Waves(),
        global_batch_size=ASKED["global_batch"],
        micro_batch_size=ASKED["micro_batch"],
        drop_last=ASKED["drop_last"],
        num_workers=ASKED["workers"],
    )
    for done, step in enumerate(run.steps(loader, total=ASKED["steps"])):
        sys.stdout.write(f"step {step.number}\n")
        sys.stdout.flush()
        for x, y in step:
            step.backward(nn.functional.mse_loss(model(x), y))
        if done == ASKED.get("raise_after"):
            raise ValueError("the script's own mistake")
        if ASKED["clip"]:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        counts["steps"] += 1
        counts["turns"] *= 1.01
        time.sleep(ASKED["pace_s"])
    others = {"lr": float(scheduler.get_last_lr()[0]), **counts}
    path = f"final-{os.environ['SPOTGUARD_RUN_ID']}-{run.rank}.npz"
    state = final_state(model, optimizer, others)  # FSDP2's is collective
    np.savez(path, **state)


if __name__ == "__main__":
    main()
