"""Where each hour and each dollar of a run went. Pure functions over the record.

The billed time of an attempt is cut into parts that follow upon each other, but for steps and
saves, which are totals. Instants come from two clocks, so that a part that seems negative is 0,
and the parts never add up to more than what was billed; what is left over is `other`. Each part
has its share of what the attempt cost, and all of them add up to what the run has spent.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from spotguard.control.journal import cost
from spotguard.shared.units import sum_known

if TYPE_CHECKING:
    from spotguard.control.journal.record import AttemptRecord, RunRecord


class Use(str, Enum):
    """What time is spent on; each knows its words."""

    label: str
    hint: str

    TRAINING = ("training", "training that counts", "finished steps that later ones build on")
    REPEATED = ("repeated", "steps repeated", "finished steps that were lost and are done again")
    SAVING = ("saving", "saving", "steps waited for a save")
    RESTORING = ("restoring", "restoring", "state was read back, up to the first step")
    SETUP = ("setup", "set-up", "packages, imports")
    PROVISIONING = ("provisioning", "provisioning", "nodes were billed before ours ran on them")
    RELEASING = ("releasing", "releasing", "nodes were billed after training had ended")
    LOST_LAUNCHES = (
        *("lost_launches", "launches that came to nothing"),
        "nodes may have run before the cloud or SkyPilot gave the launch up",
    )
    CONTROLLER = (
        *("controller", "the controller's node"),
        "it looks after the run; its time goes on beside all other",
    )
    OTHER = ("other", "other", "evaluation, first compilation, steps that were not finished")
    WAITING = ("waiting", "waiting for capacity", "no nodes were to be had; it costs nothing")

    def __new__(cls, value: str, label: str, hint: str) -> Use:
        """Make a member that carries its words."""
        member = str.__new__(cls, value)
        member._value_ = value
        member.label = label
        member.hint = hint
        return member


@dataclass(frozen=True, kw_only=True)
class TimeShare:
    """What one use took. None is unknown, never zero."""

    use: Use
    label: str
    """The use in words."""
    hint: str
    seconds: float
    """Of wall time, with all nodes of an attempt side by side; the controller's node adds none."""
    usd: float | None


@dataclass(frozen=True, kw_only=True)
class AttemptTime:
    """Where the time of one attempt went."""

    attempt: int
    shares: tuple[TimeShare, ...]
    """Those that took no time are left out."""


def attempt_times(record: RunRecord, now: float) -> tuple[AttemptTime, ...]:
    """Return where the time of each attempt went, oldest first."""
    counted, usd = cost.counted_train_s(record), cost.attempts_usd(record, now)
    return tuple(
        AttemptTime(
            attempt=attempt.number,
            shares=_shares(usd[attempt.number], _parts(attempt, counted[attempt.number], now)),
        )
        for attempt in record.attempts
    )


def run_times(record: RunRecord, now: float) -> tuple[TimeShare, ...]:
    """Return where the time of the whole run went, each use once, in the order of `Use`."""
    seconds = dict.fromkeys(Use, 0.0)
    usd: dict[Use, list[float | None]] = {use: [] for use in Use}
    shares = [share for each in attempt_times(record, now) for share in each.shares]
    for share in (*shares, *_ahead(record, now)):
        seconds[share.use] += share.seconds
        usd[share.use].append(share.usd)
    for lost in record.lost_launches:
        seconds[Use.LOST_LAUNCHES] += lost.paid_s
        usd[Use.LOST_LAUNCHES].append(lost.usd)
    usd[Use.CONTROLLER] += cost.nodes_usd(record, now)
    seconds[Use.WAITING] += cost.waited_s(record, now)
    return tuple(
        _share(use, seconds[use], sum_known(usd[use]))
        for use in Use
        if seconds[use] > 0 or usd[use]
    )


def _ahead(record: RunRecord, now: float) -> tuple[TimeShare, ...]:
    """Return where the time of the nodes went that wait for their turn: they are paid, too."""
    attempt = record.ahead
    if attempt is None:
        return ()
    parts = _parts(attempt, 0.0, now)
    return _shares(cost.attempts_usd(record, now)[attempt.number], parts)


def _parts(attempt: AttemptRecord, counted_s: float, now: float) -> dict[Use, float]:
    """Return the seconds of each use; all but waiting add up to the billed time."""
    course, start = attempt.course, attempt.billed_from
    billed_s = left = cost.billed_s(attempt, now)
    parts = dict.fromkeys(Use, 0.0)

    def take(use: Use, seconds: float) -> None:
        nonlocal left
        parts[use] = min(max(0.0, seconds), left)
        left -= parts[use]

    done_s = max(counted_s, _done_train_s(attempt))
    take(Use.TRAINING, counted_s)
    take(Use.REPEATED, done_s - counted_s)
    take(Use.SAVING, attempt.saving.stall_s)
    if attempt.started_at is None:
        begun_at = course.node_up_at
        take(Use.SETUP, 0.0 if begun_at is None else start + billed_s - begun_at)
        take(Use.PROVISIONING, left)
    else:
        up_at = start if attempt.in_place or course.node_up_at is None else course.node_up_at
        init_at = attempt.started_at if course.init_at is None else course.init_at
        take(Use.PROVISIONING, up_at - start)
        take(Use.SETUP, init_at - max(up_at, start))
        take(Use.RESTORING, attempt.started_at - init_at)
    if attempt.end is not None and attempt.end.training_ended_at is not None:
        take(Use.RELEASING, attempt.end.gone_at - attempt.end.training_ended_at)
    take(Use.OTHER, left)
    if course.waiting_since is not None:
        parts[Use.WAITING] = max(0.0, attempt.intended_at - course.waiting_since)
    return parts


def _done_train_s(attempt: AttemptRecord) -> float:
    """Return the seconds in finished steps, whether or not they count."""
    tellers = (attempt.progress, attempt.job_end, *attempt.saves)
    known = [teller.train_s for teller in tellers if teller is not None]
    return max((train_s for train_s in known if train_s is not None), default=0.0)


def _shares(usd: float | None, parts: dict[Use, float]) -> tuple[TimeShare, ...]:
    """Return the uses, with what the nodes cost in all dealt out by their time."""
    billed_s = sum(seconds for use, seconds in parts.items() if use is not Use.WAITING)

    def part_of(use: Use, seconds: float) -> float | None:
        if use is Use.WAITING or usd is None:
            return 0.0 if use is Use.WAITING else None
        # What the cloud charged of a time that our clocks did not see has no other use.
        return usd * seconds / billed_s if billed_s else usd

    return tuple(
        _share(use, seconds, part_of(use, seconds))
        for use, seconds in parts.items()
        if seconds > 0 or (use is Use.OTHER and usd and not billed_s)
    )


def _share(use: Use, seconds: float, usd: float | None) -> TimeShare:
    return TimeShare(use=use, label=use.label, hint=use.hint, seconds=seconds, usd=usd)
