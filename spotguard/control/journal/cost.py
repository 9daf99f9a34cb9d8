"""The spend meter: what a run cost, what it would have cost on demand, what of it counts.

Pure functions over the record. An attempt is billed from the moment at which its nodes
began to cost (where the launcher cannot tell: at which its launch was written down) until the
launcher confirmed its last node gone, or until its last sign of life where nobody could be asked
since. Where the cloud itself tells afterwards for how long it charged each node, that counts. A
launch that came to nothing is billed, too, unless it is proven that no node of it ran. Unknown
stays unknown (None).

Where local nodes have demo prices, that money is played, and it is told of while the whole run is.
Beside money that is really spent it counts for nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from spotguard.events import keys
from spotguard.events.states import EndReason
from spotguard.policy.plan import money
from spotguard.shared.units import sum_known
from spotguard.spec.infra import LOCAL

if TYPE_CHECKING:
    from spotguard.control.journal.nodes.controller_node import ControllerNode
    from spotguard.control.journal.record import AttemptRecord, RunRecord
    from spotguard.launch.base import Offer


def billed_s(attempt: AttemptRecord, now: float) -> float:
    """Return for how many seconds the attempt's nodes have been paid."""
    end = attempt.end
    until = now if end is None or (end.leaving and not attempt.in_doubt) else end.gone_at
    if attempt.gone_by is not None:  # while nobody can be asked, or nobody asked
        until = min(until, attempt.gone_by)
    return max(0.0, until - attempt.billed_from)


def cost_usd(attempt: AttemptRecord, now: float) -> float | None:
    """Return what the attempt has cost, or None if its price is unknown."""
    if attempt.end is not None and attempt.end.charged_node_s is not None:
        return money.cost_usd(attempt.offer.price_usd_per_h, attempt.end.charged_node_s)
    rate = money.rate_usd_per_h(attempt.offer.price_usd_per_h, attempt.nodes)
    return money.cost_usd(rate, billed_s(attempt, now))


def spent_usd(record: RunRecord, now: float) -> float | None:
    """Return what the run has cost, or None if a price is unknown."""
    lost = [each.usd for each in record.lost_launches]
    attempts = [cost_usd(attempt, now) for attempt in _paid(record)]
    return sum_known([*lost, *attempts, *nodes_usd(record, now)])


def waited_s(record: RunRecord, now: float) -> float:
    """Return for how long the run has waited for capacity, but for the waits that attempts have.

    Launches that were refused are forgotten, and with them since when each had waited.
    """
    since, last = record.waiting_since, record.attempts[-1] if record.attempts else None
    if since is None or (last is not None and last.course.waiting_since == since):
        return record.waited_s
    until = now if record.settled is None else record.settled.at
    return record.waited_s + max(0.0, until - since)


def attempts_usd(record: RunRecord, now: float) -> dict[int, float | None]:
    """Return by number what each attempt's nodes took from the run's money; None is unknown.

    With the one that waits for its turn. Together with the lost launches and the nodes of the
    controller's own this is `spent_usd`.
    """
    paid = {each.number for each in _paid(record)}
    return {
        each.number: cost_usd(each, now) if each.number in paid else 0.0
        for each in launched(record)
    }


def node_usd(node: ControllerNode, now: float) -> float | None:
    """Return what a node of the controller's own has cost, or None if its price is unknown."""
    until = now if node.until is None else min(now, node.until)
    return money.cost_usd(node.price_usd_per_h, max(0.0, until - node.since))


def nodes_usd(record: RunRecord, now: float) -> list[float | None]:
    """Return what each node of the controller's own cost; after the run's end, until it is gone."""
    at_rest = record.settled is not None
    return [
        node_usd(each, each.until if at_rest and each.until is not None else now)
        for each in record.controller_nodes
    ]


def controller_rate_usd_per_h(record: RunRecord) -> float:
    """Return the known part of what the controller's own node costs in an hour; 0 without one."""
    node = record.controller_node
    return 0.0 if node is None else node.price_usd_per_h or 0.0


def attempt_rates_usd_per_h(record: RunRecord) -> dict[int, float | None]:
    """Return by number what each attempt's nodes take from the run's money in an hour.

    With the one that waits for its turn. None is unknown.
    """
    played = demo_prices(record)
    return {
        each.number: 0.0
        if each.demo_price and not played
        else money.rate_usd_per_h(each.offer.price_usd_per_h, each.nodes)
        for each in launched(record)
    }


