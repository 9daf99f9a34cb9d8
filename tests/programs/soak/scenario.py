"""What one run of the soak is: a training, and the lives and deaths that it goes through."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Any


class Kind(str, Enum):
    """How a life is ended from outside, or by the script itself."""

    NOTICE = "notice"
    TERM_ONE = "SIGTERM to one rank"
    TERM_ALL = "SIGTERM to all ranks"
    TERM_REPEATED = "SIGTERM to all ranks, again and again"
    TERM_THEN_KILL = "SIGTERM, then kill -9"
    INT_ALL = "Ctrl-C"
    KILL_ONE = "kill -9 of one rank"
    KILL_ALL = "kill -9 of all ranks"
    FREEZE = "one rank frozen"
    STOP = "stop request"
    RAISE = "exception in the script"


_WEIGHTS = {kind: 1.0 for kind in Kind} | {Kind.KILL_ONE: 2.0, Kind.FREEZE: 0.3}


@dataclass(frozen=True, kw_only=True)
class Training:
    """What the script is asked to train."""

    seed: int
    wrap: str
    exact: str | None
    batch_norm: bool
    dropout: bool
    workers: int
    samples: int
    global_batch: int
    micro_batch: int
    drop_last: bool
    steps: int
    optimizer: str
    clip: bool
    save_every: str
    reseed: bool
    pace_s: float

    def asked(self, **more: Any) -> dict[str, Any]:
        """Return it as the script reads it."""
        return asdict(self) | more


@dataclass(frozen=True, kw_only=True)
class Life:
    """One attempt, and how it is disturbed; the last one of a run is not."""

    world: int
    kind: Kind | None = None
    victim: int = 0
    after_steps: int = 0
    """Steps that the victim begins first; -1: somewhere while the script sets up."""
    delay_s: float = 0.0
    pause_s: float = 0.0
    """Between two signals of one life."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """All that a seed decides. (Where in a step a signal lands is the machine's affair.)"""

    seed: int
    training: Training
    lives: tuple[Life, ...]

    @property
    def one_world(self) -> bool:
        """True if every life has as many ranks."""
        return len({life.world for life in self.lives}) == 1

    @property
    def bitwise(self) -> bool:
        """True if the end is promised to be that of an undisturbed run to the last bit."""
        return self.one_world or self.training.exact == "bitwise"

    @property
    def calm_world(self) -> int:
        """The ranks of the undisturbed run that it is compared with."""
        return self.lives[0].world if self.one_world else 1


def scenario(seed: int) -> Scenario:
    """Return the run of a seed."""
    chance = random.Random(seed)
    changes = chance.random() < 0.5
    world = chance.randint(1, 4)
    worlds = [chance.randint(1, 4) if changes else world for _ in range(chance.randint(2, 4))]
    lives = [_life(chance, each) for each in worlds[:-1]]
    training = _training(chance)
    if set(worlds) != {1} or training.workers:  # only then the script's own generators suffice
        training = replace(training, reseed=True)
    return Scenario(seed=seed, training=training, lives=(*lives, Life(world=worlds[-1])))


def _life(chance: random.Random, world: int) -> Life:
    kind = chance.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0]
    setting_up = chance.random() < 0.1 and kind not in (Kind.RAISE, Kind.FREEZE)
    return Life(
        world=world,
        kind=kind,
        victim=chance.randrange(world),
        after_steps=-1 if setting_up else chance.randint(0, 6),
        delay_s=chance.random() * (0.6 if setting_up else 0.03),
        pause_s=chance.choice((0.0, 0.01, 0.1)),
    )


def _training(chance: random.Random) -> Training:
    wrap = chance.choice(("plain", "ddp", "fsdp"))
    exact = "bitwise" if wrap != "fsdp" and chance.random() < 0.3 else None
    batch_norm = exact is None and chance.random() < 0.4
    micro_batch = chance.randint(3 if batch_norm else 1, 5)
    of_whole_batches = batch_norm or chance.random() < 0.5  # BatchNorm wants more than one sample
    cut = 0 if of_whole_batches else chance.randrange(micro_batch)
    return Training(
        seed=chance.randrange(1000),
        wrap=wrap,
        exact=exact,
        batch_norm=batch_norm,
        dropout=chance.random() < 0.6,
        workers=chance.choice((0, 0, 0, 1, 2)),
        samples=chance.randint(30, 90),
        global_batch=micro_batch * chance.randint(2, 6) - cut,
        micro_batch=micro_batch,
        drop_last=of_whole_batches,
        steps=chance.randint(8, 20),
        optimizer=chance.choice(("adamw", "sgd")),
        clip=chance.random() < 0.5,
        save_every=chance.choice(("1 steps", "3 steps", "100 steps", "0.05s", "auto")),
        reseed=exact is not None or chance.random() < 0.85,
        pace_s=chance.choice((0.0, 0.01, 0.03)),
    )
