"""One run's way to its team's budget: the books in the store, changed by conditional writes.

A controller has money promised before it writes down a launch, and says that it launches just
before it does. Who dies in between is found out by those who wait: what it wrote does not change
for a while, by their own monotonic clocks. They take its promise back, and should it live after
all, what it says then fails. Once it has said so, its nodes may live, and nobody takes anything
back but its own controller, wherever that is then.

Periods turn by the store's clock, the only one that all controllers stake. Where a store does not
say when an object was written, their own clocks have to do, and the first that turns counts.
"""

from __future__ import annotations

import logging
import random
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from spotguard.control.journal.team.books import TeamBooks
from spotguard.control.journal.team.stored_books import Written, read_books, to_bytes
from spotguard.errors import AlreadyExists, StoreError
from spotguard.events import keys
from spotguard.events.untrusted import Refused

if TYPE_CHECKING:
    from collections.abc import Callable

    from spotguard.control.journal.team.books import Stake
    from spotguard.shared.units import Clock
    from spotguard.spec.model import TeamCap
    from spotguard.storage.base import ObjectStore

log = logging.getLogger(__name__)

BEAT_S = 60.0
"""How often a run without nodes shows that its controller lives."""
DEAD_S = 180.0
"""Who waits for money, or is about to launch, and wrote nothing for so long is dead."""
_TRIES = 40
_PAUSE_S = 0.05
_CLOCK_VALID_S = 3600.0
"""How long the store's clock is known after it was asked: quartz is wrong by less than 1 s then."""
_JUMP_S = 5.0


class StoreClock:
    """The store's time, asked by writing into it, and known from then on by the monotonic clock."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._anchor: tuple[float, float, float] | None = None
        """The store's time when it was asked, and what the own clocks said then."""
        self._silent = False
        """It does not say when an object was written."""

    def now(self, written_at: float | None) -> float | None:
        """Return the store's time; None if it has to be asked.

        `written_at` is when the store wrote what was just read: it is that late at least.
        """
        if self._silent:
            return self._clock.now()
        if self._anchor is None:
            return None
        theirs, monotonic, wall = self._anchor
        passed_s = self._clock.monotonic() - monotonic
        # A monotonic clock may stand still in a sleep, and a wall clock be set.
        jumped = abs(self._clock.now() - wall - passed_s) > _JUMP_S
        if jumped or passed_s > _CLOCK_VALID_S:
            return None
        return max(theirs + passed_s, written_at or 0.0)

    def ask(self, write: Callable[[], float | None]) -> None:
        """Learn it from `write`, which writes an object and returns when the store says it did."""
        theirs = write()
        if theirs is None:
            self._silent = True
        else:
            self._anchor = theirs, self._clock.monotonic(), self._clock.now()


@dataclass(frozen=True, kw_only=True)
class Word:
    """What a run says of itself; sums are in USD, over all its life."""

    spent: float
    """So far."""
    most: float | None
    """What it may still cost: what is left of its own budget; None without one."""
    living: bool
    """Nodes of it may live, also of a launch that is only written down."""
    launched: bool = False
    """Nodes of it may live, of a launch that was made."""
    until_at: float | None = None
    """By then they are gone even if every controller is dead; None: unknown."""


