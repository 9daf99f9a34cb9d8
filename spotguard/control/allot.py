"""How long an attempt may live, so that a run never costs more than its budget. Pure.

The money that is left buys the nodes until `end`. Counting back from there: the controller (and,
should it be dead, the launcher's leak guard) takes the nodes down early enough for a slow
teardown, and the job saves and stops by itself early enough for a slow save before that:

    now ──── training ────► stop_at ── save ──► down_at ── teardown ──► end
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from spotguard.control import meter
from spotguard.control.record import Allotment
from spotguard.events.states import EndReason
from spotguard.plan import money

if TYPE_CHECKING:
    from spotguard.control.record import AttemptRecord, RunRecord
    from spotguard.events.states import Market


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The controller's patience and margins."""

    survivor_patience_s: float = 15.0
    """For the other nodes to save and report after one was lost or failed."""
    exit_patience_s: float = 10.0
    """For the nodes to go by themselves after the job reported its end."""
    solo_exit_patience_s: float = 3.0
    """The same where a node is gone, of which nothing will be heard, and another has saved."""
    regroup_patience_s: float = 20.0
    """The same where the nodes that stay may go on in place."""
    regrow_after_s: float = 1800.0
    """An attempt in place on fewer nodes than the run may have is saved and launched anew, on as
    many as can be had, after this long."""
    regrow_startups: float | None = None
    """Any attempt on fewer nodes than the run may have is launched anew after so many times its
    own start-up, if that pays. None: only those that went on in place."""
    market: Market | None = None
    """What nodes are bought as; None is whatever is offered."""
    on_demand_after_s: float | None = None
    """Spot nodes that were not to be had for so long may be on-demand ones. None: never."""
    on_demand_for_deadline: bool = False
    """Nodes are bought on demand where the deadline could not be kept otherwise."""
    back_to_spot_after_s: float = 3600.0
    """An attempt that had to buy on demand is saved and launched anew after this."""
    avoid_lost_place_s: float = 1800.0
    """A place that took nodes is asked last for this long."""
    finish_patience_s: float = 300.0
    """The same after the last step: what follows the loop (an export, a last evaluation) is
    the user's work and is not cut short lightly."""
    stop_patience_s: float = 300.0
    """For the job to save after the user asked it to stop."""
    down_patience_s: float = 30.0
    """Until the launcher is asked again to take the nodes down."""
    down_retry_s: float = 5.0
    """Between tries when the launcher fails to take them down."""
    intent_valid_s: float = 30.0
    """A launch that was written down but not made is given up after this."""
    capacity_patience_s: float = 600.0
    """How long to wait for capacity before the run is paused."""
    capacity_backoff_s: float = 1.0
    """The first wait between rounds of launching; doubles up to `capacity_backoff_max_s`."""
    capacity_backoff_max_s: float = 30.0
    barren_attempts: int = 3
    """So many attempts in a row without one new step pause the run."""
    contact_patience_s: float = 15.0
    """Silence that counts as lost contact."""
    save_s: float = 3.0
    """Kept for the last save, until a slower one has been measured."""
    teardown_s: float = 7.0
    """Kept for the nodes' end, until a slower one has been measured. The local launcher kills 2 s
    after its leak guard is due; the rest is for a machine that is busy."""
    useful_s: float = 5.0
    """An attempt that could train for less is not worth its start."""


def allot(
    record: RunRecord, *, nodes: int, price_usd_per_h: float | None, now: float, policy: Policy
) -> Allotment | EndReason:
    """Return the limits of an attempt launched now, or the reason for which it is not worth it."""
    margins = _Margins.of(record, policy)
    budget_end = _budget_end(record, nodes=nodes, price_usd_per_h=price_usd_per_h, now=now)
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


@dataclass(frozen=True, kw_only=True)
class _Margins:
    """What the run's own attempts have shown about saves, teardowns and starts."""

    save_s: float
    teardown_s: float
    useful_s: float

    @classmethod
    def of(cls, record: RunRecord, policy: Policy) -> _Margins:
        saves_s, steps_s, teardowns_s, startups_s = [0.0], [0.0], [0.0], []
        for attempt in record.attempts:
            saves_s += [save.duration_s or 0.0 for save in attempt.saves]
            if attempt.progress is not None:
                steps_s.append(attempt.progress.step_s or 0.0)
            teardowns_s.append(_teardown_s(attempt))
            if attempt.started_at is not None:
                startups_s.append(meter.startup_s(attempt, attempt.started_at))
        return cls(
            save_s=max(policy.save_s, 2 * (max(saves_s) + max(steps_s))),
            teardown_s=max(policy.teardown_s, 1.5 * max(teardowns_s)),
            useful_s=policy.useful_s + min(startups_s, default=0.0),
        )

    def stop_at(self, end: float | None) -> float | None:
        return None if end is None else end - self.teardown_s - self.save_s


def _teardown_s(attempt: AttemptRecord) -> float:
    """Return how long the nodes took to go once it was time, whoever saw to it; 0 if unknown."""
    if attempt.end is None:
        return 0.0
    if attempt.down is not None:
        return attempt.end.gone_at - attempt.down.at
    guard_at = attempt.allotment.down_at
    return 0.0 if guard_at is None else attempt.end.gone_at - guard_at


def _budget_end(
    record: RunRecord, *, nodes: int, price_usd_per_h: float | None, now: float
) -> float | None:
    """Return when the money is used up; None without a budget, or with an unknown price.

    Whether an unknown price may be launched under a budget at all is the machine's decision.
    """
    return money.budget_stop_at(
        now=now,
        spent_usd=meter.known_spent_usd(record, now),
        budget_usd=record.limits.budget_usd,
        rate_usd_per_h=money.rate_usd_per_h(price_usd_per_h, nodes),
        reserve_usd=0.0,
    )
