"""The state machine: what to do next, given all that is known. Pure, so every case is testable.

`decide` looks at the record (the journal, folded), at one observation of the outside, and at the
time, and names one action. The supervisor carries it out, writes down what came of it, and asks
again until the answer is `Wait`. Because an intent is in the record before the act, and every
act may be repeated, a controller that was killed anywhere just starts to ask again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from spotguard.control.journal import cost
from spotguard.control.journal.alert_rules import rules_of
from spotguard.control.journal.record import BudgetOf, Kind
from spotguard.control.supervisor.actions import (
    Action,
    Alert,
    AskDown,
    AskToStop,
    BeginPhase,
    Conclude,
    Drop,
    Gone,
    GoOn,
    Launch,
    LoseContact,
    LoseSight,
    NoteGone,
    NoteLaunched,
    NoteRefused,
    NoteReleased,
    NoteUp,
    OnAhead,
    RegainContact,
    RegainSight,
    SendDown,
    Settle,
    TakeOver,
    Wait,
    WriteStop,
)
from spotguard.control.supervisor.attempt_limits import allot, beside_s, down_due
from spotguard.control.supervisor.end_reason import (
    barren,
    conclude,
    judge,
    judge_nodes,
    never_came,
    unsaved,
    when_gone,
    words_of_patience,
)
from spotguard.control.supervisor.next_nodes import (
    ask_ahead,
    look_after_ahead,
    may_have_begun,
    next_launch,
    pursue_down,
)
from spotguard.control.supervisor.placement.moves import back_to_spot_due, move_due, regrow_due
from spotguard.control.supervisor.placement.time_left import steps_kept
from spotguard.control.supervisor.request import may_go_on_in_place
from spotguard.errors import BudgetExhausted, DeadlineReached, EnvironmentFailure, JobFailed
from spotguard.errors import NoCapacity as NoCapacityError
from spotguard.events.states import EndReason, RunState
from spotguard.events.untrusted import integer
from spotguard.launch.base import ClusterState, ClusterView, Offer
from spotguard.launch.membership import GO_ON_AFTER
from spotguard.launch.taskyaml import BUYS_SPOT
from spotguard.shared.units import format_duration
from spotguard.spec.setting import BUDGET_SHARES

if TYPE_CHECKING:
    from spotguard.control.journal.record import AttemptRecord, JobEnd, RunRecord
    from spotguard.control.supervisor.next_nodes import NoOffers
    from spotguard.control.supervisor.policy import Policy
    from spotguard.events.regrouping import Group
    from spotguard.policy.market.sightings import Sighting

EXIT_UNFINISHED = 75


@dataclass(frozen=True, kw_only=True)
class Observation:
    """One look at the outside."""

    cluster: ClusterView | None = None
    """Of the current attempt; None between attempts."""
    news_complete: bool = True
    """All that the job wrote before `cluster` was looked at has been read into the record."""
    store_silent_s: float = 0.0
    """Seconds since the run's store answered last; 0 while it does."""
    silence_s: float | None = None
    """Seconds since the last heartbeat; None if there never was one."""
    unreachable_s: float = 0.0
    """Seconds since the launcher could last say anything of the cluster."""
    free_nodes: int | None = None
    """Nodes that are free where the attempt is, beside its own; None is unknown."""
    free_spot: int | None = None
    """Nodes that are free in the spot place with most of them; None is unknown."""
    group: Group | None = None
    """The nodes that began the next attempt in place."""
    ahead: ClusterView | None = None
    """Of the attempt whose nodes were asked for ahead; None if there is none."""
    leaving: tuple[tuple[int, ClusterView], ...] = ()
    """Of attempts that have ended, and whose nodes are not known to be gone: their clusters."""
    looked_s: float = 0.0
    """Seconds for which this controller has looked; only needed between attempts."""
    offers: tuple[Offer, ...] = ()
    """The places that could be asked, best first; only needed where nodes are to be asked for."""
    no_offers: NoOffers | None = None
    """Why it is not known which there are; None if it is."""
    market: tuple[Sighting, ...] = ()
    """What runs of this machine saw of places, and what these say themselves now; needed where
    offers are."""


