"""What commands ask of sweeps. Functions block briefly and print nothing.

Those that only look take a sweep's id, or its place in a store (`STORE/SWEEP_ID`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spotguard.control.journal.record import Kind
from spotguard.control.run_folder import is_place
from spotguard.control.sweep import begin, ending, more_budget
from spotguard.control.sweep.sweep_request import find_sweep, place_of, stored_sweep
from spotguard.control.sweep.table import SweepWatch
from spotguard.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spotguard.control.sweep.sweep_request import SweepPlan, SweepRecord
    from spotguard.launch.base import Survey
    from spotguard.launch.workdir.snapshot import Snapshot
    from spotguard.spec.model import JobSpec


def start(
    spec: JobSpec,
    plan: SweepPlan,
    found: Survey | Sequence[Survey] | None = None,
    code: Snapshot | None = None,
) -> str:
    """Create a run for each point, with its controller, and return the sweep's id.

    Raises:
        UsageError: the sweep has no budget, or a point may cost more than all may.
        MissingExtra: points are to be compared, and Optuna is not installed.
        SpecError, BudgetExhausted, StoreError: as for a run; no run was created.
    """
    return begin.begin(spec, plan, found, code).sweep_id


def name_of(text: str | None) -> str:
    """Return what names the sweep that the user means: its whole id, or its place as a URL.

    Raises:
        UsageError: there is none, or several begin like that.
        StoreError: the store cannot be read.
    """
    if text is not None and is_place(text):
        found = stored_sweep(text)
        return place_of(found, found.sweep_id)
    return find_sweep(text).sweep_id


def watch(name: str) -> SweepWatch:
    """Return what looks at a sweep again and again; `name` is as `name_of` gave it."""
    if is_place(name):
        return SweepWatch(stored_sweep(name), stored=True)
    return SweepWatch(find_sweep(name), stored=False)


def go_on(name: str) -> bool:
    """Create the runs that are missing, and start missing controllers; True if there were any.

    Of a sweep that is read in its store, nothing is begun here.
    """
    if is_place(name):
        return False
    did = begin.go_on(find_sweep(name))
    return bool(did.created or did.started)


def raise_budget(name: str, usd: float) -> more_budget.Raised:
    """Let all points cost `usd` together, and those go on that had paused for want of money.

    Raises:
        UsageError: it is named by its place in a store, or that is less than now.
        EnvironmentFailure, StoreError: the sweep's ledger cannot be read or written.
    """
    return more_budget.raise_budget(_steered(name), usd)


def end(name: str, *, save: bool) -> int:
    """Ask all runs to `save` and stop, or to release their nodes; return how many were asked.

    Raises:
        UsageError: it is named by its place in a store.
        EnvironmentFailure: some could not be asked; names them and the way out. All others were.
    """
    return ending.end(_steered(name), Kind.USER_STOP if save else Kind.USER_DOWN)


def _steered(name: str) -> SweepRecord:
    """Return a sweep of this machine."""
    if is_place(name):
        raise UsageError(
            f"{name} is a place in a store: a sweep can be looked at there, and not steered.",
            hint="repeat it on the machine where it was begun",
        )
    return find_sweep(name)
