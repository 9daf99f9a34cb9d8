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
    from collections.abc import Mapping

    from spotguard.control.journal.ledger import Ledger
    from spotguard.control.journal.record import RunRecord
    from spotguard.shared.units import Clock
    from spotguard.storage.base import ObjectStore

log = logging.getLogger(__name__)

_LOOK_EVERY_S, _LOOK_AT_BUCKET_EVERY_S = 1.0, 15.0


class ReadsValues(Protocol):
    """Where a run's values come from."""

    def first_from(self, record: RunRecord, done: int) -> float | None:
        """Return the first value once so many steps are done; None if none is stored."""
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
            value = self._values.first_from(record, due)
            if value is not None:
                self._compare(ledger, due, value)
                self._again_at = float("-inf")
        except MissingExtra as problem:  # another machine has the run now
            self._again_at = float("inf")
            log.warning("the run is not compared with others of its sweep: %s", problem)
        except StoreError as problem:
            log.warning("the run is not compared with others of its sweep: %s", problem)

    def _compare(self, ledger: Ledger, due: int, value: float) -> None:
        run_id = ledger.record.run_id
        told = read_all(self._store)
        mine = told.get(run_id, Values())
        # A controller that was killed before it wrote its journal finds here what it had said.
        value = mine.by_step.get(due, value)
        mine = replace(mine, by_step={**mine.by_step, due: value})
        self._publish(run_id, mine)
        others = [each.by_step for other, each in told.items() if other != run_id]
        known = [each[due] for each in others if due in each]
        stop = bool(mine.stopped) or not goes_on(self._part, others, mine.by_step)
        why = mine.stopped or self._words(due, value, known, stop=stop)
        if stop and not mine.stopped:
            self._publish(run_id, replace(mine, stopped=why))
        ledger.write(Kind.COMPARED, {"step": due, "value": str(value), "stop": stop, "why": why})

    def _publish(self, run_id: str, values: Values) -> None:
        self._store.put(keys.values(run_id), values.to_bytes())

    def _words(self, due: int, value: float, known: list[float], *, stop: bool) -> str:
        better = sum(_is_better(each, value, self._part.goal) for each in known)
        place = f"place {better + 1} of {len(known) + 1} so far"
        told = f"at step {due}: {self._part.metric} {value:.4g}, {place}"
        return f"pruned {told}" if stop else f"compared {told}"


def _is_better(one: float, other: float, goal: str) -> bool:
    return math.isnan(other) or (one < other if goal == MINIMIZE else one > other)


def goes_on(part: SweepPart, others: list[Mapping[int, float]], mine: Mapping[int, float]) -> bool:
    """Tell whether a point goes on after its newest look, by what all had at theirs.

    Of those that came to a look, the best half goes on, and the best at least.

    Raises:
        MissingExtra: Optuna is not installed.
    """
    optuna = optuna_module()
    pruner = optuna.pruners.SuccessiveHalvingPruner(
        min_resource=part.first_step, reduction_factor=REDUCTION
    )
    direction = "minimize" if part.goal == MINIMIZE else "maximize"
    study = optuna.create_study(direction=direction, pruner=pruner)
    stops = False
    for values in (*others, mine):
        trial = study.ask()
        for step, value in sorted(values.items()):
            trial.report(value, step)
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