def decide(record: RunRecord, seen: Observation, now: float, policy: Policy) -> Action:
    """Return what to do next."""
    if record.settled is not None:
        return Wait()
    percent = _alert_due(record, now)
    if percent is not None:
        return Alert(percent)
    behind = _behind(record, seen, now, policy)
    if behind is not None:
        return behind
    attempt = record.current
    if attempt is None and may_have_begun(record):
        return TakeOver()
    rest = _rest(record, policy) if attempt is None else None
    phase_over = attempt is None and phase_due(record) > record.phase
    heard = seen.silence_s is not None and seen.silence_s < policy.contact_patience_s
    at_rest = rest is not None or phase_over
    ahead = look_after_ahead(record, seen.ahead, now, policy, at_rest=at_rest, heard=heard)
    if ahead is not None:
        return OnAhead(ahead)
    if attempt is None:
        between = BeginPhase(phase_due(record)) if phase_over else None
        action = rest or between or _between_attempts(record, seen, now, policy)
        # A run is at rest once nothing of it costs money any more; nor is there any other launcher
        # for a phase before, who could be asked for nodes that are left of it.
        if isinstance(action, (Settle, BeginPhase)) and (record.leaving or record.ahead):
            return _without_answer(record, seen, policy) or Wait()
        return action
    if seen.cluster is None:
        return Wait()
    if not attempt.launched:
        return _launching(record, attempt, seen.cluster, now, policy)
    action = _living(record, attempt, seen, seen.cluster, now, policy)
    if isinstance(action, Wait):
        return ask_ahead(record, seen.offers, now, policy, market=seen.market) or action
    return action


def state_of(record: RunRecord) -> RunState:
    """Return where the run stands."""
    if record.settled is not None:
        return record.settled.state
    attempt = record.current
    if attempt is None:
        if record.store_problem is not None:
            return RunState.CONTACT_LOST
        if record.rests:
            return RunState.DRAINING
        if record.waiting_since is not None or record.queued:
            return RunState.WAITING
        return RunState.RECOVERING if record.attempts else RunState.LAUNCHING
    if attempt.down is not None or attempt.job_end is not None or attempt.stop is not None:
        return RunState.DRAINING
    if attempt.contact_lost_at is not None or record.store_problem is not None:
        return RunState.CONTACT_LOST
    if attempt.cloud_silent_at is not None:
        return RunState.CLOUD_SILENT
    return RunState.LAUNCHING if attempt.started_at is None else RunState.RUNNING


# ---------------------------------------------------------------- between attempts


def _rest(record: RunRecord, policy: Policy) -> Settle | None:
    """Return how the run settles by what its last attempt did; None if it goes on."""
    last = record.last_ended
    if last is not None and last.number <= record.resumed_after:
        last = None
    settled = None if last is None else _settled_by(last)
    if record.wish is not None and not (last and _outlasts_wish(last)):
        return _stopped(record, last)
    if settled is not None:
        return settled
    if barren(record) >= policy.barren_attempts:
        return Settle(
            state=RunState.PAUSED,
            detail=f"{policy.barren_attempts} attempts in a row made no progress; "
            "see why each ended in `spotguard history`",
            exit_code=NoCapacityError.exit_code,
        )
    if unsaved(record) >= 2 * policy.barren_attempts:
        return Settle(
            state=RunState.PAUSED,
            detail=f"{2 * policy.barren_attempts} attempts in a row saved nothing new to go on "
            "from; save more often, or see why saves fail in `spotguard history`",
            exit_code=NoCapacityError.exit_code,
        )
    if record.rests:  # the user decides whether more nodes are bought
        return Settle(state=RunState.PAUSED, detail=record.rests, exit_code=EXIT_UNFINISHED)
    return None


