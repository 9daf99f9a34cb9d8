"""Trains a model whose buffers matter on ranks with uneven shares, and prints what is in them.

WRAP is none, ddp or fsdp. With ODD the model also keeps buffers of every sort, which DDP is then
told not to broadcast: it cannot. HURT is a step in which the first rank kills itself, between two
of its micro-batches. Before step LOOK, forward passes outside of the step move the statistics, too;
with TOLD another rank is told to stop meanwhile.
"""

import hashlib
import os
import signal
import sys
import time

import torch
from torch import nn

import spotguard.runtime as spotguard

STEPS = 12
WRAP = os.environ["WRAP"]
HURT = int(os.environ.get("HURT", "-1"))


class Counts(nn.Module):
    """Keeps buffers of many dtypes and layouts that follow from the samples that it sees."""

    mean: torch.Tensor
    seen: torch.Tensor
    codes: torch.Tensor
    counts: torch.Tensor
    waves: torch.Tensor
    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("seen", torch.zeros(4, dtype=torch.bool))
        self.register_buffer("codes", torch.zeros(8).to(torch.float8_e4m3fn))
        self.register_buffer("counts", torch.zeros(3, dtype=torch.int16).to(torch.uint16))
        self.register_buffer("waves", torch.zeros(8, dtype=torch.complex64))
        self.register_buffer("table", torch.zeros(8, 2).t())
        self.register_buffer("nothing", torch.zeros(0))
        self.register_buffer("mask", torch.zeros(1200, 1000))  # a constant of more than 4 MB

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.mean = 0.9 * self.mean + 0.1 * x.mean()  # another tensor each time
            self.seen[int(x.abs().sum() * 100) % 4] = True
            self.codes.copy_(x.mean(0))
            self.counts.copy_((x.sum(0)[:3] * 10).abs().to(torch.int32))
            self.waves.copy_(torch.complex(x.mean(0), x.std(0)))
            self.table.copy_(x[:2])
        return x * (1 + 0.1 * self.mean)  # so that weights follow the buffers


def wrapped(model: nn.Module, world: int) -> nn.Module:
    if WRAP == "ddp" and world > 1:
        return nn.parallel.DistributedDataParallel(
            model, find_unused_parameters=True, broadcast_buffers=not os.environ.get("ODD")
        )
    if WRAP == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    return model


def fingerprint(model: nn.Module) -> str:
    state = hashlib.sha256()
    for tensor in [*model.parameters(), *model.buffers()]:
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        flat = whole.detach().contiguous().reshape(-1)
        state.update(flat.view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


def main() -> None:
    torch.set_num_threads(1)
    run = spotguard.init(seed=3, save_every="3 steps")
    torch.manual_seed(3)
    counts: nn.Module = Counts() if os.environ.get("ODD") else nn.Identity()
    layers = [nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1)]
    model = wrapped(nn.Sequential(counts, *layers), run.world_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    data = torch.utils.data.TensorDataset(torch.randn(60, 8), torch.randn(60, 1))
    loader = run.loader(data, global_batch_size=18, micro_batch_size=4)  # 5 shares: 2, 2, 1
    for step in run.steps(loader, total=STEPS):
        if str(step.number) == os.environ.get("LOOK"):
            for number in run.evaluate(range(20)):
                model(data[4 * number % 56 : 4 * number % 56 + 4][0])
                if number == 2 and run.rank == 1 and os.environ.get("TOLD") == "1":
                    os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.05 if number > 1 and os.environ.get("TOLD") == "1" else 0)
        for x, y in step:
            step.backward(nn.functional.mse_loss(model(x), y))
            if step.number == HURT and run.rank == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    sys.stdout.write(f"digest {fingerprint(model)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
