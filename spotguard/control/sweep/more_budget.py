"""More money for a sweep that was begun: what all may cost, and who paused for want of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from spotguard.control.create_run import admit_resume
from spotguard.control.journal import cost
from spotguard.control.journal.fold import read_record
from spotguard.control.journal.team.membership import raise_cap
from spotguard.control.sweep.begin import start_controllers
from spotguard.control.sweep.sweep_request import stopped_mark
from spotguard.control.sweep.where import created_runs
from spotguard.errors import BudgetExhausted, SpotguardError, UsageError
from spotguard.events import keys
from spotguard.events.states import RunState
from spotguard.shared.units import format_usd
from spotguard.spec.model import JobSpec, TeamCap
from spotguard.spec.model.team import SWEEP
from spotguard.storage.urls import below

if TYPE_CHECKING:
    from spotguard.control.journal.record import RunRecord
    from spotguard.control.run_folder import RunFolder
    from spotguard.control.sweep.sweep_request import SweepRecord


@dataclass
class Raised:
    """What became of the points that had paused for want of money."""

    resumed: list[str] = field(default_factory=list)
    problems: dict[str, SpotguardError] = field(default_factory=dict)
    """Why some do not go on, by run."""


def raise_budget(sweep: SweepRecord, usd: float) -> Raised:
    """Let all points cost `usd` together, and let those go on that had paused for want of money.

    Each point's own part grows as the whole does, as far as there is money for it. Broken off
    anywhere, it may be repeated: controllers that are missing are started, too.

    Raises:
        UsageError: that is less than they may cost now, or the sweep was stopped.
        EnvironmentFailure, StoreError: the sweep's ledger cannot be read or written.
    """
    first = sweep.part.cap
    if usd < first.usd:
        raise UsageError(
            f"--budget: given {format_usd(usd)}; the sweep was begun with {format_usd(first.usd)}, "
            "and a budget can only be raised"
        )
    if stopped_mark(sweep).exists():
        raise UsageError(
            f"{sweep.sweep_id} was stopped, so none of its points goes on by itself.",
            hint="let one go on: spotguard resume RUN --budget USD",
        )
    books = raise_cap(
        below(sweep.store_root, keys.sweep(sweep.sweep_id)),
        TeamCap(usd, SWEEP, first.at_once),
    )
    raised = Raised()
    poor = _poor(sweep, raised)
    whole_usd = (JobSpec.from_json(dict(sweep.job)).budget_usd or 0.0) * usd / first.usd
    left_usd = (books.left_usd or 0.0) / max(1, len(poor))
    for folder, record in poor:
        spent_usd = cost.spent_usd(record, folder.clock().now()) or 0.0
        part_usd = min(whole_usd, spent_usd + left_usd)
        try:
            allowed_usd = max(part_usd, record.limits.budget_usd or 0.0)
            # Nobody asked for other code, and points of one sweep are compared.
            admit_resume(folder.run_id, budget_usd=allowed_usd, same_code=True)
            raised.resumed.append(folder.run_id)
        except SpotguardError as problem:
            raised.problems[folder.run_id] = problem
    raised.problems.update(start_controllers(sweep).problems)
    raised.resumed = [run_id for run_id in raised.resumed if run_id not in raised.problems]
    return raised


def _poor(sweep: SweepRecord, raised: Raised) -> list[tuple[RunFolder, RunRecord]]:
    """Return this machine's runs that had paused for want of money; tell who cannot be asked."""
    poor = []
    for folder in created_runs(sweep):
        try:
            with folder.journal() as journal:
                record = read_record(journal)
        except SpotguardError as problem:
            raised.problems[folder.run_id] = problem
            continue
        if _is_poor(record):
            poor.append((folder, record))
    return poor


def _is_poor(record: RunRecord) -> bool:
    rest = record.settled
    return (
        rest is not None
        and not record.is_away
        and rest.state is RunState.PAUSED
        and rest.exit_code == BudgetExhausted.exit_code
    )
