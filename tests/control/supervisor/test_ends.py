"""What the end of an attempt says of its save, and of the run."""

from __future__ import annotations

import pytest

from spotguard.control.supervisor.actions import Settle
from spotguard.control.supervisor.decide import Observation, decide
from spotguard.control.supervisor.end_reason import judge
from spotguard.control.supervisor.policy import Policy
from spotguard.events.states import EndReason, RunState
from tests.control.made import (
    Line,
    down_asked,
    ended,
    launched,
    made,
    node_ended,
    said,
    saved,
    training,
)


@pytest.mark.parametrize(
    ("lines", "is_saved"),
    [
        ([said(9, "terminated", step=6, saved=False)], False),  # nothing was ever saved
        ([said(9, "preempted", step=0, saved=False)], False),  # not even the beginning
        ([saved(5, 4), said(9, "budget", step=6, saved=False)], False),  # there is one, not this
        ([said(9, "terminated", step=6, saved=False), saved(9, 6)], True),  # a survivor saved it
        ([saved(8, 6), said(9, "terminated", step=6, saved=True)], True),
        ([saved(5, 4), said(9, "terminated", step=6)], False),  # of a job that did not say
        ([saved(8, 6), said(9, "terminated", step=6)], True),
        ([said(9, "terminated", step=0, saved=True)], None),  # nothing was done: nothing is claimed
        ([said(9, "budget", step=0)], None),
    ],
)
def test_an_end_says_what_became_of_its_own_save(lines: list[Line], is_saved: bool | None) -> None:
    """A checkpoint that exists says nothing; one of the very step that was reached does."""
    attempt = made(*launched(), training(), *lines).attempts[0]

    assert attempt.saved is is_saved
    for reason in (EndReason.PREEMPTED, EndReason.TERMINATED, EndReason.BUDGET, EndReason.STOPPED):
        words = reason.told(attempt.saved)
        promised = reason.label.partition(", ")[0]
        ways = {True: reason.label, False: f"{promised}, not saved in time", None: promised}
        assert words == ways[is_saved]


def test_what_is_not_known_is_not_claimed() -> None:
    """An attempt that never said a step promises nothing; labels without a promise stay."""
    attempt = made(*launched()).attempts[0]

    assert attempt.saved is None
    assert EndReason.BUDGET.told(None) == "budget reached"
    assert {EndReason.FAILED.told(saved) for saved in (True, False, None)} == {
        EndReason.FAILED.label
    }


STOPPING = (
    *launched(),
    training(),
    saved(8.0, 8),
    ("user_stop", 9.0),
    ("stop_asked", 9.0, 1, {"reason": "stopped"}),
    ("stop_written", 9.0, 1),
)
LOST = said(12.0, "failed", step=12, saved_step=8, saved=False)
KILLED = (*STOPPING, down_asked(11.0, "stopped"), LOST)


@pytest.mark.parametrize(
    ("lines", "reason", "state", "exit_code"),
    [
        (STOPPING, "finished", RunState.FINISHED, 0),
        (STOPPING, "failed", RunState.FAILED, 10),
        (STOPPING, "unprotected", RunState.FAILED, 10),
        (STOPPING, "store_failed", RunState.FAILED, 3),
        (KILLED, "store_failed", RunState.FAILED, 3),
        (KILLED, "failed", RunState.STOPPED, 75),
        (STOPPING, "node_lost", RunState.STOPPED, 75),
        (STOPPING, "launch_failed", RunState.STOPPED, 75),
    ],
)
def test_a_stop_that_a_job_answers_with_a_failure_is_told_as_one(
    lines: tuple[Line, ...], reason: str, state: RunState, exit_code: int
) -> None:
    """Who believed that it had been saved would delete what it can be resumed from.

    What a job says as its nodes are taken from it by force is no failure of its own.
    """
    record = made(*lines, ended(13.0, reason, last_step=12))
    action = decide(record, Observation(), 14.0, Policy())
    assert isinstance(action, Settle)
    assert (action.state, action.exit_code) == (state, exit_code)


@pytest.mark.parametrize(
    ("lines", "detail"),
    [
        ((*STOPPING[:4], ended(8.5, "vanished", last_step=12), STOPPING[4]), "stopped by you"),
        ((*STOPPING, saved(11.0, 12)), "stopped by you, state saved"),
        ((*STOPPING, LOST), "stopped by you, not saved in time: so it ended"),
        ((*launched(), ("user_stop", 9.0)), "stopped by you"),
        (
            (*STOPPING[:3], ("compared", 9.0, None, {"stop": True, "why": "place 2 of 2"})),
            "place 2 of 2",
        ),
    ],
)
def test_a_run_that_you_stop_says_what_is_saved(lines: tuple[Line, ...], detail: str) -> None:
    """As far as it is known; one that its sweep stops has that one's words."""
    end = ended(13.0, "stopped", last_step=None if len(lines) == 3 else 12)
    end[3]["detail"] = "so it ended"
    over = any(line[0] == end[0] for line in lines)
    record = made(*lines) if over else made(*lines, end)
    action = decide(record, Observation(), 14.0, Policy())
    assert isinstance(action, Settle)
    assert (action.state, action.detail) == (RunState.STOPPED, detail)


@pytest.mark.parametrize(
    ("codes", "reason"), [((75, 75), "stopped"), ((75, 1), "failed"), ((1, 1), "failed")]
)
def test_a_job_that_leaves_as_it_was_told_to_has_not_failed(
    codes: tuple[int, int], reason: str
) -> None:
    """Also where the store did not take its word for that: its exit code has the same."""
    ends = [node_ended(12.0, node, code=code) for node, code in enumerate(codes)]
    verdict = judge(made(*STOPPING, *ends).attempts[0])
    assert verdict.reason.value == reason
    assert (verdict.reason is EndReason.STOPPED) == ("the last save is of step 8" in verdict.detail)
