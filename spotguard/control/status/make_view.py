"""Makes the picture that `status` shows from a record. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spotguard.control.journal import cost
from spotguard.control.journal.record import BudgetOf
from spotguard.control.status.bottlenecks import bottlenecks
from spotguard.control.status.footprint import attempt_footprint, run_footprint
from spotguard.control.status.recovery import recoveries
from spotguard.control.status.view import AttemptView, RunSummary, RunView
from spotguard.control.supervisor.decide import alert_percents, state_of
from spotguard.events.states import EndReason, RunState
from spotguard.events.untrusted import text
from spotguard.policy.plan.money import saved_pct
from spotguard.shared.units import format_duration, format_usd, to_iso

if TYPE_CHECKING:
    from spotguard.control.journal.record import AttemptRecord, RunRecord, Save, StepProgress


_LOOKS_WITHIN_S = 120.0
"""A controller looks every ten seconds at least; one question to a cloud may take a minute."""


def run_view(
    record: RunRecord,
    *,
    live: StepProgress | None,
    now: float,
    controller_alive: bool,
    store_url: str,
    looked_at: float | None = None,
) -> RunView:
    """Return the picture of a run.

    Args:
        record: the folded journal.
        live: newer progress of the current attempt than the journal's, if there is any.
        now: epoch seconds.
        controller_alive: whether a process controls the run.
        store_url: of the run's own prefix.
        looked_at: when its controller looked last, if that is known.
    """
    known_at, stale = _stale(record, looked_at, now)
    state = state_of(record)
    step = _step(record, live)
    total_steps = (live and live.total_steps) or record.total_steps
    progress = live or _last_progress(record)
    step_s = progress.step_s if progress else None
    metrics = progress.metrics if progress else {}
    saved = newest_save(record)
    until = now if record.settled is None else record.settled.at
    spent = cost.spent_usd(record, until)
    unseen = cost.unseen_usd(record)
    on_demand = cost.on_demand_usd(record, until)
    last = record.last_ended
    failed = state is RunState.FAILED and last is not None and last.end is not None
    return RunView(
        run_id=record.run_id,
        name=record.name,
        state=state,
        state_detail=_detail(record, state, now),
        step=step,
        total_steps=total_steps,
        loss=progress.loss if progress else None,
        step_s=step_s,
        eta_s=_eta_s(state, step, total_steps, step_s),
        store=store_url,
        known_at=known_at,
        created_at=record.created_at,
        finished_at=record.settled.at if record.settled else None,
        spent_usd=spent,
        spent_most_usd=spent + unseen if spent is not None and unseen > 0 else None,
        budget_usd=record.limits.budget_usd,
        on_demand_usd=on_demand,
        saved_pct=saved_pct(spent, on_demand),
        goodput=cost.goodput(record, until),
        saved_step=saved.step if saved else None,
        saved_at=saved.at if saved else None,
        warnings=(*stale, *record.warnings, *_unseen(unseen), *bottlenecks(metrics)),
        traceback=last.end.traceback if failed and last and last.end else None,
        controller_alive=controller_alive,
        attempts=_attempt_views(record, live, until),
        recoveries=recoveries(record),
        metrics=metrics,
        on_demand_infra=record.spec.get("on_demand_infra"),
        demo_prices=cost.demo_prices(record),
        phase=record.phase + 1 if record.phases else None,
        phases=len(record.phases),
        until_step=record.until_step,
        rate_usd_per_h=cost.rate_usd_per_h(record),
        next_alert=_next_alert(record, until),
        carbon=run_footprint(record, until),
        queued=_queued(record),
        exit_code=record.settled.exit_code if record.settled else None,
        lacks_budget_of=_lacks_budget_of(record),
    )


def run_summary(record: RunRecord, *, now: float, live: StepProgress | None = None) -> RunSummary:
    """Return one line of the list of runs; `live` and `now` as for `run_view`."""
    until = now if record.settled is None else record.settled.at
    return RunSummary(
        run_id=record.run_id,
        name=record.name,
        state=state_of(record),
        created_at=record.created_at,
        spent_usd=cost.spent_usd(record, until),
        demo_prices=cost.demo_prices(record),
        budget_usd=record.limits.budget_usd,
        rate_usd_per_h=cost.rate_usd_per_h(record),
        next_alert=_next_alert(record, until),
        step=_step(record, live),
        total_steps=(live and live.total_steps) or record.total_steps,
        attempts=len(record.attempts),
        interruptions=sum(
            attempt.end is not None and attempt.end.reason.retried for attempt in record.attempts
        ),
        queued=_queued(record),
        problem=record.settled.detail if record.is_away and record.settled is not None else None,
    )


def _stale(
    record: RunRecord, looked_at: float | None, now: float
) -> tuple[float | None, tuple[str, ...]]:
    """Return as of when the picture is, if that is older than it should be, and why in words."""
    if record.settled is not None:
        return None, ()
    known: list[tuple[float, str]] = []
    if record.store_silent_since is not None:
        known.append((record.store_silent_since, "its store has not answered"))
    if looked_at is not None and now - looked_at > _LOOKS_WITHIN_S:
        known.append((looked_at, "its controller has not looked: frozen, or its disk is full"))
    if not known:
        return None, ()
    at, why = min(known)
    age = format_duration(max(0.0, now - at))
    return at, (f"this is how it stood {age} ago, at {to_iso(at)}: since then {why}",)


def _unseen(unseen_usd: float) -> tuple[str, ...]:
    """Say what is not known of the money, if anything is not."""
    if unseen_usd <= 0:
        return ()
    return (
        f"nobody saw when some nodes went, so up to {format_usd(unseen_usd)} more may be charged "
        "than is known; the budget counts it, and the cloud's bill knows it",
    )


def _queued(record: RunRecord) -> str | None:
    """Return why a run waits for money that others hold; None if it does not, or nobody knows.

    While the store cannot be read the run cannot ask for money either: it is out of contact.
    """
    return record.queued or None if state_of(record) is RunState.WAITING else None


def _lacks_budget_of(record: RunRecord) -> str | None:
    """Return the id of the run, or of its sweep, if the budget of that is used up."""
    lacks = None if record.settled is None else record.settled.lacks_budget_of
    sweep_id = text(record.sweep, "sweep_id")
    return {BudgetOf.RUN: record.run_id, BudgetOf.SWEEP: sweep_id, None: None}[lacks]


def _next_alert(record: RunRecord, now: float) -> str | None:
    """Return which share of the budget is told next, and when at today's price."""
    budget_usd, spent = record.limits.budget_usd, cost.spent_usd(record, now)
    if record.settled is not None or not budget_usd or spent is None:
        return None
    percent = next((p for p in alert_percents(record) if spent < budget_usd * p / 100), None)
    if percent is None:
        return None
    left_usd, rate = budget_usd * percent / 100 - spent, cost.rate_usd_per_h(record)
    when = f", in {format_duration(left_usd / rate * 3600)}" if rate else ""
    return f"{percent} % of the budget at {format_usd(budget_usd * percent / 100)}{when}"


