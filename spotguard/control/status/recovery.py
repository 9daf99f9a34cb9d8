"""Where the time of each recovery went: from the end of an attempt to the next one's first step.

Pure functions over the record. Instants come from two clocks, the controller's and the nodes', so
a part that seems negative is 0. What nobody noted is unknown (None).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from spotguard.events.states import EndReason
from spotguard.shared.json_documents import INSTANT

if TYPE_CHECKING:
    from spotguard.control.journal.record import AttemptEnd, AttemptRecord, RunRecord


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """One recovery. Its parts follow upon each other and add up to the total."""

    ended: int
    """Number of the attempt that ended."""
    attempt: int
    """Number of the one that went on."""
    reason: EndReason
    in_place: bool
    """It went on by itself on the nodes that stayed: nothing was released or provisioned."""
    ended_at: float | None = field(metadata=INSTANT)
    """The job said that it ends; or its last sign of life, if it could not say so."""
    detect_s: float | None
    """Until the controller knew; in place, until the nodes that stay had agreed to go on."""
    release_s: float | None
    """Until the last of the old nodes was confirmed gone; a cloud need only have been told."""
    waiting_s: float
    """For capacity: from the first launch that was refused to the one that was not."""
    provision_s: float | None
    """From there to the first command of ours on the new node, but for the waiting."""
    setup_s: float | None
    """Until the script called `spotguard.init`: packages, imports."""
    restore_s: float | None
    """Until the state was restored; with what the script does before its loop."""
    first_step_s: float | None
    """Until the first step was done."""
    total_s: float | None


def recoveries(record: RunRecord) -> tuple[Recovery, ...]:
    """Return the recoveries of a run, oldest first; the newest one may be under way.

    An attempt that the user let go on after the run had come to rest is none, nor is the first one
    of a phase: nothing had been lost.
    """
    return tuple(
        _recovery(before, before.end, after)
        for before, after in pairwise(record.attempts)
        if before.end is not None
        and before.end.reason is not EndReason.PHASE_DONE
        and not after.course.after_resume
    )


def _recovery(before: AttemptRecord, end: AttemptEnd, after: AttemptRecord) -> Recovery:
    ended_at = before.job_end.at if before.job_end else end.last_beat_at
    marks = _in_place(after) if after.in_place else _by_controller(before, end, after)
    course, restored_at = after.course, after.started_at
    known_at = marks.known_at
    if known_at is not None and ended_at is not None:
        known_at = max(known_at, ended_at)  # a node was lost, and the others saved and left then
    return Recovery(
        ended=before.number,
        attempt=after.number,
        reason=end.reason,
        in_place=after.in_place,
        ended_at=ended_at,
        detect_s=_between(ended_at, known_at),
        release_s=_between(known_at, marks.gone_at),
        waiting_s=marks.waiting_s,
        provision_s=_between(marks.gone_at + marks.waiting_s, marks.up_at),
        setup_s=_between(marks.up_at, _not_before(marks.gone_at, course.init_at)),
        restore_s=_between(_not_before(marks.gone_at, course.init_at), restored_at),
        first_step_s=_between(restored_at, course.first_step_at),
        total_s=_between(ended_at, course.first_step_at),
    )


@dataclass(frozen=True, kw_only=True)
class _Marks:
    """What differs between a recovery in place and one by the controller."""

    known_at: float | None
    gone_at: float
    waiting_s: float
    up_at: float | None


def _in_place(after: AttemptRecord) -> _Marks:
    agreed_at = after.intended_at
    return _Marks(known_at=agreed_at, gone_at=agreed_at, waiting_s=0.0, up_at=agreed_at)


def _by_controller(before: AttemptRecord, end: AttemptEnd, after: AttemptRecord) -> _Marks:
    # Who waited for its turn may have heard the end before the controller gave its verdict.
    gone_at = end.at if after.started_at is None else min(end.at, after.started_at)
    return _Marks(
        known_at=before.course.end_seen_at,
        gone_at=gone_at,
        waiting_s=_between(after.course.waiting_since, after.intended_at) or 0.0,
        up_at=_not_before(gone_at, after.course.node_up_at),
    )


def _not_before(begin_at: float, at: float | None) -> float | None:
    """Return an instant; one that came while the attempt before still trained took no time."""
    return None if at is None else max(begin_at, at)


def _between(begin_at: float | None, end_at: float | None) -> float | None:
    return None if begin_at is None or end_at is None else max(0.0, end_at - begin_at)
