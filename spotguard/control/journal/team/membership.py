"""What a person does with a team's budget: set it, look at it, begin a run under it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from spotguard.control.journal.team.books import TeamBooks, in_words
from spotguard.control.journal.team.budget import StoreClock, change_books
from spotguard.control.journal.team.stored_books import read_books
from spotguard.errors import EnvironmentFailure, SpecError, UsageError
from spotguard.events import keys
from spotguard.events.untrusted import Refused
from spotguard.shared.units import SystemClock, format_usd
from spotguard.spec.model.team import SWEEP
from spotguard.storage import open_existing, open_store
from spotguard.storage.urls import split_last

if TYPE_CHECKING:
    from collections.abc import Callable

    from spotguard.spec.model import TeamCap
    from spotguard.storage.base import ObjectStore


@dataclass(frozen=True, kw_only=True)
class TeamRun:
    """One run's part of a team's budget. Sums are in USD."""

    run_id: str
    spent_usd: float
    """In this period."""
    promised_usd: float
    """What it may still spend."""
    launched: bool
    """Nodes of it may live."""
    wants_usd: float | None
    """It waits in the queue for so much; None: it does not wait."""
    place: int | None
    """In the queue, from 1 on."""
    priority: int


@dataclass(frozen=True, kw_only=True)
class TeamDocument:
    """What `team --json` prints: what all runs of a store may cost together, and what they do."""

    schema: Literal[1] = field(default=1, init=False)
    """Version of this document's form."""
    store: str
    """The root of the runs."""
    budget_usd: float | None
    """For each period; None: the team has no budget there."""
    per: str
    """month, week or day."""
    period: str
    """The present one, in UTC: 2026-11, 2026-W48 or 2026-11-25; empty if nothing was ever spent."""
    spent_usd: float
    """By all runs in this period, those at rest among them."""
    promised_usd: float
    """What runs that are not at rest may still spend."""
    left_usd: float | None
    """What is neither; None without a budget."""
    runs: tuple[TeamRun, ...] = ()
    """Those that are not at rest: who waits by place, before them who does not."""


def check_budget(
    store_root: str,
    cap: TeamCap | None = None,
    *,
    budget_usd: float | None,
    allow_unknown_price: bool,
    spent_usd: float = 0.0,
) -> TeamBooks | None:
    """Check that a run can be paid by its team; return the team's books, None without a budget.

    Args:
        store_root: where the runs are.
        cap: the team's budget by the run's settings.
        budget_usd: the run's own.
        allow_unknown_price: whether it would take nodes of which nobody knows the price.
        spent_usd: what of its own budget it has spent already.

    Raises:
        SpecError: the settings say another budget than the store's, or the run's own budget is
            missing, too large, or cannot be kept.
        EnvironmentFailure: the books cannot be read.
    """
    books = _read(open_store(store_root)) or TeamBooks()
    stands = books.cap or cap
    if stands is None:
        return None
    if cap is not None and cap != stands:
        raise SpecError(
            "team.budget",
            f"given {cap.words}; the runs of {store_root} share {stands.words}",
            hint=f"for all of them: spotguard team {store_root} --budget '{cap}'",
        )
    shared = f"the runs of {store_root} share {stands.words}"
    if budget_usd is None:
        raise SpecError(
            "budget", f"not given; {shared}, so each needs one of its own", hint="--budget USD"
        )
    if budget_usd - spent_usd > stands.usd:
        of_it = f", {format_usd(spent_usd)} of it spent" if spent_usd else ""
        raise SpecError("budget", f"given {format_usd(budget_usd)}{of_it}; {shared}")
    if allow_unknown_price:
        raise SpecError(
            "allow_unknown_price",
            f"given; {shared}, and what has no price could exceed that",
            hint="--price USD says what a node costs per hour",
        )
    return _with_cap(books, stands)


def join(
    store_root: str, cap: TeamCap | None, *, budget_usd: float | None, allow_unknown_price: bool
) -> None:
    """Check as `check_budget`, and begin the books if these settings are the first to ask for."""
    books = check_budget(
        store_root, cap, budget_usd=budget_usd, allow_unknown_price=allow_unknown_price
    )
    if books is not None and cap is not None:
        _change(open_store(store_root), lambda books: _with_cap(books, books.cap or cap))


def outlook(
    store_root: str, cap: TeamCap | None, *, budget_usd: float | None, allow_unknown_price: bool
) -> str:
    """Return what of the team's budget is left for a new run, in words; empty without one.

    Raises as `check_budget`.
    """
    books = check_budget(
        store_root, cap, budget_usd=budget_usd, allow_unknown_price=allow_unknown_price
    )
    if books is None or books.cap is None:
        return ""
    now = books.turned(SystemClock().now())
    left_usd = now.left_usd or 0.0
    waits = left_usd < (budget_usd or 0.0) or bool(now.queue)
    return (
        f"the team's budget is {books.cap.words}; {format_usd(left_usd)} are left for "
        f"{in_words(now.period)}" + (": the run may wait for its turn" if waits else "")
    )


