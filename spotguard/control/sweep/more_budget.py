"""More money for a sweep that was begun: what all may cost, and who paused for want of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from spotguard.control.controller import start
from spotguard.control.create_run import admit_resume
from spotguard.control.journal.fold import read_record
from spotguard.control.journal.team.membership import raise_cap
from spotguard.control.sweep.where import created_runs
from spotguard.errors import BudgetExhausted, SpotguardError, UsageError
from spotguard.events import keys
from spotguard.events.states import RunState
from spotguard.shared.units import format_usd
from spotguard.spec.model import JobSpec, TeamCap
from spotguard.spec.model.team import SWEEP
from spotguard.storage.urls import below

if TYPE_CHECKING:
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

    Each point's own part grows as the whole does. One that goes on keeps the part that it has,
    until that is used up and this is repeated. Broken off anywhere, it may be repeated.

    Raises:
        UsageError: that is less than they may cost now.
        EnvironmentFailure, StoreError: the sweep's ledger cannot be read or written.
    """
    first = sweep.part.cap
    if usd < first.usd:
        raise UsageError(
            f"--budget: given {format_usd(usd)}; the sweep was begun with {format_usd(first.usd)}, "
            "and a budget can only be raised"
        )
    raise_cap(
        below(sweep.store_root, keys.sweep(sweep.sweep_id)),
        TeamCap(usd, SWEEP, first.at_once),
    )
    part_usd = (JobSpec.from_json(dict(sweep.job)).budget_usd or 0.0) * usd / first.usd
    raised = Raised()
    for folder in created_runs(sweep):
        try:
            if _goes_on(folder, part_usd):
                raised.resumed.append(folder.run_id)
        except SpotguardError as problem:
            raised.problems[folder.run_id] = problem
    return raised


def _goes_on(folder: RunFolder, part_usd: float) -> bool:
    """Resume a run that had paused for want of money; False if it had not."""
    with folder.journal() as journal:
        record = read_record(journal)
    rest = record.settled
    if rest is None or record.is_away or rest.state is not RunState.PAUSED:
        return False
    if rest.exit_code != BudgetExhausted.exit_code:
        return False
    admit_resume(folder.run_id, budget_usd=max(part_usd, record.limits.budget_usd or 0.0))
    start.start(folder)
    return True
