"""Comparing a point with the others of its sweep, and stopping it where they do better.

Nobody drives this: each run's controller publishes its own value, reads those of the others, and
decides on its own run. By what is in the store at that moment, Optuna's successive halving says who
goes on, so who is slow or dead holds up nobody.
"""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from spotguard.control.journal.record import Kind
from spotguard.control.journal.sweep.part import MINIMIZE, REDUCTION, SweepPart
from spotguard.control.journal.sweep.published import Values, read_all
from spotguard.errors import MissingExtra, StoreError
from spotguard.events import keys
from spotguard.storage.urls import is_folder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spotguard.control.journal.ledger import Ledger
    from spotguard.control.journal.record import RunRecord
    from spotguard.shared.units import Clock
    from spotguard.storage.base import ObjectStore

log = logging.getLogger(__name__)

_LOOK_EVERY_S, _LOOK_AT_BUCKET_EVERY_S = 1.0, 15.0


class ReadsValues(Protocol):
    """Where a run's values come from."""

    def first_from(self, record: RunRecord, done: int) -> tuple[int, float] | None:
        """Return the first value once so many steps are done, and how many were done then.

        None if none is stored.
        """
        ...


class Comparison:
    """Compares one run with the others. Not thread-safe; `look` blocks for the store at a look."""

    def __init__(
        self, part: SweepPart, store: ObjectStore, values: ReadsValues, clock: Clock
    ) -> None:
        """`store` is the sweep's own, `values` are the run's."""
        self._part = part
        self._store = store
        self._values = values
        self._clock = clock
        self._every_s = _LOOK_EVERY_S if is_folder(store.url) else _LOOK_AT_BUCKET_EVERY_S
        self._again_at = float("-inf")

    def look(self, ledger: Ledger, step: int) -> None:
        """Compare the run if it has come to its next look, and write down what comes of it.

        Args:
            ledger: the run's.
            step: how many steps are done.
        """
        record = ledger.record
        due = None if record.looks is None else self._part.look_at(record.looks)
        if due is None or step < due or self._clock.monotonic() < self._again_at:
            return
        leaves = record.current is None or record.current.stop is not None
        is_last = record.total_steps is not None and due >= record.total_steps
        if leaves or is_last or record.wish is not None:
            return
        self._again_at = self._clock.monotonic() + self._every_s
        try:
            found = self._values.first_from(record, due)
            if found is not None and self._compare(ledger, due, *found):
                self._again_at = float("-inf")
        except MissingExtra as problem:  # another machine has the run now
            self._again_at = float("inf")
            log.warning("the run is not compared with others of its sweep: %s", problem)
        except StoreError as problem:
            log.warning("the run is not compared with others of its sweep: %s", problem)

    def _compare(self, ledger: Ledger, due: int, done: int, value: float) -> bool:
        """Compare by a value that was logged once `done` steps were; False if it is too late.

        Looks that the value is beyond are left out: of several that one value decided, each would
        halve the same points again.
        """
        run_id, total_steps = ledger.record.run_id, ledger.record.total_steps
        told = read_all(self._store)
        mine = told.get(run_id, Values())
        # A controller that was killed before it wrote its journal finds here what it had said.
        said = min((step for step in mine.by_step if step >= due), default=None)
        looks = self._part.looks_by(done if said is None else said)
        at = self._part.look_at(looks - 1) if said is None else said
        if at is None or (total_steps is not None and at >= total_steps):
            return False
        value = mine.by_step.get(at, value)
        mine = replace(mine, by_step={**mine.by_step, at: value})
        self._publish(run_id, mine)
        others = [each.by_step for other, each in told.items() if other != run_id]
        known = [each[at] for each in others if at in each]
        stop = bool(mine.stopped) or not goes_on(self._part, at, known, value)
        why = mine.stopped or self._words(at, value, known, stop=stop)
        if stop and not mine.stopped:
            self._publish(run_id, replace(mine, stopped=why))
        body = {"step": at, "looks": looks, "value": str(value), "stop": stop, "why": why}
        ledger.write(Kind.COMPARED, body)
        return True

    def _publish(self, run_id: str, values: Values) -> None:
        self._store.put(keys.values(run_id), values.to_bytes())

    def _words(self, due: int, value: float, known: list[float], *, stop: bool) -> str:
        better = sum(_is_better(each, value, self._part.goal) for each in known)
        place = f"place {better + 1} of {len(known) + 1} so far"
        told = f"at step {due}: {self._part.metric} {value:.4g}, {place}"
        return f"pruned {told}" if stop else f"compared {told}"


def _is_better(one: float, other: float, goal: str) -> bool:
    return math.isnan(other) or (one < other if goal == MINIMIZE else one > other)


def goes_on(part: SweepPart, at: int, others: Sequence[float], mine: float) -> bool:
    """Tell whether a point goes on after the look at a step, by what all had there.

    Of those that came to a look, the best half goes on, and the best at least. Optuna hears of
    this look alone: it would take a value for that of each earlier one which a point left out.

    Raises:
        MissingExtra: Optuna is not installed.
    """
    optuna = optuna_module()
    pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=at, reduction_factor=REDUCTION)
    direction = "minimize" if part.goal == MINIMIZE else "maximize"
    study = optuna.create_study(direction=direction, pruner=pruner)
    stops = False
    for value in (*others, mine):
        trial = study.ask()
        trial.report(value, at)
        stops = trial.should_prune()
    return not stops


def optuna_module() -> Any:
    """Return Optuna, which says nothing on stderr then; `MissingExtra` if it is not installed."""
    try:
        import optuna
    except ImportError as problem:
        raise MissingExtra(
            "To stop the worse points of a sweep takes Optuna, which is not installed.",
            hint="pip install 'spotguard[optuna]'",
        ) from problem
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna
