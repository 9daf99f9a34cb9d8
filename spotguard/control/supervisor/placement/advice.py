"""Which of the offers may be asked now, in which order. Pure.

Under a deadline `spotguard.policy` decides, on what the journal tells of each place. Elsewhere it
is spot whenever there is some, and on demand when the user's rule says so; a place that took nodes
a while ago is asked last.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spotguard.control.journal import cost
from spotguard.control.journal.nodes.offer import place_key
from spotguard.control.supervisor.attempt_limits import end_margin_s
from spotguard.control.supervisor.placement.seen_places import (
    accelerator_of,
    checkpoint_bytes,
    move_usd,
    place_name,
    seen_of,
    was_taken,
)
from spotguard.control.supervisor.placement.time_left import (
    SLACK,
    expected_start_s,
    pressing_s,
    spare_s,
    undone_s,
    work_left_s,
    work_s,
)
from spotguard.events.states import Market
from spotguard.policy.action import ON_DEMAND, SPOT, Buy
from spotguard.policy.market.sightings import FREE
from spotguard.policy.view import JobState, MarketPlace, Running, Seen, View
from spotguard.shared.units import format_duration, format_usd

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from spotguard.control.journal.record import AttemptRecord, RunRecord
    from spotguard.control.supervisor.policy import Policy
    from spotguard.launch.base import Offer
    from spotguard.policy.action import Action
    from spotguard.policy.market.hazard import Hazard
    from spotguard.policy.market.sightings import Sighting


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What may be bought now, in which order; none is to wait. `why` is a sentence."""

    offers: tuple[Offer, ...]
    why: str
    patient: bool = False
    """On demand could be asked for now, and is not: the deadline leaves time."""


def advised(
    record: RunRecord,
    offers: Sequence[Offer],
    nodes: int,
    now: float,
    policy: Policy,
    *,
    market: Sequence[Sighting] = (),
    patient: int | None = None,
) -> Advice:
    """Return the offers that may be asked for so many nodes, and why these.

    `market` is what other runs of this machine saw of the places. `patient` is a larger number of
    nodes, with which the deadline leaves time to wait for spot: then fewer are no reason to hurry,
    and nothing is bought on demand for them.
    """
    offers = [offer for offer in offers if not _too_dear(offer, policy.max_usd_per_h)]
    deadline = policy.on_demand_for_deadline and record.limits.deadline_at is not None
    if deadline and policy.market is Market.SPOT and policy_can_choose(offers):
        action, named = by_policy(record, offers, nodes, now, policy, market, patient=patient)
        wanted = [named[key] for key in _asked(action) if key in named]
        over = [offer for offer in wanted if offer.market is Market.ON_DEMAND]
        may_buy_over = any(sort == ON_DEMAND for _, sort in named)
        if patient is not None:
            wanted = [offer for offer in wanted if offer not in over]
        return Advice(offers=tuple(wanted), why=action.why, patient=may_buy_over and not over)
    ranked = offers_now(record, offers, now, policy)
    return Advice(offers=tuple(ranked), why=_why(record, ranked, now, policy))


def policy_can_choose(offers: Sequence[Offer]) -> bool:
    """Tell whether all prices are known, and the deadline can be kept by buying on demand."""
    on_demand = any(offer.market is Market.ON_DEMAND for offer in offers)
    return on_demand and all(offer.price_usd_per_h is not None for offer in offers)


def _too_dear(offer: Offer, max_usd_per_h: float | None) -> bool:
    if max_usd_per_h is None or offer.market is not Market.SPOT:
        return False
    return offer.price_usd_per_h is None or offer.price_usd_per_h > max_usd_per_h


def offers_now(
    record: RunRecord, offers: Sequence[Offer], now: float, policy: Policy
) -> list[Offer]:
    """Return who may be asked, who took nodes lately last; spot where nothing else is ever sold."""
    markets = markets_now(record, now, policy)
    allowed = [offer for offer in offers if offer.market in markets]
    allowed = allowed or [offer for offer in offers if offer.market is policy.market]
    lost = {
        place_key(attempt.offer)
        for attempt in record.attempts
        if _is_taken(attempt)
        and (attempt.end is None or now - attempt.end.at < policy.avoid_lost_place_s)
    }
    over = [_price(each) for each in allowed if each.market is not Market.SPOT]
    over_usd = min((each for each in over if each is not None), default=math.inf)

    def rank(offer: Offer) -> tuple[bool, bool, bool]:
        spot = offer.market is Market.SPOT
        dear = spot and (offer.price_usd_per_h or 0.0) > over_usd
        return dear, not spot, place_key(offer) in lost

    return sorted(allowed, key=rank)


