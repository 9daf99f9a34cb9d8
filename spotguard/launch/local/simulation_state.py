"""What outlives a cluster: when the run's cloud began, its seed, what it has done already."""

from __future__ import annotations

import itertools
import random
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spotguard.launch.local.files import create_json, locked, read_json, write_json
from spotguard.launch.local.interruptions import How, Interruption

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from spotguard.launch.local.options import LocalOptions
    from spotguard.shared.units import Clock

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """One random interruption."""

    at_s: float
    """Seconds after the run's first launch."""
    how: How
    pick: float
    """In 0..1: which of the nodes that run then."""


def arrivals(seed: int, mtbf_s: float) -> Iterator[Arrival]:
    """Yield the random interruptions of a run, in time, without end.

    They depend on the seed alone, and on the run's time: those that come while no node runs hit
    nothing. So no position need be kept, whatever dies.
    """
    dice = random.Random(seed)
    at_s = 0.0
    while True:
        at_s += dice.expovariate(1.0 / mtbf_s)
        how = dice.choice((How.NOTICE, How.TERM, How.KILL))
        yield Arrival(at_s=at_s, how=how, pick=dice.random())


@dataclass(frozen=True, kw_only=True)
class Scripted:
    """A scripted interruption and the name under which the world remembers it."""

    key: str
    interruption: Interruption


def number_script(script: tuple[Interruption, ...]) -> tuple[Scripted, ...]:
    """Return the script with a key for each entry; equal entries are told apart by a count."""
    seen: dict[str, int] = {}
    numbered = []
    for interruption in script:
        text = str(interruption)
        seen[text] = seen.get(text, 0) + 1
        numbered.append(Scripted(key=f"{text}#{seen[text]}", interruption=interruption))
    return tuple(numbered)


class World:
    """The run's cloud as successive clusters share it. Safe between processes."""

    def __init__(self, folder: Path, options: LocalOptions, clock: Clock) -> None:
        self._path = folder / "world.json"
        self._lock = folder / "world.lock"
        self._options = options
        self._clock = clock
        self.trace = options.read_trace()
        self._started_at: float | None = None
        self.script = number_script(options.script())

    def begin(self) -> None:
        """Let the run's time start now, unless it has."""
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        seed = self._options.seed
        body = {
            "schema": SCHEMA,
            "seed": secrets.randbits(31) if seed is None else seed,
            "started_at": self._clock.now(),
            "fired": [],
            "capacity": None,
        }
        create_json(self._path, body)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the run's first launch; 0 before it."""
        if self._started_at is None:  # once there it never changes
            body = read_json(self._path)
            self._started_at = None if body is None else float(body["started_at"])
        if self._started_at is None:
            return 0.0
        return max(0.0, self._clock.now() - self._started_at)

    @property
    def seed(self) -> int:
        """The seed of the random interruptions; only after `begin`."""
        return int(self._read()["seed"])

    def pending(self) -> list[Scripted]:
        """Return the scripted interruptions that have not fired."""
        fired = set(self._read()["fired"])
        return [scripted for scripted in self.script if scripted.key not in fired]

    def claim(self, scripted: Scripted) -> bool:
        """Note, durably, that it fires now; return False if it had fired before.

        Noted before it is done: after a crash in between it is left out rather than done twice.
        """
        with locked(self._lock):
            body = self._read()
            if scripted.key in body["fired"]:
                return False
            body["fired"].append(scripted.key)
            if scripted.interruption.capacity is not None:
                body["capacity"] = scripted.interruption.capacity
            write_json(self._path, body)
            return True

    def claim_due_capacity(self) -> None:
        """Let changes of capacity that were due by time happen, though no cluster was there."""
        elapsed_s = self.elapsed_s
        timed = [s for s in self.pending() if s.interruption.capacity is not None]
        due = [s for s in timed if s.interruption.is_due(step=-1, elapsed_s=elapsed_s)]
        for scripted in sorted(due, key=lambda s: s.interruption.at_s or 0.0):
            self.claim(scripted)

    def capacity(self) -> int | None:
        """Return how many spot nodes can be had now; None if there is no limit."""
        body = read_json(self._path)
        limits = [] if body is None or body["capacity"] is None else [int(body["capacity"])]
        if self.trace is not None:
            limits.append(self.trace.capacity_at(self.elapsed_s, self._options.speed_up))
        return min(limits, default=None)

    def spot_usd_per_h(self) -> float | None:
        """Return what a spot node costs now."""
        if self._options.price_usd_per_h is not None or self.trace is None:
            return self._options.price_usd_per_h
        return self.trace.price_at(self.elapsed_s, self._options.speed_up)

    def arrivals_from(self, elapsed_s: float) -> Iterator[Arrival]:
        """Yield the random interruptions later than `elapsed_s`; none without a mean time."""
        if self._options.mtbf_s is None:
            return iter(())
        every = arrivals(self.seed, self._options.mtbf_s)
        return itertools.dropwhile(lambda arrival: arrival.at_s <= elapsed_s, every)

    def _read(self) -> dict[str, Any]:
        body = read_json(self._path)
        assert body is not None, "begin() comes first"
        return body
