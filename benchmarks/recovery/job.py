"""What both contestants of `benchmarks.recovery` train; `--plain` without spotguard.

The plain one loads and saves as SkyPilot's guide for managed jobs teaches: the newest file of a
shared folder, or an object in S3, every few steps. It is more careful than the guide: a file is
whole or not there.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import socket
import time
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable

BATCH = 32
_LIFE = f"{time.time_ns()}"


def trace(target: str, step: int) -> None:
    """Append a line on a finished step to a file, or send it to `tcp:HOST:PORT`."""
    line = {"at": time.time(), "step": step, "life": _LIFE, "node": os.uname().nodename}
    text = json.dumps(line) + "\n"
    kind, _, address = target.partition(":")
    if kind == "tcp":
        host, _, port = address.partition(":")
        with socket.create_connection((host, int(port)), timeout=10.0) as there:
            there.sendall(text.encode())
    else:
        with Path(target).open("a") as file:
            file.write(text)


class Kept:
    """The one checkpoint of the plain job, as a file or as an object of `s3://BUCKET/KEY`."""

    def __init__(self, place: str) -> None:
        self._path = Path(place)
        self._object = place.removeprefix("s3://").split("/", 1) if "://" in place else None

    def load(self) -> dict[str, Any] | None:
        """Return what was saved; None before the first time."""
        if self._object is None:
            return dict(torch.load(self._path)) if self._path.exists() else None
        bucket, key = self._object
        try:
            body = _s3().get_object(Bucket=bucket, Key=key)["Body"].read()
        except _s3().exceptions.NoSuchKey:
            return None
        return dict(torch.load(io.BytesIO(body)))

    def save(self, state: dict[str, Any]) -> None:
        """Keep it instead of the one before."""
        if self._object is None:
            torch.save(state, self._path.with_suffix(".new"))
            self._path.with_suffix(".new").replace(self._path)
            return
        bucket, key = self._object
        buffer = io.BytesIO()
        torch.save(state, buffer)
        _s3().put_object(Bucket=bucket, Key=key, Body=buffer.getvalue())


@cache
def _s3() -> Any:
    import boto3

    return boto3.client("s3")


def model_and_data() -> tuple[nn.Module, torch.optim.Optimizer, torch.utils.data.TensorDataset]:
    """Return the same small model and samples each time."""
    torch.manual_seed(0)
    x = torch.randn(4096, 16)
    model = nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    return model, optimizer, torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))


def ours(steps: int, done: Callable[[int], None]) -> None:
    """Train under spotguard, which restores and saves by itself."""
    import spotguard.runtime as spotguard

    run = spotguard.init(seed=0)
    model, optimizer, data = model_and_data()
    run.track(model=model, optimizer=optimizer)
    loader = run.loader(data, global_batch_size=BATCH, micro_batch_size=BATCH)
    for step in run.steps(loader, total=steps):
        for x, y in step:
            step.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        done(step.number + 1)


def plain(steps: int, done: Callable[[int], None], checkpoint: str, save_every: int) -> None:
    """Train with `torch.save` and `torch.load`."""
    model, optimizer, data = model_and_data()
    finished, kept = 0, Kept(checkpoint)
    if state := kept.load():
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        finished = state["step"]
    while finished < steps:
        begin = finished * BATCH % len(data)
        x, y = data[begin : begin + BATCH]
        loss = nn.functional.mse_loss(model(x), y)
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        finished += 1
        done(finished)
        if finished % save_every == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            kept.save({**state, "step": finished})


def main() -> None:
    """Train, and leave a word of each step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("trace", help="a file, or tcp:HOST:PORT")
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--pause", type=float, default=0.25, help="seconds that a step takes")
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--plain", metavar="CHECKPOINT")
    given = parser.parse_args()

    def done(step: int) -> None:
        time.sleep(given.pause)
        trace(given.trace, step)

    train = (
        ours
        if given.plain is None
        else partial(plain, checkpoint=given.plain, save_every=given.save_every)
    )
    train(given.steps, done)


if __name__ == "__main__":
    main()
