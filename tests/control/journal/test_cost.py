from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from spotguard.control.journal import cost
from spotguard.control.journal.record import Limits, RunRecord, StepProgress
from spotguard.control.status.make_view import newest_save, run_summary, run_view
from spotguard.control.supervisor.actions import Conclude
from spotguard.control.supervisor.decide import Observation, decide
from spotguard.control.supervisor.policy import Policy
from spotguard.events.states import RunState
from spotguard.launch.base import ClusterState, ClusterView
from tests.control.made import (
    Line,
    ended,
    intended,
    launched,
    made,
    node_ended,
    said,
    saved,
    training,
)

if TYPE_CHECKING:
    from spotguard.control.status.view import RunView

H = 3600.0

TWO_ATTEMPTS: tuple[Line, ...] = (
    *launched(0.0, 1, nodes=2),
    training(100.0, 1),
    saved(600.0, 50, train_s=400.0),
    ("progress", 800.0, 1, {"step": 70, "train_s": 560.0, "total_steps": 100}),
    node_ended(900.0, end="lost"),
    ended(1000.0, "node_lost", last_step=80),
    *launched(1000.0, 2, nodes=1),
    training(1100.0, 2, step=50, source="checkpoints/000000000050-000001/"),
    saved(2000.0, 100, 2, train_s=800.0, checkpoint_kind="final"),
    ended(2050.0, "finished", 2, last_step=100),
)


def picture(record: RunRecord, now: float = 5000.0, live: StepProgress | None = None) -> RunView:
    """Return what `status` shows."""
    return run_view(record, live=live, now=now, controller_alive=True, store_url="s/job-1")


def test_an_attempt_costs_from_intent_to_confirmed_end() -> None:
    """Nodes times price times billed time, summed; a living attempt costs until now."""
    record = made(*TWO_ATTEMPTS)
    assert cost.spent_usd(record, 5000.0) == pytest.approx((2 * 1000 + 1050) / H)
    living = made(*launched(10.0, nodes=3))
    assert cost.spent_usd(living, 110.0) == pytest.approx(300 / H)
    assert cost.spent_usd(living, 5.0) == 0.0


def test_an_unknown_price_makes_the_total_unknown() -> None:
    """None, never zero: but guards still know the lower bound."""
    record = made(
        *launched(0.0, 1, price=None), ended(100.0, "vanished"), *launched(100.0, 2, nodes=1)
    )
    assert cost.spent_usd(record, 200.0) is None
    assert cost.known_spent_usd(record, 200.0) == pytest.approx(100 / H)
    assert picture(record).spent_usd is None
    assert picture(record).saved_pct is None


def test_work_counts_up_to_the_checkpoint_that_was_resumed() -> None:
    """Lost steps are paid but do not count; steps lost are those after the resumed checkpoint."""
    record = made(*TWO_ATTEMPTS)
    assert cost.counted_train_s(record) == {1: 400.0, 2: 800.0}
    assert cost.steps_lost(record, record.attempts[0]) == 30
    assert cost.steps_lost(record, record.attempts[1]) == 0
    assert cost.goodput(record, 5000.0) == pytest.approx(1200 / 2050)


def test_on_demand_is_the_useful_work_and_one_start_up() -> None:
    """2 x (400 + 100 start-up) + 1 x 800 node-seconds at the on-demand price of 3."""
    record = made(*TWO_ATTEMPTS)
    assert cost.on_demand_usd(record, 5000.0) == pytest.approx(3 * (2 * 500 + 800) / H)
    assert picture(record).saved_pct == pytest.approx(100 * (1 - 3050 / (3 * 1800)))


def test_a_start_up_on_demand_is_paid_from_when_spot_nodes_cost() -> None:
    """The time before is free on both sides: else it would count as money that spot has saved."""
    record = made(
        *launched(0.0),
        ("cluster_up", 60.0, 1, {"at": 60.0}),
        training(100.0),
        ("progress", 500.0, 1, {"step": 40, "train_s": 400.0}),
    )
    assert cost.spent_usd(record, 500.0) == pytest.approx(2 * 440 / H)
    assert cost.on_demand_usd(record, 500.0) == pytest.approx(3 * 2 * (40 + 400) / H)


