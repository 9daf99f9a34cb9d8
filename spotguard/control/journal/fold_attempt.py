"""The fold's other half: what each journal event changes in an `AttemptRecord`. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from spotguard.control.journal.nodes.energy_counter import EnergyCounter
from spotguard.control.journal.record import (
    JOB_PREFIX,
    KEPT_SAVES,
    AttemptEnd,
    AttemptRecord,
    DownAsked,
    JobEnd,
    Kind,
    NodeEnded,
    NoticeHeard,
    Save,
    SaveTotals,
    StepProgress,
    StopAsked,
)
from spotguard.events.event import JobEvent
from spotguard.events.metric import newest_values, of_node
from spotguard.events.states import CheckpointKind, EndReason
from spotguard.events.untrusted import amount, instant, integer, number, seconds, text
from spotguard.launch.base import NodeEnd

if TYPE_CHECKING:
    from collections.abc import Callable

    from spotguard.control.journal.journal import Entry

_WEIGHT_OF_ENDS = (
    # When several ranks wrote how it ended, the first of these is the cause, the rest follow
    # from it: a rank that failed by itself makes its peers report a lost node.
    EndReason.UNPROTECTED,
    EndReason.FAILED,
    EndReason.STORE_FAILED,
    EndReason.FINISHED,
    EndReason.PREEMPTED,
    EndReason.TERMINATED,
    EndReason.RESIZED,
    EndReason.MOVED,
    EndReason.PHASE_DONE,
    EndReason.BUDGET,
    EndReason.DEADLINE,
    EndReason.STOPPED,
    EndReason.NODE_LOST,
    EndReason.FENCED,
)


def progress_of(data: dict[str, Any], at: float) -> StepProgress | None:
    """Return where training stood according to untrusted data, or None if it does not say."""
    step = integer(data, "step")
    if step is None:
        return None
    return StepProgress(
        at=at,
        step=step,
        total_steps=integer(data, "total_steps"),
        epoch=integer(data, "epoch"),
        train_s=number(data, "train_s"),
        step_s=number(data, "step_s"),
        loss=number(data, "loss"),
        metrics=newest_values(data),
    )


def _end_seen(attempt: AttemptRecord, at: float) -> AttemptRecord:
    """Note that the controller knows of its end; the first time counts."""
    if attempt.course.end_seen_at is not None:
        return attempt
    return replace(attempt, course=replace(attempt.course, end_seen_at=at))


def _node_ended(attempt: AttemptRecord, entry: Entry) -> AttemptRecord:
    data = entry.data
    node = NodeEnded(
        node=data["node"],
        at=entry.at,
        end=NodeEnd(data["end"]),
        exit_code=data["exit_code"],
        detail=data["detail"],
        in_doubt=data.get("in_doubt") is True,  # journals of earlier versions do not say these
        in_vain=data.get("in_vain") is True,
    )
    return _end_seen(replace(attempt, node_ends=(*attempt.node_ends, node)), entry.at)


def _stop_asked(attempt: AttemptRecord, entry: Entry) -> AttemptRecord:
    why = str(entry.data.get("why") or "")  # journals of earlier versions do not say it
    asked = StopAsked(at=entry.at, reason=EndReason(entry.data["reason"]), why=why)
    return replace(attempt, stop=asked)


def _stop_written(attempt: AttemptRecord, _: Entry) -> AttemptRecord:
    return replace(attempt, stop=attempt.stop and replace(attempt.stop, written=True))


def _down_asked(attempt: AttemptRecord, entry: Entry) -> AttemptRecord:
    data = entry.data
    asked = DownAsked(
        at=entry.at,
        reason=EndReason(data["reason"]),
        detail=data["detail"],
        log=data.get("log"),
        in_doubt=data.get("in_doubt") is True,
    )
    return _end_seen(replace(attempt, down=attempt.down or asked), entry.at)


def _down_sent(attempt: AttemptRecord, entry: Entry) -> AttemptRecord:
    return replace(attempt, down=attempt.down and replace(attempt.down, sent_at=entry.at))


def _down_failed(attempt: AttemptRecord, entry: Entry) -> AttemptRecord:
    return replace(attempt, down=attempt.down and replace(attempt.down, failed_at=entry.at))


def end_attempt(attempt: AttemptRecord, entry: Entry) -> AttemptRecord:
    """Return the attempt with the verdict on it."""
    data = entry.data
    end = AttemptEnd(
        at=entry.at,
        reason=EndReason(data["reason"]),
        detail=data["detail"],
        gone_at=data["gone_at"],
        gone_latest_at=seconds(data, "gone_latest_at"),
        last_step=data["last_step"],
        training_ended_at=data["training_ended_at"],
        traceback=data["traceback"],
        last_beat_at=number(data, "last_beat_at"),
        leaving=data.get("leaving") is True,
        charged_node_s=amount(data, "charged_node_s"),
    )
    return _end_seen(
        replace(attempt, end=end, contact_lost_at=None, cloud_silent_at=None), entry.at
    )


def _released(attempt: AttemptRecord, entry: Entry) -> AttemptRecord:
    gone_at, charged_s = entry.data["gone_at"], amount(entry.data, "charged_node_s")
    latest_at, end = seconds(entry.data, "gone_latest_at"), attempt.end
    if end is not None:
        end = replace(end, leaving=False, gone_at=gone_at, charged_node_s=charged_s)
        end = replace(end, gone_latest_at=latest_at)
    return replace(attempt, end=end)


def _progress(attempt: AttemptRecord, entry: Entry) -> AttemptRecord:
    progress = progress_of(entry.data, entry.at)
    if progress is None:
        return attempt
    return replace(attempt, progress=progress, energy=_counted(attempt.energy, progress.metrics))


def _counted(
    known: tuple[EnergyCounter, ...], metrics: dict[str, float]
) -> tuple[EnergyCounter, ...]:
    """Return the counters with newer values; one that went back began anew, and is let be."""
    counters = {counter.name: counter for counter in known}
    for name, value in metrics.items():
        of = of_node(name)
        if of is None or of[2] != "energy_j":
            continue
        counter = counters.get(name)
        if counter is None:
            counters[name] = EnergyCounter(name=name, first_j=value, last_j=value)
        elif value > counter.last_j:
            counters[name] = replace(counter, last_j=value)
    return tuple(counters.values())


def _job_started(attempt: AttemptRecord, entry: Entry) -> AttemptRecord:
    data = entry.data
    course = replace(
        attempt.course, node_up_at=instant(data, "node_up_at"), init_at=instant(data, "init_at")
    )
    return replace(
        attempt,
        started_at=entry.at if attempt.started_at is None else attempt.started_at,
        resumed_from=text(data, "resumed_from"),
        resumed_step=integer(data, "resumed_step") or 0,
        course=course,
    )


def _first_step(attempt: AttemptRecord, entry: Entry) -> AttemptRecord:
    return replace(attempt, course=replace(attempt.course, first_step_at=entry.at))


def _job_notice(attempt: AttemptRecord, entry: Entry) -> AttemptRecord:
    notice = NoticeHeard(
        at=entry.at,
        source=text(entry.data, "source") or "unknown source",
        deadline_at=instant(entry.data, "deadline_at"),
        node=integer(entry.data, "node"),
    )
    before = next((each for each in attempt.notices if each.node == notice.node), None)
    if before is not None and (before.deadline_at or notice.deadline_at is None):
        return attempt
    others = _notices_but_of(attempt, notice.node)
    return replace(attempt, notices=(*others, notice))  # a recommendation may have come before it


def _notices_but_of(attempt: AttemptRecord, node: int | None) -> tuple[NoticeHeard, ...]:
    return tuple(each for each in attempt.notices if each.node != node)


def _job_withdrawn(attempt: AttemptRecord, entry: Entry) -> AttemptRecord:
    """Take one node's warning back: another node may go all the same."""
    return replace(attempt, notices=_notices_but_of(attempt, integer(entry.data, "node")))


