"""Which nodes to ask for next: between two attempts, and ahead, at the notice of one. Pure.

Nodes that are announced to go are replaced while they still train. The attempt that is asked for
ahead (`RunRecord.ahead`) waits on its own nodes until the current one has ended, and then takes its
place; where it is not needed after all, its nodes are given up. Both are paid while both are there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from spotguard.control.journal import cost
from spotguard.control.journal.nodes.offer import place_key
from spotguard.control.journal.record import BudgetOf
from spotguard.control.supervisor.actions import (
    Action,
    AskDown,
    BackOff,
    Drop,
    GiveUp,
    Intend,
    Launch,
    NoteLaunched,
    NoteRefused,
    NoteUp,
    SendDown,
    Settle,
    Wait,
)
from spotguard.control.supervisor.attempt_limits import allot
from spotguard.control.supervisor.end_reason import never_came
from spotguard.control.supervisor.placement.advice import advised, paced_nodes, will_buy_later
from spotguard.control.supervisor.placement.time_left import work_left_s
from spotguard.errors import BudgetExhausted, DeadlineReached, EnvironmentFailure
from spotguard.errors import NoCapacity as NoCapacityError
from spotguard.events.states import EndReason, RunState
from spotguard.launch.base import ClusterState, ClusterView, Offer
from spotguard.launch.taskyaml import BUYS_SPOT
from spotguard.policy.plan.ladder import node_ladder
from spotguard.shared.units import format_duration, format_usd

if TYPE_CHECKING:
    from spotguard.control.journal.record import AttemptRecord, RunRecord
    from spotguard.control.supervisor.policy import Policy
    from spotguard.policy.market.sightings import Sighting

_ROUNDS_OF_DOUBT = 3
_QUOTA_OF_SPOT = re.compile("MaxSpotInstanceCount|PREEMPTIBLE|LowPriority")
"""How AWS, GCP and Azure name the quotas of spot machines, beside which those on demand have others
(docs.aws.amazon.com: Spot Instance quotas; cloud.google.com: preemptible quotas)."""
_FULL_FOR_LONG = (
    "; the quota stayed full: ask the cloud for a larger one (docs/aws.md says how on AWS), or end "
    "what else of the account uses it"
)


@dataclass(frozen=True, kw_only=True)
class NoOffers:
    """The places could not be looked up, which says nothing of the nodes that they have."""

    problem: str
    lasting: bool
    """No wait mends it: the job makes no sense any more, or a package is missing, at two looks."""


def next_launch(
    record: RunRecord,
    offers: tuple[Offer, ...],
    now: float,
    policy: Policy,
    *,
    market: tuple[Sighting, ...] = (),
    beside: AttemptRecord | None = None,
    no_offers: NoOffers | None = None,
) -> Action:
    """Take the largest number of nodes that can be paid and was not refused in this round.

    `market` is what other runs of this machine saw of places. `beside` is an attempt that lives on
    until its notice comes true: it is paid till then. `no_offers` is why there are no `offers`.
    """
    if no_offers is not None and no_offers.lasting:
        return _launch_failed(no_offers.problem)
    refusals: list[EndReason] = []
    unpriced, priced = None, bool(record.tried)
    why = ""
    patient: int | None = None
    most, pace = paced_nodes(record, offers, now, policy)
    for nodes in node_ladder(record.limits.nodes_min, most):
        advice = advised(record, offers, nodes, now, policy, market=market, patient=patient)
        if patient is None and advice.patient:
            patient = nodes
        why = f"{advice.why}; {pace}" if pace else advice.why
        for offer in advice.offers:
            if (nodes, place_key(offer)) in record.tried:
                continue
            if _price_forbids(record, offer):
                unpriced = unpriced or offer
                continue
            priced = True
            allotted = allot(
                record,
                nodes=nodes,
                price_usd_per_h=cost.price_usd_per_h(record, offer),
                now=now,
                policy=policy,
                beside=beside,
            )
            if not isinstance(allotted, EndReason):
                return Intend(nodes=nodes, offer=offer, allotment=allotted, why=why)
            refusals.append(allotted)
    if unpriced is not None and not priced:
        return _unknown_price(record, unpriced)
    if refusals and not record.tried:
        return _refused(record, refusals[0], now)
    unknown = "" if no_offers is None else no_offers.problem
    return _no_capacity(record, offers, now, policy, BackOff(now, why, unknown))


def _no_capacity(
    record: RunRecord, offers: tuple[Offer, ...], now: float, policy: Policy, wait: BackOff
) -> Action:
    """Return the `wait` for nodes with its end, or how the run settles without one."""
    buys_later = will_buy_later(record, offers, now, policy)
    if record.tried and not (record.mendable or _may_be_bought(record, buys_later=buys_later)):
        wait = replace(wait, quota_until=_quota_until(record, now, policy))
        doubts = record.rounds < _rounds_of_doubt(record)
        if not doubts and (wait.quota_until is None or now >= wait.quota_until):
            full = record.quota_refusal + _FULL_FOR_LONG
            return _launch_failed(full if record.full else record.refusal)
    # A look-up that fails once says nothing of the wait before it: the next one may answer.
    since = record.unlisted_since if wait.problem else record.waiting_since
    since = now if since is None else since
    patience_is_over = now - since >= policy.capacity_patience_s
    if patience_is_over and not buys_later and wait.problem:
        return Settle(
            state=RunState.PAUSED,
            detail=f"where nodes are to be had cannot be looked up: {wait.problem}; it waited for "
            f"{format_duration(now - since)}",
            exit_code=EnvironmentFailure.exit_code,
        )
    if patience_is_over and not buys_later:
        return Settle(
            state=RunState.PAUSED,
            detail=f"no place had {record.limits.nodes_min} node(s) for "
            f"{format_duration(now - since)}{_in_words(record.refusal)}",
            exit_code=NoCapacityError.exit_code,
        )
    # The exponent is capped so that a long wait cannot overflow a float.
    delay_s = policy.capacity_backoff_s * 2.0 ** min(record.rounds, 30)
    retry_at = now + min(delay_s, policy.capacity_backoff_max_s)
    if wait.quota_until is not None and now < wait.quota_until:
        retry_at = min(retry_at, wait.quota_until)  # the last try comes when it is said to
    return replace(wait, retry_at=retry_at)


def _may_be_bought(record: RunRecord, *, buys_later: bool) -> bool:
    """Tell whether what a quota of spot refuses will be bought on demand, which has its own."""
    is_of_spot = _QUOTA_OF_SPOT.search(record.quota_refusal) is not None
    return buys_later and bool(record.full) and is_of_spot


def _quota_until(record: RunRecord, now: float, policy: Policy) -> float | None:
    """Return until when a quota that refused nodes in this round may be full for a moment only.

    It counts nodes for a while after they have ended. None: no quota is in the way.
    """
    if not record.full:
        return None
    if record.quota_until is not None and not record.leaving:
        return record.quota_until
    ends = _own_nodes_ended(record, now)
    return max([now + policy.quota_patience_s, *(end + policy.quota_freed_s for end in ends)])


def _own_nodes_ended(record: RunRecord, now: float) -> list[float]:
    """Return when nodes of the run ended that ran or may have run; now for those still there."""
    ended = [
        now if attempt.end.leaving else attempt.end.gone_at
        for attempt in record.attempts
        if attempt.end is not None and attempt.end.gone_at > attempt.billed_from
    ]
    return [*ended, *(lost.at + lost.paid_s for lost in record.lost_launches)]


def _launch_failed(problem: str) -> Settle:
    """Settle because no wait mends what stands against a launch."""
    return Settle(
        state=RunState.FAILED,
        detail=f"the launch failed: {problem}",
        exit_code=EnvironmentFailure.exit_code,
    )


def _rounds_of_doubt(record: RunRecord) -> int:
    """Return how many rounds are waited although no wait is said to mend what was refused.

    What has worked in this place before may be away for a moment: a name service, a role.
    """
    worked = any(attempt.started_at is not None for attempt in record.of_this_place)
    return _ROUNDS_OF_DOUBT if worked else 0


def _in_words(refusal: str) -> str:
    return f": {refusal}" if refusal else ""


def _price_forbids(record: RunRecord, offer: Offer) -> bool:
    """Tell whether a budget stands against a price that nobody knows."""
    limits = record.limits
    if limits.budget_usd is None or limits.allow_unknown_price:
        return False
    known = all(attempt.offer.price_usd_per_h is not None for attempt in record.attempts)
    return offer.price_usd_per_h is None or not known


def _unknown_price(record: RunRecord, offer: Offer) -> Settle:
    return Settle(
        state=RunState.PAUSED,
        detail=f"the price of {offer.instance_type or offer.infra} is unknown, so the budget of "
        f"{format_usd(record.limits.budget_usd)} cannot be kept",
        exit_code=BudgetExhausted.exit_code,
    )


def _refused(record: RunRecord, reason: EndReason, now: float) -> Settle:
    """Settle because what is left of the money or the time buys no useful training."""
    if reason is EndReason.DEADLINE:
        return Settle(
            state=RunState.PAUSED,
            detail="the time left until the deadline is too short for another attempt",
            exit_code=DeadlineReached.exit_code,
        )
    most_usd, unseen_usd = cost.known_spent_usd(record, now), cost.unseen_usd(record)
    spent, unseen = format_usd(most_usd), ""
    if unseen_usd > 0:
        spent = f"between {format_usd(most_usd - unseen_usd)} and {spent}"
        unseen = " (nobody saw when nodes went; `spotguard resume --budget` goes on with more)"
    return Settle(
        state=RunState.PAUSED,
        detail=f"{spent} of the budget of {format_usd(record.limits.budget_usd)} are spent"
        f"{unseen}, and the rest buys no useful training",
        exit_code=BudgetExhausted.exit_code,
        lacks_budget_of=BudgetOf.RUN,
    )


def sweep_used_up(record: RunRecord) -> Settle:
    """Settle because the money of the run's sweep never buys what it was asked for."""
    return Settle(
        state=RunState.PAUSED,
        detail=record.queued,
        exit_code=BudgetExhausted.exit_code,
        lacks_budget_of=BudgetOf.SWEEP,
    )


