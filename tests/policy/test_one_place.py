"""One spot place alone: what its plan does with slack, and what it saves."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from spotguard.policy.action import Buy, HoldOff, Stay
from spotguard.policy.decide import Model, decide
from spotguard.policy.market.hazard import pooled
from spotguard.policy.market.recorded import recorded
from spotguard.policy.one_place import NOTHING, OVER, SPOT, OnePlacePlan, plan_for
from spotguard.policy.simulation.omniscient import least_usd
from spotguard.policy.simulation.policy_players import Rollout, RuleOf, play
from spotguard.policy.simulation.windows import cut
from spotguard.policy.view import JobState, MarketPlace, Running, Seen, View

HOUR = 3600.0


def _plan(left_h: float = 30.0) -> OnePlacePlan:
    plan = plan_for(
        pooled("H100", 8),
        spot=2.0,
        on_demand=10.0,
        left_s=left_h * HOUR,
        work_s=24 * HOUR,
        start_s=600.0,
        tick_s=600.0,
    )
    assert plan is not None
    return plan


@pytest.mark.parametrize(
    ("left_h", "running", "up", "age_h", "wanted"),
    [
        (30.0, NOTHING, True, 0.0, SPOT),
        (30.0, NOTHING, False, 0.0, NOTHING),  # soon back, and there is time
        (25.5, NOTHING, False, 8.0, OVER),  # it has been gone for long, and time is short
        (25.0, OVER, True, 0.0, OVER),  # spot is back, but might be gone at once
        (25.0, OVER, True, 4.0, SPOT),
        (30.0, OVER, True, 0.0, SPOT),
        (24.2, NOTHING, True, 4.0, OVER),  # nothing may go wrong any more
    ],
)
def test_what_is_wanted(left_h: float, running: int, up: bool, age_h: float, wanted: int) -> None:
    """Slack is spent on outages that end soon; a place that is back is trusted by its age."""
    told = _plan().wanted(
        left_s=left_h * HOUR, work_s=24 * HOUR, running=running, up=up, age_s=age_h * HOUR
    )
    assert int(told) == wanted


def test_one_plan_serves_many_decisions() -> None:
    """It is made anew when less work or time is left by half, not at each tick."""
    assert _plan(30.0) is _plan(29.0)


def test_what_ends_in_a_week_has_no_plan() -> None:
    """Steps would be too coarse."""
    far = {"left_s": 7 * 24 * HOUR, "work_s": 24 * HOUR, "start_s": 600.0, "tick_s": 600.0}
    assert plan_for(pooled("H100", 8), spot=2.0, on_demand=10.0, **far) is None


def test_a_plan_is_never_late_and_cheaper_than_the_constants() -> None:
    """On a zone that comes and goes, with little slack."""
    zones = recorded("gcp_h100x16_2025-10")
    windows = cut(
        [zone for zone in zones if zone.zone == "us-central1-a"],
        gang=8,
        work_h=12,
        deadline_h=13.5,
        start_s=600,
        begins=[int(each) for each in np.linspace(0, 800, 12)],
    )
    least = least_usd(windows)
    planned, fixed = play(windows, Rollout()), play(windows, RuleOf())
    assert not planned.late.any()
    assert (planned.usd / least).mean() < (fixed.usd / least).mean() - 0.02


def test_nodes_that_run_are_kept_to_the_end() -> None:
    """In the last step there is no plan any more; the guard alone may give them up."""
    kept = _plan().wanted(left_s=60.0, work_s=60.0, running=SPOT, up=True, age_s=HOUR)
    assert int(kept) == SPOT
    assert int(_plan().wanted(left_s=60.0, work_s=60.0, running=OVER, up=True, age_s=HOUR)) == OVER


def test_who_runs_where_nobody_knows_the_price_stays() -> None:
    """There is nothing to compare with; only the guard's word takes it from there."""
    unknown = Running(place="b", market="spot", nodes=8)
    for seen in (Seen(up=True, unseen_s=0.0), Seen(up=False, unseen_s=0.0)):
        view = _view(40.0, seen=seen, running=unknown)
        assert isinstance(decide(view, Model.of("H100", 8), 0).action, Stay)


def _view(left_h: float, *, seen: Seen, running: Running | None = None) -> View:
    job = JobState(
        work_left_s=24 * HOUR, left_s=left_h * HOUR, start_s=200.0, guard_start_s=600.0, nodes=8
    )
    place = MarketPlace(name="a", spot_usd_per_h=2.0, on_demand_usd_per_h=10.0, seen=seen)
    return View(job=job, places=(place,), running=running)


def test_decisions_follow_the_plan() -> None:
    """With one place that was asked; the guard's reserve is not counted as slack."""
    model = Model.of("H100", 8)
    gone, back = Seen(up=False, unseen_s=0.0), Seen(up=True, unseen_s=0.0)
    assert isinstance(decide(_view(30, seen=gone), model, 0).action, HoldOff)
    assert isinstance(decide(_view(30, seen=back), model, 0).action, Buy)
    paid = Running(place="a", market="on_demand", nodes=8)
    assert isinstance(decide(_view(24.4, seen=back, running=paid), model, 0).action, Stay)
    tight = _view(26.0, seen=gone)
    assert isinstance(decide(tight, model, 0).action, HoldOff)
    kept = replace(tight, job=replace(tight.job, reserve_s=1.6 * HOUR))
    bought = decide(kept, model, 0).action
    assert isinstance(bought, Buy)
    assert bought.market == "on_demand"
