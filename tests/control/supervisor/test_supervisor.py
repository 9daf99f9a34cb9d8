from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from spotguard.control.journal.fold import limits_to_json
from spotguard.control.journal.journal import Journal
from spotguard.control.journal.record import BudgetOf, Kind, Limits
from spotguard.control.status.history_words import history_lines
from spotguard.control.status.make_view import run_view
from spotguard.control.supervisor.lease import Lease
from spotguard.control.supervisor.policy import Policy
from spotguard.control.supervisor.supervisor import Supervisor
from spotguard.errors import NoCapacity, StoreUnavailable
from spotguard.events import keys
from spotguard.events.event import Event, Heartbeat, JobEvent
from spotguard.events.regrouping import Group
from spotguard.events.states import EndReason, Market, RunState
from spotguard.launch.base import ClusterState, ClusterView, NodeEnd
from spotguard.testing.clock import FakeClock
from spotguard.testing.job import JobFate
from spotguard.testing.launcher import FAKE_OFFER, FakeLauncher
from spotguard.testing.stores import FaultyStore, SimulatedCrash
from tests.control.world import RUN_ID, World

if TYPE_CHECKING:
    from pathlib import Path

    from spotguard.control.journal.record import RunRecord
    from spotguard.errors import StoreError
    from spotguard.launch.base import LaunchRequest, Offer


def reasons(record: RunRecord) -> list[EndReason | None]:
    """Return how each attempt ended."""
    return [attempt.end.reason if attempt.end else None for attempt in record.attempts]


def check_books(world: World, *, budget_usd: float | None = None) -> None:
    """The journal's cost is the cloud's own; no node is left; nothing was started twice."""
    assert world.launcher.living() == []
    assert len(set(world.launcher.started)) == len(world.launcher.started)
    assert world.spent_usd() == pytest.approx(world.launcher.billed_usd(), abs=1e-9)
    if budget_usd is not None:
        assert world.launcher.billed_usd() <= budget_usd


def test_an_undisturbed_run_finishes_in_one_attempt(tmp_path: Path) -> None:
    """One cluster, all steps once, the final state, the exact bill."""
    world = World(tmp_path)
    record = world.run()
    assert record.settled is not None
    assert (record.settled.state, record.settled.exit_code) == (RunState.FINISHED, 0)
    assert reasons(record) == [EndReason.FINISHED]
    assert [step for _, step in world.job.trained] == list(range(1, 21))
    assert world.spent_usd() == pytest.approx(24.0 / 3600)
    check_books(world)


@pytest.mark.parametrize(
    ("fate", "reason"),
    [
        (JobFate(how="notice", at_s=9), EndReason.PREEMPTED),
        (JobFate(how="term", at_s=9), EndReason.TERMINATED),
        (JobFate(how="lose", at_s=9), EndReason.NODE_LOST),
        (JobFate(how="lose", at_s=9, nodes=2), EndReason.VANISHED),
        (JobFate(how="lose_and_tell", at_s=9), EndReason.NODE_LOST),
        (JobFate(how="lose", at_s=1, nodes=2), EndReason.VANISHED),
    ],
)
def test_whatever_the_cloud_takes_the_run_goes_on(
    tmp_path: Path, fate: JobFate, reason: EndReason
) -> None:
    """Each way to lose nodes is named rightly, and the next attempt goes on from the last save."""
    world = World(tmp_path, limits=Limits(nodes_min=2, nodes_max=2), fates={1: fate, 2: fate})
    record = world.run()
    assert record.settled is not None
    assert record.settled.state is RunState.FINISHED
    assert reasons(record) == [reason, reason, EndReason.FINISHED]
    assert {step for _, step in world.job.trained} == set(range(1, 21))
    check_books(world)


def test_those_that_stay_go_on_in_place(tmp_path: Path) -> None:
    """A node leaves, the others begin the next attempt by themselves: no new cluster, right bills.

    What comes after, whatever it is, concerns the nodes that stayed.
    """
    fates = {
        1: JobFate(how="notice", at_s=9, regroup_s=4.0),
        2: JobFate(how="lose_and_tell", at_s=6, regroup_s=4.0),
        3: JobFate(how="notice", at_s=5, nodes=2),
    }
    world = World(tmp_path, limits=Limits(nodes_min=1, nodes_max=4), fates=fates)
    record = world.run()

    assert [(a.nodes, a.members, a.in_place) for a in record.attempts] == [
        (4, None, False),
        (3, (1, 2, 3), True),
        (2, (2, 3), True),
        (4, None, False),
    ]
    assert reasons(record) == [
        EndReason.PREEMPTED,
        EndReason.NODE_LOST,
        EndReason.PREEMPTED,
        EndReason.FINISHED,
    ]
    assert world.launcher.started == ["job-1-1", "job-1-4"]
    assert [a.cluster for a in record.attempts] == ["job-1-1"] * 3 + ["job-1-4"]
    for earlier, later in zip(record.attempts[:3], record.attempts[1:3], strict=False):
        assert earlier.end is not None
        assert later.intended_at == earlier.end.gone_at, "no second is billed twice, or never"
    assert {step for _, step in world.job.trained} == set(range(1, 21))
    assert world.launcher.living() == []


def test_the_controller_may_be_dead_meanwhile(tmp_path: Path) -> None:
    """Two attempts in place, and their end, without a controller: a new one tells them apart."""
    fates = {
        1: JobFate(how="notice", at_s=5, regroup_s=2.0),
        2: JobFate(how="notice", at_s=6, regroup_s=2.0),
        3: JobFate(how="notice", at_s=5, nodes=2),
    }
    world = World(tmp_path, limits=Limits(nodes_min=1, nodes_max=4), fates=fates)
    world.run_until(4.0)
    world.clock.advance(100.0)
    record = world.run()
    assert [a.nodes for a in record.attempts] == [4, 3, 2, 4]
    assert reasons(record)[:3] == [EndReason.PREEMPTED] * 3
    assert record.settled is not None
    assert record.settled.state is RunState.FINISHED
    assert {step for _, step in world.job.trained} == set(range(1, 21))


