"""The next nodes are asked for at a notice, while the ones to be taken still train."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from spotguard.control.handover.adopt import Rebuild
from spotguard.control.journal import cost
from spotguard.control.journal.fold import read_record
from spotguard.control.journal.journal import Journal
from spotguard.control.journal.record import Kind, Limits
from spotguard.control.status.make_view import run_view
from spotguard.control.status.recovery import recoveries
from spotguard.control.supervisor.policy import Policy
from spotguard.events import keys
from spotguard.events.states import EndReason, RunState
from spotguard.launch.base import ClusterState
from spotguard.shared.units import to_iso
from spotguard.testing.job import JobFate
from spotguard.testing.launcher import FAKE_OFFER, FakeLauncher
from tests.control.controller.test_crashes import Saboteur, repaired, run_with
from tests.control.made import intended, launched, made, training
from tests.control.world import RUN_ID, World

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from spotguard.control.journal.record import RunRecord
    from spotguard.launch.base import Offer

ON_AWS = replace(FAKE_OFFER, infra="aws")
OTHER_ZONE = replace(ON_AWS, zone="here-b")
POLICY = Policy(capacity_patience_s=60.0, teardown_s=20.0, capacity_backoff_s=5.0)
BOOT_S = 12.0
BEGIN = 1_700_000_000.0


def a_run(
    folder: Path, fates: Mapping[int, JobFate], *, limits: Limits | None = None, **more: Any
) -> World:
    """Return a run of 60 steps on AWS, whose nodes need 12 s until they train."""
    offers = more.pop("offers", (ON_AWS, OTHER_ZONE))
    return World(
        folder,
        limits=limits or Limits(nodes_min=2, nodes_max=2),
        policy=more.pop("policy", POLICY),
        launcher={"offers": offers, "teardown_s": 5.0, **more.pop("launcher", {})},
        total_steps=more.pop("total_steps", 60),
        boot_s=BOOT_S,
        fates=fates,
        **more,
    )


GRACE = JobFate(how="grace", at_s=20.0, for_s=30.0)


def check(world: World, record: RunRecord) -> None:
    """Each step was trained once, in order; no two at once; all that was billed is counted."""
    assert record.settled is not None
    assert record.ahead is None
    steps = [step for _, step in world.job.trained]
    assert steps == sorted(steps)
    attempts = [attempt for attempt, _ in world.job.trained]
    assert attempts == sorted(attempts), "two attempts trained by turns"
    assert len(set(world.launcher.started)) == len(world.launcher.started)
    assert world.launcher.living() == []
    assert world.spent_usd() == pytest.approx(world.launcher.billed_usd(), rel=0.02)
    assert world.spent_usd() >= world.launcher.billed_usd() - 1e-9


def test_the_next_nodes_come_while_the_old_ones_train(tmp_path: Path) -> None:
    """Their start is not waited for: training stands still for a second or two, not for twelve."""
    world = a_run(tmp_path, {1: GRACE})
    record = world.run()
    check(world, record)
    assert record.settled is not None
    assert record.settled.state is RunState.FINISHED
    assert [a.number for a in record.attempts] == [1, 2]
    first, second = record.attempts
    assert first.job_end is not None
    assert second.intended_at < first.job_end.at - 20.0
    assert second.offer == OTHER_ZONE, "the place that takes nodes is asked last"
    assert second.started_at is not None
    assert second.started_at - first.job_end.at < 3.0
    (recovery,) = recoveries(record)
    assert recovery.total_s is None or recovery.total_s < 5.0
    assert recovery.provision_s in (None, 0.0)


def test_a_job_waits_while_the_one_before_it_trains(tmp_path: Path) -> None:
    """Nodes that come early train nothing before those that leave have left."""
    world = a_run(tmp_path, {1: replace(GRACE, for_s=60.0)}, total_steps=100)
    record = world.run_until(60.0)
    assert record.ahead is not None
    assert record.ahead.launched
    assert {attempt for attempt, _ in world.job.trained} == {1}
    now = world.clock.now()
    assert cost.known_spent_usd(record, now) == pytest.approx(world.launcher.billed_usd())
    assert cost.spent_usd(record, now) == cost.known_spent_usd(record, now)
    assert cost.rate_usd_per_h(record) == 4.0
    view = run_view(record, live=None, now=now, controller_alive=True, store_url="")
    assert "the nodes of attempt 2 are started meanwhile" in view.state_detail
    check(world, world.run())


def test_nodes_that_vanish_without_a_word_give_way_all_the_same(tmp_path: Path) -> None:
    """The job that waits is told by the controller."""
    world = a_run(tmp_path, {1: replace(GRACE, how="vanish")})
    record = world.run()
    assert reasons(record) == [EndReason.VANISHED, EndReason.FINISHED]
    assert len(world.launcher.started) == 2
    assert world.launcher.living() == []


def test_a_withdrawn_notice_gives_the_nodes_up_and_they_are_paid(tmp_path: Path) -> None:
    """The run stays where it is, asks no second time, and counts what the others cost."""
    world = a_run(tmp_path, {1: JobFate(how="withdraw", at_s=20.0, for_s=20.0)})
    record = world.run()
    check(world, record)
    assert [a.number for a in record.attempts] == [1]
    assert world.kinds().count(Kind.GIVEN_UP.value) == 1
    assert len(world.launcher.started) == 2
    (lost,) = record.lost_launches
    assert lost.paid_s > 15.0


def test_nodes_that_outlive_their_notice_are_not_paid_twice_for_ever(tmp_path: Path) -> None:
    """A notice that never comes true: the nodes asked for ahead are given up soon after."""
    world = a_run(tmp_path, {1: JobFate(how="deaf", at_s=20.0, for_s=15.0)})
    record = world.run()
    check(world, record)
    assert [a.number for a in record.attempts] == [1]
    (lost,) = record.lost_launches
    assert lost.paid_s < 15.0 + POLICY.teardown_s + 15.0


@pytest.mark.parametrize("wish", [Kind.USER_STOP, Kind.USER_DOWN])
def test_what_you_stop_leaves_nothing(tmp_path: Path, wish: Kind) -> None:
    """Both clusters go, and the run is at rest only then."""
    world = a_run(tmp_path, {1: GRACE})
    assert world.run_until(35.0).ahead is not None
    world.write(wish)
    record = world.run()
    check(world, record)
    assert record.settled is not None
    assert record.settled.state is RunState.STOPPED


def test_a_recommendation_does_not_hide_the_notice_that_follows() -> None:
    """AWS often recommends to leave minutes before it says when it takes a node."""
    lines = (
        *launched(),
        training(),
        ("job_notice", 5.0, 1, {"source": "aws", "action": "rebalance"}),
        ("job_notice", 9.0, 1, {"source": "aws", "deadline_at": to_iso(129.0)}),
        ("job_notice", 10.0, 1, {"source": "aws", "action": "rebalance"}),
    )
    (attempt,) = made(*lines).attempts
    assert attempt.notice is not None
    assert (attempt.notice.at, attempt.notice.deadline_at) == (9.0, 129.0)


def test_a_run_that_will_be_done_by_then_asks_for_nothing(tmp_path: Path) -> None:
    """Five steps are left, and thirty seconds."""
    world = a_run(tmp_path, {1: replace(GRACE, at_s=67.0)})
    record = world.run()
    check(world, record)
    assert world.launcher.started == ["job-1-1"]


def test_a_full_cloud_is_asked_again_after_the_end(tmp_path: Path) -> None:
    """Nothing is to be had at the notice: the attempt trains on, and the search begins at its end.

    A launch that was taken and then refused is forgotten, and the next place asked.
    """
    world = a_run(tmp_path, {1: GRACE})
    world.launcher.capacity = lambda now: 0 if 25 < now - BEGIN < 60 else 9
    record = world.run()
    check(world, record)
    assert reasons(record) == [EndReason.PREEMPTED, EndReason.FINISHED]

    (folder := tmp_path / "late").mkdir()
    other = a_run(folder, {1: GRACE})
    other.run_until(5.0)
    other.launcher.refuse_late("none left", after_s=4.0)
    record = other.run()
    check(other, record)
    assert reasons(record) == [EndReason.PREEMPTED, EndReason.FINISHED]
    assert other.launcher.started == ["job-1-1", "job-1-2", "job-1-2r1"]


def test_a_budget_holds_with_two_clusters_at_once(tmp_path: Path) -> None:
    """Whatever it is, what the cloud bills is never more; with little left nothing comes ahead."""
    asked = []
    for cents in (4, 6, 8, 10, 16):
        limits = Limits(nodes_min=2, nodes_max=2, budget_usd=cents / 100)
        (folder := tmp_path / str(cents)).mkdir()
        world = a_run(folder, {1: GRACE}, limits=limits)
        record = world.run()
        assert record.settled is not None
        assert world.launcher.living() == []
        assert world.launcher.billed_usd() <= cents / 100
        assert world.spent_usd() >= world.launcher.billed_usd() - 1e-9
        asked.append(any(entry for entry in intents(world)))
    assert not asked[0]
    assert asked[-1]


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_controller_killed_anywhere_goes_on(tmp_path: Path, after: bool) -> None:
    """Killed before or after each of its acts: nothing is launched twice, forgotten, or left."""

    def make(folder: Path) -> World:
        return a_run(folder, {1: GRACE}, tick_s=2.0)

    (folder := tmp_path / "count").mkdir()
    saboteur = Saboteur()
    assert run_with(make(folder), saboteur)
    for nth in range(1, saboteur.acts + 1, 6):
        world, record = repaired(make, tmp_path / str(nth), Saboteur(nth=nth, after=after))
        assert record.settled is not None, nth
        assert record.settled.state is RunState.FINISHED, nth
        assert record.ahead is None, nth
        assert world.launcher.living() == [], nth
        assert len(set(world.launcher.started)) == len(world.launcher.started) == 2, nth


def reasons(record: RunRecord) -> list[EndReason]:
    """Return how each attempt ended."""
    return [a.end.reason for a in record.attempts if a.end is not None]


def intents(world: World) -> list[int]:
    """Return the numbers of the attempts whose nodes were asked for ahead."""
    with world.journal() as journal:
        return [
            entry.attempt or 0
            for entry in journal.events()
            if entry.kind == Kind.INTENDED.value and entry.data.get("ahead")
        ]


@pytest.mark.parametrize("wish", [None, Kind.USER_STOP])
def test_who_took_its_turn_while_nobody_controlled_the_run_is_an_attempt(
    tmp_path: Path, wish: Kind | None
) -> None:
    """What it trained counts, and it is asked to save like any other; nothing is bought again."""
    world = a_run(tmp_path, {1: GRACE}, total_steps=60 if wish is None else 1000)
    assert world.run_until(35.0).ahead is not None
    for _ in range(60 if wish is None else 30):
        world.clock.sleep(3.0)
        world.launcher.living()  # which lets the jobs live on
    if wish is not None:
        world.write(wish)
    record = world.run()
    check(world, record)
    assert world.launcher.started == ["job-1-1", "job-1-2"]
    assert [attempt.number for attempt in record.attempts] == [1, 2]
    assert record.attempts[1].saved is True
    assert Kind.GIVEN_UP.value not in world.kinds()


@pytest.mark.slow
@pytest.mark.same_everywhere
def test_a_budget_holds_where_the_notice_is_taken_back(tmp_path: Path) -> None:
    """What the needless nodes cost is taken from the time of those that train on."""
    asked = []
    for cents in range(5, 30, 3):
        limits = Limits(nodes_min=2, nodes_max=2, budget_usd=cents / 100)
        folder = tmp_path / str(cents)
        folder.mkdir()
        fate = JobFate(how="withdraw", at_s=20.0, for_s=20.0)
        world = a_run(folder, {1: fate}, limits=limits, total_steps=5000)
        world.run()
        assert world.launcher.living() == []
        assert world.launcher.billed_usd() <= cents / 100
        asked.append(Kind.GIVEN_UP.value in world.kinds())
    assert any(asked)


def test_a_refusal_of_nodes_asked_ahead_begins_no_wait() -> None:
    """The run trains: days later it must not be paused as one that has waited since then."""
    data = {"nodes": 1, "place": "p", "problem": "none", "late": True}
    intent = {**intended(9.0)[3], "ahead": True}
    lines = (*launched(1.0), training(2.0), ("launch_intended", 9.0, 2, intent))
    record = made(*lines, ("launched", 9.5, 2, {}), ("no_capacity", 12.0, 2, data))
    assert (record.ahead, record.waiting_since) == (None, None)
    assert record.current is not None


def test_who_does_not_want_to_pay_both_asks_after_the_end(tmp_path: Path) -> None:
    """`ask_ahead = false`: nothing is asked for before the notice has come true."""
    world = a_run(tmp_path, {1: GRACE}, spec={"ask_ahead": False})
    record = world.run()
    check(world, record)
    first, second = record.attempts
    assert first.job_end is not None
    assert second.intended_at >= first.job_end.at


class ChargingLauncher(FakeLauncher):
    """A cloud that tells what it charged: a second less for each node than is seen from outside."""

    def charged_node_s(self, cluster: str, offer: Offer, nodes: int) -> float | None:
        """Return the nodes' seconds; unknown while it lives."""
        assert offer.infra == ON_AWS.infra
        view = self.observe(cluster)
        if view.state is not ClusterState.GONE or view.gone_at is None:
            return None
        known = self.clusters[cluster]
        return known.request.nodes * (view.gone_at - known.started_at - 1.0)