def price_usd_per_h(record: RunRecord, offer: Offer) -> float | None:
    """Return what a node there takes from the run's budget in an hour; None is unknown.

    Nothing, where it is played money in a run that really costs some.
    """
    played = offer.infra == LOCAL and record.spec.get("price_usd_per_h") is None
    return 0.0 if played and not demo_prices(record) else offer.price_usd_per_h


def rate_usd_per_h(record: RunRecord) -> float | None:
    """Return what the run costs in an hour now: 0 without nodes, None if a price is unknown.

    Nodes of an ended attempt that were told to go are paid until they are gone. Of those in doubt
    it is not known whether they cost anything.
    """
    living = [each for each in (record.current, record.ahead) if each is not None]
    living += [each for each in record.leaving if not each.in_doubt]
    rates = attempt_rates_usd_per_h(record) if living else {}
    usd_per_h = [rates[attempt.number] for attempt in living]
    if record.controller_node is not None:
        usd_per_h.append(record.controller_node.price_usd_per_h)
    return sum_known([0.0, *usd_per_h])


def demo_prices(record: RunRecord) -> bool:
    """Tell whether all of the money is played: what was spent, and what the job's phases will.

    Local nodes cost nothing; their prices are for demonstration, unless the user gave one.
    """
    if record.controller_nodes or not all(attempt.demo_price for attempt in record.attempts):
        return False
    own = record.job or record.spec
    places = [record.spec, *({**own, **_said(phase)} for phase in record.phases)]
    return all(
        place.get("infra") == LOCAL and place.get("price_usd_per_h") is None for place in places
    )


def _said(phase: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in phase.items() if value is not None}


def known_spent_usd(record: RunRecord, now: float) -> float:
    """Return the known part of what the run has cost, for guards only: unknown prices count 0.

    What may have been spent while nobody saw is in it: a budget holds also then.
    """
    lost = sum(each.usd or 0.0 for each in record.lost_launches)
    nodes = sum(usd or 0.0 for usd in nodes_usd(record, now))
    seen = lost + nodes + sum(cost_usd(attempt, now) or 0.0 for attempt in _paid(record))
    return seen + unseen_usd(record)


def unseen_usd(record: RunRecord) -> float:
    """Return what the run may have cost beyond `spent_usd`, by nodes that nobody saw go."""
    lost = sum(each.unseen_usd for each in record.lost_launches)
    return lost + sum(_unseen_usd(attempt) for attempt in _paid(record))


def _unseen_usd(attempt: AttemptRecord) -> float:
    end, gone = attempt.end, attempt.gone_seen
    if end is not None:
        if end.leaving or end.charged_node_s is not None:
            return 0.0
        gone = end.gone_at, end.gone_latest_at
    if gone is None or gone[1] is None:
        return 0.0
    rate = money.rate_usd_per_h(attempt.offer.price_usd_per_h, attempt.nodes)
    return money.cost_usd(rate, max(0.0, gone[1] - gone[0])) or 0.0


def _paid(record: RunRecord) -> tuple[AttemptRecord, ...]:
    """Return the attempts that cost money, with the one that waits for its turn."""
    every = launched(record)
    return every if demo_prices(record) else tuple(each for each in every if not each.demo_price)


def launched(record: RunRecord) -> tuple[AttemptRecord, ...]:
    """Return all attempts, with the one that waits for its turn."""
    return record.attempts if record.ahead is None else (*record.attempts, record.ahead)


def counted_train_s(record: RunRecord) -> dict[int, float]:
    """Return, for each attempt, its seconds in finished steps that still count.

    Walks back from the newest attempt that trained: all of its work counts (up to its last save,
    once it has ended unfinished), of the attempt it resumed from the work up to that checkpoint,
    and so on. Steps done again were paid twice and count once. Where a save was not reported,
    the one before it stands in: a lower bound.
    """
    counted = {attempt.number: 0.0 for attempt in record.attempts}
    started = [attempt for attempt in record.attempts if attempt.started_at is not None]
    if not started:
        return counted
    attempt = started[-1]
    counted[attempt.number] = _train_s_at_end(attempt)
    by_number = {attempt.number: attempt for attempt in started}
    while attempt.resumed_from is not None:
        checkpoint = keys.parse_checkpoint(attempt.resumed_from)
        source = by_number.get(checkpoint[1]) if checkpoint else None
        if checkpoint is None or source is None or source.number >= attempt.number:
            break
        counted[source.number] = _train_s_at(source, step=checkpoint[0])
        attempt = source
    return counted