def newest_save(record: RunRecord) -> Save | None:
    """Return the save from which the next attempt would go on; None if there is none."""
    for attempt in reversed(record.attempts):
        if attempt.last_save is not None:
            return attempt.last_save
        if attempt.started_at is not None:
            return _save_named(record, attempt.resumed_from)
    return None


def _save_named(record: RunRecord, checkpoint: str | None) -> Save | None:
    saves = [save for attempt in record.attempts for save in attempt.saves]
    return next((save for save in saves if checkpoint and save.checkpoint == checkpoint), None)


def _attempt_views(
    record: RunRecord, live: StepProgress | None, now: float
) -> tuple[AttemptView, ...]:
    counted = cost.counted_train_s(record)
    return tuple(
        _attempt_view(record, attempt, live, now, train_s=counted[attempt.number])
        for attempt in record.attempts
    )


def _attempt_view(
    record: RunRecord,
    attempt: AttemptRecord,
    live: StepProgress | None,
    now: float,
    *,
    train_s: float,
) -> AttemptView:
    end, offer = attempt.end, attempt.offer
    last_step = attempt.last_step
    if attempt is record.current and live is not None:
        last_step = max(last_step or 0, live.step)
    return AttemptView(
        attempt=attempt.number,
        infra=offer.infra,
        region=offer.region,
        zone=offer.zone,
        instance_type=offer.instance_type,
        market=offer.market.value,
        nodes=attempt.nodes,
        in_place=attempt.in_place,
        price_usd_per_h=offer.price_usd_per_h,
        on_demand_usd_per_h=offer.on_demand_usd_per_h,
        gpus=offer.gpus,
        demo_prices=attempt.demo_price,
        started_at=attempt.intended_at,
        ended_at=end.gone_at if end else None,
        end_reason=end.reason if end else None,
        by_sweep=attempt.by_sweep,
        end_detail=end.detail if end else "",
        saved=attempt.saved if end else None,
        notice_s=cost.notice_s(attempt),
        saved_before_end_s=cost.saved_before_end_s(record, attempt),
        steps_lost=cost.steps_lost(record, attempt),
        first_step=attempt.resumed_step,
        last_step=last_step,
        cost_usd=cost.cost_usd(attempt, now),
        train_s=train_s,
        carbon=attempt_footprint(record, attempt, now),
    )


