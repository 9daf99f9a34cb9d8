"""How a sweep stands: one table of its points, on this machine or from its store alone."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, Literal

from spotguard.control.journal.sweep.part import MINIMIZE, sweep_store
from spotguard.control.journal.sweep.published import Values, read_values
from spotguard.control.journal.team.stored_books import read_books
from spotguard.control.report.stored import StoredRun
from spotguard.control.status.metrics import ValuesOfRun
from spotguard.control.status.view import label_of
from spotguard.control.sweep.sweep_request import place_of, stopped_mark
from spotguard.control.sweep.where import folder_here, look_at, was_launched
from spotguard.errors import JournalDamaged, SpotguardError, StoreError, UsageError
from spotguard.events.states import RunState
from spotguard.events.untrusted import Refused
from spotguard.shared.json_documents import INSTANT
from spotguard.shared.units import sum_known
from spotguard.spec.model.sweep import in_words
from spotguard.storage import PrefixedStore, open_store
from spotguard.storage.urls import is_folder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spotguard.control.journal.record import RunRecord
    from spotguard.control.status.view import RunView
    from spotguard.control.sweep.sweep_request import SweepRecord

SCHEMA: Final = 1
PATIENCE_S: Final = 60.0
"""A store that cannot be reached for a moment makes nothing unreadable for good."""


@dataclass(frozen=True, kw_only=True)
class SweepPoint:
    """One point of a sweep and its run. None means unknown, never zero."""

    number: int
    """From 1 on."""
    run_id: str
    arguments: dict[str, str]
    """What it adds to the script's arguments, by name."""
    state: RunState | None
    """How its run stands; None: it is not created, or cannot be read."""
    unreadable: bool = False
    """Whether its run cannot be read, so that nobody knows what it costs; `detail` says why."""
    step: int | None = None
    total_steps: int | None = None
    value: float | None = None
    """The newest value of the sweep's metric: that of its newest save, or soon after it."""
    spent_usd: float | None = None
    saved_step: int | None = None
    """Steps done at its newest checkpoint that counts."""
    pruned: bool = False
    """Whether it was stopped because others did better."""
    queued: bool = False
    """Whether it waits for its turn, or for money."""
    settled: bool = False
    exit_code: int | None = None
    """What the run ended with, by docs/exit-codes.md; None while it goes on."""
    detail: str = ""
    """What goes on, or why it ended."""

    @property
    def words(self) -> str:
        """What it adds to the script's arguments, in words."""
        return in_words(self.arguments)

    @property
    def state_label(self) -> str:
        """How its run stands, in a word; empty where it is not created."""
        if self.pruned or self.unreadable:
            return "pruned" if self.pruned else "unreadable"
        return "" if self.state is None else label_of(self.state, self.queued)


@dataclass(frozen=True, kw_only=True)
class SweepDocument:
    """How a sweep stands: what `spotguard sweep` and `up --sweep` print with `--json`."""

    schema: Literal[1] = field(default=SCHEMA, init=False)
    """Version of this document's form."""
    sweep_id: str
    store: str
    """The root of its runs."""
    created_at: float = field(metadata=INSTANT)
    budget_usd: float
    """What all points may cost together."""
    spent_usd: float | None
    """What they have; None if that of one is unknown."""
    demo_prices: bool
    """True if the money is played: local nodes cost nothing, and their price was not given."""
    parallel: int | None
    """So many points go on side by side."""
    metric: str | None
    goal: str
    """`min` or `max`."""
    first_step: int | None
    """Steps done at which points are compared first; None: none is stopped."""
    settled: bool
    """Whether nothing more happens unless somebody asks for it."""
    points: tuple[SweepPoint, ...]
    best: str | None
    """The run with the best value of those that finished, else of those that saved; None without
    one."""

    @property
    def is_stuck(self) -> bool:
        """Whether all that has not ended cannot be read: how that ends, nobody will see."""
        return not self.settled and all(each.settled or each.unreadable for each in self.points)

    @property
    def in_folder(self) -> bool:
        """Whether its store is a folder, at which looking costs nothing."""
        return is_folder(self.store)


@dataclass(frozen=True)
class _Seen:
    """What was seen of a point's run."""

    view: RunView
    record: RunRecord
    by_store: bool
    """Whether the store says so; else this machine's journal does."""
    is_lost: bool = False
    """Whether its folder is gone from this machine, where it belongs."""


