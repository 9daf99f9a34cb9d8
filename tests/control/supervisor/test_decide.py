from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from spotguard.control.journal.record import BudgetOf, Limits
from spotguard.control.supervisor import actions
from spotguard.control.supervisor.actions import AskDown, AskToStop, Conclude, Intend, Settle
from spotguard.control.supervisor.decide import Observation, decide, state_of
from spotguard.control.supervisor.policy import Policy
from spotguard.events.states import EndReason, RunState
from spotguard.launch.base import ClusterState, ClusterView, NodeEnd, NodeView
from spotguard.shared.units import to_iso
from spotguard.testing.launcher import FAKE_OFFER
from tests.control.made import (
    Line,
    down_asked,
    ended,
    intended,
    launched,
    made,
    node_ended,
    node_left,
    said,
    saved,
    training,
)

POLICY = Policy()
UP = ClusterView(
    state=ClusterState.UP,
    nodes=tuple(NodeView(index=index, end=NodeEnd.RUNNING) for index in range(2)),
)
OVER = ClusterView(
    state=ClusterState.UP,
    nodes=tuple(NodeView(index=index, end=NodeEnd.EXITED, exit_code=1) for index in range(2)),
)
GONE = ClusterView(state=ClusterState.GONE, gone_at=99.0)
AWAY = ClusterView(state=ClusterState.UNREACHABLE, detail="SkyPilot is slow")
ABSENT = ClusterView(state=ClusterState.ABSENT)
STARTING = ClusterView(state=ClusterState.STARTING)
UNREACHABLE = ClusterView(state=ClusterState.UNREACHABLE)


def answer(
    lines: tuple[Line, ...],
    cluster: ClusterView | None,
    now: float,
    limits: Limits | None = None,
    **seen: Any,
) -> actions.Action:
    """Return what the machine decides."""
    seen.setdefault("offers", () if cluster else (FAKE_OFFER,))
    return decide(made(*lines, limits=limits), Observation(cluster=cluster, **seen), now, POLICY)


ALIVE = (*launched(infra="local"), training())
ON_SLURM = (*launched(infra="slurm"), training())
BOTH_LEFT = (node_ended(11.0, code=1), node_ended(11.0, node=1, code=1))
DOWN = (*ALIVE, down_asked(10.0, "node_lost"))
SENT = (*DOWN, ("down_sent", 11.0, 1))
STOP = (*ALIVE, ("stop_asked", 10.0, 1, {"reason": "stopped"}))
WRITTEN = (*STOP, ("stop_written", 10.0, 1))
LIMITED = (*launched(budget_stop_at=50.0, down_at=60.0, max_lifetime_s=60.0), training())

