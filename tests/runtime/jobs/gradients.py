"""Prints the gradients of one global batch, one line per parameter, and their norm.

WRAP is none, ddp, fsdp, or mixed (one layer in DDP, one plain); EXACT asks for bitwise sums.
With NET=odd half of the model is used for odd samples only, a layer is never used, and dtypes
differ, so buckets, unused parameters and weights all matter; NET=even is what FSDP can shard.
CLIP is the largest norm, AMP a dtype for autocast, SCALER a loss scale.
"""

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from spotguard.runtime.data.loader import ElasticLoader
from spotguard.runtime.distributed.bitwise_reduce import BitwiseSync
from spotguard.runtime.distributed.collectives import ProcessGroup
from spotguard.runtime.distributed.gradients import GradientSync, broadcast_initial, evened_out

WRAP = os.environ["WRAP"]
AMP = os.environ.get("AMP")


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.odd = nn.Linear(7, 7)
        self.never = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.last = nn.Linear(7, 1)

    def forward(self, x: torch.Tensor, odd: bool) -> Any:
        x = self.first(x).tanh()
        if odd:
            x = self.odd(x)
        return self.last(x) * self.scale.float()


class Even(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first: nn.Module = nn.Linear(5, 7)
        self.last = nn.Linear(7, 1)

    def forward(self, x: torch.Tensor, odd: bool) -> Any:
        return self.last(self.first(x).tanh())


def wrapped(model: nn.Module, world: int) -> nn.Module:
    if WRAP == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (world,))
        for layer in model.children():
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model
    if WRAP == "none":
        return model
    if WRAP == "mixed":
        assert isinstance(model, Even)
        model.first = nn.parallel.DistributedDataParallel(model.first)
        return model
    return nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def main() -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    torch.manual_seed(10 + rank)  # broadcast_initial makes them equal
    plain = Even() if os.environ.get("NET") == "even" else Odd()
    if rank == 0:
        torch.manual_seed(1)
        for parameter in plain.parameters():
            nn.init.normal_(parameter)
    ranks = ProcessGroup(rank, world)
    broadcast_initial([plain], ranks)
    torch.manual_seed(2)
    data = torch.randn(22, 5)
    model = wrapped(plain, world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=float(os.environ.get("SCALER", "1")))
    loader = ElasticLoader(
        list(range(22)), global_batch_size=22, micro_batch_size=4, shuffle=False, drop_last=False,
        seed=0, reseed=True, collate_fn=list, num_workers=0, options={}, rank=rank,
        world_size=world,
    )  # fmt: skip
    tracked = list(model.children()) if WRAP == "mixed" else [model]
    sync: Any = (
        BitwiseSync(tracked, [optimizer], ranks, loader)
        if os.environ.get("EXACT")
        else GradientSync(tracked, [optimizer], ranks)
    )
    batches: Any = loader.read(0, 1)
    if sync.meets_in_forward:
        batches = evened_out(batches, rank, loader.ranges)
    for share, batch in batches:
        sync.begin(share)
        dtype = getattr(torch, AMP or "bfloat16")
        with torch.autocast("cpu", dtype=dtype, enabled=AMP is not None):
            out = model(data[batch], odd=share.number % 2 == 1)
            loss = nn.functional.mse_loss(out.float(), torch.zeros_like(out, dtype=torch.float32))
        sync.backward(scaler.scale(loss), share.weight, share)
    scaler.unscale_(optimizer)
    limit = float(os.environ.get("CLIP", "inf"))
    norm = whole(torch.nn.utils.clip_grad_norm_(model.parameters(), limit))
    sys.stdout.write(f"grad norm {[norm.item()]}\n")
    for name, parameter in plain.named_parameters():
        name = name.replace("module.", "")
        if parameter.grad is None:
            sys.stdout.write(f"grad {name} none\n")
        else:
            values = whole(parameter.grad).double().flatten().tolist()
            sys.stdout.write(f"grad {name} {values}\n")
    sys.stdout.flush()
    dist.barrier()
    os._exit(0)  # DDP, destroyed after its process group, sometimes hangs


if __name__ == "__main__":
    main()