@pytest.mark.parametrize("how", ["grace", "withdraw"])
def test_a_cloud_is_believed_what_it_charges(tmp_path: Path, how: str) -> None:
    """Of attempts that ended, those released later, and nodes that were given up."""
    world = a_run(tmp_path, {1: JobFate(how=how, at_s=20.0, for_s=30.0)})
    world.launcher.__class__ = ChargingLauncher
    record = world.run()
    clusters = len(world.launcher.started)
    assert clusters == 2
    less_usd = clusters * 2 * 1.0 * (ON_AWS.price_usd_per_h or 0.0) / 3600.0
    assert world.spent_usd() == pytest.approx(world.launcher.billed_usd() - less_usd, abs=1e-9)
    published = json.loads(world.store.get(keys.end(record.attempts[0].number)))
    end = record.attempts[0].end
    assert end is not None
    assert published["charged_node_s"] == end.charged_node_s
    adopted = rebuilt(world, tmp_path)
    assert [each.end and each.end.charged_node_s for each in adopted.attempts] == [
        each.end and each.end.charged_node_s for each in record.attempts
    ]


def rebuilt(world: World, home: Path) -> RunRecord:
    """Lose the journal, write a new one from the store and return what it says."""
    (home / "journal.db").rename(home / "lost.db")
    with (
        Journal.open(home / "lost.db") as lost,
        Journal.create(home / "journal.db") as journal,
    ):
        created = next(iter(lost.read()))
        journal.append(Kind.CREATED.value, at=created.at, data=created.data)
        rebuild = Rebuild(journal, world.launcher, RUN_ID)
        rebuild.attempts(world.store)
        told = {"lost_launches": rebuild.lost_launches}
        journal.append(Kind.ADOPTED.value, at=world.clock.now(), data=told)
        return read_record(journal)


