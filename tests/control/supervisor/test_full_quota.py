"""A quota that is full for a moment only: clouds count nodes for a while after they have ended."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from spotguard.control.journal.fold import limits_to_json
from spotguard.control.journal.record import Limits
from spotguard.control.status.history_words import history_lines
from spotguard.control.status.make_view import run_view
from spotguard.control.supervisor.actions import BackOff, Settle
from spotguard.control.supervisor.next_nodes import next_launch
from spotguard.control.supervisor.policy import SKY_POLICY, Policy
from spotguard.events.states import Market, RunState
from spotguard.shared.units import to_iso
from spotguard.testing.job import JobFate
from spotguard.testing.launcher import FAKE_OFFER
from tests.control.made import Line, intended, launched, made
from tests.control.world import World

if TYPE_CHECKING:
    from pathlib import Path

    from spotguard.control.journal.record import RunRecord

FULL = "MaxSpotInstanceCountExceeded (RunInstances): Max spot instance count exceeded"
ON_AWS = replace(FAKE_OFFER, infra="aws")
POLICY = replace(SKY_POLICY, teardown_s=20.0)
NEWCOMER_S, FREED_S = POLICY.quota_patience_s, POLICY.quota_freed_s


def a_world(folder: Path, *, at_first: int = 0, **more: Any) -> World:
    """Return a run that asks as patiently as on a cloud; each try takes a second."""
    folder.mkdir(exist_ok=True)
    world = World(folder, policy=POLICY, tick_s=2.0, **{"total_steps": 30, **more})
    if at_first:
        world.launcher.refuse_late(FULL, after_s=1.0, times=at_first, quota_full=True)
    return world


def waits(world: World) -> list[float]:
    """Return how long it was waited between the tries."""
    with world.journal() as journal:
        return [e.data["retry_at"] - e.at for e in journal.events() if e.kind == "waiting"]


def given_up(record: RunRecord) -> float:
    """Return when the run failed for its quota, with the cloud's words and the way out."""
    assert record.settled is not None
    assert (record.settled.state, record.settled.exit_code) == (RunState.FAILED, 3)
    assert record.settled.detail.startswith(f"the launch failed: {FULL}; the quota stayed full")
    return record.settled.at


def test_a_run_that_follows_another_waits_until_the_others_nodes_count_no_more(
    tmp_path: Path,
) -> None:
    """A sweep, or an `up` right after another run's end: it failed at once."""
    world = a_world(tmp_path, at_first=4)
    record = world.run()
    assert record.settled is not None
    assert record.settled.state is RunState.FINISHED
    assert [round(each) for each in waits(world)] == [10, 20, 40, 80]


def test_an_account_without_a_quota_is_told_soon(tmp_path: Path) -> None:
    """A few tries within three minutes, the last one at their end; then the cloud's words."""
    world = a_world(tmp_path, at_first=1000)
    begun_at = world.clock.now()
    assert NEWCOMER_S - 1.0 < given_up(world.run()) - begun_at < NEWCOMER_S + 10.0
    assert len(world.launcher.started) == 6


@pytest.mark.parametrize("trained", [False, True])
def test_a_run_waits_for_what_its_own_last_nodes_fill(tmp_path: Path, trained: bool) -> None:
    """Also nodes that were taken in their set-up, before the run had trained at all."""
    world = a_world(tmp_path, fates={1: JobFate(how="lose", at_s=10)} if trained else {})
    if trained:
        world.run_until(8.0)
    else:
        world.launcher.lose_in_set_up("Failed to SSH to the node")
    world.launcher.refuse_late(FULL, after_s=1.0, times=1000, quota_full=True)
    record = world.run()
    (attempt,) = record.attempts
    assert attempt.end is not None
    assert attempt.end.reason.retried
    assert (attempt.started_at is not None) is trained
    waited_s = given_up(record) - attempt.end.gone_at
    assert FREED_S - 1.0 < waited_s < FREED_S + 10.0
    assert len(world.launcher.started) < 12, "the waits grow: the cloud is not hammered"


def test_a_controller_that_begins_anew_gives_up_at_the_same_time(tmp_path: Path) -> None:
    """The end of the patience stands in the journal."""
    undisturbed = a_world(tmp_path / "one", at_first=1000)
    world = a_world(tmp_path / "many", at_first=1000)
    for _ in range(50):
        world.run_until(5.0)
    assert given_up(world.record()) == pytest.approx(given_up(undisturbed.run()), abs=5.0)