def _outlasts_wish(last: AttemptRecord) -> bool:
    """Tell whether an attempt's end says more than that the run was to stop.

    A job that was done before it heard of that is not to be resumed, only to find that out; one
    whose save failed, or that crashed, is not to be taken for saved. The signal by which its nodes
    were taken may look like a crash.
    """
    assert last.end is not None
    if last.end.reason is EndReason.FAILED:
        return last.down is None or last.down.reason is not EndReason.STOPPED
    return last.end.reason in (
        EndReason.FINISHED,
        EndReason.STORE_FAILED,
        EndReason.UNPROTECTED,
    )


def _stopped(record: RunRecord, last: AttemptRecord | None) -> Settle:
    """Settle as the sweep asked, in its words, or the user, with what is known to be saved."""
    detail = record.wish_why or "stopped by you"
    if record.store_problem is not None and not (last and last.saved):
        detail += "; its store does not answer, so what it saved last is not known here"
    elif not record.wish_why and last is not None and last.end and last.saved is not None:
        told = any(each and each.reason is EndReason.STOPPED for each in (last.stop, last.down))
        if last.saved:
            detail += ", state saved"
        elif told:  # else it had ended before, and there was nothing to save
            detail += ", not saved in time"
            why = last.end.detail if last.end.reason is EndReason.STOPPED else ""
            detail += f": {why}" if why else ""
    return Settle(state=RunState.STOPPED, detail=detail, exit_code=EXIT_UNFINISHED)


def phase_due(record: RunRecord) -> int:
    """Return the phase in which the next attempt belongs, by the steps that it need not do."""
    last, phase = record.last_ended, record.phase
    done = steps_kept(record)
    ends = [integer(each, "until_step") for each in record.phases]
    if last is not None and last.end is not None and last.number > _placed_after(record):
        # Where its save was not heard of, it is the job's own word that the steps are done.
        said = last.end.reason is EndReason.PHASE_DONE and last.saved is not False
        done = max(done, record.until_step or 0) if said else done
    while phase < len(ends) - 1:
        end = ends[phase]
        if end is None or done < end:
            break
        phase += 1
    return phase


def _placed_after(record: RunRecord) -> int:
    return record.placing.after if record.placing is not None else 0


def _between_attempts(record: RunRecord, seen: Observation, now: float, policy: Policy) -> Action:
    if record.ahead is not None:
        ready = record.ahead.launched and record.ahead.down is None
        return TakeOver() if ready else Wait()
    if record.retry_at is not None and now < record.retry_at:
        return Wait()
    if not record.attempts and now < (record.start_at or now):
        return Wait()
    return next_launch(
        record, seen.offers, now, policy, market=seen.market, no_offers=seen.no_offers
    )


def _settled_by(last: AttemptRecord) -> Settle | None:
    """Return how the newest attempt's end settles the run; None if the next one may start."""
    assert last.end is not None
    state, exit_code = {
        EndReason.FINISHED: (RunState.FINISHED, 0),
        EndReason.FAILED: (RunState.FAILED, JobFailed.exit_code),
        EndReason.UNPROTECTED: (RunState.FAILED, JobFailed.exit_code),
        EndReason.STORE_FAILED: (RunState.FAILED, EnvironmentFailure.exit_code),
        EndReason.LAUNCH_FAILED: (RunState.FAILED, EnvironmentFailure.exit_code),
        EndReason.BUDGET: (RunState.PAUSED, BudgetExhausted.exit_code),
        EndReason.DEADLINE: (RunState.PAUSED, DeadlineReached.exit_code),
        EndReason.STOPPED: (RunState.STOPPED, EXIT_UNFINISHED),
    }.get(last.end.reason, (None, 0))
    if state is None:
        return None
    reason = last.end.reason
    words = reason.hint if reason is EndReason.FINISHED else reason.told(last.saved)
    detail = words if last.end.detail in ("", words) else f"{words}: {last.end.detail}"
    own = BudgetOf.RUN if reason is EndReason.BUDGET else None
    return Settle(state=state, detail=detail, exit_code=exit_code, lacks_budget_of=own)


# ---------------------------------------------------------------- one attempt