class SweepWatch:
    """Looks at a sweep again and again; points at rest are read once. Not thread-safe."""

    def __init__(self, sweep: SweepRecord, *, stored: bool) -> None:
        """Look at this machine's runs, or with `stored` at what the store says of all.

        The store is asked for runs that another machine controls in any case.
        """
        self._sweep = sweep
        self._stored = stored
        self._root = open_store(sweep.store_root)
        self._runs: dict[str, StoredRun] = {}
        self._at_rest: dict[str, tuple[SweepPoint, bool]] = {}
        self._stuck_since: float | None = None

    def look(self) -> SweepDocument:
        """Return how it stands now.

        Raises:
            StoreError: the store cannot be read.
        """
        sweep, part = self._sweep, self._sweep.part
        told = [self._point(each.number, each.run_id) for each in sweep.parts()]
        points = [point for point, _ in told]
        return SweepDocument(
            sweep_id=sweep.sweep_id,
            store=sweep.store_root,
            created_at=sweep.created_at,
            budget_usd=self._budget_usd(),
            spent_usd=sum_known(each.spent_usd for each in points),
            demo_prices=any(played for _, played in told),
            parallel=part.cap.at_once,
            metric=part.metric,
            goal=part.goal,
            first_step=part.first_step,
            settled=all(point.settled for point in points),
            points=tuple(points),
            best=best_of(points, part.goal),
        )

    def is_over(self, told: SweepDocument) -> bool:
        """Return whether waiting is in vain: all have ended, or the rest stays unreadable."""
        if not told.is_stuck:
            self._stuck_since = None
            return told.settled
        now = time.monotonic()
        if self._stuck_since is None:
            self._stuck_since = now
        return now - self._stuck_since >= PATIENCE_S

    def _budget_usd(self) -> float:
        """Return what all may cost now: it may have been raised since the sweep was begun."""
        try:
            found = read_books(sweep_store(self._root, self._sweep.sweep_id))
        except Refused:  # who asks it for money says so
            found = None
        except StoreError:
            if self._stored:
                raise
            found = None  # this machine knows its own runs without it
        cap = self._sweep.part.cap if found is None else found.books.cap
        return (cap or self._sweep.part.cap).usd

    def _point(self, number: int, run_id: str) -> tuple[SweepPoint, bool]:
        if run_id in self._at_rest:
            return self._at_rest[run_id]
        arguments = dict(self._sweep.points[number - 1])
        named = SweepPoint(number=number, run_id=run_id, arguments=arguments, state=None)
        try:
            seen = self._read(run_id)
        except SpotguardError as problem:
            if self._stored and not isinstance(problem, JournalDamaged):
                raise
            return replace(named, unreadable=True, detail=problem.message), False
        if seen is None:
            return self._unbegun(named), False
        point = self._pictured(named, seen)
        # What is paused may go on by a larger budget, which somebody gives while this one looks.
        is_over = point.settled and point.state is not RunState.PAUSED
        if is_over and (self._stored or not seen.by_store):
            self._at_rest[run_id] = point, seen.view.demo_prices
        return point, seen.view.demo_prices

    def _unbegun(self, named: SweepPoint) -> SweepPoint:
        """Return a point that has no run, and so cost nothing."""
        named = replace(named, spent_usd=0.0)
        if self._stored or not stopped_mark(self._sweep).exists():
            return replace(named, detail="not begun yet")
        never = replace(named, settled=True, detail="never begun: the sweep was stopped")
        self._at_rest[named.run_id] = never, False
        return never

    def _pictured(self, named: SweepPoint, seen: _Seen) -> SweepPoint:
        """Return a point with what its run says."""
        view, record = seen.view, seen.record
        told = self._told(named.run_id) if view.state is RunState.STOPPED else Values()
        pruned = bool(told.stopped) and (seen.by_store or view.state_detail == told.stopped)
        detail = told.stopped if pruned else view.state_detail
        if seen.is_lost and not view.state.settled:
            place = place_of(self._sweep, named.run_id)
            detail = f"its folder is gone from this machine: spotguard adopt {place}"
        return replace(
            named,
            state=view.state,
            step=view.step,
            total_steps=view.total_steps,
            value=self._value(view, record),
            spent_usd=view.spent_usd,
            saved_step=view.saved_step,
            pruned=pruned,
            queued=view.queued is not None,
            settled=view.state.settled,
            exit_code=None if record.settled is None else record.settled.exit_code,
            detail=detail,
        )

    def _read(self, run_id: str) -> _Seen | None:
        """Return what is seen of a run; None if it is not begun."""
        if self._stored:
            try:
                return self._by_store(run_id)
            except UsageError:
                return None
        folder = folder_here(run_id)
        if folder is None:
            lost = run_id in self._runs or was_launched(self._sweep, run_id)
            return replace(self._by_store(run_id), is_lost=True) if lost else None
        seen = _Seen(*look_at(folder), by_store=False)
        return self._by_store(run_id) if seen.record.is_away else seen

    def _by_store(self, run_id: str) -> _Seen:
        run = self._runs.get(run_id) or StoredRun(place_of(self._sweep, run_id))
        self._runs[run_id] = run
        run.refresh()
        return _Seen(*look_at(run.folder), by_store=True)

    def _value(self, view: RunView, record: RunRecord) -> float | None:
        metric = self._sweep.part.metric
        if metric is None:
            return None
        if not view.state.settled:  # each question to a bucket costs money
            return view.metrics.get(metric)
        try:
            newest = ValuesOfRun(PrefixedStore(self._root, view.run_id), metric).newest(record)
        except StoreError:
            newest = None
        value = view.metrics.get(metric) if newest is None else newest
        return value if value is not None and math.isfinite(value) else None

    def _told(self, run_id: str) -> Values:
        return read_values(sweep_store(self._root, self._sweep.sweep_id), run_id)


def best_of(points: Sequence[SweepPoint], goal: str) -> str | None:
    """Return the run with the best value of those that finished, else of those that saved."""
    saved = [each for each in points if each.value is not None and each.saved_step is not None]
    finished = [each for each in saved if each.state is RunState.FINISHED]
    sign = 1.0 if goal == MINIMIZE else -1.0
    best = min(finished or saved, key=lambda each: sign * (each.value or 0.0), default=None)
    return None if best is None else best.run_id