def on_demand_usd(record: RunRecord, now: float) -> float | None:
    """Return what the same useful work would have cost on demand, undisturbed.

    That is each attempt's counted training time on its nodes at the on-demand price, and one
    start-up (from when nodes cost to the first step) at the size of the first attempt.
    """
    counted = counted_train_s(record)
    costs: list[float | None] = []
    paid = [attempt for attempt in _paid(record) if attempt is not record.ahead]
    for attempt in paid:
        useful_s = counted[attempt.number]
        if attempt is paid[0]:
            useful_s += _billed_startup_s(attempt, now)
        if useful_s > 0:
            rate = money.rate_usd_per_h(attempt.offer.on_demand_usd_per_h, attempt.nodes)
            costs.append(money.cost_usd(rate, useful_s))
    return sum_known(costs)


def startup_s(attempt: AttemptRecord, now: float) -> float:
    """Return the seconds from the launch to the job's start, or what has passed of them."""
    started_at = attempt.started_at
    if started_at is None:
        return billed_s(attempt, now)
    return max(0.0, started_at - attempt.intended_at)


def _billed_startup_s(attempt: AttemptRecord, now: float) -> float:
    """Return for how long of it nodes are paid: on demand, too, the cloud needs time before."""
    if attempt.started_at is None:
        return billed_s(attempt, now)
    return max(0.0, attempt.started_at - attempt.billed_from)


def goodput(record: RunRecord, now: float) -> float | None:
    """Return the share (0..1) of billed wall time that went into steps that count."""
    billed = sum(billed_s(attempt, now) for attempt in record.attempts)
    if billed <= 0:
        return None
    return min(1.0, sum(counted_train_s(record).values()) / billed)


def steps_lost(record: RunRecord, attempt: AttemptRecord) -> int | None:
    """Return the finished steps of an ended attempt that no later attempt could build on."""
    if attempt.end is None:
        return None
    done = attempt.last_step
    if attempt.end.reason is EndReason.FINISHED or done is None:
        return 0
    kept = _step_resumed_after(record, attempt)
    if kept is None:
        kept = attempt.last_save.step if attempt.last_save else attempt.resumed_step or 0
    return max(0, done - kept)


def notice_s(attempt: AttemptRecord) -> float | None:
    """Return the seconds of warning that the attempt had; None without a notice."""
    if attempt.notice is None or attempt.notice.deadline_at is None:
        return None
    return max(0.0, attempt.notice.deadline_at - attempt.notice.at)


def saved_before_end_s(record: RunRecord, attempt: AttemptRecord) -> float | None:
    """Return the seconds between the last save and the end of training.

    The save may be of an attempt before, if this one ended before its first. None if there is
    none, or the attempt still lives.
    """
    if attempt.end is None or attempt.end.training_ended_at is None:
        return None
    ended_at = attempt.end.training_ended_at
    for each in reversed(record.attempts):
        if each.number <= attempt.number and each.last_save is not None:
            return max(0.0, ended_at - each.last_save.at)
    return None


def _step_resumed_after(record: RunRecord, attempt: AttemptRecord) -> int | None:
    for later in record.attempts:
        if later.number > attempt.number and later.started_at is not None:
            return later.resumed_step
    return None


def _train_s_at_end(attempt: AttemptRecord) -> float:
    if attempt.end is None or attempt.end.reason is EndReason.FINISHED:
        tellers = (attempt.progress, attempt.job_end, *attempt.saves)
        known = [teller.train_s for teller in tellers if teller is not None]
        return max((train_s for train_s in known if train_s is not None), default=0.0)
    last = attempt.last_save
    return 0.0 if last is None else _train_s_at(attempt, step=last.step)


def _train_s_at(attempt: AttemptRecord, *, step: int) -> float:
    known = [
        save.train_s for save in attempt.saves if save.step <= step and save.train_s is not None
    ]
    return max(known, default=0.0)
