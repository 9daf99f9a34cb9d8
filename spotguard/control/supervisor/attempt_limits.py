"""How long an attempt may live, so that a run never costs more than its budget. Pure.

The money that is left buys the nodes until `end`. Counting back from there: the controller (and,
should it be dead, the launcher's leak guard) takes the nodes down early enough for a slow
teardown, and the job saves and stops by itself early enough for a slow save before that:

    now ──── training ────► stop_at ── save ──► down_at ── teardown ──► end
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from spotguard.control.journal import cost
from spotguard.control.journal.record import Allotment
from spotguard.events.states import EndReason
from spotguard.policy.plan import money

if TYPE_CHECKING:
    from spotguard.control.journal.record import AttemptRecord, RunRecord
    from spotguard.control.supervisor.policy import Policy


CONTROLLER_LEAVES_S = 900.0
"""How long the controller's own node may take to go once its run is at rest: it waits for a word of
the user's for some minutes, and clouds take some to end it."""


def allot(
    record: RunRecord,
    *,
    nodes: int,
    price_usd_per_h: float | None,
    now: float,
    policy: Policy,
    beside: AttemptRecord | None = None,
) -> Allotment | EndReason:
    """Return the limits of an attempt launched now, or the reason for which it is not worth it.

    `beside` still trains, until its notice comes true: what it may cost is not there to be spent.
    """
    margins = _Margins.of(record, policy)
    budget_end = _budget_end(
        record,
        nodes=nodes,
        price_usd_per_h=price_usd_per_h,
        now=now,
        reserve_usd=_still_leaving_usd(record, margins.teardown_s)
        + _until_taken_usd(beside, margins.teardown_s, now)
        + controller_end_usd(record),
    )
    deadline_end = record.limits.deadline_at
    for end, reason in ((deadline_end, EndReason.DEADLINE), (budget_end, EndReason.BUDGET)):
        if end is not None and end - margins.save_s - margins.teardown_s - now < margins.useful_s:
            return reason
    ends = [
        (end, reason)
        for end, reason in ((budget_end, EndReason.BUDGET), (deadline_end, EndReason.DEADLINE))
        if end is not None
    ]
    if not ends:
        return Allotment()
    first_end, first_reason = min(ends, key=lambda pair: pair[0])
    down_at = first_end - margins.teardown_s
    return Allotment(
        budget_stop_at=margins.stop_at(budget_end),
        deadline_stop_at=margins.stop_at(deadline_end),
        down_at=down_at,
        down_reason=first_reason,
        max_lifetime_s=down_at - now,
    )


def beside_s(record: RunRecord, attempt: AttemptRecord, now: float, policy: Policy) -> float:
    """Return by how many seconds an attempt has to end earlier for what was spent beside it.

    All that was left went to it; nodes that were asked for ahead since then are paid from the same,
    and those of earlier attempts that take longer to go than was thought.
    """
    rate = money.rate_usd_per_h(attempt.offer.price_usd_per_h, attempt.nodes)
    if not rate:
        return 0.0
    since = [each.usd or 0.0 for each in record.lost_launches if each.at >= attempt.intended_at]
    waiting = record.ahead and cost.cost_usd(record.ahead, now)
    moved = _controller_beside_usd(record, attempt.intended_at, now)
    late = _late_usd(record, attempt, now, policy)
    return (sum(since) + (waiting or 0.0) + moved + late) / rate * money.SECONDS_PER_H


def down_due(
    record: RunRecord, attempt: AttemptRecord, now: float, policy: Policy
) -> EndReason | None:
    """Return the limit at which the nodes have to be taken down now, saved or not; None if none.

    What is spent beside an attempt moves its budget's end also where its deadline comes first.
    """
    limit = attempt.allotment
    if limit.down_at is None:
        return None
    broke_at = math.inf
    if limit.down_reason is EndReason.BUDGET:
        broke_at = limit.down_at
    elif limit.budget_stop_at is not None and limit.deadline_stop_at is not None:
        broke_at = limit.budget_stop_at + (limit.down_at - limit.deadline_stop_at)
    if now + beside_s(record, attempt, now, policy) >= broke_at:
        return EndReason.BUDGET
    return limit.down_reason if now >= limit.down_at else None


def _late_usd(record: RunRecord, launched: AttemptRecord, now: float, policy: Policy) -> float:
    """Return what earlier attempts cost beyond what a launch left for the end of their nodes."""
    at, rates = launched.intended_at, cost.attempt_rates_usd_per_h(record)
    teardown_s = _teardown_margin_s(record, policy, before=at)
    late_usd = 0.0
    for each in record.attempts:
        rate, end = rates[each.number], each.end
        if not rate or end is None or each.number >= launched.number:
            continue
        if not end.leaving and end.gone_at <= at:
            continue
        left_s = teardown_s + (_until_taken_s(each, at) if end.at > at else 0.0)
        before_usd = cost.cost_usd(replace(each, end=None), at) or 0.0
        paid_usd = (cost.cost_usd(each, now) or 0.0) - before_usd
        if end.leaving:  # what it takes from here on is not known any better
            paid_usd += money.cost_usd(rate, teardown_s) or 0.0
        late_usd += max(0.0, paid_usd - (money.cost_usd(rate, left_s) or 0.0))
    return late_usd