CASES: dict[str, tuple[tuple[Line, ...], ClusterView, float, type[object], EndReason | None]] = {
    # launching: the intent is written, the launcher says whether it was followed
    "intended, not launched": ((intended(),), ABSENT, 1.0, actions.Launch, None),
    "intended, launched, not noted": ((intended(),), STARTING, 1.0, actions.NoteLaunched, None),
    "intended, came and went": ((intended(),), GONE, 1.0, actions.NoteLaunched, None),
    "intended, nobody knows": ((intended(),), UNREACHABLE, 1.0, actions.Wait, None),
    "intended long ago": ((intended(),), ABSENT, 31.0, actions.Drop, None),
    "intended, then you stop": (
        (intended(), ("user_stop", 1.0)),
        ABSENT,
        1.0,
        actions.Drop,
        None,
    ),
    "the launch failed": (
        (intended(), ("launch_failed", 1.0, 1, {"problem": "no"})),
        ABSENT,
        1.0,
        Conclude,
        EndReason.LAUNCH_FAILED,
    ),
    "the launch failed half way": (
        (*launched(), ("launch_failed", 1.0, 1, {"problem": "no"})),
        UP,
        1.0,
        AskDown,
        EndReason.LAUNCH_FAILED,
    ),
    # an undisturbed attempt
    "it trains": (ALIVE, UP, 10.0, actions.Wait, None),
    "it starts": (launched(), STARTING, 10.0, actions.Wait, None),
    "it is gone": (ALIVE, GONE, 100.0, Conclude, EndReason.VANISHED),
    # it reported its end
    "finished, leaving": ((*ALIVE, said(10.0, "finished")), UP, 30.0, actions.Wait, None),
    "finished, stays for ever": (
        (*ALIVE, said(10.0, "finished")),
        UP,
        311.0,
        AskDown,
        EndReason.FINISHED,
    ),
    "preempted, leaving, or going on in place": (
        (*ALIVE, said(10.0, "preempted")),
        UP,
        29.0,
        actions.Wait,
        None,
    ),
    "preempted, does not leave": (
        (*ALIVE, said(10.0, "preempted")),
        UP,
        30.0,
        AskDown,
        EndReason.PREEMPTED,
    ),
    "preempted, all left, nodes still billed": (
        (*ALIVE, said(10.0, "preempted")),
        OVER,
        11.0,
        AskDown,
        EndReason.PREEMPTED,
    ),
    "preempted, all left by their own word, and may go on in place": (
        (*ALIVE, said(10.0, "preempted"), *BOTH_LEFT),
        UP,
        29.0,
        actions.Wait,
        None,
    ),
    "preempted on Slurm, does not leave": (
        (*ON_SLURM, said(10.0, "preempted")),
        UP,
        20.0,
        AskDown,
        EndReason.PREEMPTED,
    ),
    "preempted on Slurm, one left": (
        (*ON_SLURM, said(10.0, "preempted"), BOTH_LEFT[0]),
        UP,
        19.0,
        actions.Wait,
        None,
    ),
    "preempted on Slurm, all left by their own word": (
        (*ON_SLURM, said(10.0, "preempted"), *BOTH_LEFT),
        UP,
        12.0,
        AskDown,
        EndReason.PREEMPTED,
    ),
    "stopped, leaving": ((*ALIVE, said(10.0, "stopped")), UP, 19.0, actions.Wait, None),
    "stopped, does not leave": (
        (*ALIVE, said(10.0, "stopped")),
        UP,
        20.0,
        AskDown,
        EndReason.STOPPED,
    ),
    "a node is gone, the others leave": (
        (*ON_SLURM, said(10.0, "node_lost", solo=True, step=7, saved_step=7)),
        UP,
        12.0,
        actions.Wait,
        None,
    ),
    "a node is gone, and the one that left had not saved": (
        (*ON_SLURM, said(10.0, "node_lost", solo=True, step=7, saved_step=5)),
        UP,
        19.0,
        actions.Wait,
        None,
    ),
    "a node is gone, the others have left": (
        (*ON_SLURM, said(10.0, "node_lost", solo=True, step=7, saved_step=7)),
        UP,
        13.0,
        AskDown,
        EndReason.NODE_LOST,
    ),
    # nodes ended without a word
    "a node is lost, the others may save": (
        (*ALIVE, node_ended(10.0, end="lost")),
        UP,
        24.0,
        actions.Wait,
        None,
    ),
    "a node is lost, the others hang": (
        (*ALIVE, node_ended(10.0, end="lost")),
        UP,
        25.0,
        AskDown,
        EndReason.NODE_LOST,
    ),
    "a node failed, the others hang": (
        (*ALIVE, node_ended(10.0, code=1)),
        UP,
        25.0,
        AskDown,
        EndReason.FAILED,
    ),
    "a node is done, the others go on": (
        (*ALIVE, node_ended(10.0, code=0)),
        UP,
        500.0,
        actions.Wait,
        None,
    ),
    "all failed": (
        (*ALIVE, node_ended(10.0, code=1), node_ended(10.0, node=1, code=1)),
        OVER,
        10.0,
        AskDown,
        EndReason.FAILED,
    ),
    "all failed by their own word": (
        (*ALIVE, *BOTH_LEFT),
        UP,
        11.0,
        AskDown,
        EndReason.FAILED,
    ),
    "finished, all left by their own word": (
        (*ALIVE, said(10.0, "finished"), node_ended(11.0, code=0), node_ended(11.0, 1, code=0)),
        UP,
        11.0,
        AskDown,
        EndReason.FINISHED,
    ),
    "finished, one left": (
        (*ALIVE, said(10.0, "finished"), node_ended(11.0, code=0)),
        UP,
        60.0,
        actions.Wait,
        None,
    ),
    # orders
    "down is to be sent": (DOWN, UP, 10.0, actions.SendDown, None),
    "down was sent": (SENT, UP, 40.0, actions.Wait, None),
    "down was sent, nothing happens": (SENT, UP, 41.0, actions.SendDown, None),
    "down failed just now": ((*DOWN, ("down_failed", 11.0, 1)), UP, 12.0, actions.Wait, None),
    "down failed": ((*DOWN, ("down_failed", 11.0, 1)), UP, 16.0, actions.SendDown, None),
    "you stop it": ((*ALIVE, ("user_stop", 9.0)), UP, 9.0, AskToStop, EndReason.STOPPED),
    "you stop it before it trains": (
        (*launched(), ("user_stop", 9.0)),
        UP,
        9.0,
        AskDown,
        EndReason.STOPPED,
    ),
    "the stop is to be written": (STOP, UP, 10.0, actions.WriteStop, EndReason.STOPPED),
    "the stop is written": (WRITTEN, UP, 300.0, actions.Wait, None),
    "it does not stop": (WRITTEN, UP, 310.0, AskDown, EndReason.STOPPED),
    "you want it down": ((*ALIVE, ("user_down", 9.0)), UP, 9.0, AskDown, EndReason.STOPPED),
    "down beats stop": (
        (*WRITTEN, ("user_down", 11.0), ("user_stop", 12.0)),
        UP,
        12.0,
        AskDown,
        EndReason.STOPPED,
    ),
    # limits
    "the budget is near": (LIMITED, UP, 50.0, AskToStop, EndReason.BUDGET),
    "the budget is here": (LIMITED, UP, 60.0, AskDown, EndReason.BUDGET),
    "the budget is here, nobody can be asked": (
        LIMITED,
        UNREACHABLE,
        60.0,
        AskDown,
        EndReason.BUDGET,
    ),
    "the budget is near, it has ended": (
        (*LIMITED, said(49.0, "preempted")),
        UP,
        50.0,
        actions.Wait,
        None,
    ),
    "the deadline is near": (
        (*launched(deadline_stop_at=50.0, down_at=60.0), training()),
        UP,
        50.0,
        AskToStop,
        EndReason.DEADLINE,
    ),
    "settled": (
        (("settled", 1.0, None, {"state": "paused", "detail": "", "exit_code": 11}),),
        UP,
        2.0,
        actions.Wait,
        None,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_each_case_has_one_answer(name: str) -> None:
    """The whole table of what the controller does with a living or launching attempt."""
    lines, cluster, now, kind, reason = CASES[name]
    action = answer(lines, cluster, now)
    assert type(action) is kind
    if reason is not None:
        assert getattr(action, "reason", None) is reason


VERDICTS: dict[str, tuple[tuple[Line, ...], EndReason]] = {
    "said finished": ((said(9.0, "finished"),), EndReason.FINISHED),
    "said finished, exit 0": ((said(9.0, "finished"), node_ended(9.0, code=0)), EndReason.FINISHED),
    "said finished, exit 75": (
        (said(9.0, "finished"), node_ended(9.0, code=75)),
        EndReason.FINISHED,
    ),
    "said finished, then exit 1": (
        (said(9.0, "finished"), node_ended(9.0, code=1)),
        EndReason.FAILED,
    ),
    "said finished when SIGTERM came, exit 1 by torchrun": (
        (said(9.0, "finished", warned_at="2026-01-01T00:00:00Z"), node_ended(9.0, code=1)),
        EndReason.FINISHED,
    ),
    "said finished, then taken": (
        (said(9.0, "finished"), node_ended(9.0, end="lost")),
        EndReason.FINISHED,
    ),
    "said preempted, exit 1 by torchrun": (
        (said(9.0, "preempted"), node_ended(9.0, code=1)),
        EndReason.PREEMPTED,
    ),
    "said terminated": ((said(9.0, "terminated"),), EndReason.TERMINATED),
    "said terminated, without another's answer": (
        (said(9.0, "terminated", solo=True),),
        EndReason.NODE_LOST,
    ),
    "said preempted, without another's answer": (
        (said(9.0, "preempted", solo=True),),
        EndReason.PREEMPTED,
    ),
    "said node lost": ((said(9.0, "node_lost"),), EndReason.NODE_LOST),
    "said fenced": ((said(9.0, "fenced"),), EndReason.FENCED),
    "said store failed": ((said(9.0, "store_failed"),), EndReason.STORE_FAILED),
    "said failed": ((said(9.0, "failed"), node_ended(9.0, code=1)), EndReason.FAILED),
    "one said failed, its peer lost it": (
        (said(8.0, "node_lost"), said(9.0, "failed")),
        EndReason.FAILED,
    ),
    "one said failed, its peer lost it later": (
        (said(8.0, "failed"), said(9.0, "node_lost")),
        EndReason.FAILED,
    ),
    "failed because its peer was killed": (
        (said(9.0, "failed"), node_ended(9.1, end="lost")),
        EndReason.NODE_LOST,
    ),
    "failed, and long after a node was lost": (
        (said(9.0, "failed"), node_ended(60.0, end="lost")),
        EndReason.FAILED,
    ),
    "failed, and its peer was told to leave for it": (
        (said(9.0, "failed"), node_left(9.1, code=1), node_left(12.0, node=1, told=True)),
        EndReason.FAILED,
    ),
    "failed, and SkyPilot says no more than that the job failed": (
        (said(9.0, "failed"), node_left(9.1, code=1), node_ended(12.0, node=1, end="over")),
        EndReason.FAILED,
    ),
    "failed in peace after a peer was told to leave": (
        (said(9.0, "failed"), node_left(8.0, told=True)),
        EndReason.NODE_LOST,
    ),
    "failed after a notice, and a peer was told to leave": (
        (
            ("job_notice", 8.0, 1, {"source": "aws"}),
            said(9.0, "failed"),
            node_left(9.5, told=True),
        ),
        EndReason.NODE_LOST,
    ),
    "exit 1, and its peer was told to leave for it": (
        (node_left(9.0, code=1), node_left(12.0, node=1, told=True)),
        EndReason.FAILED,
    ),
    "exit 1, and SkyPilot says no more than that the job failed": (
        (node_left(9.0, code=1), node_ended(12.0, node=1, end="over")),
        EndReason.FAILED,
    ),
    "SkyPilot says no more than that the job failed": (
        (node_ended(9.0, end="over"), node_ended(9.0, node=1, end="over")),
        EndReason.VANISHED,
    ),
    "one node lost": ((node_ended(9.0, end="lost"),), EndReason.NODE_LOST),
    "all nodes lost": (
        (node_ended(9.0, end="lost"), node_ended(9.0, node=1, end="lost")),
        EndReason.VANISHED,
    ),
    "nothing is known": ((), EndReason.VANISHED),
    "exit 1": ((node_ended(9.0, code=1),), EndReason.FAILED),
    "exit 1 after a notice": (
        (("job_notice", 8.0, 1, {"source": "aws"}), node_ended(9.0, code=1)),
        EndReason.NODE_LOST,
    ),
    "exit 1 after a withdrawn notice": (
        (
            ("job_notice", 8.0, 1, {"source": "azure"}),
            ("job_notice_withdrawn", 8.5, 1),
            node_ended(9.0, code=1),
        ),
        EndReason.FAILED,
    ),
    "exit 0 without a word": ((node_ended(9.0, code=0),), EndReason.FAILED),
    "exit 0 with a final save": (
        (saved(8.0, 20, checkpoint_kind="final"), node_ended(9.0, code=0)),
        EndReason.FINISHED,
    ),
    "taken down by you while it saved": (
        (down_asked(8.0, "stopped"), said(9.0, "terminated")),
        EndReason.STOPPED,
    ),
    "taken down for the budget": ((down_asked(8.0, "budget"),), EndReason.BUDGET),
    "finished just before it was taken down": (
        (down_asked(8.0, "stopped"), said(9.0, "finished")),
        EndReason.FINISHED,
    ),
    "survivors hung until they were taken down": (
        (node_ended(7.0, end="lost"), down_asked(8.0, "node_lost")),
        EndReason.NODE_LOST,
    ),
    "an end of an unknown kind": ((said(9.0, "eaten"),), EndReason.VANISHED),
}


@pytest.mark.parametrize("name", VERDICTS)
def test_the_store_is_believed_first_and_the_launcher_second(name: str) -> None:
    """The whole table of why an attempt ended."""
    lines, reason = VERDICTS[name]
    action = answer((*ALIVE, *lines), GONE, 100.0)
    assert isinstance(action, Conclude)
    assert action.reason is reason
    assert action.gone_at == 99.0


def test_a_leak_guard_that_struck_is_named_for_its_limit() -> None:
    """Nodes that the launcher took because the money was gone ended by the budget."""
    lines = (*LIMITED, *(node_ended(60.0, node=node, end="lost") for node in range(2)))
    action = answer(lines, GONE, 100.0)
    assert isinstance(action, Conclude)
    assert action.reason is EndReason.BUDGET
    assert "had not saved" in action.detail


def test_no_verdict_before_all_is_read() -> None:
    """A cluster that is gone while the store cannot be read is not judged: an end may be there."""
    waits = answer(ALIVE, GONE, 100.0, news_complete=False)
    assert waits == actions.NoteGone(actions.Gone(99.0)), "what is gone costs nothing more"
    over = (*ALIVE, node_ended(10.0, code=1), node_ended(10.0, node=1, code=1))
    assert answer(over, OVER, 10.0, news_complete=False) == actions.Wait()


def test_silence_and_outages_are_a_state_never_a_verdict() -> None:
    """However long nothing is seen, nothing is killed; when it is seen again, that is noted."""
    lost = (*ALIVE, ("contact_lost", 20.0, 1))
    for name in ("silence_s", "unreachable_s"):
        assert isinstance(answer(ALIVE, UP, 20.0, None, **{name: 16.0}), actions.LoseContact)
        assert answer(lost, UP, 1e6, None, **{name: 1e6}) == actions.Wait()
    both = answer(ALIVE, AWAY, 20.0, silence_s=16.0, unreachable_s=16.0)
    assert both == actions.LoseContact(
        "no heartbeat for 16 s; the cluster cannot be asked: SkyPilot is slow"
    )
    assert answer(lost, UP, 30.0, silence_s=0.0) == actions.RegainContact()
    assert answer(ALIVE, UP, 20.0, silence_s=14.0) == actions.Wait()
    assert state_of(made(*lost)) is RunState.CONTACT_LOST


def test_nodes_that_only_wait_for_a_lost_one_are_not_paid_for() -> None:
    """A node is taken after the last step, before all have left: torchrun waits for it.

    While a process lives it is heard, and may export or evaluate as long as before.
    """
    done = (*ALIVE, said(10.0, "finished"))
    lost = (*done, node_ended(11.0, node=1, end="lost"))
    assert answer(lost, UP, 30.0, silence_s=16.0) == AskDown(EndReason.FINISHED, "")
    assert answer(lost, UP, 30.0, silence_s=1.0) == actions.Wait()
    assert answer(lost, UP, 30.0) == actions.Wait(), "a restarted controller hears first"
    assert answer(done, UP, 30.0, silence_s=16.0) == actions.Wait()


def test_a_cloud_that_is_silent_is_no_lost_contact_while_the_job_is_heard() -> None:
    """Two states, and one leads to the other when the job falls silent, or is heard again."""
    silent = (*ALIVE, ("cloud_silent", 20.0, 1))
    lost = (*ALIVE, ("contact_lost", 20.0, 1))
    asked = "the cluster cannot be asked: SkyPilot is slow"
    assert answer(ALIVE, AWAY, 20.0, silence_s=1.0, unreachable_s=16.0) == actions.LoseSight(asked)
    assert answer(silent, AWAY, 1e6, silence_s=1.0, unreachable_s=1e6) == actions.Wait()
    assert answer(silent, UP, 30.0, silence_s=1.0) == actions.RegainSight()
    unheard = answer(silent, AWAY, 30.0, silence_s=16.0, unreachable_s=16.0)
    assert isinstance(unheard, actions.LoseContact)
    assert answer(lost, AWAY, 30.0, silence_s=1.0, unreachable_s=16.0) == actions.RegainContact()
    assert state_of(made(*silent)) is RunState.CLOUD_SILENT
    assert state_of(made(*silent, ("contact_lost", 30.0, 1))) is RunState.CONTACT_LOST
    assert state_of(made(*silent, ("cloud_back", 30.0, 1))) is RunState.RUNNING


SETTLED = {
    "finished": (RunState.FINISHED, 0),
    "failed": (RunState.FAILED, 10),
    "unprotected": (RunState.FAILED, 10),
    "store_failed": (RunState.FAILED, 3),
    "launch_failed": (RunState.FAILED, 3),
    "budget": (RunState.PAUSED, 20),
    "deadline": (RunState.PAUSED, 21),
    "stopped": (RunState.STOPPED, 75),
}


@pytest.mark.parametrize("reason", list(EndReason))
def test_an_end_settles_the_run_or_the_next_attempt_starts(reason: EndReason) -> None:
    """Every end reason leads to its documented state and exit code, or to another attempt."""
    action = answer((*ALIVE, ended(30.0, reason.value, last_step=5)), None, 30.0)
    if reason.value in SETTLED:
        assert isinstance(action, Settle)
        assert (action.state, action.exit_code) == SETTLED[reason.value]
        assert (action.lacks_budget_of is BudgetOf.RUN) == (action.exit_code == 20)
    else:
        assert isinstance(action, Intend)
    if reason.retried:
        assert isinstance(action, Intend)


def test_a_wish_to_stop_settles_what_would_go_on() -> None:
    """A run that was preempted while the user stopped it does not start again."""
    lines = (*ALIVE, ("user_stop", 9.0), ended(30.0, "preempted", last_step=5))
    action = answer(lines, None, 30.0)
    assert isinstance(action, Settle)
    assert action.state is RunState.STOPPED


def test_after_a_resume_the_old_end_counts_no_more() -> None:
    """`resume` lets a run go on that its last attempt had settled."""
    resumed = ("resumed", 40.0, None, {"limits": Limits().__dict__})
    lines = (*ALIVE, ended(30.0, "failed", last_step=5), resumed)
    assert isinstance(answer(lines, None, 41.0), Intend)


def tried_on(attempts: int, reason: str, *, last_step: int) -> tuple[Line, ...]:
    """So many attempts in a row, each of which another one followed, go on from step 5."""
    lines: tuple[Line, ...] = ()
    for number in range(1, attempts + 1):
        assert isinstance(answer(lines, None, number * 10.0), Intend)
        lines += (*launched(number * 10.0, number), training(number * 10.0, number, step=5))
        lines += (ended(number * 10.0 + 5, reason, number, last_step),)
    return lines


def test_three_attempts_without_a_new_step_pause_the_run() -> None:
    """A job that never gets anywhere does not burn money for ever."""
    lines = tried_on(3, "vanished", last_step=5)
    action = answer(lines, None, 50.0)
    assert isinstance(action, Settle)
    assert (action.state, action.exit_code) == (RunState.PAUSED, 11)
    assert "no progress" in action.detail
    moved = tuple(
        line if line[0] != "attempt_ended" else (*line[:3], {**line[3], "reason": "moved"})
        for line in lines
    )
    assert isinstance(answer(moved, None, 50.0), Intend), "it was told to go elsewhere"


def test_steps_that_are_never_saved_are_not_paid_for_ever() -> None:
    """Each attempt trains, and nothing of it is kept: six are enough. A save starts anew."""
    lines = tried_on(6, "node_lost", last_step=9)
    action = answer(lines, None, 70.0)
    assert isinstance(action, Settle)
    assert (action.state, action.exit_code) == (RunState.PAUSED, 11)
    assert "saved nothing" in action.detail
    once = [index for index, line in enumerate(lines) if line[:3] == ("attempt_ended", 35.0, 3)]
    kept = (*lines[: once[0]], saved(34.0, 8, 3), *lines[once[0] :])
    assert isinstance(answer(kept, None, 70.0), Intend)
    between = (*launched(70.0, 7), ended(75.0, "vanished", 7))  # it never began to train
    again = (*launched(80.0, 8), training(80.0, 8, step=5), ended(85.0, "node_lost", 8, 9))
    assert isinstance(answer((*lines, *between, *again), None, 90.0), Settle)
    unheard = (*launched(70.0, 7), training(70.0, 7, step=8), ended(75.0, "node_lost", 7))
    assert isinstance(answer((*lines, *unheard), None, 80.0), Intend), "the sixth had saved"


def no_capacity(at: float, nodes: int) -> tuple[Line, Line]:
    """One rung of the ladder is refused."""
    refusal = {"nodes": nodes, "place": "fake/here/here-a/thought/spot", "problem": "none"}
    return intended(at, nodes=nodes), ("no_capacity", at, 1, refusal)


def test_the_ladder_goes_down_within_one_round_then_waits_longer_and_longer() -> None:
    """4, 3, 2 nodes are asked for at once; then the waits double up to a cap, then it pauses."""
    limits = Limits(nodes_min=2, nodes_max=4)
    lines: tuple[Line, ...] = ()
    waits = []
    now = 0.0
    while now < 600.0:
        for nodes in (4, 3, 2):
            action = answer(lines, None, now, limits)
            assert isinstance(action, Intend)
            assert action.nodes == nodes
            lines += no_capacity(now, nodes)
        action = answer(lines, None, now, limits)
        assert isinstance(action, actions.BackOff)
        waits.append(action.retry_at - now)
        lines += (("waiting", now, None, {"retry_at": action.retry_at}),)
        assert answer(lines, None, action.retry_at - 0.01, limits) == actions.Wait()
        assert state_of(made(*lines)) is RunState.WAITING
        now = action.retry_at
    assert waits[:7] == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    for nodes in (4, 3, 2):
        lines += no_capacity(now, nodes)
    action = answer(lines, None, now, limits)
    assert isinstance(action, Settle)
    assert (action.state, action.exit_code) == (RunState.PAUSED, 11)
    assert made(*lines).attempts == ()


def test_no_place_at_all_is_no_capacity() -> None:
    """A launcher that offers nothing is waited for, like one that has no nodes."""
    assert isinstance(answer((), None, 0.0, offers=()), actions.BackOff)


def test_the_budget_takes_the_largest_rung_it_can_pay() -> None:
    """With little money left a smaller cluster runs; with less than that, none, and it says why."""
    rungs = []
    for budget_usd in (0.1, 0.015, 0.008, 0.004, 0.001):
        action = answer((), None, 0.0, Limits(budget_usd=budget_usd, nodes_max=4))
        rungs.append(action.nodes if isinstance(action, Intend) else None)
    assert rungs == [4, 3, 1, None, None]
    assert isinstance(action, Settle)
    assert (action.state, action.exit_code) == (RunState.PAUSED, 20)
    assert action.lacks_budget_of is BudgetOf.RUN
    assert "$0.0010" in action.detail


def test_an_unknown_price_is_not_free() -> None:
    """Under a budget, a place without a price, or one used before, stops the run; or is allowed."""
    limits = Limits(budget_usd=5.0)
    unknown = (*launched(price=None), training(), ended(9.0, "vanished", last_step=5))
    for lines in ((), unknown):
        offers = (FAKE_OFFER if lines else _without_price(),)
        action = answer(lines, None, 10.0, limits, offers=offers)
        assert isinstance(action, Settle)
        assert action.exit_code == 20
        assert action.lacks_budget_of is None, "more money does not help"
        assert "unknown" in action.detail
        allowed = Limits(budget_usd=5.0, allow_unknown_price=True)
        assert isinstance(answer(lines, None, 10.0, allowed, offers=offers), Intend)


def test_a_place_without_a_price_does_not_end_the_wait_for_one_that_has_one() -> None:
    """The priced place is full for a moment; the other one cannot be paid for with a budget."""
    elsewhere = replace(_without_price(), zone="elsewhere")
    limits, offers = Limits(budget_usd=5.0), (FAKE_OFFER, elsewhere)
    full = (intended(0.0), no_capacity(1.0, 1)[1])
    assert isinstance(answer((), None, 0.0, limits, offers=offers), Intend)
    assert isinstance(answer(full, None, 2.0, limits, offers=offers), actions.BackOff)


def test_a_wait_without_any_offer_is_a_wait() -> None:
    """A catalogue that lost its place, or cannot be read: said so, and not for ever."""
    waiting = ("waiting", 1.0, None, {"retry_at": 2.0})
    assert state_of(made(waiting)) is RunState.WAITING
    action = answer((waiting,), None, 2.0 + POLICY.capacity_patience_s, offers=())
    assert isinstance(action, Settle)
    assert action.state is RunState.PAUSED


def _without_price() -> Any:
    return FAKE_OFFER.__class__(**{**FAKE_OFFER.__dict__, "price_usd_per_h": None})


def test_a_deadline_too_near_starts_nothing() -> None:
    """An attempt that could not even save before the deadline is not launched."""
    assert isinstance(answer((), None, 0.0, Limits(deadline_at=16.0)), Intend)
    action = answer((), None, 2.0, Limits(deadline_at=16.0))
    assert isinstance(action, Settle)
    assert (action.state, action.exit_code) == (RunState.PAUSED, 21)


def test_alerts_come_once_each() -> None:
    """50, 80 and 95 percent are reported once; a share that is jumped over is not told late."""
    limits = Limits(budget_usd=1.0)
    lines: tuple[Line, ...] = (*launched(nodes=1), training())
    told = []
    for now in (0.0, 1790.0, 1801.0, 1802.0, 3500.0, 3590.0):
        action = answer(lines, UP, now, limits)
        if isinstance(action, actions.Alert):
            told.append(action.percent)
            lines += (("budget_alert", now, None, {"percent": action.percent}),)
    assert told == [50, 95]


STATES: dict[RunState, tuple[Line, ...]] = {
    RunState.LAUNCHING: (intended(),),
    RunState.RUNNING: ALIVE,
    RunState.DRAINING: STOP,
    RunState.RECOVERING: (*ALIVE, ended(9.0, "vanished")),
    RunState.WAITING: no_capacity(1.0, 2),
    RunState.CONTACT_LOST: (*ALIVE, ("store_lost", 9.0)),
    RunState.CLOUD_SILENT: (*ALIVE, ("cloud_silent", 9.0, 1)),
    RunState.FAILED: (("settled", 1.0, None, {"state": "failed", "detail": "", "exit_code": 10}),),
}


def test_a_run_whose_store_is_gone_has_lost_contact_also_without_nodes() -> None:
    """It does not say `launching` while nothing can be launched."""
    assert state_of(made(("store_lost", 1.0))) is RunState.CONTACT_LOST
    assert state_of(made(("store_lost", 1.0), ("store_back", 2.0))) is RunState.LAUNCHING


@pytest.mark.parametrize("state", STATES)
def test_the_state_is_what_the_journal_says(state: RunState) -> None:
    """Each stage of a run shows as its state."""
    assert state_of(made(*STATES[state])) is state


# ---------------------------------------------------------------- clouds that take their time

REFUSED = ClusterView(state=ClusterState.REFUSED, detail="none left")
FAILED = ClusterView(state=ClusterState.FAILED, detail="no such image")
UP_SINCE = replace(UP, up_at=7.0)


def came_up(at: float) -> Line:
    """The nodes began to cost."""
    return ("cluster_up", at, 1, {"at": at})


LATE: dict[str, tuple[tuple[Line, ...], ClusterView, actions.Action | type[object]]] = {
    "refused": (launched(), REFUSED, actions.NoteRefused("none left")),
    "refused, and the controller had died": ((intended(),), REFUSED, actions.NoteLaunched()),
    "failed, and the controller had died": ((intended(),), FAILED, actions.NoteLaunched()),
    "up": (launched(), UP_SINCE, actions.NoteUp(7.0)),
    "up, noted": ((*launched(), came_up(7.0)), UP_SINCE, actions.Wait()),
    "up, nobody says since when": (launched(), UP, actions.Wait()),
    "up, to be taken down": ((*launched(), down_asked(8.0, "stopped")), UP_SINCE, actions.NoteUp),
}


@pytest.mark.parametrize("name", LATE)
def test_what_is_said_long_after_the_launch(name: str) -> None:
    """A launch that was taken may come to nodes, to nothing, or to a problem."""
    lines, cluster, wanted = LATE[name]
    action = answer(lines, cluster, 10.0)
    assert action == wanted or type(action) is wanted


@pytest.mark.parametrize(
    ("lines", "cluster", "reason", "gone_at"),
    [
        (launched(1.0), FAILED, EndReason.LAUNCH_FAILED, 1.0),
        ((*launched(1.0), down_asked(8.0, "stopped")), REFUSED, EndReason.STOPPED, 1.0),
        ((*launched(1.0), down_asked(8.0, "stopped")), FAILED, EndReason.STOPPED, 1.0),
        (
            (*launched(1.0), came_up(5.0), down_asked(8.0, "launch_failed")),
            FAILED,
            EndReason.LAUNCH_FAILED,
            10.0,
        ),
    ],
)
def test_what_never_came_costs_nothing_and_what_came_does(
    lines: tuple[Line, ...], cluster: ClusterView, reason: EndReason, gone_at: float
) -> None:
    """Only nodes that were up are billed, until nothing is left of them."""
    action = answer(lines, cluster, 10.0)
    assert isinstance(action, Conclude)
    assert (action.reason, action.gone_at) == (reason, gone_at)


def late_refusal(at: float, nodes: int) -> tuple[Line, ...]:
    """A launch was taken, and refused some seconds later."""
    refusal = {"nodes": nodes, "place": "fake/here/here-a/thought/spot", "problem": "none"}
    taken = launched(at, nodes=nodes)
    return (*taken, ("no_capacity", at + 3.0, 1, {**refusal, "late": True}))


def test_what_is_left_of_a_launch_that_no_wait_will_mend_is_taken_down_with_its_cause() -> None:
    """Else it would count as nodes that vanished, and be launched again."""
    left = replace(UP, detail="quota", lasting=True)
    assert answer(launched(), left, 10.0) == AskDown(EndReason.LAUNCH_FAILED, "quota")


def test_a_late_refusal_leaves_the_search_where_it_was() -> None:
    """The next rung, the next round and the patience are those of a refusal at once."""
    limits = Limits(nodes_min=2, nodes_max=4)
    lines: tuple[Line, ...] = ()
    for round_begins in (0.0, 20.0):
        for rung, nodes in enumerate((4, 3, 2)):
            action = answer(lines, None, round_begins + 4 * rung, limits)
            assert isinstance(action, Intend)
            assert action.nodes == nodes
            lines += late_refusal(round_begins + 4 * rung, nodes)
        now = round_begins + 12.0
        action = answer(lines, None, now, limits)
        assert isinstance(action, actions.BackOff)
        assert action.retry_at - now == (1.0 if round_begins == 0 else 2.0)
        lines += (("waiting", now, None, {"retry_at": action.retry_at}),)
    record = made(*lines)
    assert (record.waiting_since, record.rounds, record.refused) == (0.0, 2, 6)
    assert record.attempts == ()
    assert (record.next_number, record.retry_at) == (1, 34.0)


def test_an_attempt_on_few_nodes_is_saved_and_launched_anew_when_that_pays() -> None:
    """Where a start is dear, it is asked to stop once it has lived for some of them."""
    progress = {"step": 10, "total_steps": 1000, "step_s": 10.0}
    lines = (*launched(nodes=2), training(60.0), ("progress", 100.0, 1, progress))
    record = made(*lines, limits=Limits(nodes_min=1, nodes_max=4))
    policy = Policy(regrow_startups=3.0)
    seen = Observation(cluster=UP)
    assert decide(record, seen, 179.0, policy) == actions.Wait()
    assert decide(record, seen, 180.0, policy) == AskToStop(EndReason.RESIZED)
    assert decide(record, seen, 180.0, Policy()) == actions.Wait()


@pytest.mark.parametrize(
    ("gone_at", "counted"), [(-18_000.0, 50.0), (40.0, 50.0), (55.0, 55.0), (18_000.0, 60.0)]
)
def test_an_end_that_the_machines_clock_has_moved_is_not_believed(
    gone_at: float, counted: float
) -> None:
    """SkyPilot stamps by a clock that may have been set since: nodes that lived are not free."""
    lines = (*launched(0.0), training(5.0), saved(50.0, 10))
    gone = ClusterView(state=ClusterState.GONE, gone_at=gone_at)
    action = answer(lines, gone, 60.0, news_complete=True)
    assert isinstance(action, actions.Conclude)
    assert action.gone_at == counted


def test_nodes_do_not_begin_to_cost_in_the_future() -> None:
    """The same clock, set forward: what they cost until then would be free."""
    assert answer(launched(0.0), replace(UP, up_at=18_000.0), 60.0) == actions.NoteUp(60.0)


def test_a_withdrawn_notice_is_one_nodes() -> None:
    """Two are told to go, and one may stay after all: the other one goes."""
    told = [
        (
            "job_notice",
            8.0 + node,
            1,
            {"source": "azure", "node": node, "deadline_at": to_iso(90.0)},
        )
        for node in range(2)
    ]
    stays = ("job_notice_withdrawn", 10.0, 1, {"source": "azure", "node": 0})
    goes = made(*ALIVE, *told, stays).attempts[0].notice
    assert goes is not None
    assert (goes.node, goes.at) == (1, 9.0)
    both_stay = ("job_notice_withdrawn", 11.0, 1, {"source": "azure", "node": 1})
    assert made(*ALIVE, *told, stays, both_stay).attempts[0].notice is None