def look(store_root: str) -> TeamDocument:
    """Return how a team's budget stands.

    Raises:
        EnvironmentFailure: the books cannot be read.
    """
    store = open_existing(store_root)
    return _document(store.url, _read(store) or TeamBooks())


def set_cap(store_root: str, cap: TeamCap | None) -> TeamDocument:
    """Change what the team allows, from now on and for all runs; return how it stands then.

    Raises:
        UsageError: these are a sweep's books, whose one period never turns: under a month's or
            none, what was spent would be forgotten.
        EnvironmentFailure: the books cannot be read or written.
    """
    store = open_store(store_root)

    def change(books: TeamBooks) -> TeamBooks:
        if books.cap is not None and books.cap.per == SWEEP:
            raise UsageError(
                f"{store.url} has the budget of a sweep, and not of a team; it can be raised only",
                hint=f"spotguard sweep {split_last(store.url)[1]} --budget USD",
            )
        return _with_cap(books, cap)

    return _document(store.url, _change(store, change))


def raise_cap(store_root: str, cap: TeamCap) -> TeamBooks:
    """Let all runs cost more than now, from now on; return the books as they stand then.

    Raises:
        UsageError: it would be less.
        EnvironmentFailure: the books cannot be read or written.
    """

    def change(books: TeamBooks) -> TeamBooks:
        if books.cap is not None and cap.usd < books.cap.usd:
            raise UsageError(
                f"--budget: given {format_usd(cap.usd)}; it is {format_usd(books.cap.usd)} already"
            )
        return _with_cap(books, cap)

    return _change(open_store(store_root), change)


def give_back(store_root: str, run_id: str) -> TeamDocument:
    """Take back what was promised to a run that will never come back; return how it stands then.

    Raises:
        UsageError: nothing is promised to such a run.
        EnvironmentFailure: the books cannot be read or written.
    """
    store = open_existing(store_root)

    def change(books: TeamBooks) -> TeamBooks:
        if run_id not in books.stakes:
            known = ", ".join(sorted(books.stakes)) or "none"
            raise UsageError(
                f"nothing of {store.url} is promised to a run {run_id}", hint=f"these are: {known}"
            )
        return books.given_back(run_id)

    return _document(store.url, _change(store, change))


def _with_cap(books: TeamBooks, cap: TeamCap | None) -> TeamBooks:
    return books if books.cap == cap else books.under(cap)


def _read(store: ObjectStore) -> TeamBooks | None:
    try:
        found = read_books(store)
    except Refused as problem:
        raise _unreadable(store, problem) from problem
    return None if found is None else found.books


def _change(store: ObjectStore, change: Callable[[TeamBooks], TeamBooks]) -> TeamBooks:
    clock = SystemClock()
    changed = TeamBooks()

    def noted(books: TeamBooks) -> tuple[TeamBooks, str]:
        nonlocal changed
        changed = change(books)
        return changed, ""

    try:
        change_books(store, clock, StoreClock(clock), noted)
    except Refused as problem:
        raise _unreadable(store, problem) from problem
    return changed


def _unreadable(store: ObjectStore, problem: Refused) -> EnvironmentFailure:
    return EnvironmentFailure(
        f"{keys.TEAM} in {store.url} cannot be used: {problem}",
        hint="once no run of the team has nodes, remove it and set the budget again",
    )


def _document(store_url: str, books: TeamBooks) -> TeamDocument:
    if books.period or books.cap:
        books = books.turned(SystemClock().now())  # as it will be once a controller writes
    queue = books.queue
    runs = [
        TeamRun(
            run_id=run_id,
            spent_usd=stake.spent_here_usd,
            promised_usd=stake.promised_usd,
            launched=stake.launched,
            wants_usd=stake.wants_usd,
            place=queue.index(run_id) + 1 if run_id in queue else None,
            priority=stake.priority,
        )
        for run_id, stake in sorted(books.stakes.items())
    ]
    return TeamDocument(
        store=store_url,
        budget_usd=None if books.cap is None else books.cap.usd,
        per="month" if books.cap is None else books.cap.per,
        period=books.period,
        spent_usd=books.spent_usd,
        promised_usd=books.promised_usd,
        left_usd=books.left_usd,
        runs=tuple(sorted(runs, key=lambda run: run.place or 0)),
    )