def test_status_says_that_a_quota_is_full_why_it_waits_and_until_when(tmp_path: Path) -> None:
    """And the history does, line by line."""
    world = a_world(tmp_path, at_first=1000)
    record, now = world.run_until(5.0), world.clock.now()
    assert record.quota_until is not None
    view = run_view(record, live=None, now=now, controller_alive=True, store_url="")
    assert view.state is RunState.WAITING
    until = to_iso(record.quota_until)
    assert view.state_detail.startswith(f"a quota of the account is full ({FULL}), and a cloud")
    assert view.state_detail.endswith(f"s, until {until}")
    with world.journal() as journal:
        told = [line.text for line in history_lines(journal.read())]
    assert f"a quota has no room for 1 node(s): {FULL}" in told
    assert any(f"waiting for room in a full quota, until {until}, asking" in line for line in told)


def refused(at: float, attempt: int = 1, place: str = "p", **more: Any) -> tuple[Line, Line]:
    """A launch was refused: by a full quota, unless `more` says otherwise."""
    data = {"nodes": 2, "place": place, "problem": FULL, "late": False, "lasting": True}
    return intended(at, attempt), ("no_capacity", at, attempt, data | {"quota_full": True} | more)


def ended(at: float, *, leaving: bool) -> Line:
    """The nodes of attempt 1 were taken, and may still be on their way."""
    end = {"reason": "preempted", "detail": "", "gone_at": at, "leaving": leaving}
    nothing = {"last_step": None, "training_ended_at": None, "traceback": None}
    return ("attempt_ended", at, 1, end | nothing)


TWO = Limits(nodes_min=2, nodes_max=2)


def after(*lines: Line, now: float, policy: Policy = POLICY) -> float | None:
    """Return until when the quota is waited for, once no place is left to be asked."""
    action = next_launch(made(*lines, limits=TWO), (), now, policy)
    assert isinstance(action, BackOff), action
    assert now < action.retry_at
    return action.quota_until


def test_the_patience_counts_from_when_nodes_that_leave_are_gone() -> None:
    """Until then it has not begun, however often it was asked in vain."""
    lines: tuple[Line, ...] = (*launched(0.0), ended(100.0, leaving=True), *refused(110.0, 2))
    assert after(*lines, now=110.0) == 110.0 + FREED_S
    waiting = ("waiting", 110.0, None, {"retry_at": 120.0, "quota_until": 110.0 + FREED_S})
    lines = (*lines, waiting, *refused(300.0, 2))
    assert after(*lines, now=300.0) == 300.0 + FREED_S
    released = ("released", 150.0, 1, {"gone_at": 150.0})
    assert after(*lines, released, now=300.0) == 110.0 + FREED_S


def test_nodes_of_long_ago_fill_no_quota() -> None:
    """Others of the account do: so each run waits as a newcomer does, at least."""
    lines = (*launched(0.0), ended(100.0, leaving=False), *refused(5000.0, 2))
    assert after(*lines, now=5000.0) == 5000.0 + NEWCOMER_S


def test_nodes_that_never_ran_fill_none() -> None:
    """They were stopped while they were still asked for."""
    lines = (*launched(100.0), ended(100.0, leaving=False), *refused(110.0, 2))
    assert after(*lines, now=110.0) == 110.0 + NEWCOMER_S


def test_nodes_of_a_launch_that_came_to_nothing_fill_it() -> None:
    """The answer was lost, and the cloud had started some all the same."""
    assert after(*refused(100.0, paid_s=60.0), now=160.0) == 160.0 + FREED_S


def test_another_patience_holds_where_something_else_is_in_the_way() -> None:
    """Missing capacity is waited for as ever, a missing right is not; beside a quota it is."""
    first = refused(100.0)
    none = refused(101.0, place="q", problem="none left", lasting=False, quota_full=False)
    assert after(*first, *none, now=102.0) is None
    denied = refused(101.0, place="q", problem="AccessDenied", quota_full=False)
    assert after(*first, *denied, now=102.0) == 102.0 + NEWCOMER_S
    settled = next_launch(made(*denied, limits=TWO), (), 102.0, POLICY)
    assert isinstance(settled, Settle)
    assert settled.detail == "the launch failed: AccessDenied"


DENIED = "UnauthorizedOperation (RunInstances): You are not authorized"


def beside_a_missing_right(*, late: bool) -> tuple[Line, ...]:
    """A quota is full in one place; another, asked later, lacks a right."""
    right = refused(101.0, place="q", problem=DENIED, quota_full=False, late=late)
    taken: tuple[Line, ...] = (("launched", 101.0, 1),) if late else ()
    return (*refused(100.0), right[0], *taken, right[1])


@pytest.mark.parametrize("late", [False, True])
def test_a_quota_of_spot_counts_whatever_is_refused_after_it(late: bool) -> None:
    """Nodes that will be bought on demand are waited for: the run failed by the last refusal."""
    buys = replace(POLICY, market=Market.SPOT, on_demand_after_s=500.0)
    on_demand = replace(ON_AWS, market=Market.ON_DEMAND)
    record = replace(made(*beside_a_missing_right(late=late), limits=TWO), quota_until=280.0)
    assert isinstance(next_launch(record, (on_demand,), 302.0, buys), BackOff)
    lines = (*refused(100.0), ("waiting", 100.0, None, {"retry_at": 110.0, "quota_until": None}))
    denied = refused(111.0, problem=DENIED, quota_full=False)
    no_more = made(*lines, *denied, limits=TWO)
    assert isinstance(next_launch(no_more, (on_demand,), 112.0, buys), Settle)