def test_an_attempt_that_nobody_resumed_from_does_not_count() -> None:
    """After a fresh start, or past a checkpoint of an older attempt, work in between is lost."""
    fresh = made(
        *launched(0.0, 1),
        training(10.0, 1),
        saved(50.0, 5, train_s=40.0),
        ended(60.0, "vanished"),
        *launched(60.0, 2),
        training(70.0, 2),
        ("progress", 90.0, 2, {"step": 2, "train_s": 15.0}),
    )
    assert cost.counted_train_s(fresh) == {1: 0.0, 2: 15.0}
    passed_over = made(
        *launched(0.0, 1),
        training(10.0, 1),
        saved(50.0, 5, train_s=40.0),
        ended(60.0, "vanished"),
        *launched(60.0, 2),
        training(70.0, 2, step=5, source="checkpoints/000000000005-000001/"),
        saved(80.0, 7, 2, train_s=9.0),
        ended(90.0, "vanished", 2),
        *launched(90.0, 3),
        training(99.0, 3, step=5, source="checkpoints/000000000005-000001/"),
    )
    assert cost.counted_train_s(passed_over) == {1: 40.0, 2: 0.0, 3: 0.0}
    assert cost.steps_lost(passed_over, passed_over.attempts[1]) == 2


def test_lineage_that_makes_no_sense_ends_the_walk() -> None:
    """A checkpoint of a later attempt, or a name that is none, cannot loop the meter."""
    for source in ("checkpoints/000000000005-000009/", "checkpoints/000000000005-000001/", "x"):
        record = made(*launched(0.0, 1), training(1.0, 1, step=5, source=source))
        assert cost.counted_train_s(record) == {1: 0.0}


def test_notice_and_last_save_are_measured() -> None:
    """Seconds of warning, and from the last save to the end of training, of an ended attempt."""
    record = made(
        *launched(),
        training(),
        saved(50.0, 5),
        ("job_notice", 60.0, 1, {"source": "aws", "deadline_at": "1970-01-01T00:03:00Z"}),
        ended(70.0, "preempted"),
        *launched(70.0, 2),
        ended(80.0, "vanished", 2),
    )
    first, second = record.attempts
    assert cost.notice_s(first) == pytest.approx(120.0)
    assert cost.saved_before_end_s(record, first) == pytest.approx(20.0)
    assert cost.notice_s(second) is None
    assert cost.saved_before_end_s(record, second) == pytest.approx(30.0)
    assert cost.steps_lost(record, second) == 0


def test_what_is_unknown_shows_as_null() -> None:
    """A run that has just been created claims nothing."""
    view = picture(made(intended(price=None)))
    body = json.loads(json.dumps(view.to_json()))
    for name in ("spent_usd", "saved_pct", "goodput", "saved_step", "total_steps", "loss", "eta_s"):
        assert body[name] is None or name == "goodput"
    attempt = body["attempts"][0]
    for name in ("ended_at", "end_reason", "notice_s", "saved_before_end_s", "steps_lost"):
        assert attempt[name] is None


def test_live_progress_is_fresher_than_the_journal() -> None:
    """The step, the loss and the ETA come from the newest sign of life."""
    record = made(*launched(), training(), ("progress", 10.0, 1, {"step": 7, "total_steps": 100}))
    live = StepProgress(at=20.0, step=9, total_steps=100, step_s=2.0, loss=0.5)
    view = picture(record, live=live)
    assert (view.step, view.loss, view.eta_s) == (9, 0.5, 182.0)
    assert view.attempts[0].last_step == 9
    assert view.state is RunState.RUNNING


def test_between_attempts_the_step_is_what_is_saved() -> None:
    """Steps that are lost are not shown as done; the newest save is the one that counts."""
    lost = made(*TWO_ATTEMPTS[:7])
    view = picture(lost)
    assert (view.step, view.saved_step, view.state) == (50, 50, RunState.RECOVERING)
    resumed = made(*TWO_ATTEMPTS[:10])
    save = newest_save(resumed)
    assert save is not None
    assert save.step == 50


def test_a_loss_that_is_not_a_number_is_unknown() -> None:
    """NaN is no JSON: it never reaches `status --json`."""
    lines = (*launched(), training(), ("progress", 10.0, 1, {"step": 7, "loss": float("nan")}))
    assert picture(made(*lines)).loss is None


def test_a_summary_says_the_same_as_the_picture() -> None:
    """The list of runs and `status` cannot disagree."""
    record = made(*TWO_ATTEMPTS, limits=Limits(budget_usd=2.0))
    summary, view = run_summary(record, now=5000.0), picture(record)
    assert (summary.state, summary.spent_usd) == (view.state, view.spent_usd)