def _controller_beside_usd(record: RunRecord, launched_at: float, now: float) -> float:
    """Return what the controller's nodes cost beyond what a launch left for the one there was."""
    nodes = record.controller_nodes
    then = [
        each
        for each in nodes
        if each.since < launched_at and (each.until is None or each.until > launched_at)
    ]
    left_usd_per_h = (then[-1].price_usd_per_h or 0.0) if then else 0.0
    left = money.cost_usd(left_usd_per_h, now - launched_at + CONTROLLER_LEAVES_S) or 0.0
    paid = sum(
        (cost.node_usd(each, now) or 0.0) - (cost.node_usd(each, launched_at) or 0.0)
        for each in nodes
    )
    return max(0.0, paid + controller_end_usd(record) - left)


def controller_end_usd(record: RunRecord) -> float:
    """Return what the controller's own node costs from when the run is at rest until it is gone."""
    return money.cost_usd(cost.controller_rate_usd_per_h(record), CONTROLLER_LEAVES_S) or 0.0


def end_margin_s(record: RunRecord, policy: Policy) -> float:
    """Return how long before a limit the job stops: for its last save, and for the nodes' end."""
    margins = _Margins.of(record, policy)
    return margins.save_s + margins.teardown_s


@dataclass(frozen=True, kw_only=True)
class _Margins:
    """What the run's own attempts have shown about saves, teardowns and starts."""

    save_s: float
    teardown_s: float
    useful_s: float

    @classmethod
    def of(cls, record: RunRecord, policy: Policy) -> _Margins:
        saves_s, steps_s = [0.0], [0.0]
        for attempt in record.attempts:
            saves_s += [save.duration_s or 0.0 for save in attempt.saves]
            if attempt.progress is not None:
                steps_s.append(attempt.progress.step_s or 0.0)
        startups_s = [
            cost.startup_s(attempt, attempt.started_at)
            for attempt in record.of_this_place
            if attempt.started_at is not None
        ]
        return cls(
            save_s=max(policy.save_s, 2 * (max(saves_s) + max(steps_s))),
            teardown_s=_teardown_margin_s(record, policy),
            useful_s=policy.useful_s + min(startups_s, default=0.0),
        )

    def stop_at(self, end: float | None) -> float | None:
        return None if end is None else end - self.teardown_s - self.save_s


def _teardown_margin_s(record: RunRecord, policy: Policy, *, before: float = math.inf) -> float:
    """Return what is left for the nodes' end, by what had been seen of it `before`."""
    seen = [each for each in record.of_this_place if each.end and each.end.gone_at <= before]
    return max(policy.teardown_s, 1.5 * max(map(_teardown_s, seen), default=0.0))


def _teardown_s(attempt: AttemptRecord) -> float:
    """Return how long the nodes took to go once it was time, whoever saw to it; 0 if unknown."""
    if attempt.end is None or attempt.end.leaving:
        return 0.0
    if attempt.down is not None:
        return attempt.end.gone_at - attempt.down.at
    guard_at = attempt.allotment.down_at
    return 0.0 if guard_at is None else attempt.end.gone_at - guard_at


def _still_leaving_usd(record: RunRecord, teardown_s: float) -> float:
    """Return what nodes that were told to go may cost until they are gone."""
    rates = [
        money.rate_usd_per_h(attempt.offer.price_usd_per_h, attempt.nodes)
        for attempt in record.leaving
    ]
    return sum(money.cost_usd(rate, teardown_s) or 0.0 for rate in rates)


def _until_taken_usd(attempt: AttemptRecord | None, teardown_s: float, now: float) -> float:
    """Return what an attempt may cost from now until all its nodes are gone after its notice."""
    if attempt is None or attempt.notice is None or attempt.notice.deadline_at is None:
        return 0.0
    rate = money.rate_usd_per_h(attempt.offer.price_usd_per_h, attempt.nodes)
    return money.cost_usd(rate, _until_taken_s(attempt, now) + teardown_s) or 0.0


def _until_taken_s(attempt: AttemptRecord, now: float) -> float:
    """Return for how long an attempt's nodes are there until its notice comes true."""
    if attempt.notice is None or attempt.notice.deadline_at is None:
        return 0.0
    return max(0.0, attempt.notice.deadline_at - now)


def _budget_end(
    record: RunRecord,
    *,
    nodes: int,
    price_usd_per_h: float | None,
    now: float,
    reserve_usd: float,
) -> float | None:
    """Return when the money is used up; None without a budget, or with an unknown price.

    Whether an unknown price may be launched under a budget at all is the machine's decision.
    """
    rate = money.rate_usd_per_h(price_usd_per_h, nodes)
    return money.budget_stop_at(
        now=now,
        spent_usd=cost.known_spent_usd(record, now),
        budget_usd=record.limits.budget_usd,
        rate_usd_per_h=None if rate is None else rate + cost.controller_rate_usd_per_h(record),
        reserve_usd=reserve_usd,
    )
