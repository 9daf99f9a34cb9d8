"""Two hundred runs, each interrupted at random again and again, in one process and in seconds.

The real loader, saver, lineage and tracked objects train a small model over a store in memory.
Ranks are played one after the other; each attempt may have another number of them.
"""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from spotguard.checkpoint.lineage import read_claim
from spotguard.errors import Fenced, StoreError
from spotguard.runtime.data.loader import ElasticLoader
from spotguard.testing import FaultyStore, MemoryStore
from spotguard.testing.stores import SimulatedCrash
from tests.runtime.harness.lab import Rank, same

SAMPLES, GLOBAL, MICRO, EPOCHS = 13, 5, 2, 6
STEPS = 3 * EPOCHS
DATA = torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(1))


class Script:
    """What a training script makes and tracks, and one optimizer step of it."""

    def __init__(self, world: int) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.2), nn.Linear(4, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.05, STEPS)
        self.seen: dict[str, Any] = {"samples": 0}
        self.loaders = [
            ElasticLoader(
                range(SAMPLES), global_batch_size=GLOBAL, micro_batch_size=MICRO, shuffle=True,
                drop_last=False, seed=5, reseed=True, collate_fn=list, num_workers=0, options={},
                rank=rank, world_size=world,
            )
            for rank in range(world)
        ]  # fmt: skip

    @property
    def tracked(self) -> dict[str, Any]:
        """Return what `run.track` would be given."""
        return {
            "model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler,
            "seen": self.seen,
        }  # fmt: skip

    def step(self, number: int) -> list[int]:
        """Take a step; return the samples that it trained on."""
        samples: list[int] = []
        parts: list[list[torch.Tensor]] = []
        for loader in self.loaders:
            for share, batch in loader.read(number, number + 1):
                loader.seed_training(share)
                (self.model(DATA[batch]).square().mean() * share.weight).backward()
                samples += batch if share.weight else []
            parts.append([p.grad for p in self.model.parameters() if p.grad is not None])
            self.optimizer.zero_grad(set_to_none=True)
        for parameter, *grads in zip(self.model.parameters(), *parts, strict=True):
            parameter.grad = torch.stack(grads).sum(0)  # what the ranks' all-reduce does
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.seen["samples"] += len(samples)
        return samples


DEATHS = ["anywhere", "kill", "notice", "bad store"]


@dataclass
class Life:
    """One attempt: it restores, trains and saves until it dies or all is done."""

    inner: MemoryStore
    attempt: int
    world: int
    interval: int
    rng: random.Random
    trace: dict[int, list[int]]
    finished: int = 0
    told: bool = False
    """True if it was given the time to save when it was told to stop."""
    disturbed: bool = False
    """True if it died with a save in flight."""

    def __post_init__(self) -> None:
        self.store = FaultyStore(self.inner)
        self.rank = Rank(self.store, attempt=self.attempt, keep_last=self.rng.choice([2, 2, 3]))
        self.script = Script(self.world)

    def live(self, dies: str, at: int) -> None:
        """Train to the end, or until it `dies`, at step `at` or at a change of the store."""
        if dies == "anywhere":
            self.store.crash_at(self.rng.randint(1, 12), after=self.rng.random() < 0.5)
        if dies == "bad store":
            self.store.fail("put", nth=self.rng.randint(1, 8), times=self.rng.randint(1, 3))
        try:
            self._start()
            self._train(STEPS if dies in ("not", "anywhere") else min(at, STEPS))
            if dies == "notice" or self.finished == STEPS:
                self.rank.saver.wait()
                self.rank.now(self.finished, **self.script.tracked)
                self.told = True
        except StoreError:
            self.disturbed = True  # no save is possible any more: as good as killed
        except SimulatedCrash:
            self.disturbed = True
        self._end_thread()

    def _start(self) -> None:
        found = self.rank.start(**self.script.tracked)
        self.finished = found.manifest.step if found.manifest else 0

    def _train(self, until: int) -> None:
        begun = self.finished
        while self.finished < until:
            if self.finished > begun and (self.finished - begun) % self.interval == 0:
                self.rank.later(self.finished, **self.script.tracked)
                if self.rng.random() < 0.7:
                    self.rank.saver.wait()
            self.store.head("alive")  # a process that died in its background thread is dead
            self.trace[self.finished] = self.script.step(self.finished)
            self.finished += 1

    def _end_thread(self) -> None:
        """Let a save in flight die at its next write, as its process does."""
        thread = self.rank.saver._thread
        if thread is not None:
            self.disturbed |= thread.is_alive()
            self.store.crash_at(self.store.mutations + 1)
            thread.join(10)
            assert not thread.is_alive()

    @property
    def committed(self) -> int:
        """Return the newest step that it knows to be saved."""
        return max((saved.step for saved in self.rank.saved), default=0)

    @property
    def most_lost(self) -> int:
        """Return how many steps its end may cost: an interval, and what its failed saves held."""
        return self.interval * (1 + self.disturbed + len(self.rank.failed))


