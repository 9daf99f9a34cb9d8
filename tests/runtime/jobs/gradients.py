"""Prints the gradients of one global batch as hex, one line per parameter; `WRAP` is none or ddp.

Half of the model is used for odd samples only, a layer is never used, one parameter is shared, and
dtypes differ, so buckets, unused parameters and weights all matter.
"""

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from spotguard.runtime.gradients import GradientSync
from spotguard.runtime.loader import ElasticLoader


class Net(nn.Module):
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


def main() -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    torch.manual_seed(10 + rank)  # broadcast_initial makes them equal
    model = Net()
    if rank == 0:
        torch.manual_seed(1)
        for parameter in model.parameters():
            nn.init.normal_(parameter)
    GradientSync([model], [], world).broadcast_initial([model])
    torch.manual_seed(2)
    data = torch.randn(22, 5)
    wrapped: nn.Module = model
    if os.environ["WRAP"] == "ddp":
        wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = GradientSync([wrapped], [optimizer], world)
    loader = ElasticLoader(
        list(range(22)), global_batch_size=22, micro_batch_size=4, shuffle=False, drop_last=False,
        seed=0, reseed=True, collate_fn=list, num_workers=0, options={}, rank=rank,
        world_size=world,
    )  # fmt: skip
    for share, batch in loader.read(0, 1):
        sync.begin(last=share.last)
        loss = wrapped(data[batch], odd=share.number % 2 == 1).square().mean()
        sync.backward(loss, share.weight, last=share.last)
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            sys.stdout.write(f"grad {name} none\n")
        else:
            sys.stdout.write(f"grad {name} {parameter.grad.double().flatten().tolist()}\n")
    sys.stdout.flush()
    dist.barrier()
    os._exit(0)  # DDP, destroyed after its process group, sometimes hangs


if __name__ == "__main__":
    main()