def _job_saved(attempt: AttemptRecord, entry: Entry) -> AttemptRecord:
    data = entry.data
    step = integer(data, "step")
    if step is None:
        return attempt
    save = Save(
        at=entry.at,
        step=step,
        train_s=number(data, "train_s"),
        checkpoint=text(data, "checkpoint"),
        kind=text(data, "checkpoint_kind") or "periodic",
        duration_s=number(data, "duration_s"),
    )
    saves = _thinned((*attempt.saves, save))
    return replace(attempt, saves=saves, saving=_with(attempt.saving, data))


def _with(totals: SaveTotals, data: dict[str, Any]) -> SaveTotals:
    size_bytes = number(data, "size_bytes")
    return SaveTotals(
        count=totals.count + 1,
        size_bytes=totals.size_bytes + (size_bytes or 0.0),
        duration_s=totals.duration_s + (number(data, "duration_s") or 0.0),
        stall_s=totals.stall_s + (number(data, "stall_s") or 0.0),
        last_bytes=size_bytes,
    )


def _node_exited(attempt: AttemptRecord, entry: Entry) -> AttemptRecord:
    """Take a node's own word for its end; the first word counts, whoever says it."""
    node, code = integer(entry.data, "node"), integer(entry.data, "exit_code")
    if node is None or code is None or any(each.node == node for each in attempt.node_ends):
        return attempt
    told = bool(entry.data.get("told"))
    ended = NodeEnded(
        at=entry.at,
        node=node,
        end=NodeEnd.LOST if told else NodeEnd.EXITED,
        exit_code=code,
        detail="it was told to leave" if told else "",
    )
    attempt = replace(attempt, node_ends=(*attempt.node_ends, ended))
    return _end_seen(attempt, _seen_at(entry))


