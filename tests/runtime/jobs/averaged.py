"""Evaluates averaged weights in the model's place, as torch_ema does; `HURT` as in `shapes`."""

# ruff: noqa: T201
from __future__ import annotations

import contextlib
import hashlib
import os
import signal
from typing import TYPE_CHECKING

import torch

import spotguard.runtime as spotguard
from spotguard.events.states import EndReason
from spotguard.runtime.preemption.stop_consensus import StopRequest

if TYPE_CHECKING:
    from collections.abc import Iterator

run = spotguard.init(save_every="4 steps")
data = torch.utils.data.TensorDataset(torch.randn(26, 3), torch.randn(26, 1))
model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
average = {"weights": [p.detach().clone() for p in model.parameters()]}
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
run.track(model=model, optimizer=optimizer, average=average)
loader = run.loader(data, global_batch_size=6, micro_batch_size=1)


@contextlib.contextmanager
def averaged() -> Iterator[None]:
    """Put the average in the weights' place."""
    raw = [p.detach().clone() for p in model.parameters()]
    try:
        for p, mean in zip(model.parameters(), average["weights"], strict=True):
            p.data.copy_(mean)
        yield
    finally:
        for p, value in zip(model.parameters(), raw, strict=True):
            p.data.copy_(value)


def be_told() -> None:
    """Be told to end: by the cloud, or because the money is spent."""
    if os.environ.get("BY") == "budget":
        run._job.watch.request(StopRequest(reason=EndReason.BUDGET, message="no money"))
    else:
        os.kill(os.getpid(), signal.SIGTERM)


def evaluate(done: int) -> None:
    """Read some batches; be told to end in the midst of them."""
    for number in run.evaluate(range(4)):
        if number == 1 and os.environ.get("HURT") == str(done):
            if run.rank == run.world_size - 1:
                be_told()
            while run._job.watch.agreed is None:
                signal.sigtimedwait([], 0.01)
    print("evaluated", done, flush=True)


done = run.restore(loader, total=14)
print("done", done, flush=True)
while (step := run.begin_step()) is not None:
    for x, y in step:
        step.backward(torch.nn.functional.mse_loss(model(x), y))
    optimizer.step()
    optimizer.zero_grad()
    for mean, p in zip(average["weights"], model.parameters(), strict=True):
        mean.mul_(0.5).add_(p.detach(), alpha=0.5)
    run.end_step()
    if (step.number + 1) % 3 == 0:
        with averaged():
            evaluate(step.number + 1)
run.finish()
state = b"".join(p.detach().numpy().tobytes() for p in (*model.parameters(), *average["weights"]))
print("digest", hashlib.sha256(state).hexdigest())