def _launching(
    record: RunRecord, attempt: AttemptRecord, cluster: ClusterView, now: float, policy: Policy
) -> Action:
    """An attempt was intended; whether it was also launched, the launcher has to say."""
    if cluster.state is ClusterState.UNREACHABLE:
        return Wait()
    if cluster.state is not ClusterState.ABSENT:
        return NoteLaunched()
    if attempt.launch_problem is not None:
        return Conclude(
            reason=EndReason.LAUNCH_FAILED,
            detail=attempt.launch_problem,
            gone_at=attempt.intended_at,
            training_ended_at=attempt.intended_at,
        )
    if record.wish is not None:
        return Drop("you asked to stop before it was launched")
    down_at = attempt.allotment.down_at
    if down_at is not None and now >= down_at - policy.useful_s:
        return Drop("what was allotted to it is used up, and nothing was started")
    if now - attempt.intended_at > policy.intent_valid_s:
        return Drop("it was not launched in time, and nothing was started")
    return Launch()


def _living(
    record: RunRecord,
    attempt: AttemptRecord,
    seen: Observation,
    cluster: ClusterView,
    now: float,
    policy: Policy,
) -> Action:
    job = attempt.job_end
    if seen.group is not None and job is not None and job.reason in GO_ON_AFTER:
        return _go_on(record, attempt, seen.group, cluster, now, policy)
    if cluster.state in (ClusterState.REFUSED, ClusterState.FAILED):
        return _never_came(attempt, cluster, now, policy)
    if cluster.state in (ClusterState.GONE, ClusterState.ABSENT):
        gone = when_gone(attempt, cluster, now, policy)
        if seen.news_complete or _is_not_waited_for(record, seen, policy):
            return conclude(attempt, gone=gone)
        return Wait() if attempt.gone_seen is not None else NoteGone(gone)
    if cluster.up_at is not None and attempt.up_at is None:
        return NoteUp(min(cluster.up_at, now))  # the machine's clock may have been set
    if attempt.down is not None:
        return _ended_before_gone(record, attempt, seen, now) or pursue_down(attempt, now, policy)
    return (
        _end_due(record, attempt, seen, cluster, now, policy)
        or _stop_due(record, attempt, seen, now, policy)
        or _contact(attempt, seen, cluster, policy)
        or Wait()
    )


def _is_not_waited_for(record: RunRecord, seen: Observation, policy: Policy) -> bool:
    """Tell whether the job's last words stay unread: the user ended the run, the store is away."""
    return record.wish is not None and seen.store_silent_s > policy.contact_patience_s


def _never_came(attempt: AttemptRecord, cluster: ClusterView, now: float, policy: Policy) -> Action:
    """Its launch was taken, and nothing came of it: what is billed is what may have run."""
    gone = never_came(attempt, cluster, now, policy)
    if attempt.down is None and cluster.state is ClusterState.REFUSED:
        return NoteRefused(
            cluster.detail,
            lasting=cluster.lasting,
            busy=cluster.busy,
            quota_full=cluster.quota_full,
            gone=gone,
        )
    never = Gone(attempt.intended_at)
    verdict = conclude(attempt, gone=gone or never)
    if attempt.down is not None:
        return verdict
    return replace(
        verdict,
        reason=EndReason.LAUNCH_FAILED,
        detail=cluster.detail,
        training_ended_at=attempt.intended_at,
        traceback=None,
    )


