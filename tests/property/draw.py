"""One draw of the property test: a script, its blows, and how it is written as one line.

    loops/plain store=bucket 2:term-all@stepped:0.41:0 3:kill-one@batch:0.20:1+503@shard 1

Each life is `RANKS:BLOW@MOMENT:PLACE:VICTIM+FAULT@MOMENT`. PLACE says which of the times that the
moment is expected to come, as a share of them. The last life is not struck.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from tests.property.child.blows import FAULTS
from tests.property.child.moments import MOMENTS, ONCE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.property.scripts import Script

KINDS = {
    "notice": 1.0,
    "term-one": 1.0,
    "term-all": 1.0,
    "term-repeated": 0.5,
    "term-then-kill": 0.5,
    "int-all": 0.4,
    "kill-one": 1.5,
    "kill-all": 1.0,
    "freeze": 0.2,
    "wake": 0.3,
    "stop": 0.5,
    "raise": 0.7,
}
"""What strikes, and how often; `wake`: a rank freezes, and wakes within the next attempt."""
_SAVES = ("1_steps", "3_steps", "3_steps", "100_steps", "0.05s", "auto")
_WORLDS = {1: 0.35, 2: 0.35, 3: 0.18, 4: 0.12}
NOT_BY_MISTAKE = {"set-up", "shard", "manifest", "committed", "after-loop"}
"""Where a script that raises is another matter: its own set-up, a thread of ours."""


@dataclass(frozen=True, kw_only=True)
class Life:
    """One attempt, and how it ends."""

    world: int
    kind: str = ""
    at: str = ""
    place: float = 0.0
    victim: int = 0
    fault: str = ""
    fault_at: str = ""

    def __str__(self) -> str:
        text = str(self.world)
        if self.kind:
            text += f":{self.kind}@{self.at}:{self.place:.2f}:{self.victim}"
        return text + (f"+{self.fault}@{self.fault_at}" if self.fault else "")


@dataclass(frozen=True, kw_only=True)
class Draw:
    """What a seed decides."""

    script: str
    lives: tuple[Life, ...]
    save: str = "3_steps"
    bucket: bool = False
    leave_at: float = 0.0
    """The share of the steps after which the script leaves its loop by `break`; 0: it does not."""
    number: int = field(default=0, compare=False)

    def __str__(self) -> str:
        words = [self.script, f"save={self.save}"]
        words += ["store=bucket"] * self.bucket
        words += [f"leave={self.leave_at:.2f}"] if self.leave_at else []
        return " ".join([*words, *map(str, self.lives)])

    @property
    def size(self) -> tuple[int, int, int]:
        """How large it is: what is smaller is easier to look at."""
        faults = sum(bool(life.fault) for life in self.lives)
        ranks = sum(life.world for life in self.lives)
        return len(self.lives), ranks, faults + self.bucket + bool(self.leave_at)


def parsed(line: str) -> Draw:
    """Return the draw that a line says."""
    script, *words = line.split()
    options = dict(word.split("=", 1) for word in words if "=" in word)
    lives = tuple(_life(word) for word in words if "=" not in word)
    return Draw(
        script=script,
        lives=lives,
        save=options.get("save", "3_steps"),
        bucket=options.get("store") == "bucket",
        leave_at=float(options.get("leave", 0)),
    )


def _life(word: str) -> Life:
    text, _, fault = word.partition("+")
    world, *blow = text.split(":")
    fault, _, fault_at = fault.partition("@")
    life = Life(world=int(world), fault=fault, fault_at=fault_at)
    if not blow:
        return life
    kind, _, at = blow[0].partition("@")
    place = float(blow[1]) if len(blow) > 1 else 0.0
    victim = int(blow[2]) if len(blow) > 2 else 0
    return replace(life, kind=kind, at=at, place=place, victim=victim)


def drawn(seed: int, number: int, scripts: Sequence[Script], again: int = 0) -> Draw:
    """Return draw `number` of a seed; `again`: those before it did not disturb anything.

    The scripts are gone through in random rounds, so that each comes as often as the others.
    """
    order = random.Random(f"{seed} round {number // len(scripts)}").sample(scripts, len(scripts))
    script = order[number % len(scripts)]
    chance = random.Random(f"{seed} {number} {again}")
    resizes = len(script.worlds) > 1 and script.elastic != "refused" and chance.random() < 0.45
    pick = _picker(chance, script)
    world = pick()
    worlds = [pick() if resizes else world for _ in range(chance.choice((2, 3, 3, 4)))]
    bucket = chance.random() < 0.35
    lives = [_drawn_life(chance, each, bucket, len(worlds) - 1) for each in worlds[:-1]]
    last = Life(world=worlds[-1])
    if bucket and chance.random() < 0.4:
        last = replace(last, fault=chance.choice(FAULTS), fault_at=_fault_moment(chance))
    leaves = script.can_be_left and chance.random() < 0.15
    return Draw(
        script=script.name,
        lives=(*lives, last),
        save=chance.choice(_SAVES),
        bucket=bucket,
        leave_at=chance.choice((0.5, 0.75)) if leaves else 0.0,
        number=number,
    )


def _picker(chance: random.Random, script: Script) -> Callable[[], int]:
    weights = [_WORLDS[world] for world in script.worlds]
    return lambda: chance.choices(script.worlds, weights)[0]


def _fault_moment(chance: random.Random) -> str:
    return chance.choice(("shard", "manifest", "step", "stepped", "restored", "set-up"))


def _drawn_life(chance: random.Random, world: int, bucket: bool, blows: int) -> Life:
    kind = chance.choices(list(KINDS), list(KINDS.values()))[0]
    moments = [m for m in MOMENTS if kind != "raise" or m not in NOT_BY_MISTAKE]
    weights = [0.4 if moment in ONCE or moment == "set-up" else 1.0 for moment in moments]
    faulty = bucket and chance.random() < 0.5
    return Life(
        world=world,
        kind=kind,
        at=chance.choices(moments, weights)[0],
        place=round(chance.random() * (0.95 if blows == 1 else 0.6), 2),
        victim=chance.randrange(world),
        fault=chance.choice(FAULTS) if faulty else "",
        fault_at=_fault_moment(chance) if faulty else "",
    )
