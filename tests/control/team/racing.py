"""Controllers that race for one team's money, in memory: their clocks, crashes, pauses, nodes.

What is true of the nodes is kept beside what the books say, so that the books can be proven wrong.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from spotguard.control.journal.team.books import period_of
from spotguard.control.journal.team.budget import TeamBudget, Word
from spotguard.spec.model import TeamCap
from spotguard.testing.clock import FakeClock
from spotguard.testing.stores import MemoryStore, SimulatedCrash

if TYPE_CHECKING:
    from collections.abc import Callable

    from spotguard.storage.base import Content, ObjectInfo

ROUNDING_USD = 1e-3
NOON = 1_700_000_000.0


class StampedStore(MemoryStore):
    """A store that says by its own clock when an object was written, and lets others act first."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__()
        self.clock = clock
        self.before: Callable[[], None] = lambda: None
        """Called before each operation: what else happens then."""
        self.refused = 0
        """Writes that another one was before."""
        self._written: dict[str, float] = {}

    def put(
        self, key: str, data: Content, *, if_absent: bool = False, if_match: str | None = None
    ) -> str:
        """Store it and stamp it."""
        self.before()
        self.refused += 1
        etag = super().put(key, data, if_absent=if_absent, if_match=if_match)
        self.refused -= 1
        self._written[key] = self.clock.now()
        return etag

    def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        """Return it, after what others do."""
        self.before()
        return super().get(key, max_bytes=max_bytes)

    def head(self, key: str) -> ObjectInfo | None:
        """Return what is known of it, with the stamp."""
        self.before()
        found = super().head(key)
        return None if found is None else replace(found, modified_at=self._written[key])


@dataclass
class Nodes:
    """What one run has, in truth."""

    living: bool = False
    spent_usd: float = 0.0
    most_usd: float = 0.0
    """Beyond what is spent."""
    until_at: float | None = None


class Racer:
    """One run and its controller, whose clocks are its own."""

    def __init__(self, race: Race, name: str, *, budget_usd: float, ahead_s: float) -> None:
        self.race = race
        self.name = name
        self.budget_usd = budget_usd
        self.clock = FakeClock(race.clock.now() + ahead_s, monotonic=race.dice.uniform(1, 1e6))
        self.nodes = Nodes(most_usd=budget_usd)
        self.phase = "wants"
        self.busy = False
        self.starts()

    def starts(self) -> None:
        """Begin as a new process, which remembers nothing but what its journal says."""
        self.dead = False
        self.team = TeamBudget(self.race.store, self.clock, self.name, cap=self.race.cap)

    @property
    def word(self) -> Word:
        """What it says of itself."""
        return Word(
            spent=self.nodes.spent_usd,
            most=self.nodes.most_usd,
            living=self.nodes.living,
            until_at=self.nodes.until_at,
        )

    def step(self) -> None:
        """Do the next thing that a controller does; it may die at any store operation of that."""
        if self.busy or self.dead:
            return
        self.busy = True
        try:
            {"wants": self._ask, "promised": self._launch, "trains": self._look}[self.phase]()
        except SimulatedCrash:
            self.dead = True
        finally:
            self.busy = False

    def _ask(self) -> None:
        if not self.team.ask(self.word):
            self.phase = "promised"

    def _launch(self) -> None:
        nodes = self.nodes
        until_at = self.clock.now() + nodes.most_usd / self.race.rate_usd_per_s
        if self.team.launch(replace(self.word, until_at=until_at)):
            self.phase = "wants"
            return
        nodes.living, nodes.until_at, self.phase = True, until_at, "trains"
        self.race.check()

    def _look(self) -> None:
        if self.nodes.living and self.race.dice.random() < 0.7:
            self.team.tell(self.word)
            return
        self.nodes.living = False
        self.nodes.until_at = None
        self.phase = "wants"
        if self.nodes.most_usd <= 0 or self.race.dice.random() < 0.5:
            self.team.release(self.nodes.spent_usd)
            self.nodes.most_usd = self.budget_usd  # resumed, with as much again
        else:
            self.team.tell(self.word)


class Race:
    """The store, the true time, and all racers."""

    def __init__(
        self, seed: int, *, cap_usd: float, budgets_usd: list[float], per: str = "month"
    ) -> None:
        random.seed(seed)  # for what the code under test draws
        self.dice = random.Random(seed)
        self.cap = TeamCap(cap_usd, per)
        self.rate_usd_per_s = 0.01
        self.clock = FakeClock(NOON)
        self.store = StampedStore(self.clock)
        self.spent_usd: dict[str, float] = {}
        """In truth, by period of the store's clock."""
        self.crashes = self.pauses = 0.0
        """How likely each is before an operation of the store."""
        self.longest_s = 400.0
        self.acting: list[Racer] = []
        self.between = 0
        """How often another one acted in the middle of what one did."""
        self.racers = [
            Racer(self, f"run-{n}", budget_usd=usd, ahead_s=self.dice.uniform(-8e4, 8e4))
            for n, usd in enumerate(budgets_usd)
        ]
        self.store.before = self._something_happens

    def turn(self, racer: Racer) -> None:
        """Let one act; others act in between, anywhere."""
        if racer.busy or racer.dead:
            return
        self.between += bool(self.acting)
        self.acting.append(racer)
        try:
            racer.step()
        finally:
            self.acting.pop()

    def advance(self, seconds: float) -> None:
        """Let time pass for all, and nodes cost money."""
        for racer in self.racers:
            nodes = racer.nodes
            if nodes.living:
                self._spend(nodes, seconds)
            racer.clock.advance(seconds)
        self.clock.advance(seconds)
        self.check()

    def check(self) -> None:
        """Check that what was spent in the present period, and may yet be, is within the cap."""
        spent = self.spent_usd.get(self.period, 0.0)
        may = sum(racer.nodes.most_usd for racer in self.racers if racer.nodes.living)
        assert spent + may <= self.cap.usd + ROUNDING_USD, (self.period, spent, may)

    @property
    def period(self) -> str:
        """The present one, by the store's clock."""
        return period_of(self.clock.now(), self.cap.per)

    def _spend(self, nodes: Nodes, seconds: float) -> None:
        """Count what nodes cost from now on, in the periods into which it falls."""
        end, at = self.clock.now() + seconds, self.clock.now()
        while at < end and nodes.most_usd > 0:
            period = period_of(at, self.cap.per)
            until = min(end, at + 3600 - at % 3600)  # periods begin at a full hour
            usd = min(nodes.most_usd, (until - at) * self.rate_usd_per_s)
            self.spent_usd[period] = self.spent_usd.get(period, 0.0) + usd
            nodes.spent_usd += usd
            nodes.most_usd -= usd
            at = until
        if nodes.most_usd <= 1e-9:  # its guard takes them down
            nodes.living = False

    def _something_happens(self) -> None:
        if not self.acting or len(self.acting) > 3:
            return
        if self.dice.random() < self.pauses:
            self.advance(self.dice.uniform(0, self.longest_s))
        if self.dice.random() < 0.4:
            self.turn(self.dice.choice(self.racers))
        if self.dice.random() < self.crashes:
            raise SimulatedCrash
