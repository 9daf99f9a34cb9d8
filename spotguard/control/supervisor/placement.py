"""Spot or on demand, and where: which of the offers may be asked now, in which order. Pure.

Under a deadline `spotguard.policy` decides, on what the journal tells of each place. Elsewhere it
is spot whenever there is some, and on demand when the user's rule says so; a place that took nodes
a while ago is asked last. Paid nodes are never given up for a place that has not answered.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from spotguard.control.journal import cost
from spotguard.control.journal.nodes.offer import place_key
from spotguard.control.supervisor.attempt_limits import end_margin_s
from spotguard.events.states import EndReason, Market
from spotguard.launch.taskyaml import BUYS_SPOT
from spotguard.policy.action import ON_DEMAND, SPOT, Buy, Move
from spotguard.policy.market.sightings import FREE, answers_of, says_free, seen_by
from spotguard.policy.view import JobState, MarketPlace, Running, Seen, View
from spotguard.shared.hazard import HazardByAge
from spotguard.shared.units import format_duration, format_usd
from spotguard.spec.infra import LOCAL

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from spotguard.control.journal.record import AttemptRecord, RunRecord
    from spotguard.control.supervisor.policy import Policy
    from spotguard.launch.base import Offer
    from spotguard.policy.action import Action
    from spotguard.policy.market.hazard import Hazard
    from spotguard.policy.market.sightings import Sighting

_SLACK = 0.1
"""Of the work that is left: with less slack than this nobody waits for spot."""
_MOST_DOUBLINGS = 5
_FAILING = HazardByAge(((0.0, 0.01),))
"""Machines that nobody takes: one in four days fails, a guess from above."""
_CHEAPER = 1.01
"""Places whose prices differ by less than this are as dear as each other."""
_ASK_AHEAD_S = 300.0
"""So long before on-demand nodes may be given up it is asked whether spot ones are free: the
answer takes a while, and is not waited for."""
TAKEN = frozenset(
    {EndReason.PREEMPTED, EndReason.TERMINATED, EndReason.NODE_LOST, EndReason.VANISHED}
)
"""The ends that a spot market brings."""


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What may be bought now, in which order; none is to wait. `why` is a sentence."""

    offers: tuple[Offer, ...]
    why: str


def advised(
    record: RunRecord,
    offers: Sequence[Offer],
    nodes: int,
    now: float,
    policy: Policy,
    *,
    market: Sequence[Sighting] = (),
) -> Advice:
    """Return the offers that may be asked for so many nodes, and why these.

    `market` is what other runs of this machine saw of the places.
    """
    offers = [offer for offer in offers if not _too_dear(offer, policy.max_usd_per_h)]
    deadline = policy.on_demand_for_deadline and record.limits.deadline_at is not None
    if deadline and policy.market is Market.SPOT and _policy_can_choose(offers):
        action, named = _by_policy(record, offers, nodes, now, policy, market)
        wanted = [named[key] for key in _asked(action) if key in named]
        return Advice(offers=tuple(wanted), why=action.why)
    ranked = offers_now(record, offers, now, policy)
    return Advice(offers=tuple(ranked), why=_why(record, ranked, now, policy))


def _policy_can_choose(offers: Sequence[Offer]) -> bool:
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
    return sorted(allowed, key=lambda it: (it.market is not Market.SPOT, place_key(it) in lost))


def _is_taken(attempt: AttemptRecord) -> bool:
    """Tell whether its place took nodes of it, or has announced that it will."""
    if attempt.end is not None:
        return attempt.end.reason in TAKEN
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
    slack_s = _slack_s(record, record.limits.nodes_max, now, policy)
    if policy.on_demand_for_deadline and slack_s is not None:
        if slack_s < expected_start_s(record, now, policy) + policy.ask_s:
            return frozenset({Market.ON_DEMAND})
        if slack_s < _pressing_s(record, record.limits.nodes_max):
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
    if not (free and _policy_can_choose(offers) and may_move(record, attempt, now, policy)):
        return False
    running = Running(place=place_name(attempt.offer), market=SPOT, nodes=attempt.nodes)
    action, _ = _by_policy(record, offers, attempt.nodes, now, policy, market, running)
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


def work_left_s(record: RunRecord, nodes: int) -> float | None:
    """Return how long the steps that are left take on so many nodes; None if nobody can tell.

    In a phase these are its own: at what pace later ones train, elsewhere, is not known yet.
    """
    steps = [attempt.last_step for attempt in record.attempts if attempt.last_step is not None]
    paces = [
        attempt.progress.step_s * attempt.nodes
        for attempt in record.of_this_place  # other machines have another pace
        if attempt.progress is not None and attempt.progress.step_s
    ]
    if record.total_steps is None or not paces:
        return None
    total = min(record.total_steps, record.until_step or record.total_steps)
    return max(0, total - max(steps, default=0)) * min(paces) / nodes


def _time_for_spot(record: RunRecord, attempt: AttemptRecord, now: float, policy: Policy) -> bool:
    """Tell whether spot nodes that are taken at once would still leave time for on-demand ones."""
    slack_s = _slack_s(record, attempt.nodes, now, policy)
    if slack_s is None:
        return True
    start_s = expected_start_s(record, now, policy)
    return slack_s >= max(start_s + policy.ask_s, _pressing_s(record, attempt.nodes))