def _seen_at(entry: Entry) -> float:
    """Return when the controller read what the job wrote at `entry.at`."""
    return seconds(entry.data, "seen_at") or entry.at


def _job_ended(attempt: AttemptRecord, entry: Entry) -> AttemptRecord:
    data = entry.data
    try:
        reason = EndReason(str(data.get("reason")))
    except ValueError:
        return attempt
    end = JobEnd(
        at=entry.at,
        seen_at=_seen_at(entry),
        reason=reason,
        step=integer(data, "step"),
        saved_step=integer(data, "saved_step"),
        train_s=number(data, "train_s"),
        message=text(data, "message") or "",
        traceback=text(data, "traceback"),
        warned=data.get("warned_at") is not None,
        solo=data.get("solo") is True,
        saved=data["saved"] if isinstance(data.get("saved"), bool) else None,
    )
    if attempt.job_end is not None and _weight(attempt.job_end.reason) <= _weight(reason):
        return attempt
    return _end_seen(replace(attempt, job_end=end), end.seen_at)


def _weight(reason: EndReason) -> int:
    return _WEIGHT_OF_ENDS.index(reason) if reason in _WEIGHT_OF_ENDS else len(_WEIGHT_OF_ENDS)


CHANGES_OF_ATTEMPT: dict[str, Callable[[AttemptRecord, Entry], AttemptRecord]] = {
    Kind.LAUNCHED.value: lambda attempt, _: replace(attempt, launched=True),
    Kind.LAUNCH_FAILED.value: lambda attempt, entry: replace(
        attempt, launch_problem=entry.data["problem"]
    ),
    Kind.NODES_GONE.value: lambda attempt, entry: replace(
        attempt, gone_seen=(entry.data["gone_at"], seconds(entry.data, "gone_latest_at"))
    ),
    Kind.CLUSTER_UP.value: lambda attempt, entry: replace(attempt, up_at=entry.data["at"]),
    Kind.NODE_ENDED.value: _node_ended,
    Kind.CONTACT_LOST.value: lambda attempt, entry: replace(attempt, contact_lost_at=entry.at),
    Kind.CONTACT_BACK.value: lambda attempt, _: replace(attempt, contact_lost_at=None),
    Kind.CLOUD_SILENT.value: lambda attempt, entry: replace(attempt, cloud_silent_at=entry.at),
    Kind.CLOUD_BACK.value: lambda attempt, _: replace(attempt, cloud_silent_at=None),
    Kind.STOP_ASKED.value: _stop_asked,
    Kind.STOP_WRITTEN.value: _stop_written,
    Kind.DOWN_ASKED.value: _down_asked,
    Kind.DOWN_SENT.value: _down_sent,
    Kind.DOWN_FAILED.value: _down_failed,
    Kind.ATTEMPT_ENDED.value: end_attempt,
    Kind.RELEASED.value: _released,
    Kind.PROGRESS.value: _progress,
    JOB_PREFIX + JobEvent.STARTED.value: _job_started,
    JOB_PREFIX + JobEvent.FIRST_STEP.value: _first_step,
    JOB_PREFIX + JobEvent.NOTICE.value: _job_notice,
    JOB_PREFIX + JobEvent.WITHDRAWN.value: _job_withdrawn,
    JOB_PREFIX + JobEvent.SAVED.value: _job_saved,
    JOB_PREFIX + JobEvent.NODE_EXITED.value: _node_exited,
    JOB_PREFIX + JobEvent.GIVEN_BACK.value: lambda attempt, entry: replace(
        attempt, given_back_at=entry.at
    ),
    JOB_PREFIX + JobEvent.ENDED.value: _job_ended,
}


def _thinned(saves: tuple[Save, ...]) -> tuple[Save, ...]:
    """Return at most `KEPT_SAVES` of them: all of the newest, fewer the older they are.

    The slowest and every final one stay. A run that goes on from a save that is left out counts
    the one kept before it, as if it had not been reported.
    """
    if len(saves) <= KEPT_SAVES:
        return saves
    older, newer = saves[: KEPT_SAVES // 2], saves[KEPT_SAVES // 2 :]
    slowest = max(saves, key=lambda save: save.duration_s or 0.0)
    kept = tuple(
        save
        for index, save in enumerate(older)
        if index % 2 == 0 or save is slowest or save.kind == CheckpointKind.FINAL.value
    )
    return kept + newer