# ---------------------------------------------------------------- ahead, at a notice


def may_ask_ahead(record: RunRecord, now: float) -> bool:
    """Tell whether the next nodes are asked for now, while the current attempt still trains.

    Only where a cloud said when it takes a node: by then this attempt has ended, and what it costs
    until then is known. One that will have finished by then needs no next one. The user may not
    want to pay both.
    """
    if not record.spec.get("ask_ahead", True):
        return False
    attempt = record.current
    if attempt is None or record.ahead is not None or record.asked_ahead_of == attempt.number:
        return False
    notice = attempt.notice
    if notice is None or notice.deadline_at is None or now >= notice.deadline_at:
        return False
    if attempt.offer.infra not in BUYS_SPOT or attempt.started_at is None or not _leads_on(record):
        return False
    left_s = work_left_s(record, attempt.nodes)
    return left_s is None or left_s > notice.deadline_at - now


def ask_ahead(
    record: RunRecord,
    offers: tuple[Offer, ...],
    now: float,
    policy: Policy,
    *,
    market: tuple[Sighting, ...] = (),
) -> Intend | None:
    """Return the next launch, beside the attempt that is announced to end; None if there is none.

    What is not to be had, or not to be paid beside this one, is for the time after its end.
    """
    if not may_ask_ahead(record, now):
        return None
    action = next_launch(record, offers, now, policy, market=market, beside=record.current)
    return replace(action, ahead=True) if isinstance(action, Intend) else None