def _pressing_s(record: RunRecord, nodes: int) -> float:
    """Return the slack below which nobody waits: half as much where the work is but assumed."""
    share = _SLACK / 2 if work_left_s(record, nodes) is None else _SLACK
    return share * _work_s(record, nodes)


def _work_s(record: RunRecord, nodes: int) -> float:
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
    return (record.limits.deadline_at - begins_at) / (1 + _SLACK)


def _slack_s(record: RunRecord, nodes: int, now: float, policy: Policy) -> float | None:
    """Return the time beyond the work, one start and the last save; None without a deadline."""
    deadline_at = record.limits.deadline_at
    if deadline_at is None:
        return None
    left_s = deadline_at - now - end_margin_s(record, policy)
    return left_s - _work_s(record, nodes) - expected_start_s(record, now, policy)


def expected_start_s(record: RunRecord, now: float, policy: Policy) -> float:
    """Return what a start takes, its 95th percentile: of few that were seen, the longest."""
    starts = sorted(
        cost.startup_s(each, now) for each in record.of_this_place if each.started_at is not None
    )
    return starts[min(len(starts) - 1, int(0.95 * len(starts)))] if starts else policy.start_s


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


def _by_policy(
    record: RunRecord,
    offers: Sequence[Offer],
    nodes: int,
    now: float,
    policy: Policy,
    market: Sequence[Sighting],
    running: Running | None = None,
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
    view = _view(record, named, nodes, now, policy, model.hazard, market, running)
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
) -> View:
    """Return what the policy is told."""
    limits = record.limits
    assert limits.deadline_at is not None
    start_s = expected_start_s(record, now, policy)
    # Nodes may be taken as they start, and who says that they are free may still refuse them.
    lost_s = max(start_s, policy.ask_s if any(each.kind == FREE for each in market) else 0.0)
    return View(
        job=JobState(
            work_left_s=max(1.0, _work_s(record, nodes)),
            left_s=limits.deadline_at - now - end_margin_s(record, policy),
            start_s=start_s,
            reserve_s=lost_s,
            nodes=nodes,
        ),
        places=tuple(
            MarketPlace(
                name=name,
                spot_usd_per_h=_price(named.get((name, SPOT))),
                on_demand_usd_per_h=_price(named.get((name, ON_DEMAND))),
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
    return work_s is None or (1 + _SLACK) * work_s + 2 * start_s <= left_s


def _price(offer: Offer | None) -> float | None:
    return None if offer is None else offer.price_usd_per_h


def place_name(offer: Offer) -> str:
    """Return a place in words, without its market: `aws/us-east-1/us-east-1a/p3.2xlarge`."""
    words = (offer.infra, offer.region, offer.zone, offer.instance_type or offer.gpus)
    return "/".join(word for word in words if word)


def seen_of(
    record: RunRecord,
    offer: Offer | None,
    nodes: int,
    now: float,
    hazard: Hazard,
    market: Sequence[Sighting] = (),
) -> Seen:
    """Return what is known of a spot place: by the run's attempts, its refusals, other runs."""
    if offer is None:
        return Seen()
    key = place_key(offer)
    told = answers_of(market, place=place_name(offer), nodes=nodes, without_run=record.run_id)
    for attempt in record.attempts:
        if place_key(attempt.offer) != key:
            continue
        begun_at = attempt.started_at if attempt.started_at is not None else attempt.up_at
        if begun_at is not None:
            told.append((begun_at, True))
        if attempt.end is not None and attempt.end.reason in TAKEN:
            told.append((attempt.end.gone_at, False))
    if (nodes, key) in record.tried:
        told.append((now, False))
    elif says_free(market, place=place_name(offer), nodes=nodes):
        told.append((now, True))
    return seen_by(sorted(told), now, hazard)


def hazard_of(
    record: RunRecord, attempt: AttemptRecord, now: float, market: Sequence[Sighting] = ()
) -> HazardByAge | None:
    """Return how often an attempt's nodes are taken, by their age; None where nobody takes any.

    On demand they only fail. Of spot nodes it is the record of their kind and number, corrected by
    what the run and others have seen of the place.
    """
    if attempt.offer.infra == LOCAL:
        return None
    if attempt.offer.market is not Market.SPOT:
        return _FAILING
    from spotguard.policy.market.hazard import pooled, recorded_level, taken_by_age

    accelerator, gpus = accelerator_of(record, attempt.offer)
    kind = accelerator, attempt.nodes * gpus
    seen = seen_of(record, attempt.offer, attempt.nodes, now, pooled(*kind), market)
    level = recorded_level(*kind)
    return taken_by_age(level, taken=seen.taken, expected=seen.taken_expected)


def accelerator_of(record: RunRecord, offer: Offer | None = None) -> tuple[str, int]:
    """Return the kind of GPU, in capitals, and how many a node has; `` and 1 without any.

    Of several alternatives it is the offer's; without one, the first.
    """
    gpus = record.spec.get("gpus")
    asked = gpus.partition(",")[0] if isinstance(gpus, str) else ""
    name, _, count = (offer.gpus if offer is not None and offer.gpus else asked).partition(":")
    return name.upper(), int(count) if count.isdigit() else 1