def test_who_adopts_a_run_with_two_attempts_has_both(tmp_path: Path) -> None:
    """The one that trains goes on, the other waits for its end, and no third one is launched."""
    limits = Limits(nodes_min=2, nodes_max=2, budget_usd=5.0)
    world = a_run(tmp_path, {1: replace(GRACE, for_s=60.0)}, total_steps=100, limits=limits)
    record = world.run_until(60.0)
    assert record.ahead is not None
    adopted = rebuilt(world, tmp_path)
    assert adopted.current is not None
    assert adopted.ahead is not None
    assert (adopted.current.number, adopted.ahead.number) == (1, 2)
    assert record.current is not None
    assert record.current.allotment.budget_stop_at is not None
    for before, after in ((record.current, adopted.current), (record.ahead, adopted.ahead)):
        assert after.allotment == before.allotment, "it may live as long as it might before"
    assert (adopted.current.down, adopted.ahead.down) == (None, None)
    assert adopted.ahead.cluster == record.ahead.cluster
    finished = world.run()
    check(world, finished)
    assert reasons(finished) == [EndReason.PREEMPTED, EndReason.FINISHED]
    assert len(world.launcher.started) == 2


def test_who_adopts_a_run_whose_nodes_are_gone_is_told_what_they_cost(tmp_path: Path) -> None:
    """Those that trained and those that waited, as the cloud charged them, not as was seen."""
    world = a_run(tmp_path, {1: replace(GRACE, for_s=60.0)}, total_steps=100)
    world.launcher.__class__ = ChargingLauncher
    record = world.run_until(60.0)
    assert record.ahead is not None
    for cluster in world.launcher.living():
        world.launcher.down(cluster)
    world.clock.sleep(600.0)
    adopted = rebuilt(world, tmp_path)
    less_usd = 2 * 2 * 1.0 * (ON_AWS.price_usd_per_h or 0.0) / 3600.0
    spent_usd = cost.spent_usd(adopted, world.clock.now())
    assert spent_usd == pytest.approx(world.launcher.billed_usd() - less_usd, abs=1e-9)