def test_a_quota_that_stays_full_is_told_in_its_own_words() -> None:
    """Not in those of what was refused after it."""
    waiting = ("waiting", 102.0, None, {"retry_at": 110.0, "quota_until": 280.0})
    record = made(*beside_a_missing_right(late=False), waiting, limits=TWO)
    view = run_view(record, live=None, now=103.0, controller_alive=True, store_url="")
    assert view.state_detail.startswith(f"a quota of the account is full ({FULL}), and a cloud")
    record = replace(made(*beside_a_missing_right(late=False), limits=TWO), quota_until=102.0)
    settled = next_launch(record, (), 103.0, POLICY)
    assert isinstance(settled, Settle)
    assert settled.detail.startswith(f"the launch failed: {FULL}; the quota stayed full")


def test_a_quota_that_a_round_did_not_meet_begins_anew() -> None:
    """Capacity came back in between, or was all that lacked."""
    waiting = ("waiting", 100.0, None, {"retry_at": 110.0, "quota_until": 280.0})
    lines: tuple[Line, ...] = (*refused(100.0), waiting)
    assert after(*lines, *refused(150.0), now=150.0) == 280.0
    none = refused(150.0, problem="none left", lasting=False, quota_full=False)
    lines = (*lines, *none, ("waiting", 150.0, None, {"retry_at": 170.0, "quota_until": None}))
    assert after(*lines, *refused(170.0), now=170.0) == 170.0 + NEWCOMER_S


@pytest.mark.parametrize("kind", ["resumed", "moved"])
def test_who_lets_the_run_go_on_gives_it_a_patience_of_its_own(kind: str) -> None:
    """What was refused before the run came to rest says nothing any more."""
    waiting = ("waiting", 100.0, None, {"retry_at": 110.0, "quota_until": 280.0})
    goes_on = (kind, 900.0, None, {"limits": limits_to_json(TWO), "spec": {}, "phase": 0})
    lines = (*refused(100.0), waiting, *refused(110.0), goes_on)
    record = made(*lines)
    assert (record.tried, record.full, record.quota_until) == ((), (), None)
    assert after(*lines, *refused(910.0), now=910.0) == 910.0 + NEWCOMER_S


def test_what_a_quota_refuses_at_a_notice_leaves_no_wait_behind(tmp_path: Path) -> None:
    """The old nodes filled it: after their end the first launch is made at once."""
    fate = JobFate(how="grace", at_s=20.0, for_s=30.0)
    launcher = {"offers": [ON_AWS, replace(ON_AWS, zone="here-b")], "teardown_s": 5.0}
    world = a_world(tmp_path, fates={1: fate}, launcher=launcher, total_steps=60)
    world.run_until(10.0)
    world.launcher.refuse_late(FULL, after_s=1.0, times=2, quota_full=True)
    record = world.run()
    assert record.settled is not None
    assert record.settled.state is RunState.FINISHED
    assert record.refused == 2, "both places were asked ahead"
    assert "waiting" not in world.kinds()
    assert len(world.launcher.started) == 4


def test_a_place_that_had_no_nodes_at_a_notice_is_passed_over_as_ever() -> None:
    """Only what the quota refused is forgotten, also where the last refusal came after the end."""
    ahead = {**intended(9.0)[3], "ahead": True}
    begun: tuple[Line, ...] = (*launched(1.0), ("launch_intended", 9.0, 2, ahead))
    full = {"nodes": 2, "place": "p", "problem": FULL, "lasting": True, "quota_full": True}
    none = {"nodes": 2, "place": "q", "problem": "none left"}
    again: Line = ("launch_intended", 12.0, 2, ahead)
    lines = (*begun, ("no_capacity", 11.0, 2, full), again)
    record = made(*lines, ("no_capacity", 13.0, 2, none), ended(20.0, leaving=False))
    assert (record.tried, record.full) == (((2, "q"),), ())
    took = (("launched", 12.5, 2), ended(20.0, leaving=False), ("next_took_over", 20.0, 2))
    record = made(*lines, *took, ("no_capacity", 25.0, 2, {**none, "late": True}))
    assert (record.tried, record.full) == (((2, "q"),), ())
    in_place = {**intended(20.0)[3], "after": 1, "at": 20.0, "ended": ended(20.0, leaving=False)[3]}
    record = made(*begun, ("no_capacity", 11.0, 2, full), ("went_on_in_place", 20.0, 2, in_place))
    assert record.search is not None
    assert (record.tried, record.search.tried) == ((), ())
