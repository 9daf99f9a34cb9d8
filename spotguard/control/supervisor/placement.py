"""Spot or on demand, and where: which of the offers may be asked now, in which order. Pure.

Spot whenever there is some. With none, wait as long as the deadline leaves slack for it; on demand
when the user's rule says so, and only on demand when nothing else keeps the deadline. A place that
took nodes a while ago is asked last.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from spotguard.control.journal import cost
from spotguard.control.journal.record import place_key
from spotguard.events.states import EndReason, Market

if TYPE_CHECKING:
    from collections.abc import Iterable

    from spotguard.control.journal.record import AttemptRecord, RunRecord
    from spotguard.control.supervisor.policy import Policy
    from spotguard.launch.base import Offer

_SLACK = 0.1
"""Of the work that is left, kept for interruptions before the deadline decides the market."""
_MOST_DOUBLINGS = 5
_ASK_AHEAD_S = 300.0
"""So long before on-demand nodes may be given up it is asked whether spot ones are free: the
answer takes a while, and is not waited for."""
_TAKEN = frozenset(
    {EndReason.PREEMPTED, EndReason.TERMINATED, EndReason.NODE_LOST, EndReason.VANISHED}
)


def offers_now(
    record: RunRecord, offers: Iterable[Offer], now: float, policy: Policy
) -> list[Offer]:
    """Return the offers that may be asked, those that took nodes a short while ago last."""
    markets = markets_now(record, now, policy)
    allowed = [offer for offer in offers if offer.market in markets]
    lost = {
        place_key(attempt.offer)
        for attempt in record.attempts
        if attempt.end is not None
        and attempt.end.reason in _TAKEN
        and now - attempt.end.at < policy.avoid_lost_place_s
    }
    return sorted(
        allowed, key=lambda offer: (offer.market is not Market.SPOT, place_key(offer) in lost)
    )


def markets_now(record: RunRecord, now: float, policy: Policy) -> frozenset[Market]:
    """Return the markets in which nodes may be bought now."""
    if policy.market is None:
        return frozenset(Market)
    if policy.market is Market.ON_DEMAND:
        return frozenset({Market.ON_DEMAND})
    if policy.on_demand_for_deadline and _deadline_presses(record, now):
        return frozenset({Market.ON_DEMAND})
    waited_s = 0.0 if record.waiting_since is None else now - record.waiting_since
    if policy.on_demand_after_s is not None and waited_s >= policy.on_demand_after_s:
        return frozenset({Market.SPOT, Market.ON_DEMAND})
    return frozenset({Market.SPOT})


def back_to_spot_due(
    record: RunRecord,
    attempt: AttemptRecord,
    now: float,
    policy: Policy,
    *,
    free_spot: int | None = None,
) -> bool:
    """Tell whether an attempt that made do with on-demand nodes shall look for spot again.

    Not where it is known that too few are free (`free_spot`; None is unknown). Each try in a row
    that ended on demand again doubles the time until the next one.
    """
    if not _made_do(attempt, policy):
        return False
    if free_spot is not None and free_spot < record.limits.nodes_min:
        return False
    if policy.on_demand_for_deadline and _deadline_presses(record, now):
        return False
    return now - attempt.intended_at >= _back_to_spot_after_s(record, policy)


def may_go_back_to_spot(
    record: RunRecord, attempt: AttemptRecord, now: float, policy: Policy
) -> bool:
    """Tell whether it is time to ask for free spot nodes."""
    age_s = now - attempt.intended_at
    return _made_do(attempt, policy) and age_s >= _back_to_spot_after_s(record, policy) - (
        _ASK_AHEAD_S
    )


def _made_do(attempt: AttemptRecord, policy: Policy) -> bool:
    return policy.market is Market.SPOT and attempt.offer.market is not Market.SPOT


def _back_to_spot_after_s(record: RunRecord, policy: Policy) -> float:
    in_vain = 0
    for before, after in reversed(tuple(pairwise(record.attempts))):
        if not (_was_resized(before) and _made_do(before, policy) and _made_do(after, policy)):
            break
        in_vain += 1
    return policy.back_to_spot_after_s * float(2 ** min(in_vain, _MOST_DOUBLINGS))


def may_regrow(record: RunRecord, attempt: AttemptRecord) -> bool:
    """Tell whether an attempt trains on fewer nodes than the run may have."""
    return attempt.nodes < record.limits.nodes_max and attempt.started_at is not None


def regrow_due(
    record: RunRecord,
    attempt: AttemptRecord,
    now: float,
    policy: Policy,
    *,
    free_nodes: int | None = None,
) -> bool:
    """Tell whether an attempt on few nodes shall be saved and launched anew on as many as may be.

    Not where it is known that none is free (`free_nodes`; None is unknown). The gain, should all of
    them be had, must be worth twice the start that it costs; each try that brought no more nodes
    doubles the time until the next one, until their number changes.
    """
    if free_nodes == 0 or not may_regrow(record, attempt):
        return False
    age_s = now - attempt.intended_at
    if policy.regrow_startups is None:  # only what went on in place can have left nodes behind
        return attempt.in_place and age_s >= policy.regrow_after_s
    start_s = cost.startup_s(attempt, now)
    doublings = min(_tries_in_vain(record), _MOST_DOUBLINGS)
    if age_s < policy.regrow_startups * start_s * 2**doublings:
        return False
    left_s = work_left_s(record, attempt.nodes)
    if left_s is None:
        return False
    return left_s * (1 - attempt.nodes / record.limits.nodes_max) > 2 * start_s


def _tries_in_vain(record: RunRecord) -> int:
    """Return how many times nodes were given up, and no more came of it, since the last change.

    A change is that there were more nodes, or that some were lost and not replaced. Nodes that were
    taken and replaced by as many change nothing: that there were no more is still known.
    """
    count = 0
    for before, after in reversed(tuple(pairwise(record.attempts))):
        resized = _was_resized(before)
        if after.nodes > before.nodes or (after.nodes < before.nodes and not resized):
            break
        count += resized
    return count


def _was_resized(attempt: AttemptRecord) -> bool:
    return attempt.end is not None and attempt.end.reason is EndReason.RESIZED


def work_left_s(record: RunRecord, nodes: int) -> float | None:
    """Return how long the steps that are left take on so many nodes; None if nobody can tell."""
    steps = [attempt.last_step for attempt in record.attempts if attempt.last_step is not None]
    paces = [
        attempt.progress.step_s * attempt.nodes
        for attempt in record.attempts
        if attempt.progress is not None and attempt.progress.step_s
    ]
    if record.total_steps is None or not paces:
        return None
    return max(0, record.total_steps - max(steps, default=0)) * min(paces) / nodes


def _deadline_presses(record: RunRecord, now: float) -> bool:
    """Tell whether waiting for spot nodes, or losing some, would miss the deadline."""
    deadline_at = record.limits.deadline_at
    left_s = work_left_s(record, record.limits.nodes_max)
    if deadline_at is None:
        return False
    if left_s is None:
        return _waited_long(record, deadline_at, now)
    starts = [cost.startup_s(each, now) for each in record.attempts if each.started_at is not None]
    slack_s = deadline_at - now - left_s - min(starts, default=0.0)
    return slack_s < _SLACK * left_s


def _waited_long(record: RunRecord, deadline_at: float, now: float) -> bool:
    """Tell the same of a job that never ran: it may need all of the time that there was for it."""
    since = record.waiting_since
    if since is None or any(attempt.started_at is not None for attempt in record.attempts):
        return False
    return now - since > _SLACK * (deadline_at - since)