def _end_due(
    record: RunRecord,
    attempt: AttemptRecord,
    seen: Observation,
    cluster: ClusterView,
    now: float,
    policy: Policy,
) -> AskDown | None:
    """Return the order to take the nodes down, if it is time for it."""
    job, stop = attempt.job_end, attempt.stop
    launch_problem = cluster.detail if cluster.lasting else attempt.launch_problem
    if launch_problem is not None:
        return AskDown(EndReason.LAUNCH_FAILED, launch_problem)
    if record.wish is Kind.USER_DOWN:
        return AskDown(EndReason.STOPPED, "you asked to release the nodes at once")
    if record.wish is Kind.USER_STOP and attempt.started_at is None:
        return AskDown(EndReason.STOPPED, "it had not started to train")
    limit = down_due(record, attempt, now, policy)
    if limit is not None:
        return AskDown(limit, "the nodes were taken down at the hard limit")
    if job is not None:
        regroups = job.reason.retried and may_go_on_in_place(record, attempt)
        over = cluster.job_over or (_all_left(attempt) and not regroups)
        over = over or _waits_for_lost(attempt, job, seen, policy)
        if over or now - job.seen_at >= _exit_patience_s(job, policy, regroups=regroups):
            return AskDown(job.reason, job.message)
        return None
    if cluster.job_over or _all_left(attempt):
        verdict = judge_nodes(attempt)
        return AskDown(verdict.reason, verdict.detail) if seen.news_complete else None
    ended = [*attempt.lost_nodes, *attempt.failed_nodes]
    if ended and now - min(node.at for node in ended) >= policy.survivor_patience_s:
        verdict = judge_nodes(attempt)
        return AskDown(verdict.reason, verdict.detail)
    if stop is not None and now - stop.at >= policy.stop_patience_s:
        words = words_of_patience("it did not save and leave", policy.stop_patience_s)
        return AskDown(stop.reason, words)
    return None


def _all_left(attempt: AttemptRecord) -> bool:
    """Tell whether each node's end is known, which SkyPilot says up to a minute later."""
    return {node.node for node in attempt.node_ends} >= set(attempt.cluster_nodes)


def _waits_for_lost(attempt: AttemptRecord, job: JobEnd, seen: Observation, policy: Policy) -> bool:
    """Tell whether a job is done, no process of it lives, and a node was lost at its very end.

    Then the first node waits for that one's ranks to end, for five minutes at most.
    """
    silent = seen.silence_s is not None and seen.silence_s > policy.contact_patience_s
    return job.reason is EndReason.FINISHED and silent and bool(attempt.lost_nodes)


def _exit_patience_s(job: JobEnd, policy: Policy, *, regroups: bool) -> float:
    """Return how long nodes may stay after the job reported its end."""
    if job.reason is EndReason.FINISHED:
        return policy.finish_patience_s
    if regroups:
        return policy.regroup_patience_s
    saved_alone = job.solo and job.saved_step is not None and job.saved_step == job.step
    return policy.solo_exit_patience_s if saved_alone else policy.exit_patience_s


def _go_on(
    record: RunRecord,
    attempt: AttemptRecord,
    group: Group,
    cluster: ClusterView,
    now: float,
    policy: Policy,
) -> GoOn:
    """Take note of an attempt in place; what it may spend follows from its own nodes."""
    group = replace(group, at=min(max(group.at, attempt.intended_at), now))
    gone = conclude(attempt, gone=Gone(group.at))
    verdict = replace(
        gone, gone_at=group.at, training_ended_at=min(gone.training_ended_at, group.at)
    )
    allotted = allot(
        record,
        nodes=len(group.nodes),
        price_usd_per_h=cost.price_usd_per_h(record, attempt.offer),
        now=group.at,
        policy=policy,
    )
    # It is under way already: where nothing is left to spend, the old limits end it.
    limits = attempt.allotment if isinstance(allotted, EndReason) else allotted
    return GoOn(group=group, verdict=verdict, allotment=limits)


def _stop_due(
    record: RunRecord, attempt: AttemptRecord, seen: Observation, now: float, policy: Policy
) -> Action | None:
    """Return the request that the job save and stop, if it is time for it."""
    stop, limit = attempt.stop, attempt.allotment
    if stop is not None:
        return None if stop.written else WriteStop(stop.reason)
    if attempt.job_end is not None:
        return None
    if record.wish is not None:
        return AskToStop(EndReason.STOPPED)
    stop_at = limit.budget_stop_at
    if stop_at is not None and now + beside_s(record, attempt, now, policy) >= stop_at:
        return AskToStop(EndReason.BUDGET)
    if limit.deadline_stop_at is not None and now >= limit.deadline_stop_at:
        return AskToStop(EndReason.DEADLINE)
    if regrow_due(record, attempt, now, policy, free_nodes=seen.free_nodes):
        return AskToStop(EndReason.RESIZED)
    if back_to_spot_due(record, attempt, now, policy, free_spot=seen.free_spot):
        return AskToStop(EndReason.MOVED)
    if move_due(record, attempt, seen.offers, now, policy, market=seen.market):
        return AskToStop(EndReason.MOVED)
    return None