def state(script: Script) -> dict[str, Any]:
    """Return everything that must be the same in the end."""
    return {
        "weights": dict(script.model.state_dict()),
        "moments": script.optimizer.state_dict(),
        "rates": script.scheduler.get_last_lr(),
        "seen": dict(script.seen),
    }


@cache
def undisturbed() -> tuple[dict[str, Any], dict[int, list[int]]]:
    """Return the final state and the samples of each step when nothing happens."""
    life = Life(MemoryStore(), 1, 1, 4, random.Random(0), {})
    life.live("not", STEPS)
    return state(life.script), life.trace


def run_through(seed: int) -> int:
    """Live one run through its interruptions, checking each; return how many there were."""
    rng = random.Random(seed)
    inner, trace, alone = MemoryStore(), dict[int, list[int]](), seed % 2 == 0
    interval, interruptions = rng.randint(1, 5), rng.randint(1, 7)
    last: Life | None = None
    sure = attempt = 0
    while last is None or last.finished < STEPS or not last.told:
        attempt += 1
        world = 1 if alone else rng.randint(1, 4)
        dies = rng.choice(DEATHS) if attempt <= interruptions else "not"
        life = Life(inner, attempt, world, interval, rng, trace)
        life.live(dies, (last.finished if last else 0) + rng.randint(0, 7))
        claim = read_claim(inner, attempt)
        if claim is None:
            continue  # it died before it was anybody
        begun = claim.resumed_step
        assert begun >= sure, f"seed {seed}: attempt {attempt} lost a committed save"
        if last is not None:
            lost = last.finished - begun
            assert lost <= (0 if last.told else last.most_lost), f"seed {seed}, attempt {attempt}"
            fence(inner, last)
        sure = max(sure, begun, life.committed)
        life.finished = max(life.finished, begun)
        last = life
    check_end(seed, last, bitwise=alone)
    return attempt - 1


def fence(inner: MemoryStore, zombie: Life) -> None:
    """Let an attempt that was thought dead save once more, after the next one has claimed."""
    undead = Rank(inner, attempt=zombie.attempt)
    with pytest.raises(Fenced):
        undead.now(STEPS + 1, **zombie.script.tracked)


def check_end(seed: int, last: Life, *, bitwise: bool) -> None:
    """Compare the end of a run with that of the undisturbed one."""
    expected, samples = undisturbed()
    assert last.trace == samples, f"seed {seed}: a step trained on other samples"
    for epoch in range(EPOCHS):
        read = [i for step in range(3 * epoch, 3 * epoch + 3) for i in last.trace[step]]
        assert sorted(read) == list(range(SAMPLES)), f"seed {seed}: epoch {epoch}"
    found = state(last.script)
    assert found["seen"] == {"samples": SAMPLES * EPOCHS}
    assert found["rates"] == expected["rates"]
    if bitwise:
        assert same(found, expected), f"seed {seed}"
    for name, weight in expected["weights"].items():
        torch.testing.assert_close(found["weights"][name], weight, rtol=1e-4, atol=1e-5)


@pytest.mark.e2e
@pytest.mark.same_everywhere
@pytest.mark.parametrize("block", range(8))
def test_random_interruptions_never_end_wrong(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """200 seeds: killed anywhere, in saves too, told to stop, on a failing store, fenced, resized.

    Each interruption costs at most one save interval (and the save in flight); what was committed
    is never lost; every epoch reads each sample once; and the end is that of the undisturbed run,
    bit by bit if the number of ranks was always one, else within rounding.
    """
    show = threading.excepthook

    def hook(problem: Any) -> None:  # a save that dies with its process has nobody to tell
        if not issubclass(problem.exc_type, SimulatedCrash):
            show(problem)

    monkeypatch.setattr(threading, "excepthook", hook)
    interrupted = [run_through(seed) for seed in range(block * 25, block * 25 + 25)]

    assert sum(interrupted) >= 50
