"""When paid nodes are given up for others: spot again, a cheaper place, or more of them. Pure.

They are never given up for a place that has not answered.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from spotguard.control.journal import cost
from spotguard.control.supervisor.placement.advice import by_policy, paced_nodes, policy_can_choose
from spotguard.control.supervisor.placement.seen_places import place_name
from spotguard.control.supervisor.placement.time_left import (
    expected_start_s,
    pressing_s,
    spare_s,
    undone_s,
    work_left_s,
)
from spotguard.events.states import EndReason, Market
from spotguard.launch.taskyaml import BUYS_SPOT
from spotguard.policy.action import SPOT, Move
from spotguard.policy.market.sightings import says_free
from spotguard.policy.view import Running

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from spotguard.control.journal.record import AttemptRecord, RunRecord
    from spotguard.control.supervisor.policy import Policy
    from spotguard.launch.base import Offer
    from spotguard.policy.market.sightings import Sighting

_MOST_DOUBLINGS = 5
_CHEAPER = 1.01
"""Places whose prices differ by less than this are as dear as each other."""
_ASK_AHEAD_S = 300.0
"""So long before on-demand nodes may be given up it is asked whether spot ones are free: the
answer takes a while, and is not waited for."""


def back_to_spot_due(
    record: RunRecord,
    attempt: AttemptRecord,
    now: float,
    policy: Policy,
    *,
    free_spot: int | None = None,
) -> bool:
    """Tell whether an attempt that made do with on-demand nodes shall look for spot again.

    Only where it is known that enough are free (`free_spot`; None is unknown): paid nodes are not
    given up for a place that has not answered. Each try in a row that ended on demand again
    doubles the time until the next one.
    """
    if not _made_do(attempt, policy):
        return False
    if free_spot is None or free_spot < record.limits.nodes_min:
        return False
    if policy.on_demand_for_deadline and not _time_for_spot(record, attempt, now, policy):
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
        if not (_was_moved(before) and _made_do(before, policy) and _made_do(after, policy)):
            break
        in_vain += 1
    return policy.back_to_spot_after_s * float(2 ** min(in_vain, _MOST_DOUBLINGS))


def may_move(record: RunRecord, attempt: AttemptRecord, now: float, policy: Policy) -> bool:
    """Tell whether the policy may give an attempt's spot nodes up for cheaper ones.

    Not on clouds, which do not tell what is free. Each move in a row that led to no cheaper nodes
    doubles the time until the next one: who says that nodes are free may not give them.
    """
    if now - attempt.intended_at < _move_after_s(record, policy):
        return False
    by_policy = policy.on_demand_for_deadline and record.limits.deadline_at is not None
    on_spot = policy.market is Market.SPOT and attempt.offer.market is Market.SPOT
    trains = attempt.started_at is not None and attempt.stop is None and attempt.job_end is None
    return by_policy and on_spot and trains and attempt.offer.infra not in BUYS_SPOT


def _move_after_s(record: RunRecord, policy: Policy) -> float:
    in_vain = 0
    for before, after in reversed(tuple(pairwise(record.attempts))):
        moved = before.end is not None and before.end.reason is EndReason.MOVED
        if not moved or cheaper_places(before, [after.offer]):
            break
        in_vain += 1
    return policy.think_of_moves_s * 2.0 ** min(in_vain, _MOST_DOUBLINGS) if in_vain else 0.0


def cheaper_places(attempt: AttemptRecord, offers: Iterable[Offer]) -> list[Offer]:
    """Return the spot places that cost less than the attempt's; none if its price is unknown."""
    price = attempt.offer.price_usd_per_h
    return [
        offer
        for offer in offers
        if offer.market is Market.SPOT
        and offer.price_usd_per_h is not None
        and price is not None
        and offer.price_usd_per_h * _CHEAPER < price
    ]


def move_due(
    record: RunRecord,
    attempt: AttemptRecord,
    offers: Sequence[Offer],
    now: float,
    policy: Policy,
    *,
    market: Sequence[Sighting] = (),
) -> bool:
    """Tell whether the policy gives spot nodes up for cheaper ones, whose place says it has them.

    `market` has their word. Where no node can be bought on demand, or a price is unknown, it stays.
    """
    spot = [place_name(each) for each in offers if each.market is Market.SPOT]
    free = place_name(attempt.offer) in spot and any(
        says_free(market, place=place_name(offer), nodes=attempt.nodes)
        for offer in cheaper_places(attempt, offers)
    )
    if not (free and policy_can_choose(offers) and may_move(record, attempt, now, policy)):
        return False
    running = Running(place=place_name(attempt.offer), market=SPOT, nodes=attempt.nodes)
    action, _ = by_policy(record, offers, attempt.nodes, now, policy, market, running)
    return isinstance(action, Move) and action.market == SPOT


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
    most, _ = paced_nodes(record, [attempt.offer], now, policy)
    if attempt.nodes >= most:
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
    return left_s * (1 - attempt.nodes / most) > 2 * start_s


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


def _was_moved(attempt: AttemptRecord) -> bool:
    """Tell whether it was saved to go on elsewhere, which earlier versions called a resize."""
    return attempt.end is not None and attempt.end.reason in (EndReason.MOVED, EndReason.RESIZED)


def _was_resized(attempt: AttemptRecord) -> bool:
    return attempt.end is not None and attempt.end.reason is EndReason.RESIZED


def _time_for_spot(record: RunRecord, attempt: AttemptRecord, now: float, policy: Policy) -> bool:
    """Tell whether spot nodes that are taken at once would still leave time for on-demand ones."""
    slack_s = spare_s(record, attempt.nodes, now, policy)
    if slack_s is None:
        return True
    start_s = expected_start_s(record, now, policy)
    lost_s = start_s + policy.ask_s + undone_s(record, attempt.nodes)
    return slack_s >= max(lost_s, pressing_s(record, attempt.nodes))
