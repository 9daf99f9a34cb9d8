"""Why an attempt ended: the run store's word first, the launcher's second. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from spotguard.control.journal.record import Kind
from spotguard.control.supervisor.actions import Conclude, Gone
from spotguard.events.states import EXIT_CODE_OF_JOB_TOLD_TO_STOP, CheckpointKind, EndReason
from spotguard.launch.base import ClusterState, NodeEnd
from spotguard.shared.units import format_duration

if TYPE_CHECKING:
    from collections.abc import Callable

    from spotguard.control.journal.record import AttemptRecord, JobEnd, NodeEnded, RunRecord
    from spotguard.control.supervisor.policy import Policy
    from spotguard.launch.base import ClusterView

_BLAME_WINDOW_S = 10.0
"""A job's failure within so many seconds of a node's loss is taken for its consequence."""

_OVERRIDING = (
    EndReason.STOPPED,
    EndReason.BUDGET,
    EndReason.DEADLINE,
    EndReason.LAUNCH_FAILED,
)
"""Why the controller took nodes down, when that explains an end better than the job can: the job
only sees a SIGTERM then."""


_OF_THE_JOB = (EndReason.FAILED, EndReason.STORE_FAILED, EndReason.UNPROTECTED)
"""What a job says of itself that explains its end, whatever the controller wanted meanwhile."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Why an attempt ended."""

    reason: EndReason
    detail: str = ""
    traceback: str | None = None


def judge(attempt: AttemptRecord) -> Verdict:
    """Return why an attempt whose nodes all ended did so; all its events must have been read."""
    job, down = attempt.job_end, attempt.down
    if job is not None and job.reason is EndReason.FINISHED:
        return _finished(attempt, job)
    if job is not None and job.reason in _OF_THE_JOB:
        return _failed(attempt, job)
    if down is not None and down.reason in _OVERRIDING:
        return Verdict(reason=down.reason, detail=_with_save(attempt, down.detail))
    if job is not None and _left_alone(attempt, job):
        # Slurm ends the rest of an allocation when a node of it dies: the signal is not the cause.
        detail = f"{job.message}, and another rank gave no answer"
        return Verdict(reason=EndReason.NODE_LOST, detail=_with_save(attempt, detail))
    if job is not None:
        return Verdict(reason=job.reason, detail=job.message)
    if down is not None:
        return Verdict(reason=down.reason, detail=down.detail)
    return judge_nodes(attempt)


def _left_alone(attempt: AttemptRecord, job: JobEnd) -> bool:
    """Tell whether a node was told to end by a signal while another one was silent."""
    return job.solo and job.reason is EndReason.TERMINATED and attempt.nodes > 1


def judge_nodes(attempt: AttemptRecord) -> Verdict:
    """Return why an attempt ended that never said so itself, from its nodes' ends alone."""
    failed = attempt.failed_nodes
    lost = _lost_first(attempt, failed[0].at) if failed else attempt.lost_nodes
    if lost and _guarded(attempt):
        return Verdict(
            reason=attempt.allotment.down_reason,
            detail=_with_save(attempt, "the launcher's own guard took the nodes"),
        )
    if lost or not attempt.node_ends:
        whole = not lost or (len(lost) == attempt.nodes and not any(node.in_doubt for node in lost))
        reason = EndReason.VANISHED if whole else EndReason.NODE_LOST
        return Verdict(reason=reason, detail=_words_of_loss(attempt))
    if failed:
        return _exited_badly(attempt)
    if any(save.kind == CheckpointKind.FINAL.value for save in attempt.saves):
        return Verdict(reason=EndReason.FINISHED, detail="its final save says so")
    if attempt.started_at is None:
        return Verdict(
            reason=EndReason.UNPROTECTED,
            detail="the script ended without ever beginning a loop of spotguard",
        )
    return Verdict(reason=EndReason.FAILED, detail="the script ended without finishing its loop")


def _finished(attempt: AttemptRecord, job: JobEnd) -> Verdict:
    bad = [
        node
        for node in attempt.failed_nodes
        if node.exit_code != EXIT_CODE_OF_JOB_TOLD_TO_STOP and not _was_told(node)
    ]
    if bad and not job.warned:  # else it may be that of a node which was told to stop, too
        return Verdict(
            reason=EndReason.FAILED,
            detail=f"the script failed after its last step, with exit code {bad[0].exit_code}",
        )
    return Verdict(reason=EndReason.FINISHED, detail=job.message)


def _failed(attempt: AttemptRecord, job: JobEnd) -> Verdict:
    lost = _lost_first(attempt, job.at)
    if lost and lost[0].at <= job.at + _BLAME_WINDOW_S:
        # A collective that breaks when a peer dies looks like an error of the script.
        return Verdict(
            reason=EndReason.NODE_LOST,
            detail=f"{_words_of_loss(attempt)}; the rest of the job failed with it: {job.message}",
        )
    return Verdict(reason=job.reason, detail=job.message, traceback=job.traceback)


