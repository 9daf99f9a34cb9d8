"""A small training whose every kind of state matters, and that can be hurt at any point.

HURT is `WHEN:WHERE:HOW`: at step WHEN (from 0), `begin`, `batch` (between two micro-batches),
`changing` (weights changed, schedule not) or `end` of the step; or WHEN is `put` and WHERE counts
the writes to the store. HOW is a signal's name, `raise`, `full` or `stop`. SLOW_EVENTS are the
seconds that the store takes for each event.
"""

import hashlib
import os
import random
import resource
import signal
import sys
import time
from typing import Any

import torch
from torch import nn

import spotguard.runtime as spotguard
from spotguard.storage.filesystem.store import FileStore

WHEN, WHERE, HOW = os.environ.get("HURT", "::").split(":")
STEPS = int(os.environ.get("STEPS", "24"))
WIDTH = int(os.environ.get("WIDTH", "16"))
told = False


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def hurt(step: int | str, where: str) -> None:
    if (str(step), where) != (WHEN, WHERE):
        return
    say(f"hurt at {step}")
    if HOW == "raise":
        raise ValueError("the script's own mistake")
    if HOW == "full":
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))
    elif HOW == "hang":
        time.sleep(600)
    else:
        global told
        told = True
        for name in HOW.split("+"):
            os.kill(os.getpid(), getattr(signal, name))


def watched_put(inner: Any) -> Any:
    count = 0

    def put(self: Any, key: str, *args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        hurt("put", str(count))
        return inner(self, key, *args, **kwargs)

    return put


def slow_for_events(inner: Any, seconds: float) -> Any:
    def put(self: Any, key: str, *args: Any, **kwargs: Any) -> Any:
        if "/events/" in key:
            time.sleep(seconds)
        return inner(self, key, *args, **kwargs)

    return put


class Noisy(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        if WHEN == "sample" and int(WHERE) == index:
            raise ValueError("a broken sample")
        x = torch.linspace(index, index + 1, 8).sin() + 0.1 * torch.rand(8) + 0.1 * random.random()
        return x, torch.tensor([float(index % 7)])


def main() -> None:
    if WHEN == "put":
        setattr(FileStore, "put", watched_put(FileStore.put))  # noqa: B010 - for mypy
    if slow := os.environ.get("SLOW_EVENTS"):
        setattr(FileStore, "put", slow_for_events(FileStore.put, float(slow)))  # noqa: B010
    run = spotguard.init(
        seed=3,
        save_every=os.environ.get("EVERY", "5 steps"),
        reseed="OWN_RANDOMNESS" not in os.environ,
    )
    torch.manual_seed(3)
    random.seed(3)
    model: nn.Module = nn.Sequential(
        nn.Linear(8, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Dropout(0.3), nn.Linear(WIDTH, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=STEPS)
    noise = random.Random(5)
    seen = {"samples": 0, "worst": 0.0}
    if os.environ.get("DDP"):
        model = nn.parallel.DistributedDataParallel(model)
    run.track(model=model, optimizer=optimizer, scheduler=scheduler, noise=noise, seen=seen)
    loader = run.loader(
        Noisy(),
        global_batch_size=12,
        micro_batch_size=4,
        num_workers=int(os.environ.get("WORKERS", "0")),
    )
    for step in run.steps(loader, total=STEPS):
        if HOW == "full" and str(step.number) == WHEN:
            run._job.keeper.saver.wait(30.0)  # the disk is full for what comes, not for this
        hurt(step.number, "begin")
        for x, y in step:
            seen["samples"] += len(x)
            x = x + (noise.gauss(0, 0.1) if run.world_size == 1 else 0)
            loss = nn.functional.mse_loss(model(x), y)
            seen["worst"] = max(seen["worst"], loss.item() if run.world_size == 1 else 0)
            step.backward(loss)
            hurt(step.number, "batch")
        optimizer.step()
        hurt(step.number, "changing")
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        hurt(step.number, "end")
        # Who was told to stop must not finish before it has heard.
        time.sleep(0.1 if told else float(os.environ.get("PACE_S", "0")))
    if run.rank == 0:
        weights = hashlib.sha256()
        for parameter in model.parameters():
            weights.update(parameter.detach().contiguous().numpy().tobytes())
        state = hashlib.sha256(weights.digest())
        for buffer in model.buffers():
            state.update(buffer.contiguous().numpy().tobytes())
        if run.world_size == 1:
            state.update(repr((noise.getstate(), seen, scheduler.get_last_lr())).encode())
        say(f"weights {weights.hexdigest()}")
        say(f"digest {state.hexdigest()}")


if __name__ == "__main__":
    main()