def test_who_adopts_after_nodes_were_given_up_sees_one_attempt_and_their_price(
    tmp_path: Path,
) -> None:
    """What nodes that waited have left in the store is no attempt, and hides none that trains."""
    world = a_run(tmp_path, {1: JobFate(how="withdraw", at_s=20.0, for_s=20.0)}, total_steps=200)
    record = world.run_until(80.0)
    assert record.ahead is None
    (lost,) = record.lost_launches
    world.store.put(f"{keys.logs(2)}00000-1700000000000-000000-0001.jsonl.gz", b"they waited")
    adopted = rebuilt(world, tmp_path)
    assert [each.number for each in adopted.attempts] == [1]
    assert adopted.current is not None
    assert adopted.current.down is None
    assert adopted.ahead is None
    assert adopted.lost_launches == (lost,)
    assert adopted.next_number == record.next_number


def test_what_an_earlier_version_gave_up_is_no_attempt_either(tmp_path: Path) -> None:
    """It took away all that the store said of the launch; its nodes' words stayed."""
    world = a_run(tmp_path, {1: JobFate(how="withdraw", at_s=20.0, for_s=20.0)}, total_steps=200)
    record = world.run_until(80.0)
    world.store.delete(keys.launch(2))
    world.store.put(f"{keys.logs(2)}00000-1700000000000-000000-0001.jsonl.gz", b"they waited")
    adopted = rebuilt(world, tmp_path)
    assert [each.number for each in adopted.attempts] == [1]
    assert adopted.current is not None
    assert adopted.current.down is None
    assert adopted.next_number == record.next_number