def _lost_first(attempt: AttemptRecord, failed_at: float) -> tuple[NodeEnded, ...]:
    """Return the lost nodes that may be the cause of a failure, and not its consequence.

    With the first node that fails SkyPilot ends the job on all the others: some still say that
    they were told to leave, of some it is known only that the job is over.
    """
    if attempt.notice is not None and attempt.notice.at <= failed_at:
        return attempt.lost_nodes
    return tuple(n for n in attempt.lost_nodes if n.at <= failed_at or _vanished(n))


def _vanished(node: NodeEnded) -> bool:
    return node.end is NodeEnd.LOST and node.exit_code is None


def _exited_badly(attempt: AttemptRecord) -> Verdict:
    node = attempt.failed_nodes[0]
    if attempt.notice is not None:
        return Verdict(
            reason=EndReason.NODE_LOST,
            detail=f"it left after the notice with exit code {node.exit_code}, and could not say "
            "whether it had saved",
        )
    codes = {each.exit_code for each in attempt.failed_nodes}
    if attempt.stop is not None and codes == {EXIT_CODE_OF_JOB_TOLD_TO_STOP}:
        told = "it left as it was told to stop, and could not say whether it had saved"
        return Verdict(reason=attempt.stop.reason, detail=_with_save(attempt, told))
    if _was_told(node):
        return Verdict(
            reason=EndReason.NODE_LOST,
            detail=f"node {node.node}: {node.detail}, before the script could say anything",
        )
    return Verdict(
        reason=EndReason.FAILED,
        detail=f"the script ended with exit code {node.exit_code} on node {node.node}",
    )


def _was_told(node: NodeEnded) -> bool:
    """Tell whether a signal told the node to leave: it then says 1, whatever its ranks say."""
    return node.exit_code == 1 and node.detail.startswith("left after")


def _words_of_loss(attempt: AttemptRecord) -> str:
    lost = attempt.lost_nodes
    if not lost:
        return "nothing is left of the cluster"
    words = f"{_names(lost)}: {lost[0].detail or 'taken'}"
    if attempt.notice is None:
        return words
    return f"{words}; the notice left too little time to report a save"


def _names(lost: tuple[NodeEnded, ...]) -> str:
    if any(node.in_doubt for node in lost):
        return "a node"
    names = ", ".join(str(each) for each in sorted(node.node for node in lost))
    return f"node{'s' if len(lost) > 1 else ''} {names}"


def _with_save(attempt: AttemptRecord, detail: str) -> str:
    """Say honestly what is saved, where the end reason's label alone would promise too much."""
    job, save = attempt.job_end, attempt.last_save
    if job is not None and job.saved_step is not None and job.saved_step == job.step:
        return f"{detail}; saved at step {job.saved_step}"
    if save is not None:
        return f"{detail}; the last save is of step {save.step}"
    return f"{detail}; this attempt had not saved yet"


def _guarded(attempt: AttemptRecord) -> bool:
    """Tell whether the nodes went when the launcher's leak guard was due."""
    lifetime_s = attempt.allotment.max_lifetime_s
    if lifetime_s is None:
        return False
    return attempt.lost_nodes[0].at >= attempt.intended_at + lifetime_s - 1.0


def when_gone(attempt: AttemptRecord, cluster: ClusterView, now: float, policy: Policy) -> Gone:
    """Return when the nodes went: after the job's last word, and not in the future.

    The launcher reads the machine's clock, which may have been set since the run began. Where it
    doesn't say when, and nobody looked for a while, they went somewhere between the last sign of
    them and now, or the end that was set at their launch: nobody pays for what nobody saw as if it
    were known.
    """
    if attempt.gone_seen is not None:
        return Gone(*attempt.gone_seen)
    if cluster.gone_at is not None:
        by_at = now if attempt.gone_by is None else min(now, attempt.gone_by)  # asked hours later
        return Gone(min(max(cluster.gone_at, *_words_at(attempt)), by_at))
    if cluster.state is ClusterState.ABSENT and attempt.in_doubt and attempt.end is not None:
        return Gone(attempt.end.gone_at, attempt.end.gone_latest_at)
    if cluster.state is ClusterState.ABSENT and attempt.end is None:
        # A launcher that forgot the cluster (the run was adopted elsewhere): what was seen last.
        return Gone(last_sign_at(attempt))
    latest_at, down_at = now, attempt.allotment.down_at
    if down_at is not None:  # the launcher's own guard strikes then, whoever else is dead
        latest_at = min(latest_at, down_at + policy.teardown_s)
    if attempt.gone_by is not None:
        latest_at = min(latest_at, attempt.gone_by)
    seen = [last_sign_at(attempt), attempt.up_at or 0.0, cluster.lived_at or 0.0]
    if attempt.down is not None:  # only what is there is told to go
        seen.append(attempt.down.sent_at or attempt.down.failed_at or 0.0)
    there_at = min(max(seen), now)
    if latest_at - there_at <= policy.contact_patience_s:
        return Gone(max(latest_at, *_words_at(attempt)))
    return Gone(there_at, latest_at)


