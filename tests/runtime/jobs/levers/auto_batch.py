"""Trains with micro-batches as large as memory allows; says their size, and the weights' length.

ROOM_MB is how much memory it may have beside what it has when it begins, LIMIT how much in all.
With TRY, only a step of so many samples is tried, and whether they fit is said. In step AT it sends
itself SIGTERM. SIZE is a number of samples, in the place of `auto`.
"""

import os
import resource
import signal
import sys
import time
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


torch.set_num_threads(1)
run = spotguard.init(seed=1, backend="gloo")
torch.manual_seed(1)
net = nn.Sequential(
    nn.Linear(8, WIDTH), nn.Tanh(), *[nn.Tanh() for _ in range(5)], nn.Linear(WIDTH, 1)
)
model: nn.Module = nn.parallel.DistributedDataParallel(net) if os.environ.get("DDP") else net
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
run.track(model=model, optimizer=optimizer)
data = list(torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(2)))


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
        say("step", step.number, max(shares), sum(shares), repr(length))
        if str(step.number) == os.environ.get("AT"):
            os.kill(os.getpid(), signal.SIGTERM)
            while run._job.watch.agreed is None:  # else a busy machine trains another step first
                time.sleep(0.001)


if __name__ == "__main__":
    main()
