"""Beginning a sweep, going on where somebody died who did, and ending it.

No process drives a sweep. Its runs are created one by one, each gets its controller, and those wait
for the sweep's money and for a place as runs wait for a team's. So what is done here takes seconds,
and may be done again at any time.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spotguard.control.controller import start
from spotguard.control.create_run import create_run
from spotguard.control.journal.fold import read_record
from spotguard.control.journal.sweep.comparison import optuna_module
from spotguard.control.run_folder import RunFolder, runs_folder
from spotguard.control.sweep.asked import (
    SweepPlan,
    SweepRecord,
    alone,
    forget,
    publish,
    stopped_mark,
    write_down,
)
from spotguard.errors import JournalDamaged, SpotguardError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spotguard.control.journal.record import Kind
    from spotguard.launch.base import Survey
    from spotguard.spec.model import JobSpec

_STARTS = 4
"""Controllers that are started side by side: each takes a second of a core."""


@dataclass(frozen=True)
class Begun:
    """What was left to do of a sweep."""

    created: int = 0
    started: int = 0
    """Controllers, of runs that had none."""


def check(job: JobSpec, plan: SweepPlan) -> None:
    """Let pass a sweep that can be paid and compared.

    Raises:
        UsageError: it has no budget, or a point may cost more than all may.
        MissingExtra: its points are to be compared, and Optuna is not installed.
    """
    plan.share_usd(job)
    if job.allow_unknown_price:
        raise UsageError(
            "A sweep has one budget, and what has no price could exceed it.",
            hint="--price USD says what a node costs per hour",
        )
    if plan.first_step is not None:
        optuna_module()


def begin(
    job: JobSpec, plan: SweepPlan, found: Survey | Sequence[Survey] | None = None
) -> SweepRecord:
    """Create all runs of a sweep and start their controllers; raises as `check`, `create_run`."""
    check(job, plan)
    sweep = write_down(job, plan, time.time())
    try:
        go_on(sweep, found)
    except SpotguardError:
        if not created_runs(sweep):
            forget(sweep)
        raise
    return sweep


def go_on(sweep: SweepRecord, found: Survey | Sequence[Survey] | None = None) -> Begun:
    """Create the runs that are missing, and start the controllers of those that have none.

    Each may have been killed anywhere before: what is there is left alone.
    """
    with alone(sweep):
        created = 0
        if not stopped_mark(sweep).exists():
            publish(sweep)
            for part in sweep.parts():
                if not (runs_folder() / part.run_id).is_dir():
                    create_run(sweep.job_of(part), found, part)
                    created += 1
    lost = [folder for folder in created_runs(sweep) if _needs_controller(folder)]
    with ThreadPoolExecutor(_STARTS, thread_name_prefix="spotguard-sweep") as crew:
        list(crew.map(start.start, lost))
    return Begun(created=created, started=len(lost))


def created_runs(sweep: SweepRecord) -> list[RunFolder]:
    """Return the folders of its runs that there are on this machine."""
    folders = [RunFolder(runs_folder() / part.run_id) for part in sweep.parts()]
    return [folder for folder in folders if folder.path.is_dir()]


def end(sweep: SweepRecord, wish: Kind) -> int:
    """Ask all its runs to stop, or to release their nodes at once; return how many were asked.

    What is not created yet never is.
    """
    with alone(sweep):
        stopped_mark(sweep).touch()
    asked = 0
    for folder in created_runs(sweep):
        with folder.journal() as journal:
            if read_record(journal).settled is None:
                journal.append(wish.value, at=folder.clock().now())
                asked += 1
    go_on(sweep)
    return asked


def _needs_controller(folder: RunFolder) -> bool:
    # In this order: a controller leaves only after its run has settled.
    if folder.controller_pid() is not None:
        return False
    try:
        with folder.journal() as journal:
            return read_record(journal).settled is None and folder.controller_pid() is None
    except JournalDamaged:  # the table says so
        return False