def never_came(
    attempt: AttemptRecord, cluster: ClusterView, now: float, policy: Policy
) -> Gone | None:
    """Return when the nodes went of a launch that came to nothing; None if none was started."""
    if not cluster.nodes_ran and attempt.up_at is None:
        return None
    gone = when_gone(attempt, cluster, now, policy)
    return replace(gone, at=max(gone.at, attempt.billed_from))


def paid(
    attempt: AttemptRecord, gone: Gone | None, charged_of: Callable[[AttemptRecord], float | None]
) -> dict[str, Any]:
    """Return for how long a launch that came to nothing cost money, as the journal keeps it."""
    if gone is None:
        return {"paid_s": None}
    charged_s = charged_of(attempt)
    if charged_s is not None:
        return {"paid_s": charged_s / attempt.nodes}
    unseen_s = None if gone.latest_at is None else gone.latest_at - gone.at
    return {"paid_s": max(0.0, gone.at - attempt.billed_from), "unseen_s": unseen_s}


def conclude(attempt: AttemptRecord, *, gone: Gone) -> Conclude:
    """Return the verdict on an attempt whose nodes are gone, or were told to go."""
    verdict = judge(attempt)
    ends = [node.at for node in attempt.node_ends]
    ended_at = attempt.job_end.at if attempt.job_end else min(ends, default=gone.at)
    return Conclude(
        reason=verdict.reason,
        detail=verdict.detail,
        gone_at=gone.at,
        gone_latest_at=gone.latest_at,
        training_ended_at=min(ended_at, gone.at),
        traceback=verdict.traceback,
    )


def last_sign_at(attempt: AttemptRecord) -> float:
    """Return when something was last heard of the job, or of its nodes."""
    seen = [attempt.progress.at] if attempt.progress else []
    return max([*_words_at(attempt), *seen, *(node.at for node in attempt.node_ends)])


def _words_at(attempt: AttemptRecord) -> list[float]:
    """Return when the job is known to have lived, by its own words: others are of who saw it."""
    words = [attempt.intended_at, attempt.started_at or 0.0, *(each.at for each in attempt.saves)]
    return words + [each.at for each in (attempt.job_end, attempt.notice) if each]


def words_of_patience(what: str, patience_s: float) -> str:
    """Return a sentence part on something that did not happen in time."""
    return f"{what} within {format_duration(patience_s)}"


def without_store(record: RunRecord, stop_patience_s: float) -> str:
    """Return, as a sentence, what happens to a run while its store does not answer."""
    launched = record.leaving or any(e and e.launched for e in (record.current, record.ahead))
    if record.wish is not None and not launched:
        return "it has no nodes, and comes to rest"
    if record.wish is Kind.USER_DOWN:
        return "its nodes are released all the same"
    if record.wish is Kind.USER_STOP:
        return (
            "its job cannot be asked to save: it is asked once the store answers, and after "
            f"{format_duration(stop_patience_s)} its nodes are released; "
            f"at once: spotguard down {record.run_id}"
        )
    if launched:
        return "its nodes train on until the limits that were set at their launch"
    return "nothing is launched"


def barren(record: RunRecord) -> int:
    """Return how many attempts in a row, up to the newest, finished no new step.

    One that was told to go on elsewhere, before its first step, says nothing of the job.
    """
    count = 0
    for attempt in reversed(record.attempts):
        first, last = attempt.resumed_step or 0, attempt.last_step
        if attempt.number <= record.resumed_after or (last is not None and last > first):
            break
        if attempt.end is not None and attempt.end.reason is EndReason.PHASE_DONE:
            break  # it found all that it was for done already
        if attempt.end is None or attempt.end.reason is not EndReason.MOVED:
            count += 1
    return count


def unsaved(record: RunRecord) -> int:
    """Return how many attempts in a row, up to the newest, left nothing new to go on from.

    They may have trained: steps that are lost each time are paid each time.
    """
    count, next_first = 0, 0
    for attempt in reversed(record.attempts):
        if attempt.number <= record.resumed_after or attempt.end is None:
            break
        if attempt.started_at is None:
            count += attempt.end.reason is not EndReason.MOVED
            continue
        first, last = attempt.resumed_step or 0, attempt.last_step or 0
        kept = attempt.last_save.step if attempt.last_save is not None else 0
        kept = max(kept, next_first, last if attempt.saved else 0)
        if kept > first or attempt.end.reason is EndReason.PHASE_DONE:
            break
        count += attempt.end.reason is not EndReason.MOVED
        next_first = first
    return count