def test_few_nodes_in_place_are_not_for_ever(tmp_path: Path) -> None:
    """After a while it is saved and launched anew, on as many nodes as can be had."""
    world = World(
        tmp_path,
        limits=Limits(nodes_min=1, nodes_max=4),
        policy=Policy(regrow_after_s=30.0),
        fates={1: JobFate(how="notice", at_s=5, nodes=3, regroup_s=2.0)},
        total_steps=100,
    )
    record = world.run()
    assert [a.nodes for a in record.attempts] == [4, 1, 4]
    assert reasons(record) == [EndReason.PREEMPTED, EndReason.RESIZED, EndReason.FINISHED]
    assert {step for _, step in world.job.trained} == set(range(1, 101))


def test_fewer_nodes_may_spend_longer(tmp_path: Path) -> None:
    """The budget buys one node three times as long as three; it is kept all the same."""
    world = World(
        tmp_path,
        limits=Limits(nodes_min=1, nodes_max=3, budget_usd=0.12),
        fates={1: JobFate(how="notice", at_s=20, nodes=2, regroup_s=2.0)},
        total_steps=1000,
    )
    record = world.run()
    first, second = record.attempts[:2]
    assert first.allotment.budget_stop_at is not None
    assert second.allotment.budget_stop_at is not None
    assert second.in_place
    assert second.allotment.budget_stop_at > first.allotment.budget_stop_at + 60
    assert world.spent_usd() <= 0.12


def test_a_group_without_an_end_says_nothing(tmp_path: Path) -> None:
    """The job's own word comes first: what is left of an older attempt cannot end this one."""
    world = World(tmp_path, limits=Limits(nodes_min=2, nodes_max=2))
    group = Group(attempt=2, nodes=(0,), host="here", port=1, at=world.clock.now())
    world.store.put(keys.group(2), group.to_json())
    record = world.run()
    assert record.settled is not None
    assert record.settled.state is RunState.FINISHED
    assert len(world.launcher.started) == 1


def test_the_next_cluster_waits_until_the_last_one_is_gone(tmp_path: Path) -> None:
    """Two attempts are never billed at once, however slow the teardown."""
    fates = {1: JobFate(how="notice", at_s=9), 2: JobFate(how="lose", at_s=9)}
    world = World(
        tmp_path,
        limits=Limits(nodes_min=2, nodes_max=2),
        launcher={"teardown_s": 40.0},
        fates=fates,
    )
    record = world.run()
    for earlier, later in zip(record.attempts, record.attempts[1:], strict=False):
        assert earlier.end is not None
        assert later.intended_at >= earlier.end.gone_at
    check_books(world)


def test_the_jobs_own_failure_is_never_retried(tmp_path: Path) -> None:
    """An error of the script ends the run with its traceback and exit code 10."""
    world = World(tmp_path, fates={1: JobFate(how="fail", at_s=9)})
    record = world.run()
    assert record.settled is not None
    assert (record.settled.state, record.settled.exit_code) == (RunState.FAILED, 10)
    assert record.attempts[0].end is not None
    assert record.attempts[0].end.traceback == "ValueError: no"
    assert len(world.launcher.started) == 1
    check_books(world)


def test_a_silent_failure_shows_what_the_script_printed(tmp_path: Path) -> None:
    """Without an `ended` event the log's tail is the traceback, without its starter's report."""
    world = World(tmp_path, fates={1: JobFate(how="exit", at_s=9)})
    report = b"spotguard: the script failed on rank 1 (exitcode: 1)\n"
    world.launcher.logs[0] = b"step 1\nTraceback (most recent call last):\nKeyError: 'x'\n" + report
    record = world.run()
    assert reasons(record) == [EndReason.FAILED]
    assert record.attempts[0].end is not None
    traceback = record.attempts[0].end.traceback or ""
    assert traceback.endswith("KeyError: 'x'")


def test_leaving_the_loop_early_is_not_success(tmp_path: Path) -> None:
    """Exit code 0 without the job's own word is a failure that says so."""
    world = World(tmp_path, fates={1: JobFate(how="exit", at_s=9, exit_code=0)})
    record = world.run()
    assert record.settled is not None
    assert record.settled.exit_code == 10
    assert "without finishing its loop" in record.settled.detail


def test_less_capacity_makes_a_smaller_cluster_and_no_attempt(tmp_path: Path) -> None:
    """The ladder is walked down in one round; refused launches count as nothing."""
    world = World(tmp_path, limits=Limits(nodes_min=1, nodes_max=4), launcher={"capacity": 2})
    record = world.run()
    assert [(attempt.number, attempt.nodes) for attempt in record.attempts] == [(1, 2)]
    assert world.launcher.refused == [4, 3]
    check_books(world)


def test_capacity_that_comes_back_is_taken(tmp_path: Path) -> None:
    """The run waits with backoff and goes on by itself."""
    world = World(tmp_path)
    back_at = world.clock.now() + 20.0
    world.launcher.capacity = lambda now: 1 if now >= back_at else 0
    record = world.run()
    assert record.settled is not None
    assert record.settled.state is RunState.FINISHED
    assert record.attempts[0].number == 1
    assert back_at <= record.attempts[0].intended_at <= back_at + 16.5
    assert len(world.launcher.refused) <= 6