def _is_taken(attempt: AttemptRecord) -> bool:
    """Tell whether its place took nodes of it, or has announced that it will."""
    if attempt.end is not None:
        return was_taken(attempt)
    return attempt.notice is not None and attempt.notice.deadline_at is not None


def markets_now(record: RunRecord, now: float, policy: Policy) -> frozenset[Market]:
    """Return the markets in which nodes may be bought now, where no price helps to choose.

    A deadline that presses forbids to wait, not to buy spot; that is forbidden only where nodes
    that are taken at once would leave no time for a start on demand.
    """
    if policy.market is None:
        return frozenset(Market)
    if policy.market is Market.ON_DEMAND:
        return frozenset({Market.ON_DEMAND})
    slack_s = spare_s(record, record.limits.nodes_max, now, policy)
    if policy.on_demand_for_deadline and slack_s is not None:
        undone = undone_s(record, record.limits.nodes_max)
        if slack_s < expected_start_s(record, now, policy) + policy.ask_s + undone:
            return frozenset({Market.ON_DEMAND})
        if slack_s < pressing_s(record, record.limits.nodes_max):
            return frozenset({Market.SPOT, Market.ON_DEMAND})
    waited_s = 0.0 if record.waiting_since is None else now - record.waiting_since
    if policy.on_demand_after_s is not None and waited_s >= policy.on_demand_after_s:
        return frozenset({Market.SPOT, Market.ON_DEMAND})
    return frozenset({Market.SPOT})


def will_buy_later(record: RunRecord, offers: Iterable[Offer], now: float, policy: Policy) -> bool:
    """Tell whether the user's rule may yet buy on demand what it does not buy now."""
    if policy.market is not Market.SPOT:
        return False
    if not any(offer.market is Market.ON_DEMAND for offer in offers):
        return False
    deadline_at = record.limits.deadline_at
    if policy.on_demand_for_deadline and deadline_at is not None:
        return now < deadline_at
    return policy.on_demand_after_s is not None and Market.ON_DEMAND not in markets_now(
        record, now, policy
    )


def _why(record: RunRecord, ranked: Sequence[Offer], now: float, policy: Policy) -> str:
    if not ranked:
        return "waits: no place may be asked now"
    first = ranked[0]
    if first.market is Market.ON_DEMAND and policy.market is Market.SPOT:
        return "buys on demand: the deadline leaves no time for a start that comes to nothing"
    if len({offer.market for offer in ranked}) > 1 and policy.on_demand_after_s is not None:
        waited_s = now - (record.waiting_since or now)
        return f"asks for spot first, then on demand: it waited {format_duration(waited_s)}"
    return "asks the places in the order of their price, one that just took nodes last"


def by_policy(
    record: RunRecord,
    offers: Sequence[Offer],
    nodes: int,
    now: float,
    policy: Policy,
    market: Sequence[Sighting],
    running: Running | None = None,
    patient: int | None = None,
) -> tuple[Action, dict[tuple[str, str], Offer]]:
    """Ask the policy, with all that the journal tells of each place; return the offers by name."""
    from spotguard.policy.decide import Model, decide  # NumPy: not for a plain look

    accelerator, gpus = accelerator_of(record, offers[0] if offers else None)
    model = Model.of(accelerator, nodes * gpus)
    named: dict[tuple[str, str], Offer] = {}
    for offer in offers:
        sort = SPOT if offer.market is Market.SPOT else ON_DEMAND
        if (nodes, place_key(offer)) not in record.tried or sort == SPOT:
            named.setdefault((place_name(offer), sort), offer)
    work_left_s = max(1.0, work_s(record, patient or nodes))
    view = _view(record, named, nodes, now, policy, model.hazard, market, running, work_left_s)
    seed = zlib.crc32(f"{record.run_id} {record.next_number} {record.rounds}".encode())
    return decide(view, model, seed).action, named