def test_nodes_are_paid_from_when_they_came_up() -> None:
    """Where the launcher can tell: not while they are looked for; until it tells, to be safe."""
    waiting = made(*launched(10.0, nodes=2))
    assert cost.spent_usd(waiting, 70.0) == pytest.approx(2 * 60 / H)
    up = made(*launched(10.0, nodes=2), ("cluster_up", 75.0, 1, {"at": 50.0}))
    assert cost.spent_usd(up, 110.0) == pytest.approx(2 * 60 / H)
    ended_too = made(
        *launched(10.0, nodes=2), ("cluster_up", 75.0, 1, {"at": 50.0}), ended(150.0, "vanished")
    )
    assert cost.spent_usd(ended_too, 9e9) == pytest.approx(2 * 100 / H)


def test_a_clock_behind_ours_bills_nothing_twice() -> None:
    """Nodes cannot have cost before they were asked for; ended before they were up is nothing."""
    early = made(*launched(10.0, nodes=1), ("cluster_up", 20.0, 1, {"at": 3.0}))
    assert cost.spent_usd(early, 110.0) == pytest.approx(100 / H)
    never = made(
        *launched(10.0, nodes=1), ("cluster_up", 20.0, 1, {"at": 90.0}), ended(60.0, "vanished")
    )
    assert cost.spent_usd(never, 110.0) == 0.0


def test_an_allocation_that_was_given_back_costs_no_more() -> None:
    """The node's own word bounds the bill, also while SkyPilot cannot be asked, or asks late."""
    given_back = ("job_given_back", 100.0, 1, {"allocation": "52"})
    record = made(*launched(), training(), said(40.0, "budget"), given_back)
    assert cost.billed_s(record.attempts[0], 110.0) == 110.0
    assert cost.billed_s(record.attempts[0], 9000.0) == 130.0
    gone = ClusterView(state=ClusterState.GONE, gone_at=8000.0)
    action = decide(record, Observation(cluster=gone), 9000.0, Policy())
    assert isinstance(action, Conclude)
    assert action.gone_at == 130.0


def test_who_goes_on_in_place_is_paid_from_then_on() -> None:
    """The cluster has been up for long: its earlier seconds are the attempt's before."""
    went_on = {
        **intended(0.0, 2, nodes=1)[3],
        "after": 1,
        "ended": ended(100.0, "preempted")[3],
        "at": 100.0,
        "members": [1],
    }
    record = made(
        *launched(10.0, nodes=2),
        ("cluster_up", 20.0, 1, {"at": 20.0}),
        ("went_on_in_place", 101.0, 2, went_on),
        ("cluster_up", 102.0, 2, {"at": 20.0}),
    )
    assert cost.spent_usd(record, 200.0) == pytest.approx((2 * 80 + 100) / H)


def test_what_the_cloud_charged_counts_once_the_nodes_are_gone() -> None:
    """Each node for itself, where the cloud tells it; what was seen of the whole till then."""
    charged = ("attempt_ended", 100.0, 1, {**ended(100.0, "preempted")[3], "charged_node_s": 130.0})
    record = made(*launched(0.0, 1, nodes=2), charged)
    assert cost.spent_usd(record, 5000.0) == pytest.approx(130 / H)
    leaving = ("attempt_ended", 100.0, 1, {**ended(100.0, "preempted")[3], "leaving": True})
    released = ("released", 150.0, 1, {"gone_at": 150.0, "charged_node_s": 210.0})
    record = made(*launched(0.0, 1, nodes=2), leaving)
    assert cost.spent_usd(record, 120.0) == pytest.approx(240 / H)
    assert cost.rate_usd_per_h(record) == 2.0, "nodes that were told to go are paid until then"
    record = made(*launched(0.0, 1, nodes=2), leaving, released)
    assert cost.rate_usd_per_h(record) == 0.0
    assert cost.spent_usd(record, 5000.0) == pytest.approx(210 / H)
    untold = ("released", 150.0, 1, {"gone_at": 150.0, "charged_node_s": None})
    record = made(*launched(0.0, 1, nodes=2), leaving, untold)
    assert cost.spent_usd(record, 5000.0) == pytest.approx(300 / H), "unknown is not free"