def test_no_capacity_for_long_pauses_and_resume_goes_on(tmp_path: Path) -> None:
    """After its patience the run pauses with exit code 11, without having cost anything."""
    world = World(tmp_path, launcher={"capacity": 0})
    record = world.run()
    assert record.settled is not None
    assert (record.settled.state, record.settled.exit_code) == (RunState.PAUSED, 11)
    assert record.attempts == ()
    assert world.spent_usd() == 0

    world.launcher.capacity = 1
    world.write(Kind.RESUMED, {"limits": limits_to_json(Limits())})
    assert world.run().settled is not None
    assert reasons(world.record()) == [EndReason.FINISHED]


def test_only_the_chosen_market_is_asked(tmp_path: Path) -> None:
    """A spot job never ends up on dearer on-demand nodes because spot has none."""
    dear = replace(FAKE_OFFER, market=Market.ON_DEMAND, price_usd_per_h=3.0)
    world = World(tmp_path, launcher={"offers": [dear, FAKE_OFFER]})
    assert world.run().attempts[0].offer == FAKE_OFFER


def test_what_is_bought_on_demand_elsewhere_keeps_to_the_budget(tmp_path: Path) -> None:
    """No spot node for a minute: the other place has some, and its price is what is counted."""
    there = replace(
        FAKE_OFFER, market=Market.ON_DEMAND, infra="slurm", region="lab", zone="gpu",
        price_usd_per_h=36.0, on_demand_usd_per_h=36.0,
    )  # fmt: skip
    world = World(
        tmp_path,
        total_steps=10_000,
        limits=Limits(budget_usd=1.0),
        policy=Policy(market=Market.SPOT, on_demand_after_s=60.0, capacity_patience_s=600.0),
        spec={
            "infra": "slurm/lab/spot",
            "on_demand": "fallback-after 60s",
            "on_demand_infra": "slurm/lab/gpu",
        },
    )
    world.launcher = NoSpot(world.clock, world.job, offers=[FAKE_OFFER, there])
    record = world.run()
    assert record.settled is not None
    assert (record.settled.state, record.settled.exit_code) == (RunState.PAUSED, 20)
    assert {attempt.offer for attempt in record.attempts} == {there}
    assert record.attempts[0].intended_at - record.created_at >= 60.0
    assert 0.7 < world.launcher.billed_usd() <= 1.0
    assert record.spec["on_demand_infra"] == "slurm/lab/gpu"


def test_on_demand_nodes_are_given_up_once_spot_ones_are_free_and_not_before(
    tmp_path: Path,
) -> None:
    """Where it can be asked: twice the usual wait on demand, then one move, to what is there."""
    dear = replace(FAKE_OFFER, market=Market.ON_DEMAND, price_usd_per_h=3.0)
    world = World(
        tmp_path,
        total_steps=90,
        policy=Policy(
            market=Market.SPOT,
            on_demand_after_s=5.0,
            back_to_spot_after_s=20.0,
            capacity_patience_s=600.0,
        ),
        spec={"infra": "aws", "on_demand": "fallback-after 5s"},
    )
    world.launcher = SpotLater(world.clock, world.job, offers=[FAKE_OFFER, dear])
    world.launcher.spot_from = world.clock.now() + 50.0
    record = world.run()
    assert [(a.offer.market, a.end.reason) for a in record.attempts if a.end] == [
        (Market.ON_DEMAND, EndReason.MOVED),
        (Market.SPOT, EndReason.FINISHED),
    ]
    assert record.attempts[1].intended_at >= world.launcher.spot_from


def test_dear_spot_nodes_are_given_up_once_a_cheaper_place_says_that_it_has_some(
    tmp_path: Path,
) -> None:
    """Under a deadline it moves by the policy: once, not before, and to what is free."""
    dear = replace(FAKE_OFFER, zone="here-b", price_usd_per_h=2.5)
    paid = replace(FAKE_OFFER, market=Market.ON_DEMAND, price_usd_per_h=30.0)
    hour_s = 3600.0
    world = World(
        tmp_path,
        total_steps=240,
        step_s=60.0,
        limits=Limits(deadline_at=FakeClock().now() + 40 * hour_s),
        policy=Policy(
            market=Market.SPOT,
            on_demand_for_deadline=True,
            capacity_patience_s=600.0,
        ),
        spec={"infra": "aws", "on_demand": "deadline"},
        tick_s=5.0,
    )
    world.launcher = CheapLater(world.clock, world.job, offers=[FAKE_OFFER, dear, paid])
    world.launcher.spot_from = world.clock.now() + hour_s
    record = world.run()
    assert [(a.offer.zone, a.end.reason) for a in record.attempts if a.end] == [
        ("here-b", EndReason.MOVED),
        ("here-a", EndReason.FINISHED),
    ]
    assert record.attempts[1].intended_at >= world.launcher.spot_from


class SpotLater(FakeLauncher):
    """A place that tells how many nodes are free: of spot ones none at first."""

    spot_from = 0.0

    def free_nodes(self, offer: Offer) -> int | None:
        """Return whether it has come to spot nodes yet."""
        return 4 * (offer.market is not Market.SPOT or self._clock.now() >= self.spot_from)

    def launch(self, request: LaunchRequest) -> None:
        """Refuse what is not free."""
        if not self.free_nodes(request.offer):
            raise NoCapacity("no spot node is to be had")
        super().launch(request)


class CheapLater(SpotLater):
    """The same of its cheapest spot place; the others have nodes at once."""

    def free_nodes(self, offer: Offer) -> int | None:
        """Return whether it has come to cheap nodes yet."""
        return 4 if offer.price_usd_per_h != 1.0 else super().free_nodes(offer)


class NoSpot(FakeLauncher):
    """A cloud that has only on-demand nodes."""

    def launch(self, request: LaunchRequest) -> None:
        """Refuse spot nodes."""
        if request.offer.market is Market.SPOT:
            raise NoCapacity("no spot node is to be had")
        super().launch(request)


