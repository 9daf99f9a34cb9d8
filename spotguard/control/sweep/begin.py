"""Beginning a sweep, and going on where somebody died who did.

No process drives a sweep. Its runs are created one by one, each gets its controller, and those wait
for the sweep's money and for a place as runs wait for a team's. So what is done here takes seconds,
and may be done again at any time.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from spotguard.control.controller import start
from spotguard.control.create_run import create_run
from spotguard.control.journal.record import Kind
from spotguard.control.journal.stored.code import fix_code
from spotguard.control.journal.sweep.comparison import optuna_module
from spotguard.control.sweep.sweep_request import (
    SweepPlan,
    SweepRecord,
    alone,
    forget,
    publish,
    stopped_mark,
    sweeps_folder,
    write_down,
)
from spotguard.control.sweep.where import created_runs, folder_here, was_launched
from spotguard.errors import JournalDamaged, SpotguardError, UsageError
from spotguard.launch.workdir.snapshot import keep_for, kept_by, load
from spotguard.spec.home_folder import spotguard_home
from spotguard.spec.model import JobSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from spotguard.control.run_folder import RunFolder
    from spotguard.launch.base import Survey
    from spotguard.launch.workdir.snapshot import Snapshot

_STARTS = 4
"""Controllers that are started side by side: each takes a second of a core."""


@dataclass(frozen=True)
class Started:
    """What came of starting controllers."""

    count: int = 0
    problems: dict[str, SpotguardError] = field(default_factory=dict)
    """Why some did not start, by run."""


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
    job: JobSpec,
    plan: SweepPlan,
    found: Survey | Sequence[Survey] | None = None,
    code: Snapshot | None = None,
) -> SweepRecord:
    """Create all runs of a sweep and start their controllers; raises as `check`, `create_run`."""
    check(job, plan)
    sweep = write_down(job, plan, time.time())
    try:
        if code is not None:
            keep_for(sweeps_folder() / sweep.sweep_id, code.digest)
        _create_missing(sweep, found, is_new=True)
        _all_started(sweep)
    except SpotguardError:
        if not created_runs(sweep):
            forget(sweep)
        raise
    return sweep


def go_on(sweep: SweepRecord, found: Survey | Sequence[Survey] | None = None) -> Begun:
    """Create the runs that are missing, and start the controllers of those that have none.

    Each may have been killed anywhere before: what is there is left alone. So is a run that was
    launched and whose folder is gone from here: its nodes may live, and only `adopt` finds them.
    """
    created = _create_missing(sweep, found, is_new=False)
    return Begun(created=created, started=_all_started(sweep))


def _create_missing(
    sweep: SweepRecord,
    found: Survey | Sequence[Survey] | None,
    *,
    is_new: bool,
    tell: Callable[[str], None] = lambda _: None,
) -> int:
    """Create the runs that are missing and return how many; of a new sweep none was launched."""
    with alone(sweep):
        if stopped_mark(sweep).exists():
            return 0
        publish(sweep)
        missing = [part for part in sweep.parts() if folder_here(part.run_id) is None]
        unbegun = [part for part in missing if is_new or not was_launched(sweep, part.run_id)]
        code = _code_of(sweep, tell) if unbegun else None
        for part in unbegun:
            create_run(sweep.job_of(part), found, part, code=code)
        return len(unbegun)


def _code_of(sweep: SweepRecord, tell: Callable[[str], None]) -> Snapshot:
    """Return the one copy of the code that all points have, whenever they are created."""
    folder = sweeps_folder() / sweep.sweep_id
    kept = kept_by(folder)
    if kept is not None:
        return load(spotguard_home(), kept)
    snapshot = fix_code(JobSpec.from_json(dict(sweep.job)), tell)
    keep_for(folder, snapshot.digest)
    return snapshot


def _all_started(sweep: SweepRecord) -> int:
    started = start_controllers(sweep)
    for problem in started.problems.values():
        raise problem
    return started.count


def start_controllers(sweep: SweepRecord) -> Started:
    """Start the controllers of those runs that need one and have none."""
    lost = [folder for folder in created_runs(sweep) if _needs_controller(folder)]
    with ThreadPoolExecutor(_STARTS, thread_name_prefix="spotguard-sweep") as crew:
        problems = dict(zip((each.run_id for each in lost), crew.map(_start, lost), strict=True))
    failed = {run_id: problem for run_id, problem in problems.items() if problem is not None}
    return Started(count=len(lost) - len(failed), problems=failed)


def _start(folder: RunFolder) -> SpotguardError | None:
    """Start one controller; return why it did not: the others are started all the same.

    That a run had one before, which is gone, is an event of its own.
    """
    try:
        with folder.journal() as journal:
            if journal.newest(Kind.CONTROLLER_STARTED.value) is not None:
                start.tell_repair(folder, journal)
        start.start(folder)
    except SpotguardError as problem:
        return problem
    return None


def _needs_controller(folder: RunFolder) -> bool:
    if folder.controller_pid() is not None:
        return False
    try:
        with folder.journal() as journal:
            return start.lacks_controller(folder, journal)
    except JournalDamaged:  # the table says so
        return False
