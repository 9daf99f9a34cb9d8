"""What is said of an end is what happened, not what was meant to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from spotguard.control.journal.fold import fold
from spotguard.control.journal.record import Kind
from spotguard.control.status.history_words import history_lines
from spotguard.control.status.recovery import recoveries
from spotguard.control.supervisor.end_reason import judge
from spotguard.events.states import EndReason
from tests.control.made import Line, launched, made, training

if TYPE_CHECKING:
    from collections.abc import Iterator

    from spotguard.control.journal.journal import Entry


def saved(step: int, at: float = 5.0) -> Line:
    """A checkpoint was committed."""
    return ("job_saved", at, 1, {"step": step, "checkpoint_kind": "periodic"})


def failed(step: int, at: float = 4.0) -> Line:
    """A save failed on one rank."""
    return ("job_save_failed", at, 1, {"step": step, "problem": "no room"})


def ended(reason: EndReason, step: int, saved_step: int | None, **more: Any) -> Line:
    """The job wrote its end."""
    data = {"reason": str(reason), "step": step, "saved_step": saved_step, "seen_at": 8.0, **more}
    return ("job_ended", 7.0, 1, data)


def over(reason: EndReason, *, step: int, is_saved: bool) -> Line:
    """The controller gave its verdict."""
    end = {
        "reason": str(reason),
        "saved": is_saved,
        "detail": "",
        "gone_at": 9.0,
        "last_step": step,
        "training_ended_at": 8.0,
        "traceback": None,
    }
    return ("attempt_ended", 10.0, 1, end)


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "full": ({}, "no capacity for 2 node(s): word"),
    "busy": ({"busy": True}, "the cloud could not launch 2 node(s) just then: word"),
    "lasting": ({"lasting": True}, "the cloud refused 2 node(s): word"),
    "quota": ({"lasting": True, "quota_full": True}, "a quota has no room for 2 node(s): word"),
    "paid": (
        {"busy": True, "paid_s": 177.0},
        "the cloud could not launch 2 node(s) just then: word; "
        "nodes may have run, so 2 min 57 s are charged",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_says_what_was_in_the_way_and_what_it_cost(name: str) -> None:
    """A throttled call is no lack of nodes, and a missing right is neither."""
    more, words = REFUSALS[name]
    data = {"nodes": 2, "place": "p", "problem": "word", "late": True, **more}
    lines = history_lines(_entries(*launched(1.0), ("no_capacity", 9.0, 1, data)))
    assert list(lines)[-1].text == words


def test_a_failed_save_that_another_rank_made_is_no_warning() -> None:
    """In whichever order it is heard; a later failure stays."""
    assert made(*launched(), training(), failed(258), saved(258)).warnings == ()
    assert made(*launched(), training(), saved(258), failed(258)).warnings == ()
    (left,) = made(*launched(), training(), failed(258), saved(257)).warnings
    assert "258" in left


def test_a_cloud_that_needs_a_minute_to_refuse_is_waited_for() -> None:
    """The time of a refused launch is a wait for capacity, not the provision of nodes."""
    record = made(
        *launched(),
        training(),
        ended(EndReason.NODE_LOST, 9, 9),
        over(EndReason.NODE_LOST, step=9, is_saved=True),
        *launched(20.0, 2),
        ("no_capacity", 88.0, 2, {"nodes": 2, "place": "a", "problem": "none", "late": True}),
        *launched(90.0, 2),
        ("job_started", 120.0, 2, {"node_up_at": "1970-01-01T00:01:50Z"}),
    )
    (recovery,) = recoveries(record)

    assert recovery.waiting_s == pytest.approx(70.0)
    assert recovery.provision_s == pytest.approx(30.0)


@pytest.mark.parametrize(
    ("reason", "warned", "told"),
    [
        (EndReason.PREEMPTED, True, True),
        (EndReason.BUDGET, True, True),
        (EndReason.FAILED, False, False),
        (EndReason.FINISHED, True, False),
    ],
)
def test_torchruns_code_after_a_clean_leave_is_no_failure(
    reason: EndReason, *, warned: bool, told: bool
) -> None:
    """It returns 1 when its workers left as they were told; a script's own 1 is told as one."""
    node = {"node": 0, "end": "exited", "exit_code": 1, "detail": ""}
    end = ended(reason, 9, 9, warned_at="1970-01-01T00:00:06Z" if warned else None)
    lines = [*launched(), training(), end, (Kind.NODE_ENDED.value, 8.0, 1, node)]

    texts = [line.text for line in history_lines(_entries(*lines))]

    assert ("node 0 left, as it was told" in texts) is told
    assert any("exit code 1" in text for text in texts) is not told


@pytest.mark.parametrize(("detail", "failed"), [("left after SIGTERM", False), ("", True)])
@pytest.mark.parametrize(
    "last", [True, False], ids=["after its last step", "before its first word"]
)
def test_who_was_told_by_a_signal_has_not_failed(detail: str, *, failed: bool, last: bool) -> None:
    """torchrun says 1 when a signal reached it, also where the script was done or had not begun."""
    node = {"node": 0, "end": "exited", "exit_code": 1, "detail": detail}
    said = [training(), ended(EndReason.FINISHED, 9, 9)] if last else []
    lines = [*launched(), *said, (Kind.NODE_ENDED.value, 8.0, 1, node)]

    verdict = judge(fold(_entries(*lines)).attempts[-1])

    assert (verdict.reason is EndReason.FAILED) is failed


def test_which_node_was_lost_is_not_said_where_nobody_knows_it() -> None:
    """SkyPilot calls a cluster unhealthy as a whole; older journals say no more."""
    of_two: list[dict[str, object]] = [
        {"node": node, "end": "lost", "exit_code": None, "detail": "gone"} for node in (0, 1)
    ]
    doubted = [{**node, "in_doubt": True} for node in of_two]

    def told(nodes: list[dict[str, object]]) -> tuple[EndReason, str, list[str]]:
        ends = [(Kind.NODE_ENDED.value, 8.0, 1, node) for node in nodes]
        lines = [*launched(2), training(), *ends]
        verdict = judge(fold(_entries(*lines)).attempts[-1])
        texts = [line.text for line in history_lines(_entries(*lines)) if "lost" in line.text]
        return verdict.reason, verdict.detail, texts

    assert told(of_two)[0] is EndReason.VANISHED
    reason, detail, texts = told(doubted)
    assert (reason, detail) == (EndReason.NODE_LOST, "a node: gone")
    assert texts == [f"a node was lost, maybe node {node}: gone" for node in (0, 1)]


def _entries(*lines: Line) -> Iterator[Entry]:
    from tests.control import made as hand

    created = {
        "run_id": "job-1",
        "name": "job",
        "store_root": "memory://",
        "limits": {"budget_usd": None, "nodes_min": 1, "nodes_max": 1},
        "spec": {},
    }
    every: list[Line] = [("run_created", 0.0, None, created), *lines]
    return (hand._entry(seq, *line) for seq, line in enumerate(every, 1))