def test_silence_is_said_and_nothing_is_killed(tmp_path: Path) -> None:
    """A minute without heartbeats is lost contact, then contact again; one attempt in all."""
    world = World(tmp_path, total_steps=90, fates={1: JobFate(how="silence", at_s=5)})
    assert world.run_until(40.0).current is not None
    record = world.run()
    assert reasons(record) == [EndReason.FINISHED]
    kinds = world.kinds()
    assert kinds.index("contact_lost") < kinds.index("contact_back")
    assert len(world.launcher.started) == 1


def test_a_launcher_is_told_whether_the_job_is_heard(tmp_path: Path) -> None:
    """Not before its first sign of life, not after a few seconds without one, not while it ends."""
    world = World(tmp_path, total_steps=90, fates={1: JobFate(how="silence", at_s=20)})
    changes = _told_of_hearing(world)
    assert [is_heard for _, is_heard in changes] == [False, True, False, True, False]
    silent_at = changes[2][0]
    assert 20.0 + 8.0 - 5.0 <= silent_at <= 20.0 + 8.0 + 10.0


def test_a_job_that_lost_a_node_is_not_heard_although_it_spoke_a_moment_ago(tmp_path: Path) -> None:
    """The launcher is to look closely from there on."""
    lost = JobFate(how="lose", at_s=10)
    world = World(tmp_path, total_steps=30, fates={1: lost}, launcher={"teardown_s": 30.0})
    changes = _told_of_hearing(world)
    lost_at = changes[2][0]
    assert 10.0 <= lost_at < 15.0, "sooner than its silence could have told"


def _told_of_hearing(world: World) -> list[tuple[float, bool]]:
    """Run to the end; return when (s after the start) the launcher was told anew, and what."""
    told: list[tuple[float, bool]] = []
    born_at = world.clock.monotonic()
    observe = world.launcher.observe

    def noted_observe(cluster: str, *, heard: bool = False) -> ClusterView:
        told.append((world.clock.monotonic() - born_at, heard))
        return observe(cluster, heard=heard)

    world.launcher.observe = noted_observe  # type: ignore[method-assign]
    assert reasons(world.run())[-1] is EndReason.FINISHED
    return [told[0], *(new for old, new in pairwise(told) if old[1] != new[1])]


def test_only_a_launch_that_may_have_happened_is_looked_for(tmp_path: Path) -> None:
    """An intent of one's own is launched at once; what a dead controller intended is looked for."""
    world = World(tmp_path, total_steps=30)
    looked: list[str] = []
    asked: list[bool] = []
    observe, launch = world.launcher.observe, world.launcher.launch

    def noted_observe(cluster: str, *, heard: bool = False) -> ClusterView:
        looked.append(cluster)
        return observe(cluster, heard=heard)

    def noted_launch(request: LaunchRequest) -> None:
        asked.append(request.is_new)
        assert bool(looked) is not request.is_new
        if len(asked) == 1:
            raise SimulatedCrash
        launch(request)

    world.launcher.observe = noted_observe  # type: ignore[method-assign]
    world.launcher.launch = noted_launch  # type: ignore[method-assign]
    with pytest.raises(SimulatedCrash):
        world.run_until(1.0)
    record = world.run()
    assert reasons(record) == [EndReason.FINISHED]
    assert asked == [True, False]
    assert world.launcher.started == ["job-1-1"]


def test_an_outage_of_the_clouds_api_kills_nothing(tmp_path: Path) -> None:
    """While the launcher cannot say anything, the job is left alone."""
    world = World(tmp_path, total_steps=90)
    world.launcher.outage_until = world.clock.now() + 60.0
    world.run_until(1.0)  # even the launch has to wait: it may have happened
    assert world.launcher.started == []
    world.run_until(64.0)
    world.launcher.outage_until = world.clock.now() + 30.0
    record = world.run()
    assert reasons(record)[-1] is EndReason.FINISHED
    kinds = world.kinds()
    assert kinds.index("cloud_silent") < kinds.index("cloud_back")
    assert "contact_lost" not in kinds, "its job was heard all the time"
    check_books(world)


def test_a_job_that_is_heard_is_never_said_to_give_no_sign_of_life(tmp_path: Path) -> None:
    """What `status` says of a cloud that does not answer is another sentence."""
    world = World(tmp_path, total_steps=900)
    world.run_until(10.0)
    world.launcher.outage_until = world.clock.now() + 300.0
    record = world.run_until(60.0)
    now = world.clock.now()
    view = run_view(record, live=None, now=now, controller_alive=True, store_url="")
    assert view.state is RunState.CLOUD_SILENT
    assert "the job gives signs of life" in view.state_detail
    assert "no sign of life" not in view.state_detail
    assert view.eta_s is not None


def test_a_store_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """Nothing is heard of the job then, which may well give signs of life."""
    world = World(tmp_path)
    world.run_until(5.0)
    world.write(Kind.STORE_LOST)
    record, now = world.record(), world.clock.now()
    view = run_view(record, live=None, now=now, controller_alive=True, store_url="")
    assert view.state is RunState.CONTACT_LOST
    assert view.state_detail.startswith("the run's store cannot be read")


def test_a_jump_of_the_wall_clock_loses_no_contact(tmp_path: Path) -> None:
    """Silence is measured on the monotonic clock."""
    world = World(tmp_path, total_steps=60, fates={1: JobFate(how="silence", at_s=1000)})
    with world.journal() as journal:
        supervisor = world.supervisor(journal)
        for _ in range(20):
            supervisor.tick()
            world.clock.sleep(0.5)
        world.clock.jump_wall(120.0)
        supervisor.tick()
    assert "contact_lost" not in world.kinds()


