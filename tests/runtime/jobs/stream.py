"""A small training on streams of data; HURT is `STEP:RANK:SIGNAL`, in the midst of that step.

OPEN is `rank` (each rank has a stream of its own) or `shard` (one for each micro-batch). What is
trained on is printed at the end of each step.
"""

import hashlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import spotguard.runtime as spotguard

STEP, RANK, SIGNAL = os.environ.get("HURT", "::").split(":")


class Stream(torch.utils.data.IterableDataset[Any]):
    def __init__(self, shard: int) -> None:
        self.shard = shard
        self.epoch = 0
        self.at = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        order = list(range(11))
        random.Random(self.epoch).shuffle(order)
        while self.at < 11:
            self.at += 1
            number = self.shard * 10_000 + self.epoch * 100 + order[self.at - 1]
            yield number, torch.linspace(number, number + 1, 8).sin() + 0.1 * torch.rand(8)
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def main() -> None:
    run = spotguard.init(seed=3, save_every="4 steps")
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Dropout(0.2), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    by_shard = os.environ.get("OPEN") == "shard"
    source = (lambda shard, shards: Stream(shard)) if by_shard else Stream(run.rank)
    loader = run.loader(source, global_batch_size=12, micro_batch_size=3)
    for step in run.steps(loader, total=24):
        numbers: list[int] = []
        for number, x in step:
            numbers += number.tolist()
            step.backward(model(x).square().mean())
            if (str(step.number), str(run.rank)) == (STEP, RANK):
                os.kill(os.getpid(), getattr(signal, SIGNAL))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        sys.stdout.write(f"read {json.dumps([step.number, numbers])}\n")
        sys.stdout.flush()
        told = STEP and step.number >= int(STEP)  # none finishes before it has heard
        time.sleep(0.1 if told else float(os.environ.get("PACE_S", "0.002")))
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    sys.stdout.write(f"weights {digest.hexdigest()}\n")


if __name__ == "__main__":
    main()