def may_have_begun(record: RunRecord) -> bool:
    """Tell whether the attempt that waits may have heard by itself that its turn has come.

    Then it is judged as any other: nobody may take it down as if it had never trained.
    """
    ahead, before = record.ahead, record.current or record.last_ended
    if ahead is None or not ahead.launched or ahead.down is not None or before is None:
        return False
    return before.job_end is not None and before.job_end.reason.retried


def look_after_ahead(
    record: RunRecord,
    cluster: ClusterView | None,
    now: float,
    policy: Policy,
    *,
    at_rest: bool,
    heard: bool = False,
) -> Action | None:
    """Return what is to be done for the nodes asked for ahead; None if nothing.

    `at_rest`: the run does not go on. `heard`: the job of the current attempt gives signs of life.
    """
    ahead = record.ahead
    if ahead is None or cluster is None or cluster.state is ClusterState.UNREACHABLE:
        return None
    if record.current is not None and may_have_begun(record):
        return None  # until the current attempt has its verdict
    needless = _needless(record, now, policy, at_rest=at_rest, heard=heard)
    if not ahead.launched:
        return _launching_ahead(ahead, cluster, needless, now, policy)
    if cluster.state not in (ClusterState.UP, ClusterState.STARTING):
        return _never_took_over(ahead, cluster, now, policy)
    if cluster.up_at is not None and ahead.up_at is None:
        return NoteUp(min(cluster.up_at, now))
    if ahead.down is not None:
        action = pursue_down(ahead, now, policy)
        return action if isinstance(action, SendDown) else None
    problem = cluster.detail if cluster.lasting else ahead.launch_problem
    if problem is not None:
        return AskDown(EndReason.LAUNCH_FAILED, problem)
    if cluster.job_over:
        return AskDown(EndReason.RESIZED, "its job ended before its turn had come")
    down_at = ahead.allotment.down_at
    if down_at is not None and now >= down_at:
        needless = "what was allotted to it is used up"
    return AskDown(EndReason.RESIZED, needless) if needless else None