def test_nodes_are_given_up_only_where_others_are_free(tmp_path: Path) -> None:
    """Two of four were to be had; it grows once the cloud says that two more are, and not before.

    The refusals of its first launch do not count.
    """
    policy = Policy(regrow_startups=3.0)
    world = World(
        tmp_path, total_steps=3000, limits=Limits(nodes_min=1, nodes_max=4), policy=policy
    )
    world.launcher.capacity, world.launcher.tells_free = 2, True
    record = world.run_until(120.0)
    assert [attempt.nodes for attempt in record.attempts] == [2]
    assert record.refused == 2
    world.launcher.capacity = 4
    record = world.run_until(20.0)
    assert reasons(record) == [EndReason.RESIZED, None]
    assert [attempt.nodes for attempt in record.attempts] == [2, 4]


def test_a_stop_saves_first(tmp_path: Path) -> None:
    """`stop` reaches the job through the store; it saves, leaves, and the run is stopped."""
    world = World(tmp_path)
    world.run_until(8.0)
    world.write(Kind.USER_STOP)
    record = world.run()
    assert record.settled is not None
    assert (record.settled.state, record.settled.exit_code) == (RunState.STOPPED, 75)
    assert reasons(record) == [EndReason.STOPPED]
    assert world.job.saves[-1] == world.job.trained[-1]
    assert json.loads(world.store.get(keys.stop(1)))["reason"] == "stopped"
    check_books(world)


def test_a_job_that_was_done_before_it_heard_of_the_stop_is_finished(tmp_path: Path) -> None:
    """A `resume` would pay for nodes only to find out that there is nothing to do."""
    world = World(tmp_path, total_steps=10)
    while "job_ended" not in world.kinds():
        world.run_until(0.5)
    assert "attempt_ended" not in world.kinds()
    world.write(Kind.USER_STOP)
    record = world.run()
    assert reasons(record) == [EndReason.FINISHED]
    assert record.settled is not None
    assert (record.settled.state, record.settled.exit_code) == (RunState.FINISHED, 0)


def test_a_stop_while_nothing_runs_settles_at_once(tmp_path: Path) -> None:
    """A run that waits for capacity can be stopped too."""
    world = World(tmp_path, launcher={"capacity": 0})
    world.run_until(3.0)
    world.write(Kind.USER_STOP)
    record = world.run()
    assert record.settled is not None
    assert record.settled.state is RunState.STOPPED


def test_a_job_that_does_not_stop_is_taken_down(tmp_path: Path) -> None:
    """After its patience the controller releases the nodes of a stuck job, and says so."""
    world = World(
        tmp_path, policy=Policy(stop_patience_s=20.0), fates={1: JobFate(how="stuck", at_s=5)}
    )
    world.run_until(8.0)
    world.write(Kind.USER_STOP)
    record = world.run()
    assert reasons(record) == [EndReason.STOPPED]
    assert record.attempts[0].end is not None
    assert "did not save and leave within 20 s" in record.attempts[0].end.detail
    check_books(world)


def test_down_releases_the_nodes_at_once(tmp_path: Path) -> None:
    """`down` does not wait for a save; a launcher that fails at first is asked again."""
    world = World(tmp_path, total_steps=1000)
    world.run_until(8.0)
    world.launcher.fail_down("the API is away", times=2)
    world.write(Kind.USER_DOWN)
    asked_at = world.clock.now()
    record = world.run()
    assert record.settled is not None
    assert record.settled.state is RunState.STOPPED
    assert world.clock.now() - asked_at < 15.0
    check_books(world)


def test_a_launch_that_fails_is_reported_and_costs_nothing(tmp_path: Path) -> None:
    """Another reason than capacity ends the run with exit code 3 and the launcher's words."""
    world = World(tmp_path)
    world.launcher.fail_launch("no credentials")
    record = world.run()
    assert record.settled is not None
    assert record.settled.exit_code == 3
    assert "no credentials" in record.settled.detail
    assert world.spent_usd() == 0


# ---------------------------------------------------------------- money and time


@pytest.mark.parametrize("teardown_s", [0.5, 6.5])
@pytest.mark.parametrize("save_s", [0.0, 2.5])
@pytest.mark.parametrize("how", ["", "notice", "lose", "stuck"])
@pytest.mark.parametrize("budget_usd", [0.009, 0.013, 0.031])
def test_a_budget_is_never_exceeded(
    tmp_path: Path, teardown_s: float, save_s: float, how: str, budget_usd: float
) -> None:
    """Whatever happens, however slow the end: spent <= budget, exit 20, and resume finishes it."""
    fates = {1: JobFate(how=how, at_s=9)} if how else {}
    world = World(
        tmp_path,
        limits=Limits(budget_usd=budget_usd, nodes_min=2, nodes_max=2),
        launcher={"teardown_s": teardown_s},
        total_steps=60,
        save_s=save_s,
        fates=fates,
    )
    record = world.run()
    assert record.settled is not None
    assert (record.settled.state, record.settled.exit_code) == (RunState.PAUSED, 20)
    assert record.settled.lacks_budget_of is BudgetOf.RUN
    check_books(world, budget_usd=budget_usd)

    more = Limits(budget_usd=1.0, nodes_min=2, nodes_max=2)
    world.write(Kind.RESUMED, {"limits": limits_to_json(more)})
    record = world.run()
    assert record.settled is not None
    assert record.settled.state is RunState.FINISHED
    assert {step for _, step in world.job.trained} == set(range(1, 61))
    check_books(world, budget_usd=1.0)


def test_most_of_a_budget_is_used(tmp_path: Path) -> None:
    """The reserve is seconds, not a share: a budget buys training up to it, and it is saved."""
    world = World(tmp_path, limits=Limits(budget_usd=0.05), total_steps=1000)
    world.run()
    assert world.spent_usd() > 0.05 - 11.0 / 3600
    assert world.job.saves[-1] == world.job.trained[-1]


