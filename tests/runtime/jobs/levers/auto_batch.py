"""Trains with micro-batches as large as memory allows; says their size, and the weights' length.

ROOM_MB is how much memory it may have beside what it has when it begins, LIMIT how much in all.
With TRY, only a step of so many samples is tried, and whether they fit is said. In step AT it sends
itself SIGTERM. SIZE is a number of samples, in the place of `auto`. NET is the kind of its net.
Each step is followed by an evaluation, of samples of a number that no step has.
"""

import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import spotguard.runtime as spotguard
from spotguard.runtime.loop.batch_probe import BatchProbe

WIDTH = 2048
SAMPLES = 4000


def limit_memory() -> None:
    status = Path("/proc/self/status").read_text()
    [line] = [line for line in status.splitlines() if line.startswith("VmData")]
    limit = int(line.split()[1]) * 1024 + int(float(os.environ.get("ROOM_MB", "1e6")) * 1e6)
    limit = int(os.environ.get("LIMIT", limit))
    say("limit", limit)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.over_time = nn.LSTM(8, 96, 2, batch_first=True)
        self.end = nn.Linear(96, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.end(self.over_time(x)[0][:, -1])
        return found


def wide() -> tuple[nn.Module, tuple[int, ...]]:
    several = [nn.Tanh() for _ in range(5)]
    return nn.Sequential(nn.Linear(8, WIDTH), nn.Tanh(), *several, nn.Linear(WIDTH, 1)), (8,)


def convolutional() -> tuple[nn.Module, tuple[int, ...]]:
    first = (nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
    second = (nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU())
    end = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 1))
    return nn.Sequential(*first, *second, *end), (3, 16, 16)


def attention() -> tuple[nn.Module, tuple[int, ...]]:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    return nn.Sequential(nn.Linear(8, 32), layer, nn.Flatten(), nn.Linear(32 * 16, 1)), (16, 8)


NETS: dict[str, Callable[[], tuple[nn.Module, tuple[int, ...]]]] = {
    "wide": wide,
    "convolutional": convolutional,
    "recurrent": lambda: (Recurrent(), (16, 8)),
    "attention": attention,
}

torch.set_num_threads(1)
run = spotguard.init(seed=1, backend="gloo")
torch.manual_seed(1)
net, shape = NETS[os.environ.get("NET", "wide")]()
model: nn.Module = nn.parallel.DistributedDataParallel(net) if os.environ.get("DDP") else net
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
run.track(model=model, optimizer=optimizer)
data = list(torch.randn(SAMPLES, *shape, generator=torch.Generator().manual_seed(2)))


def loss_of(x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model(x).square().mean()
    return found


def main() -> None:
    size = os.environ.get("SIZE")
    if size is None:
        loader = run.loader(data, global_batch_size=SAMPLES, micro_batch_size="auto", probe=loss_of)
    else:
        loader = run.loader(data, global_batch_size=SAMPLES, micro_batch_size=int(size))
    limit_memory()
    if "TRY" in os.environ:
        tried = int(os.environ["TRY"])
        setattr(BatchProbe, "_search", lambda self, *_: say("tried", self._fits(tried, 0)))  # noqa: B010
    for step in run.steps(loader, total=4):
        shares = []
        for x in step:
            shares.append(len(x))
            step.backward(loss_of(x))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        length = sum(p.detach().double().square().sum().item() for p in net.parameters()) ** 0.5
        net.eval()
        with torch.no_grad():
            net(torch.stack(data[:77]))
        net.train()
        say("step", step.number, max(shares), sum(shares), repr(length))
        if str(step.number) == os.environ.get("AT"):
            os.kill(os.getpid(), signal.SIGTERM)
            while run._job.watch.agreed is None:  # else a busy machine trains another step first
                time.sleep(0.001)


if __name__ == "__main__":
    main()