def _launching_ahead(
    ahead: AttemptRecord, cluster: ClusterView, needless: str, now: float, policy: Policy
) -> Action:
    if cluster.state is not ClusterState.ABSENT:
        return NoteLaunched()
    if ahead.launch_problem is not None:
        return Drop(f"the launch failed: {ahead.launch_problem}")
    if needless or now - ahead.intended_at > policy.intent_valid_s:
        return Drop(needless or "it was not launched in time, and nothing was started")
    return Launch()


def _never_took_over(
    ahead: AttemptRecord, cluster: ClusterView, now: float, policy: Policy
) -> Action:
    """Nothing of it is left: what is billed is what may have run."""
    ended = cluster.state in (ClusterState.GONE, ClusterState.ABSENT)
    gone = never_came(ahead, replace(cluster, nodes_ran=ended or cluster.nodes_ran), now, policy)
    if cluster.state is ClusterState.REFUSED and ahead.down is None:
        return NoteRefused(
            cluster.detail,
            lasting=cluster.lasting,
            busy=cluster.busy,
            quota_full=cluster.quota_full,
            gone=gone,
        )
    why = cluster.detail if ahead.down is None else ahead.down.detail
    return GiveUp(why=why, gone=gone)


def _needless(record: RunRecord, now: float, policy: Policy, *, at_rest: bool, heard: bool) -> str:
    """Return why nobody needs the nodes that were asked for ahead; empty if the run does."""
    attempt = record.current
    if at_rest or record.wish is not None:
        return "the run does not go on"
    if attempt is None:
        return ""
    if not _leads_on(record):
        return "the run does not go on"
    if attempt.job_end is not None or attempt.node_ends or attempt.down is not None:
        return ""
    notice = attempt.notice
    if notice is None or notice.deadline_at is None:
        return "the notice was withdrawn"
    outlived = heard and now > notice.deadline_at + policy.teardown_s
    return "the nodes outlived their notice" if outlived else ""


def _leads_on(record: RunRecord) -> bool:
    """Tell whether another attempt follows the current one, for all that is known."""
    attempt = record.current
    assert attempt is not None
    ends = (attempt.job_end, attempt.down, attempt.stop)
    return record.wish is None and all(end is None or end.reason.retried for end in ends)


def pursue_down(attempt: AttemptRecord, now: float, policy: Policy) -> Action:
    """Return the order to take an attempt's nodes down, once more if it is time for that."""
    assert attempt.down is not None
    sent_at, failed_at = attempt.down.sent_at, attempt.down.failed_at
    if failed_at is not None and now - failed_at < policy.down_retry_s:
        return Wait()
    if sent_at is not None and now - sent_at < policy.down_patience_s:
        return Wait()
    return SendDown()
