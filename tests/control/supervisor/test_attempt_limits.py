"""A run keeps its budget also where nodes of its earlier attempts take long to go."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from spotguard.control.journal.record import Kind, Limits
from spotguard.control.supervisor.actions import AskDown
from spotguard.control.supervisor.attempt_limits import beside_s
from spotguard.control.supervisor.decide import Observation, decide
from spotguard.control.supervisor.policy import Policy
from spotguard.events.states import EndReason, RunState
from spotguard.launch.base import ClusterState, ClusterView
from spotguard.testing.job import JobFate
from spotguard.testing.launcher import FAKE_OFFER
from tests.control.made import Line, down_asked, ended, launched, made, training
from tests.control.world import World

if TYPE_CHECKING:
    from pathlib import Path

    from spotguard.control.journal.record import RunRecord

POLICY = Policy(teardown_s=30.0)
UP = ClusterView(state=ClusterState.UP)


def two_attempts(*more: Line, price: float = 1.0, **limit: Any) -> RunRecord:
    """Return a run whose second attempt is launched at 100 while the first one's nodes go."""
    leaving = ended(100.0, "preempted")
    leaving[3]["leaving"] = True
    return made(
        *launched(infra="aws"),
        training(),
        down_asked(95.0, "preempted"),
        leaving,
        *launched(100.0, 2, infra="aws", price=price, **limit),
        training(102.0, 2),
        *more,
    )


def released(gone_at: float, charged_node_s: float | None = None) -> Line:
    """The first attempt's nodes are gone."""
    data = {"gone_at": gone_at, "charged_node_s": charged_node_s}
    return (Kind.RELEASED.value, gone_at, 1, data)


@pytest.mark.parametrize(
    ("record", "early_s"),
    [
        (two_attempts(), 300.0),
        (two_attempts(price=2.0), 150.0),
        (two_attempts(released(120.0)), 0.0),
        (two_attempts(released(250.0)), 120.0),
        (two_attempts(released(250.0, charged_node_s=2 * 240.0)), 110.0),
    ],
    ids=["they still go", "of dearer nodes", "gone in time", "gone late", "charged less"],
)
def test_an_attempt_ends_earlier_by_what_old_nodes_cost(record: RunRecord, early_s: float) -> None:
    """Its launch left one teardown for them; while they go, they may take that long from now."""
    assert beside_s(record, record.attempts[-1], 400.0, POLICY) == pytest.approx(early_s)


def test_what_is_spent_beside_an_attempt_counts_where_its_deadline_is_nearer() -> None:
    """The budget's hard limit moves; that the deadline's comes a little before it is no matter."""
    limits: dict[str, Any] = {
        "budget_stop_at": 560.0,
        "deadline_stop_at": 540.0,
        "down_at": 550.0,
        "down_reason": EndReason.DEADLINE,
    }
    seen = Observation(cluster=UP, leaving=((1, UP),))
    sent = ("down_sent", 95.0, 1)
    for now, reason in ((250.0, None), (340.0, EndReason.BUDGET)):
        record = two_attempts(sent, ("down_sent", now, 1), **limits)
        action = decide(record, seen, now, POLICY)
        assert (action.reason if isinstance(action, AskDown) else None) is reason
    record = two_attempts(released(110.0), **limits)
    action = decide(record, Observation(cluster=UP), 551.0, POLICY)
    assert isinstance(action, AskDown)
    assert action.reason is EndReason.DEADLINE


def test_a_budget_is_kept_although_old_nodes_take_long_to_go(tmp_path: Path) -> None:
    """They cost four fifths of what was left to the attempt beside them."""
    world = World(
        tmp_path,
        limits=Limits(nodes_min=2, nodes_max=2, budget_usd=0.5),
        policy=Policy(capacity_patience_s=60.0, teardown_s=45.0),
        launcher={"teardown_s": 400.0, "offers": (replace(FAKE_OFFER, infra="aws"),)},
        fates={1: JobFate(how="notice", at_s=9)},
        total_steps=2000,
    )
    world.run_until(5.0)
    world.launcher.teardown_s = 40.0
    record = world.run()
    assert record.settled is not None
    assert record.settled.state is RunState.PAUSED
    assert world.launcher.living() == []
    assert world.spent_usd() == pytest.approx(world.launcher.billed_usd(), abs=1e-9)
    assert 0.45 < world.launcher.billed_usd() <= 0.5
