"""What a run's controller asks its team's budget, when, and what it writes down of that."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from spotguard.control.journal import cost
from spotguard.control.journal.record import Kind
from spotguard.control.journal.sweep.part import SweepPart, sweep_store
from spotguard.control.journal.team.budget import BEAT_S, TeamBudget, Word
from spotguard.events import keys
from spotguard.storage.urls import below, is_folder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spotguard.control.journal.ledger import Ledger
    from spotguard.control.journal.record import AttemptRecord, RunRecord
    from spotguard.shared.units import Clock
    from spotguard.storage.base import ObjectStore

log = logging.getLogger(__name__)

RETRY_S = 15.0
"""How often a run that waits for its team's money asks again."""
RETRY_IN_FOLDER_S = 2.0
"""The same for a sweep's next run, where to ask costs nothing: it may be a matter of seconds."""
TELL_S = 300.0
"""How often a run with nodes writes what it has spent."""
RELEASE_PATIENCE_S = 120.0
"""How long the end of a run waits for the store to take its word."""
RELEASE_RETRY_S = 5.0


class TeamGate:
    """Stands between one run's controller and the nodes that others pay with. Not thread-safe.

    A sweep's run is paid by the sweep, and that by its team: all of them have to promise, always in
    the same order, so that no two runs wait for each other.
    """

    def __init__(self, budgets: Sequence[TeamBudget], ledger: Ledger, clock: Clock) -> None:
        self._budgets = budgets
        self._ledger = ledger
        self._clock = clock
        quick = ledger.record.sweep and is_folder(ledger.record.store_root)
        self._retry_s = RETRY_IN_FOLDER_S if quick else RETRY_S
        self._unreleased = list(budgets)
        self._again_at = self._told_at = self._release_at = float("-inf")
        self._releasing_since: float | None = None

    @property
    def waits(self) -> bool:
        """Whether the team said no a short while ago, and is not asked again yet."""
        return self._clock.monotonic() < self._again_at

    def admits(self) -> bool:
        """Tell whether another launch may be written down; if not, the journal says why.

        Asks the store at most every `RETRY_S`, if it said no. Nodes ahead need not be admitted:
        what is promised pays for them as well, and `pays` asks for their launch.
        """
        if self.waits:
            return False
        record = self._ledger.record
        why = self._ask()
        if not why:
            return True
        self._again_at = self._clock.monotonic() + self._retry_s
        if why != record.queued:
            retry_at = self._clock.now() + self._retry_s
            self._ledger.write(Kind.WAITING, {"retry_at": retry_at, "why": why, "team": True})
        return False

    def pays(self, attempt: AttemptRecord) -> bool:
        """Tell whether a launch that is written down may be made now; asks as often as `admits`."""
        if self.waits:
            return False
        why = self._launch()
        if why:  # it may have slept since it was admitted
            why = self._ask() or self._launch()
        if why:
            self._again_at = self._clock.monotonic() + self._retry_s
            log.warning("attempt %s is not launched: %s", attempt.number, why)
        return not why

    def tell(self) -> None:
        """Write what the run has spent, if it is time; what fails is tried again then."""
        record = self._ledger.record
        attempt = record.current
        if record.settled is not None or (attempt is None and record.queued):
            return  # what waits shows itself by asking
        launched = attempt is not None and attempt.launched
        if self._clock.monotonic() - self._told_at < (TELL_S if launched else BEAT_S):
            return
        self._told_at = self._clock.monotonic()
        word = self._word()
        for budget in self._budgets:
            problem = budget.tell(word)
            if problem:
                log.warning("%s", problem)

    def release(self) -> str | None:
        """Give back what the run did not spend; return what failed, None to try it again."""
        now = self._clock.monotonic()
        if now < self._release_at:
            return None
        problem = ""
        while self._unreleased:
            problem = self._unreleased[-1].release(self._word().spent)
            if problem:
                break
            self._unreleased.pop()
        if not problem:
            return ""
        self._release_at = now + RELEASE_RETRY_S
        if self._releasing_since is None:
            self._releasing_since = now
            log.warning("%s", problem)
        return problem if now - self._releasing_since >= RELEASE_PATIENCE_S else None

    @property
    def is_over(self) -> bool:
        """Whether what was asked for last is never to be had again."""
        return any(budget.is_over for budget in self._budgets)

    def _ask(self) -> str:
        # What is promised now has to be given back, also where the run was resumed just after it
        # had come to rest, and this same controller goes on.
        self._unreleased, self._releasing_since = list(self._budgets), None
        word = self._word()
        return next((why for each in self._budgets if (why := each.ask(word))), "")

    def _launch(self) -> str:
        word = self._word()
        return next((why for each in self._budgets if (why := each.launch(word))), "")

    def _word(self) -> Word:
        record = self._ledger.record
        spent_usd = cost.known_spent_usd(record, self._clock.now())
        budget_usd = record.limits.budget_usd
        living = [each for each in (record.current, record.ahead, *record.leaving) if each]
        gone = [each.allotment.down_at for each in living]
        known = [at for at in gone if at is not None]
        return Word(
            spent=spent_usd,
            most=None if budget_usd is None else max(0.0, budget_usd - spent_usd),
            living=bool(living),
            launched=any(each.launched for each in living),
            until_at=max(known) if known and len(known) == len(gone) else None,
        )


def release_at_rest(record: RunRecord, store: ObjectStore, clock: Clock) -> str:
    """Give back what a run did not spend that came to rest without its supervisor.

    `store` is the root of the runs. Returns what failed, with the way out; blocks for the store.
    """
    if record.settled is None:
        return ""
    spent_usd = cost.known_spent_usd(record, record.settled.at)
    budgets = [TeamBudget(store, clock, record.run_id), *sweep_budget(store, record, clock)]
    problem = next((failed for each in budgets if (failed := each.release(spent_usd))), "")
    if not problem:
        return ""
    return f"{problem}; {give_back_words(record)}"


def sweep_budget(
    root: ObjectStore, record: RunRecord, clock: Clock, *, priority: int = 0
) -> list[TeamBudget]:
    """Return what a run's sweep may cost, by the root of the runs; nothing for one of no sweep."""
    part = SweepPart.of(record.sweep)
    if part is None:
        return []
    store = sweep_store(root, part.sweep_id)
    return [TeamBudget(store, clock, record.run_id, cap=part.cap, priority=priority)]


def give_back_words(record: RunRecord) -> str:
    """Return how a person gives back what the team's budget promised to a run."""
    stores = [record.store_root]
    part = SweepPart.of(record.sweep)
    if part is not None:
        stores.append(below(record.store_root, keys.sweep(part.sweep_id)))
    commands = "; ".join(f"spotguard team {each} --give-back {record.run_id}" for each in stores)
    return f"what the team's budget promised to it is not given back: {commands}"