@pytest.mark.parametrize("how", ["stuck", "silence"])
def test_the_budget_holds_even_when_the_controller_is_dead(tmp_path: Path, how: str) -> None:
    """Nobody looks for an hour: the job's own guard, or the launcher's, keeps the limit."""
    world = World(
        tmp_path,
        limits=Limits(budget_usd=0.02),
        total_steps=1000,
        fates={1: JobFate(how=how, at_s=10, for_s=1000.0)},
    )
    world.run_until(12.0)
    world.clock.advance(3600.0)
    record = world.run()
    assert record.settled is not None
    assert record.settled.exit_code == 20
    check_books(world, budget_usd=0.02)


def test_a_budget_tells_when_it_runs_low(tmp_path: Path) -> None:
    """Each share of the budget is told once."""
    world = World(tmp_path, limits=Limits(budget_usd=0.03), total_steps=1000)
    world.run()
    assert world.kinds().count("budget_alert") == 2  # 50 and 80; 95 percent are within the reserve
    assert list(world.record().alerted) == [50, 80]


def test_a_slow_teardown_is_remembered(tmp_path: Path) -> None:
    """The reserve of later attempts grows with what earlier ones needed."""
    world = World(
        tmp_path,
        limits=Limits(budget_usd=0.1, nodes_min=2, nodes_max=2),
        launcher={"teardown_s": 25.0},
        total_steps=500,
        fates={1: JobFate(how="lose", at_s=9)},
    )
    record = world.run()
    assert record.settled is not None
    assert record.settled.exit_code == 20
    assert len(record.attempts) >= 2
    check_books(world, budget_usd=0.1)


def test_a_deadline_saves_and_releases_in_time(tmp_path: Path) -> None:
    """At the deadline the state is saved and no node is left; exit code 21."""
    world = World(tmp_path, total_steps=1000)
    deadline_at = world.clock.now() + 60.0
    world.write(Kind.RESUMED, {"limits": limits_to_json(Limits(deadline_at=deadline_at))})
    record = world.run()
    assert record.settled is not None
    assert (record.settled.state, record.settled.exit_code) == (RunState.PAUSED, 21)
    assert world.clock.now() <= deadline_at
    assert world.job.saves[-1] == world.job.trained[-1]
    check_books(world)


# ---------------------------------------------------------------- the run store


def test_a_store_that_is_away_delays_the_verdict_only(tmp_path: Path) -> None:
    """The cluster is gone but its last words cannot be read: not judged until they can be."""
    world = World(tmp_path, fates={1: JobFate(how="notice", at_s=9)})
    world.run_until(7.0)
    faulty = FaultyStore(world.store).fail("*", times=None)
    with world.journal() as journal:
        supervisor = world.supervisor(journal, store=faulty)
        for _ in range(80):
            supervisor.tick()
            world.clock.sleep(0.5)
        assert supervisor.record.current is not None
        assert "store_lost" in world.kinds()
    record = world.run()
    assert reasons(record) == [EndReason.PREEMPTED, EndReason.FINISHED]
    assert "store_back" in world.kinds()


def test_an_event_that_appears_late_is_still_read(tmp_path: Path) -> None:
    """A node with a slow clock or store writes a key older than those read already."""
    world = World(tmp_path, total_steps=200)
    world.run_until(20.0)
    late = Event(kind=JobEvent.WARNING.value, at=world.clock.now() - 5, attempt=1, data={})
    late = replace(late, node=1, data={"message": "late but true"})
    key = keys.event(1, at=late.at, node=1, rank=1, count=1)
    world.store.put(key, late.to_json())
    record = world.run_until(2.0)
    assert record.warnings == ("attempt 1: late but true",)


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'{"schema": 1, "at": "yesterday"}', b"\xff"])
def test_rubbish_in_the_store_is_passed_over(tmp_path: Path, raw: bytes) -> None:
    """A torn or foreign object never stops the controller."""
    world = World(tmp_path)
    world.run_until(5.0)
    world.store.put(keys.event(1, at=world.clock.now(), node=3, rank=3, count=1), raw)
    world.store.put(keys.heartbeat(1, 3), raw)
    assert reasons(world.run()) == [EndReason.FINISHED]