def _last_progress(record: RunRecord) -> StepProgress | None:
    known = [attempt.progress for attempt in record.attempts if attempt.progress is not None]
    return known[-1] if known else None


def _step(record: RunRecord, live: StepProgress | None) -> int | None:
    """Return the steps done: of the living attempt, else those that the next one need not do."""
    last = record.attempts[-1] if record.attempts else None
    if last is None:
        return 0
    finished = last.end is not None and last.end.reason is EndReason.FINISHED
    if finished or (last.end is None and last.started_at is not None):
        known = [step for step in (last.last_step, live.step if live else None) if step is not None]
        return max(known, default=None)
    save = newest_save(record)
    return save.step if save else 0


def _eta_s(
    state: RunState, step: int | None, total_steps: int | None, step_s: float | None
) -> float | None:
    if (
        state not in (RunState.RUNNING, RunState.CLOUD_SILENT)
        or step is None
        or total_steps is None
        or step_s is None
    ):
        return None
    return max(0, total_steps - step) * step_s


def _detail(record: RunRecord, state: RunState, now: float) -> str:
    """Return one sentence on what is going on, or why the run settled."""
    if record.settled is not None:
        return record.settled.detail
    attempt = record.current
    if attempt is not None:
        words = _detail_of_attempt(attempt, state, record.store_problem) + _phase(record)
        ahead = record.ahead
        if ahead is None:
            return words
        return (
            f"{words}; the nodes of attempt {ahead.number} are started meanwhile, and both are paid"
        )
    if state is RunState.CONTACT_LOST:
        return (
            "the run's store cannot be read, so nothing is launched; it is tried again "
            f"({record.store_problem})"
        )
    if state is RunState.WAITING:
        if record.queued:
            return f"waits: {record.queued}"
        wait_s = max(0.0, (record.retry_at or now) - now)
        again, unlisted = f"asked again in {format_duration(wait_s)}", record.offers_problem
        if unlisted:
            return f"where nodes are to be had cannot be looked up ({unlisted}); {again}"
        why = record.refusal if record.quota_until is None else record.quota_refusal
        said = f" ({why})" if why else ""
        if record.quota_until is not None:
            return (
                f"a quota of the account is full{said}, and a cloud counts nodes for some time "
                f"after they have ended; {again}, until {to_iso(record.quota_until)}"
            )
        return f"no place has enough nodes now{said}; {again}"
    if not record.attempts and record.start_at is not None and now < record.start_at:
        wait_s = record.start_at - now
        return f"begins at {to_iso(record.start_at)}, in {format_duration(wait_s)} (--start-at)"
    if record.rests:
        return "nodes of earlier attempts go, or may live; then the run rests"
    last = record.last_ended
    if last is not None and last.end is not None:
        words = last.end.reason.told(last.saved)
        return f"attempt {last.number} ended ({words}); the next one is prepared"
    return state.hint


def _phase(record: RunRecord) -> str:
    """Return in which phase the run is; nothing where it has none."""
    if not record.phases:
        return ""
    until = record.until_step
    ends = "the last" if until is None else f"until step {until}"
    return f"; phase {record.phase + 1} of {len(record.phases)}, {ends}"


def _detail_of_attempt(attempt: AttemptRecord, state: RunState, store_problem: str | None) -> str:
    nodes = f"{attempt.nodes} node{'s' if attempt.nodes > 1 else ''}"
    if state is RunState.LAUNCHING:
        return f"attempt {attempt.number}: starting {nodes}"
    if state is RunState.CONTACT_LOST and store_problem is not None:
        unheard = (
            "the run's store cannot be read, so nothing is heard of the job; nothing is killed"
        )
        return f"{unheard} ({store_problem})"
    if state in (RunState.CONTACT_LOST, RunState.CLOUD_SILENT):
        return state.hint
    if attempt.job_end is not None:
        words = attempt.job_end.reason.told(attempt.saved, by_sweep=attempt.by_sweep)
        return f"{words}; the nodes of attempt {attempt.number} are leaving"
    if attempt.down is not None:
        words = attempt.down.reason.told(attempt.saved, by_sweep=attempt.by_sweep)
        return f"{words}; the nodes of attempt {attempt.number} are leaving"
    if attempt.stop is not None:
        why = attempt.stop.reason.told(None, by_sweep=attempt.by_sweep)
        return f"asked to save and stop: {why}"
    if attempt.lost_nodes:
        return f"node {attempt.lost_nodes[0].node} is lost; the others have a moment to save"
    if attempt.notice is not None:
        return f"a node will be taken ({attempt.notice.source}); it saves and leaves first"
    return f"attempt {attempt.number} trains on {nodes}"