def _asked(action: Action) -> list[tuple[str, str]]:
    if not isinstance(action, Buy):
        return []
    return [(action.place, action.market), *((name, SPOT) for name in action.then)]


def _view(
    record: RunRecord,
    named: dict[tuple[str, str], Offer],
    nodes: int,
    now: float,
    policy: Policy,
    hazard: Hazard,
    market: Sequence[Sighting],
    running: Running | None,
    work_left_s: float,
) -> View:
    """Return what the policy is told."""
    limits = record.limits
    assert limits.deadline_at is not None
    start_s = expected_start_s(record, now, policy)
    # Nodes may be taken as they start, or before they have saved, and who says that they are free
    # may still refuse them.
    lost_s = max(start_s, policy.ask_s if any(each.kind == FREE for each in market) else 0.0)
    lost_s += undone_s(record, nodes)
    size = checkpoint_bytes(record)
    offered = {name: offer for (name, _), offer in named.items()}
    return View(
        job=JobState(
            work_left_s=work_left_s,
            left_s=limits.deadline_at - now - end_margin_s(record, policy),
            start_s=start_s,
            reserve_s=lost_s,
            undone_s=undone_s(record, nodes),
            nodes=nodes,
        ),
        places=tuple(
            MarketPlace(
                name=name,
                spot_usd_per_h=_price(named.get((name, SPOT))),
                on_demand_usd_per_h=_price(named.get((name, ON_DEMAND))),
                move_usd=move_usd(record.store_root, offered[name], size),
                seen=seen_of(record, named.get((name, SPOT)), nodes, now, hazard, market),
            )
            for name in dict.fromkeys(name for name, _ in named)
        ),
        running=running,
        tick_s=policy.ask_s,
    )


def paced_nodes(
    record: RunRecord, offers: Sequence[Offer], now: float, policy: Policy
) -> tuple[int, str]:
    """Return the most nodes that are worth their price at the budget's pace, and why.

    Only with a budget, a deadline and a range of nodes on spot; else it is all that the run may
    have. Never so few that the work, as far as its pace is known, would miss the deadline.
    """
    limits = record.limits
    least, most = limits.nodes_min, limits.nodes_max
    prices = [each.price_usd_per_h for each in offers if each.market is Market.SPOT]
    spot = [each for each in offers if each.market is Market.SPOT]
    if (
        limits.budget_usd is None
        or limits.deadline_at is None
        or least == most
        or policy.market is not Market.SPOT
        or not prices
        or None in prices
    ):
        return most, ""
    from spotguard.policy.decide import Model
    from spotguard.policy.pacing import best_choice

    accelerator, gpus = accelerator_of(record)
    left_s = max(1.0, limits.deadline_at - now - end_margin_s(record, policy))
    start_s = expected_start_s(record, now, policy)
    left_usd = max(0.0, limits.budget_usd - cost.known_spent_usd(record, now))
    asked = Seen(up=True, unseen_s=0.0)  # whether they are to be had, the launch will tell
    view = View(
        job=JobState(
            work_left_s=1.0,
            left_s=left_s,
            start_s=start_s,
            nodes=most,
            nodes_min=least,
            budget_left_usd=left_usd,
            on_demand=False,
        ),
        places=tuple(
            MarketPlace(name=place_name(each), spot_usd_per_h=each.price_usd_per_h, seen=asked)
            for each in spot
        ),
        tick_s=policy.ask_s,
    )
    best = best_choice(view, Model.of(accelerator, least * gpus).hazards(least))
    paced = least if best is None else best.nodes
    needed = next((n for n in range(least, most) if _in_time(record, n, left_s, start_s)), most)
    if work_left_s(record, most) is None or needed <= paced:
        needed = paced
    if needed == most:
        return most, ""
    return needed, (
        f"{needed} of {most} nodes, for {format_usd(left_usd)} are to last for "
        f"{format_duration(left_s)}"
    )


def _in_time(record: RunRecord, nodes: int, left_s: float, start_s: float) -> bool:
    work_s = work_left_s(record, nodes)
    return work_s is None or (1 + SLACK) * work_s + 2 * start_s <= left_s


def _price(offer: Offer | None) -> float | None:
    return None if offer is None else offer.price_usd_per_h