def test_the_live_file_has_each_new_sign_of_life_and_is_left_alone_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`status` shows the step from it; a hundred quiet runs rewrite no file for nothing."""
    world = World(tmp_path, total_steps=200)
    world.run_until(10.0)
    live = tmp_path / "live.json"
    steps = []
    with world.journal() as journal:
        supervisor = world.supervisor(journal)
        for _ in range(3):
            world.clock.sleep(20.0)
            supervisor.tick()
            newest = Heartbeat.from_json(world.store.get(keys.heartbeat(1, 0)))
            assert json.loads(live.read_text())["step"] == newest.step
            steps.append(newest.step)
            live.write_text("{}")
            with monkeypatch.context() as quiet:
                quiet.setattr(world.job, "_beat", lambda *_: None)
                world.clock.sleep(0.6)  # it is time to ask for a sign again
                supervisor.tick()
            assert live.read_text() == "{}"
    assert len(set(steps)) == 3


def test_every_job_event_is_told_once(tmp_path: Path) -> None:
    """Controllers that follow one another copy each event of the job exactly once."""
    world = World(tmp_path, fates={1: JobFate(how="term", at_s=9)})
    while world.record().settled is None:
        world.run_until(3.0)
    with world.journal() as journal:
        told = [entry.data["key"] for entry in journal.events() if "key" in entry.data]
    written = [info.key for number in (1, 2) for info in world.store.list(keys.events(number))]
    assert sorted(told) == sorted(written)


def test_the_job_is_told_what_it_is_part_of(tmp_path: Path) -> None:
    """The environment of an attempt names the run, the store, the limits and its place."""
    world = World(tmp_path, limits=Limits(budget_usd=1.0))
    world.run_until(3.0)
    env = world.launcher.clusters[f"{RUN_ID}-1"].request.env
    assert env["SPOTGUARD_RUN_ID"] == RUN_ID
    assert env["SPOTGUARD_ATTEMPT"] == "1"
    assert env["SPOTGUARD_STORE"] == "memory://"
    assert float(env["SPOTGUARD_BUDGET_STOP_AT"]) == pytest.approx(1_700_000_000 + 3590, abs=1)
    assert "SPOTGUARD_DEADLINE_STOP_AT" not in env
    claim = json.loads(env["SPOTGUARD_CLAIM"])
    assert (claim["nodes"], claim["price_usd_per_h"], claim["market"]) == (1, 1.0, "spot")


def test_each_launch_has_a_key_that_is_written_nowhere(tmp_path: Path) -> None:
    """The ranks of an attempt know each other by it: not by the journal, nor by the store."""
    fates = {1: JobFate(how="notice", at_s=6)}
    world = World(tmp_path, fates=fates)
    world.run()
    clusters = world.launcher.clusters.values()
    found = [cluster.request.env["SPOTGUARD_KEY"] for cluster in clusters]
    assert len(set(found)) == len(found) == 2
    assert {len(bytes.fromhex(key)) for key in found} == {32}
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    written += b"".join(world.store.get(info.key) for info in world.store.list(""))
    assert written
    assert not [key for key in found if key.encode() in written]


def test_a_journal_that_makes_no_sense_is_reported(tmp_path: Path) -> None:
    """A whole file with senseless events is damage too, not a crash."""
    from spotguard.errors import JournalDamaged

    world = World(tmp_path)
    world.write(Kind.SETTLED, {"state": "eaten"})
    with pytest.raises(JournalDamaged, match="make no sense"):
        world.record()
    with Journal.open(tmp_path / "journal.db") as journal:
        assert len(journal.events()) == 2


def test_a_run_that_another_machine_had_since_is_not_launched_again(tmp_path: Path) -> None:
    """Asleep or dead meanwhile, its old controller finds the lease in other hands, a day later too.

    What happened elsewhere is not in its journal: it would go on from there, and pay twice.
    """
    world = World(tmp_path, fates={1: JobFate(how="lose", at_s=8)})
    with world.journal() as journal:
        lease = Lease(world.store, world.clock, "here")
        lease.take()
        asleep = world.supervisor(journal, lease=lease)
        for _ in range(10):
            asleep.tick()
            world.clock.sleep(0.5)
        world.clock.advance(3600)
        elsewhere = Lease(world.store, world.clock, "elsewhere")
        elsewhere.adopt()
        elsewhere.release()
        world.clock.advance(86_400)
        assert_handed_over(asleep.run())
        world.write(Kind.RESUMED, {"limits": limits_to_json(Limits())})

        lease = Lease(world.store, world.clock, "here")
        lease.take()
        assert_handed_over(world.supervisor(journal, lease=lease).run())
    assert world.launcher.started == ["job-1-1"]


def assert_handed_over(record: RunRecord) -> None:
    """The run is at rest on this machine, with the way to bring it back."""
    assert record.settled is not None
    assert (record.settled.state, record.settled.exit_code) == (RunState.STOPPED, 75)
    assert "taken over by a controller on" in record.settled.detail
    assert "spotguard adopt" in record.settled.detail


@pytest.mark.parametrize(("trains_on", "attempts"), [(True, 1), (False, 2)])
def test_a_cluster_of_which_some_node_is_said_to_be_lost(
    tmp_path: Path, trains_on: bool, attempts: int
) -> None:
    """SkyPilot cannot say which. A job that goes on to finish steps has lost none; one that hangs
    has time for a save, and no more, however alive it sounds."""
    fates = {} if trains_on else {1: JobFate(how="stuck", at_s=8)}
    world = World(
        tmp_path,
        limits=Limits(nodes_min=2, nodes_max=2),
        fates=fates,
        policy=Policy(),
        total_steps=60,
    )
    inner, doubted = world.launcher.observe, []

    def observe(name: str, *, heard: bool = False) -> ClusterView:
        seen = inner(name, heard=heard)
        if seen.state is not ClusterState.UP or seen.job_over or name != "job-1-1":
            return seen
        if world.clock.now() < world.launcher.clusters[name].started_at + 12.0:
            return seen
        doubted.append(world.clock.now())
        nodes = tuple(replace(node, end=NodeEnd.LOST) for node in seen.nodes)
        return replace(seen, nodes=nodes, some_lost=True)

    world.launcher.observe = observe  # type: ignore[assignment,method-assign]
    record = world.run()
    assert record.settled is not None
    assert record.settled.state is RunState.FINISHED
    assert len(record.attempts) == attempts
    if not trains_on:
        end = record.attempts[0].end
        assert end is not None
        assert end.reason is EndReason.NODE_LOST, "of the whole cluster nobody says so"
    assert doubted[-1] - doubted[0] > Policy().survivor_patience_s - 1.0
    check_books(world)


@pytest.mark.parametrize("hours", [1, -1, 100])
def test_a_job_with_a_wrong_clock_costs_no_hour(tmp_path: Path, hours: int) -> None:
    """Where it could not set its clock right, what it reports is of now at the latest."""
    world = World(tmp_path, total_steps=10)
    world.run_until(6.0)
    attempt = world.record().current
    assert attempt is not None
    wrong = Event(
        kind=JobEvent.SAVED.value,
        at=world.clock.now() + hours * 3600,
        attempt=attempt.number,
        node=7,
        data={"step": 1, "checkpoint_kind": "periodic"},
    )
    world.store.put(
        keys.event(attempt.number, at=wrong.at, node=7, rank=0, count=1), wrong.to_json()
    )
    world.run()

    with world.journal() as journal:
        copied = [e for e in journal.events() if e.data.get("node") == 7]
        lines = list(history_lines(journal.read()))
    assert len(copied) == 1
    assert attempt.intended_at <= copied[0].at <= copied[0].data["seen_at"]
    assert all((line.cost_usd or 0.0) <= world.spent_usd() for line in lines)


@pytest.mark.parametrize("seconds", [3600.0, -3600.0])
def test_a_jump_of_the_machine_is_told_once(tmp_path: Path, seconds: float) -> None:
    """Also when the controller is started again; back is told, too."""
    world = World(tmp_path, total_steps=40)
    ahead = [0.0]
    parts = {"machine_clock": lambda: world.clock.now() + ahead[0]}
    with world.journal() as journal:
        first = world.supervisor(journal, **parts)
        for ahead[0] in (0.0, 1.5, seconds, seconds + 1):
            first._tell_jump()
    with world.journal() as journal:
        again = world.supervisor(journal, **parts)
        for ahead[0] in (seconds, 0.0):
            again._tell_jump()

    with world.journal() as journal:
        told = [e.data["by_s"] for e in journal.events() if e.kind == Kind.CLOCK_MOVED.value]
        texts = [line.text for line in history_lines(journal.read())]
    assert told == [pytest.approx(seconds), pytest.approx(-seconds)]
    assert sum("jumped" in text for text in texts) == 2


def on_a_cloud(folder: Path, *, budget_usd: float | None = None, **job: Any) -> World:
    """Return a world of AWS, whose nodes take 40 s to go."""
    return World(
        folder,
        limits=Limits(nodes_min=2, nodes_max=2, budget_usd=budget_usd),
        launcher={"teardown_s": 40.0, "offers": (replace(FAKE_OFFER, infra="aws"),)},
        policy=Policy(capacity_patience_s=60.0, teardown_s=45.0),
        **job,
    )


def test_a_cloud_is_asked_for_the_next_nodes_while_the_old_ones_go(tmp_path: Path) -> None:
    """Nobody waits for a teardown there; both clusters are paid, and the bill has both."""
    fates = {1: JobFate(how="notice", at_s=9), 2: JobFate(how="lose", at_s=9)}
    world = on_a_cloud(tmp_path, fates=fates)
    record = world.run()
    assert record.settled is not None
    assert record.settled.state is RunState.FINISHED
    for earlier, later in pairwise(record.attempts):
        assert earlier.end is not None
        assert later.intended_at < earlier.end.gone_at
    assert record.leaving == ()
    assert world.kinds().count(Kind.RELEASED.value) == len(record.attempts) - 1
    check_books(world)


@pytest.mark.parametrize("dead_at_s", [12.0, 16.0, 22.0, 30.0, 45.0])
def test_nodes_that_go_are_not_forgotten_by_the_next_controller(
    tmp_path: Path, dead_at_s: float
) -> None:
    """Whenever the controller dies, each cluster is seen gone, and the run rests only then."""
    world = on_a_cloud(tmp_path, fates={1: JobFate(how="notice", at_s=9)})
    world.run_until(dead_at_s)
    record = world.run()
    assert record.settled is not None
    assert record.settled.state is RunState.FINISHED
    assert record.leaving == ()
    check_books(world)


@pytest.mark.parametrize("how", ["dies", "store fails"])
def test_a_verdict_reaches_the_store_whatever_happens_as_its_nodes_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Who rebuilds a lost journal need not guess what an attempt cost: the next controller tells
    what the one before had no time, or no store, to tell."""
    world = on_a_cloud(tmp_path, fates={1: JobFate(how="notice", at_s=9)}, total_steps=100)
    real = Supervisor._publish

    def broken(self: Supervisor, key: str, body: dict[str, Any] | None) -> StoreError | None:
        if key != keys.end(1):
            return real(self, key, body)
        if how == "dies":
            raise SimulatedCrash
        return StoreUnavailable("it has no minute for this")

    with monkeypatch.context() as patch, suppress(SimulatedCrash):
        patch.setattr(Supervisor, "_publish", broken)
        while Kind.RELEASED.value not in world.kinds():
            world.run_until(5.0)
    assert world.record().settled is None
    assert world.store.head(keys.end(1)) is None
    assert (Kind.RELEASED.value in world.kinds()) == (how == "store fails")

    record = world.run()

    end = record.attempts[0].end
    assert end is not None
    published = json.loads(world.store.get(keys.end(1)))
    assert (published["gone_at"], published["reason"]) == (end.gone_at, end.reason.value)
    check_books(world)


@pytest.mark.parametrize("budget_usd", [0.05, 0.06, 0.08, 0.1])
def test_nodes_that_go_are_paid_from_the_budget(tmp_path: Path, budget_usd: float) -> None:
    """What two clusters cost at once is never more than the budget leaves."""
    fates = {1: JobFate(how="notice", at_s=9), 2: JobFate(how="notice", at_s=9)}
    world = on_a_cloud(tmp_path, budget_usd=budget_usd, fates=fates)
    world.run()
    check_books(world, budget_usd=budget_usd)


def test_a_stop_while_old_nodes_go_waits_for_them(tmp_path: Path) -> None:
    """What goes is paid all the while; the run is stopped once nothing of it costs money."""
    world = on_a_cloud(tmp_path, fates={1: JobFate(how="notice", at_s=9)})
    record = world.run_until(5.0)
    while not record.leaving:
        record = world.run_until(0.5)
    record = world.run_until(10.0)
    assert record.leaving
    assert world.spent_usd() == pytest.approx(world.launcher.billed_usd(), rel=1e-6)
    world.write(Kind.USER_DOWN)
    record = world.run()
    assert record.settled is not None
    assert record.settled.state is RunState.STOPPED
    check_books(world)