class TeamBudget:
    """The books of a store, for one run. Not thread-safe; methods block, and raise nothing."""

    def __init__(
        self,
        store: ObjectStore,
        clock: Clock,
        run_id: str,
        *,
        cap: TeamCap | None = None,
        priority: int = 0,
    ) -> None:
        """`store` is the root below which all runs lie; `cap` is what the run's settings say.

        The books' own word comes before that: it counts only where there are no books.
        """
        self._store = store
        self._clock = clock
        self._run_id = run_id
        self._cap = cap
        self._priority = priority
        self._time = StoreClock(clock)
        self._known = cap is not None
        """The runs of this store have a budget together, for all that this run has seen."""
        self.is_over = False
        """What the newest `ask` wanted is never to be had again."""
        self._beat_at = float("-inf")
        """When it last wrote that it waits, by the monotonic clock."""
        self._seen: dict[str, tuple[str, float]] = {}
        """Of each other run the newest beat, and since when it is known."""

    def ask(self, word: Word) -> str:
        """Have all promised that the run may still spend; return why it may not, empty if it may.

        A run that may not stands in the queue from then on, and has to ask again, sooner than
        `DEAD_S` later. While nothing of that changes, it writes every `BEAT_S` only: all runs write
        one object, of which a store takes about one writing in a second.
        """
        now = self._clock.monotonic()
        due, beat = now - self._beat_at >= BEAT_S, False

        def change(books: TeamBooks) -> tuple[TeamBooks, str]:
            nonlocal beat
            alive = books.without_dead(self._is_dead)
            asked, why = alive.asked(
                self._run_id,
                spent_usd=word.spent,
                most_usd=word.most,
                priority=self._priority,
                living=word.living,
            )
            self.is_over = bool(why) and asked.is_over(word.most)
            beat = due or not asked.stands_alike(self._run_id, alive)
            return (asked if beat else alive), why

        why = self._change(change)
        if beat:
            self._beat_at = now
        return why

    def launch(self, word: Word) -> str:
        """Say that nodes are launched now; return why they may not be, empty if they may."""
        return self._change(
            lambda books: books.launching(
                self._run_id,
                spent_usd=word.spent,
                most_usd=word.most,
                until_at=word.until_at,
            )
        )

    def tell(self, word: Word) -> str:
        """Write what the run has spent, and whether nodes of it may live; return what failed."""
        return self._change(
            lambda books: (
                books.told(
                    self._run_id,
                    spent_usd=word.spent,
                    most_usd=word.most,
                    living=word.living,
                    launched=word.launched,
                    until_at=word.until_at,
                ),
                "",
            )
        )

    def release(self, spent_usd: float) -> str:
        """Say that the run is at rest; return what failed. What it spent stays in the books."""
        return self._change(lambda books: (books.released(self._run_id, spent_usd), ""))

    def _is_dead(self, run_id: str, stake: Stake) -> bool:
        if run_id == self._run_id or (stake.launched and stake.wants_usd is None):
            return False
        now = self._clock.monotonic()
        beat, since = self._seen.get(run_id, ("", now))
        if beat != stake.beat:
            self._seen[run_id] = (stake.beat, now)
            return False
        return now - since > DEAD_S

    def _change(self, change: Callable[[TeamBooks], tuple[TeamBooks, str]]) -> str:
        """Write what `change` makes of the books; return why that was not to be done.

        `change` may be called several times: only what the last call returned counts.
        """
        try:
            problem = change_books(
                self._store, self._clock, self._time, change, cap=self._cap, nonexistent=self._known
            )
        except StoreError as lost:
            # Who never saw a team's budget is not held up by a store that cannot be read.
            return f"the team's ledger cannot be reached: {lost.message}" if self._known else ""
        except Refused as bad:
            self._known = True
            return f"{bad}; see {keys.TEAM} in {self._store.url}"
        self._known = self._known or problem is not None
        return problem or ""


def change_books(
    store: ObjectStore,
    clock: Clock,
    time: StoreClock,
    change: Callable[[TeamBooks], tuple[TeamBooks, str]],
    *,
    cap: TeamCap | None = None,
    nonexistent: bool = True,
) -> str | None:
    """Write what `change` makes of the books of a store, and return its second value.

    Args:
        store: the root of the runs.
        clock: this machine's.
        time: the store's.
        change: takes the books of the present period, and may be called several times.
        cap: what stands in books that are new.
        nonexistent: whether books are begun where there are none; else None is returned.

    Raises:
        Refused: the books make no sense.
        StoreError: the store cannot be read or written, or too many write at once.
    """
    for attempt in range(_TRIES):
        found = read_books(store)
        if found is None and not nonexistent:
            return None
        books, at = (TeamBooks(cap=cap), None) if found is None else (found.books, found.at)
        now = time.now(at)
        try:
            if now is None:
                time.ask(partial(_touch, store, books, found))
                continue
            turned = books.turned(now)
            changed, said = change(turned)
            if found is None or changed != turned:
                _put(store, changed, found)
        except AlreadyExists:  # another controller was first
            most_s = _PAUSE_S * min(attempt + 1, 10)
            clock.sleep(random.SystemRandom().uniform(0, most_s))  # so that two do not meet again
            continue
        return said
    raise StoreError("too many runs write the team's ledger at once")


def _put(store: ObjectStore, books: TeamBooks, found: Written | None) -> None:
    etag = None if found is None else found.etag
    store.put(keys.TEAM, to_bytes(books), if_absent=etag is None, if_match=etag)


def _touch(store: ObjectStore, books: TeamBooks, found: Written | None) -> float | None:
    """Write the books as they are; return when the store says that it, or a later one, was."""
    _put(store, books, found)
    stored = store.head(keys.TEAM)
    return None if stored is None else stored.modified_at