def _contact(
    attempt: AttemptRecord, seen: Observation, cluster: ClusterView, policy: Policy
) -> Action | None:
    """Silence is a state, not a verdict: nothing is killed for it.

    Contact is lost where nothing is heard of the job. A launcher that says nothing while its job
    gives signs of life is another state.
    """
    if attempt.node_ends or attempt.job_end is not None:
        return None  # it is silent because it is ending, and is already seen to
    patience_s = policy.contact_patience_s
    unseen = seen.unreachable_s > patience_s
    asked = f"the cluster cannot be asked: {cluster.detail or 'no answer'}"
    problems = [asked] if unseen else []
    heard = seen.silence_s is not None and seen.silence_s <= patience_s
    if seen.silence_s is not None and not heard:
        problems.insert(0, f"no heartbeat for {format_duration(seen.silence_s)}")
    if problems and not heard:
        lost = LoseContact("; ".join(problems))
        return lost if attempt.contact_lost_at is None else None
    if attempt.contact_lost_at is not None:
        return RegainContact()
    if unseen:
        return LoseSight(asked) if attempt.cloud_silent_at is None else None
    return None if attempt.cloud_silent_at is None else RegainSight()


def _ended_before_gone(
    record: RunRecord, attempt: AttemptRecord, seen: Observation, now: float
) -> Conclude | None:
    """Return the verdict on an attempt whose nodes a cloud has been told to take, but has not yet.

    The next one is asked for meanwhile, under a name of its own: what a cloud takes back is not
    what the next attempt waits for. On Slurm, Kubernetes and this machine it is, so there it waits.
    The next one's claim keeps what may still run of this one out of the lineage.
    """
    assert attempt.down is not None
    if attempt.down.sent_at is None or attempt.offer.infra not in BUYS_SPOT or record.wish:
        return None
    if not (seen.news_complete and judge(attempt).reason.retried):
        return None
    told = attempt.job_end is not None or bool(attempt.node_ends)
    return replace(conclude(attempt, gone=Gone(now)), leaving=True) if told else None


def _behind(record: RunRecord, seen: Observation, now: float, policy: Policy) -> Action | None:
    """Return what is to be done for the nodes of attempts that have ended; None if nothing."""
    clusters = dict(seen.leaving)
    for attempt in record.leaving:
        cluster = clusters.get(attempt.number)
        if cluster is None or cluster.state is ClusterState.UNREACHABLE:
            continue
        if cluster.state not in (ClusterState.UP, ClusterState.STARTING):
            return NoteReleased(
                attempt=attempt.number, gone=when_gone(attempt, cluster, now, policy)
            )
        if isinstance(pursue_down(attempt, now, policy), SendDown):
            return SendDown(attempt=attempt.number)
    return None


def _without_answer(record: RunRecord, seen: Observation, policy: Policy) -> NoteReleased | None:
    """Give up nodes that nobody can be asked for: else a run that is over is never at rest."""
    if seen.looked_s < policy.answer_patience_s:
        return None
    for each in record.leaving:
        if each.in_doubt and each.end is not None:
            gone = Gone(each.end.gone_at, each.end.gone_latest_at)
            return NoteReleased(attempt=each.number, gone=gone, unseen=True)
    return None


def alert_percents(record: RunRecord) -> list[int]:
    """Return the shares of the budget that the history tells, the user's own among them."""
    return sorted({*BUDGET_SHARES, *rules_of(record.spec).shares})


def _alert_due(record: RunRecord, now: float) -> int | None:
    budget_usd = record.limits.budget_usd
    if not budget_usd:
        return None
    share = 100.0 * cost.known_spent_usd(record, now) / budget_usd
    due = [percent for percent in alert_percents(record) if share >= percent]
    return due[-1] if due and due[-1] not in record.alerted else None
