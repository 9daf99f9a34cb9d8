"""What time the work that is left takes, and what the deadline leaves beside it. Pure."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from spotguard.control.journal import cost
from spotguard.control.supervisor.attempt_limits import end_margin_s
from spotguard.events.states import CheckpointKind

if TYPE_CHECKING:
    from spotguard.control.journal.record import RunRecord
    from spotguard.control.supervisor.policy import Policy

SLACK = 0.1
"""Of the work that is left: with less slack than this nobody waits for spot."""


def work_left_s(record: RunRecord, nodes: int) -> float | None:
    """Return how long the steps that are left take on so many nodes; None if nobody can tell.

    In a phase these are its own: at what pace later ones train, elsewhere, is not known yet.
    """
    step_s = _step_s(record, nodes)
    if record.total_steps is None or step_s is None:
        return None
    total = min(record.total_steps, record.until_step or record.total_steps)
    return max(0, total - _steps_done(record)) * step_s


def _step_s(record: RunRecord, nodes: int) -> float | None:
    paces = [
        attempt.progress.step_s * attempt.nodes
        for attempt in record.of_this_place  # other machines have another pace
        if attempt.progress is not None and attempt.progress.step_s
    ]
    return min(paces) / nodes if paces else None


def _steps_done(record: RunRecord) -> int:
    """Return the steps behind the job; once its nodes are gone, those that the next ones keep."""
    current = record.current
    if current is not None and current.last_step is not None:
        return current.last_step
    last = next((each for each in reversed(record.attempts) if each.last_step is not None), None)
    if last is not None and last.last_step is not None and last.saved:
        return last.last_step
    return steps_kept(record)


def steps_kept(record: RunRecord) -> int:
    """Return the steps that the next attempt need not do, for all that was heard of saves."""
    for attempt in reversed(record.attempts):
        if attempt.last_save is not None:
            return attempt.last_save.step
        if attempt.started_at is not None:
            return attempt.resumed_step or 0
    return 0


def undone_s(record: RunRecord, nodes: int) -> float:
    """Return what nodes that vanish without a word may undo: the newest stretches without a save.

    Of the newest attempt that has taken steps; 0 as long as there is none. What was saved because
    nodes were to go says nothing of how long they may go without.
    """
    step_s = _step_s(record, nodes)
    if step_s is None:
        return 0.0
    for attempt in reversed(record.of_this_place):
        first, last = attempt.resumed_step or 0, attempt.last_step or 0
        if last > first:
            usual = (s.step for s in attempt.saves if s.kind != CheckpointKind.EMERGENCY.value)
            stretches = pairwise((*(first, *usual)[-2:], last))
            return step_s * max(later - earlier for earlier, later in stretches)
    return 0.0


def work_s(record: RunRecord, nodes: int) -> float:
    """Return the work that is left; of a job that has shown no pace, what the user says.

    Who does not say it may have the most: all of the time that the user gave it, less the slack
    that belongs to so much work.
    """
    left_s = work_left_s(record, nodes)
    if left_s is not None:
        return left_s
    said_s = record.spec.get("work_s")
    if isinstance(said_s, (int, float)):
        return float(said_s) * record.limits.nodes_max / nodes
    assert record.limits.deadline_at is not None
    begins_at = max(record.created_at, record.start_at or record.created_at)
    return (record.limits.deadline_at - begins_at) / (1 + SLACK)


def spare_s(record: RunRecord, nodes: int, now: float, policy: Policy) -> float | None:
    """Return the time beyond the work, one start and the last save; None without a deadline."""
    deadline_at = record.limits.deadline_at
    if deadline_at is None:
        return None
    left_s = deadline_at - now - end_margin_s(record, policy)
    return left_s - work_s(record, nodes) - expected_start_s(record, now, policy)


def pressing_s(record: RunRecord, nodes: int) -> float:
    """Return the slack below which nobody waits: half as much where the work is but assumed."""
    share = SLACK / 2 if work_left_s(record, nodes) is None else SLACK
    return share * work_s(record, nodes)


def expected_start_s(record: RunRecord, now: float, policy: Policy) -> float:
    """Return what a start takes, its 95th percentile: of few that were seen, the longest."""
    starts = sorted(
        cost.startup_s(each, now) for each in record.of_this_place if each.started_at is not None
    )
    return starts[min(len(starts) - 1, int(0.95 * len(starts)))] if starts else policy.start_s
