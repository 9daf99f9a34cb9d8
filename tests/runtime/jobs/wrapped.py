"""Trains a small net in the wrapper that WRAP names; says the weights' hash and length each step.

WRAP is plain, ddp, raw (DDP around it, the net itself tracked), untracked (the same, only its
parameters tracked, in a dict), nested, compiled, unused, bn, ignored (DDP leaves a parameter out),
late (DDP made in the loop), fsdp, or parts (FSDP2 on the layers alone). In step AT (from 0) rank
VICTIM sends itself SIGNAL, or is busy alone for ever if that is `busy`.
"""

import hashlib
import os
import signal
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import spotguard.runtime as spotguard

STEPS = 6
WRAP = os.environ["WRAP"]


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x)
        return out


def net() -> nn.Sequential:
    torch.manual_seed(1)
    between = nn.BatchNorm1d(60) if WRAP == "bn" else nn.Tanh()
    layers = [part for _ in range(3) for part in (nn.Linear(60, 60), nn.Tanh())]
    return nn.Sequential(nn.Linear(7, 60), between, *layers, nn.Linear(60, 1))


def wrapped(bare: nn.Sequential) -> nn.Module:
    if WRAP in ("plain", "late"):
        return bare
    if WRAP in ("fsdp", "parts"):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in bare:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        if WRAP == "fsdp":
            fully_shard(bare, mesh=mesh)
        return bare
    if WRAP == "ignored":
        kind: Any = nn.parallel.DistributedDataParallel
        kind._set_params_and_buffers_to_ignore_for_model(bare, ["0.bias"])
    ddp = nn.parallel.DistributedDataParallel(bare, find_unused_parameters=WRAP == "unused")
    if WRAP == "compiled":
        return torch.compile(ddp, backend="eager")  # type: ignore[return-value]
    return Outer(ddp) if WRAP == "nested" else ddp


def whole(tensor: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found


def fingerprint(model: nn.Module) -> str:
    state = hashlib.sha256()
    for tensor in model.state_dict().values():
        state.update(whole(tensor).detach().contiguous().numpy().tobytes())
    return state.hexdigest()


def busy_alone() -> None:
    while True:
        time.sleep(0.1)


def main() -> None:
    torch.set_num_threads(1)
    exact = os.environ.get("EXACT") or None
    run = spotguard.init(seed=1, save_every="100 steps", backend="gloo", exact=exact)
    bare = net()
    model = wrapped(bare)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = torch.randn(60, 7, generator=torch.Generator().manual_seed(2))
    # Seven micro-batches: 3, 2 and 2 on three ranks.
    loader = run.loader(list(data), global_batch_size=20, micro_batch_size=3)
    if WRAP == "untracked":
        run.track(weights=dict(bare.named_parameters()))
    else:
        run.track(model=bare if WRAP == "raw" else model)
    run.track(optimizer=optimizer)
    victim = run.rank == int(os.environ.get("VICTIM", "-1")) and run.attempt == 1
    for step in run.steps(loader, total=STEPS):
        if WRAP == "late":
            model = nn.parallel.DistributedDataParallel(bare)
        for x in step:
            step.backward(model(x).square().mean())
        if victim and step.number == int(os.environ["AT"]):
            name = os.environ["SIGNAL"]
            if name == "busy":
                busy_alone()
            os.kill(os.getpid(), signal.Signals[name])
            while run._job.watch.agreed is None:  # the others would else be done before
                time.sleep(0.01)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        sys.stdout.write(f"state {step.number} {fingerprint(bare)}\n")
        length = sum(whole(p.detach()).square().sum().item() for p in bare.parameters()) ** 0.5
        sys.stdout.write(f"length {step.number} {length!r}\n")
        sys.stdout.flush()
    sys.stdout.write("done\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
