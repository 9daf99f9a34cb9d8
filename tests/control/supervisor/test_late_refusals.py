"""Clouds that take a launch, and say half a minute later that there are no nodes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from spotguard.control.handover.adopt import Rebuild
from spotguard.control.journal.alert_rules import due
from spotguard.control.journal.fold import read_record
from spotguard.control.journal.journal import Journal
from spotguard.control.journal.nodes.lost_launch import (
    KEPT_LOST_LAUNCHES,
    LostLaunch,
    with_lost,
)
from spotguard.control.journal.record import Kind, Limits
from spotguard.control.status.history_words import history_lines
from spotguard.control.status.make_view import run_view
from spotguard.control.supervisor.actions import BackOff, GiveUp, Gone, Settle
from spotguard.control.supervisor.next_nodes import NoOffers, look_after_ahead, next_launch
from spotguard.control.supervisor.policy import Policy
from spotguard.errors import EnvironmentFailure, MissingExtra, NoCapacity, SpecError
from spotguard.events.states import EndReason, Market, RunState
from spotguard.launch.base import ClusterState, ClusterView, Unreachable
from spotguard.testing.job import JobFate
from spotguard.testing.launcher import FAKE_OFFER, FakeLauncher
from tests.control.controller.test_crashes import Saboteur, repaired, run_with
from tests.control.journal.test_snapshot import created
from tests.control.made import intended, launched, made
from tests.control.world import World

if TYPE_CHECKING:
    from pathlib import Path

    from spotguard.control.journal.record import RunRecord
    from spotguard.errors import SpotguardError
    from spotguard.launch.base import LaunchRequest, Offer

OTHER = replace(FAKE_OFFER, zone="here-b")


def late(folder: Path) -> World:
    """Return a run of which the first two launches come to nothing."""
    world = World(folder, limits=Limits(nodes_min=1, nodes_max=3))
    world.launcher.refuse_late("none left", times=2)
    return world


def check_books(world: World) -> None:
    """No name was used twice, nothing is left, and refusals cost nothing."""
    assert len(set(world.launcher.started)) == len(world.launcher.started)
    assert world.launcher.living() == []
    assert world.spent_usd() == pytest.approx(world.launcher.billed_usd())


def test_a_late_refusal_leads_to_the_next_rung_under_another_name(tmp_path: Path) -> None:
    """3, then 2, then 1 node: one attempt in the end, of which only what was there is billed."""
    world = late(tmp_path)
    record = world.run()
    assert record.settled is not None
    assert record.settled.state is RunState.FINISHED
    assert [(a.number, a.nodes) for a in record.attempts] == [(1, 1)]
    assert world.launcher.started == ["job-1-1", "job-1-1r1", "job-1-1r2"]
    assert record.refused == 2
    check_books(world)


def test_all_places_are_asked_for_a_number_of_nodes_before_fewer(tmp_path: Path) -> None:
    """A place that refuses late is as tried as one that refuses at once."""
    world = late(tmp_path)
    world.launcher.places = [FAKE_OFFER, OTHER]
    record = world.run()
    assert [(a.nodes, a.offer.zone) for a in record.attempts] == [(2, "here-a")]
    check_books(world)


def test_late_refusals_lengthen_the_waits_and_the_search_goes_on(tmp_path: Path) -> None:
    """What was tried, and since when, is not forgotten because a launch had been taken."""
    world = World(tmp_path)
    world.launcher.refuse_late("none left", after_s=1.0, times=100)
    began = world.clock.now()
    record = world.run_until(30.0)
    with world.journal() as journal:
        waits = [e.data["retry_at"] - e.at for e in journal.events() if e.kind == "waiting"]
    assert waits == [1.0, 2.0, 4.0, 8.0, 16.0]
    assert record.waiting_since is not None
    assert record.waiting_since - began < 3.0, "the patience counts from the first refusal"


def test_patience_ends_a_search_that_is_refused_late_each_time(tmp_path: Path) -> None:
    """Launches that are taken and come to nothing cannot keep a run searching for ever."""
    world = World(tmp_path, policy=Policy(capacity_patience_s=60.0))
    world.launcher.refuse_late("none left", after_s=1.0, times=1000)
    record = world.run()
    assert record.settled is not None
    assert (record.settled.state, record.settled.exit_code) == (RunState.PAUSED, 11)
    assert record.attempts == ()
    check_books(world)


def test_a_late_failure_settles_the_run(tmp_path: Path) -> None:
    """What no other place would mend is told, with the launcher's words, at no cost."""
    world = World(tmp_path)
    world.launcher.fail_late("no such image")
    record = world.run()
    assert record.settled is not None
    assert (record.settled.state, record.settled.exit_code) == (RunState.FAILED, 3)
    assert "no such image" in record.settled.detail
    assert [a.end.reason for a in record.attempts if a.end] == [EndReason.LAUNCH_FAILED]
    assert world.spent_usd() == 0.0
    check_books(world)


def test_what_no_wait_will_mend_ends_the_run_with_its_cause(tmp_path: Path) -> None:
    """Every place and number of nodes is asked once, and nothing is waited for."""
    world = World(tmp_path, limits=Limits(nodes_min=1, nodes_max=2))
    world.launcher.refuse_late("AccessDenied", times=100, lasting=True)
    record = world.run()
    assert record.settled is not None
    assert (record.settled.state, record.settled.exit_code) == (RunState.FAILED, 3)
    assert record.settled.detail == "the launch failed: AccessDenied"
    assert len(world.launcher.started) == 2
    assert "waiting" not in world.kinds()
    assert world.spent_usd() == 0.0


@pytest.mark.parametrize(
    ("refusal", "state"),
    [("MaxSpotInstanceCountExceeded", RunState.FINISHED), ("AccessDenied", RunState.FAILED)],
)
def test_a_quota_of_spot_ends_no_run_that_will_buy_on_demand(
    tmp_path: Path, refusal: str, state: RunState
) -> None:
    """On-demand machines have a quota of their own; a right is missing there, too."""
    on_demand = replace(FAKE_OFFER, market=Market.ON_DEMAND)
    world = World(
        tmp_path,
        total_steps=30,
        launcher={"offers": [FAKE_OFFER, on_demand]},
        policy=Policy(market=Market.SPOT, on_demand_after_s=500.0),
        spec={"infra": "aws", "on_demand": "fallback-after 500s"},
    )
    full = state is RunState.FINISHED
    world.launcher.refuse_late(refusal, times=12, lasting=True, quota_full=full)
    begun_at = world.clock.now()
    done = world.run()
    assert done.settled is not None
    assert done.settled.state is state
    if full:
        waited_s = done.attempts[0].intended_at - begun_at
        assert waited_s > world.policy.quota_patience_s, "the rule has a patience of its own"


def test_one_place_without_capacity_is_waited_for_whatever_the_others_lack(tmp_path: Path) -> None:
    """The run goes on as soon as it has some."""
    world = World(tmp_path, total_steps=30, launcher={"offers": [FAKE_OFFER, OTHER]})
    world.launcher.refuse_late("none left").refuse_late("AccessDenied", lasting=True)
    done = world.run()
    assert done.settled is not None
    assert done.settled.state is RunState.FINISHED
    assert world.kinds().count("waiting") == 1


def test_what_worked_before_is_asked_for_again_before_it_ends_a_run(tmp_path: Path) -> None:
    """A name service that is away for a moment does not end a run of days; what stays away does."""
    lost = {1: JobFate(how="lose", at_s=10)}
    world = World(tmp_path, total_steps=300, fates=lost)
    world.run_until(8.0)
    world.launcher.refuse_late("AccessDenied", after_s=1.0, times=2, lasting=True)
    assert world.run_until(60.0).attempts[-1].started_at is not None

    (tmp_path / "stuck").mkdir()
    stuck = World(tmp_path / "stuck", total_steps=300, fates=lost)
    stuck.run_until(8.0)
    stuck.launcher.refuse_late("AccessDenied", after_s=1.0, times=1000, lasting=True)
    record = stuck.run()
    assert record.settled is not None
    assert (record.settled.state, record.settled.exit_code) == (RunState.FAILED, 3)
    assert stuck.kinds().count("waiting") == 3


def test_a_launch_that_you_stop_before_it_is_refused(tmp_path: Path) -> None:
    """Stopped while the nodes are looked for: nothing is launched after that."""
    world = late(tmp_path)
    world.run_until(1.0)
    world.write(Kind.USER_STOP)
    record = world.run()
    assert record.settled is not None
    assert record.settled.state is RunState.STOPPED
    assert world.launcher.started == ["job-1-1"]
    check_books(world)


def count_acts(folder: Path) -> int:
    """Return how many acts the undisturbed controller does."""
    saboteur = Saboteur()
    folder.mkdir()
    assert run_with(late(folder), saboteur)
    return saboteur.acts


@pytest.mark.slow
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_controller_killed_anywhere_finds_the_refusal(tmp_path: Path, after: bool) -> None:
    """Killed before or after each of its acts: nothing is launched twice, no rung left out."""
    for nth in range(1, count_acts(tmp_path / "count") + 1):
        world, record = repaired(late, tmp_path / str(nth), Saboteur(nth=nth, after=after))
        assert record.settled is not None, nth
        assert record.settled.state is RunState.FINISHED, nth
        assert [a.nodes for a in record.attempts] == [1], nth
        assert len(set(world.launcher.started)) == len(world.launcher.started) == 3, nth
        assert world.launcher.living() == [], nth


class Mumbling:
    """A launcher whose answer to a launch is lost on the way, the first two times."""

    def __init__(self, world: World, *, took_it: bool) -> None:
        self._inner = world.launcher
        self._took_it = took_it
        self._left = 2

    def launch(self, request: LaunchRequest) -> None:
        """Launch or not, and then say that nobody answered."""
        if self._took_it or not self._left:
            self._inner.launch(request)
        if self._left:
            self._left -= 1
            raise Unreachable("no answer")

    def __getattr__(self, name: str) -> object:
        """Return what the launcher itself has."""
        return getattr(self._inner, name)


@pytest.mark.parametrize("took_it", [False, True])
def test_a_launch_without_an_answer_is_asked_for_again(tmp_path: Path, took_it: bool) -> None:
    """It neither counts as launched nor as failed, and never starts two clusters."""
    world = World(tmp_path)
    with world.journal() as journal:
        record = world.supervisor(journal, launcher=Mumbling(world, took_it=took_it)).run()
    assert record.settled is not None
    assert record.settled.state is RunState.FINISHED
    assert [a.number for a in record.attempts] == [1]
    assert world.launcher.started == ["job-1-1"]
    assert Kind.LAUNCH_FAILED.value not in world.kinds()


def test_nodes_of_a_launch_that_came_to_nothing_are_paid(tmp_path: Path) -> None:
    """AWS bills a node once it runs, also if SkyPilot gives the launch up at its tags."""
    world = World(tmp_path, limits=Limits(nodes_min=1, nodes_max=2))
    world.launcher.refuse_late("RequestLimitExceeded (CreateTags)", after_s=177.0, nodes_ran=True)
    record = world.run()
    assert record.settled is not None
    assert record.settled.state is RunState.FINISHED
    check_books(world)
    [lost] = record.lost_launches
    assert lost.paid_s == pytest.approx(177.0, abs=1.0)


def test_a_failed_launch_whose_nodes_ran_is_paid(tmp_path: Path) -> None:
    """The run ends by it, and its bill is the cloud's."""
    world = World(tmp_path)
    world.launcher.fail_late("no SSH to the nodes", after_s=90.0, nodes_ran=True)
    record = world.run()
    assert record.settled is not None
    assert record.settled.state is RunState.FAILED
    assert world.launcher.billed_usd() > 0
    check_books(world)


def test_nodes_that_are_taken_in_their_set_up_are_followed_by_others(tmp_path: Path) -> None:
    """Spot machines go in these minutes, too: the run goes on, and what ran is paid."""
    world = World(tmp_path)
    world.launcher.lose_in_set_up("no SSH to the nodes", times=2)
    record = world.run()
    assert record.settled is not None
    assert record.settled.state is RunState.FINISHED
    ends = [attempt.end for attempt in record.attempts if attempt.end]
    lost, finished = EndReason.NODE_LOST, EndReason.FINISHED
    assert [end.reason for end in ends] == [lost, lost, finished]
    assert "no SSH to the nodes" in ends[0].detail
    check_books(world)


def test_a_set_up_that_never_succeeds_is_given_up(tmp_path: Path) -> None:
    """An image that cannot be set up would eat a budget, node by node."""
    world = World(tmp_path)
    world.launcher.lose_in_set_up("Failed to start ray", times=100)
    record = world.run()
    assert record.settled is not None
    assert record.settled.state is RunState.PAUSED
    assert len(world.launcher.started) == Policy().barren_attempts
    check_books(world)


def test_a_budget_ends_launches_that_come_to_nothing_and_cost_money(tmp_path: Path) -> None:
    """Hard means hard: each try is paid, and none is made that the rest cannot pay."""
    patient = Policy(capacity_patience_s=1e6)
    world = World(tmp_path, limits=Limits(budget_usd=1.0), policy=patient, tick_s=5.0)
    world.launcher.refuse_late("gave up", after_s=190.0, times=1000, nodes_ran=True)
    record = world.run()
    assert record.settled is not None
    assert record.settled.state is RunState.PAUSED
    assert 0.5 < world.launcher.billed_usd() <= 1.0
    check_books(world)


def test_many_lost_launches_are_added_up(tmp_path: Path) -> None:
    """A record must not grow with each of ten thousand tries; the sum stays."""
    lost: tuple[LostLaunch, ...] = ()
    for n in range(500):
        lost = with_lost(lost, LostLaunch(at=float(n), paid_s=2.0, usd=0.25))
    assert len(lost) == KEPT_LOST_LAUNCHES
    assert sum(each.paid_s for each in lost) == 1000.0
    assert sum(each.usd or 0.0 for each in lost) == 125.0
    unknown = with_lost(lost, LostLaunch(at=1e3, paid_s=1.0, usd=None))
    for n in range(50):
        unknown = with_lost(unknown, LostLaunch(at=2e3 + n, paid_s=1.0, usd=0.0))
    assert unknown[0].usd is None, "unknown is never taken for nothing"


def test_who_adopts_the_run_knows_what_lost_launches_cost(tmp_path: Path) -> None:
    """The store says it with the next launch; a budget goes on from the same sum."""
    world = World(tmp_path, limits=Limits(nodes_min=1, nodes_max=2))
    world.launcher.refuse_late("gave up", after_s=20.0, times=2, nodes_ran=True)
    check_adopted(world, tmp_path, world.run())


def test_who_adopts_a_run_that_waits_for_nodes_knows_what_they_cost(tmp_path: Path) -> None:
    """The next launch, which would tell it, may be hours away: the refused one tells it, too."""
    policy = Policy(capacity_backoff_s=3600.0)
    world = World(tmp_path, limits=Limits(nodes_min=1, nodes_max=2), policy=policy)
    world.launcher.refuse_late("gave up", after_s=20.0, times=2, nodes_ran=True)
    world.launcher.refuse_late("gave up", after_s=1.0, times=100)
    record = world.run_until(300.0)
    assert record.attempts == ()
    check_adopted(world, tmp_path, record)


def check_adopted(world: World, folder: Path, record: RunRecord) -> None:
    """Who rebuilds the journal sees the same attempts and lost launches, of which are two."""
    with Journal.create(folder / "adopted.db") as journal:
        journal.append(Kind.CREATED.value, at=0.0, data=created())
        rebuild = Rebuild(journal, world.launcher, record.run_id)
        rebuild.attempts(world.store)
        told = {"lost_launches": rebuild.lost_launches}
        journal.append(Kind.ADOPTED.value, at=world.clock.now(), data=told)
        adopted = read_record(journal)
    assert adopted.lost_launches == record.lost_launches
    assert len(record.lost_launches) == 2
    assert [each.number for each in adopted.attempts] == [each.number for each in record.attempts]
    assert adopted.next_number == record.next_number


class Unlisted(FakeLauncher):
    """Cannot say what places there are, for a while."""

    problem: SpotguardError
    times = 0

    def offers(self) -> list[Offer]:
        """Return the scripted places, once it can."""
        if self.times > 0:
            self.times -= 1
            raise self.problem
        return super().offers()


def unlisted(folder: Path, problem: SpotguardError, times: int) -> World:
    """Return a run of which the places cannot be looked up so many times."""
    world = World(folder)
    launcher = Unlisted(world.clock, world.job)
    launcher.problem, launcher.times = problem, times
    world.launcher = launcher
    return world


UNREADABLE = EnvironmentFailure("SkyPilot's prices can be neither read nor fetched")


def test_places_that_cannot_be_looked_up_are_not_said_to_have_no_nodes(tmp_path: Path) -> None:
    """Status, history and the alert on a long wait say what is wrong until it is mended."""
    world = unlisted(tmp_path, UNREADABLE, 3)
    record, now = world.run_until(2.0), world.clock.now()
    detail = run_view(record, live=None, now=now, controller_alive=True, store_url="").state_detail
    assert detail.startswith(f"where nodes are to be had cannot be looked up ({UNREADABLE})")
    assert "no place" not in detail
    patient = replace(record, spec={**record.spec, "notify_on": ["waiting 1s"]})
    assert [UNREADABLE.message in each.text for each in due(patient, now)] == [True]
    with world.journal() as journal:
        texts = [line.text for line in history_lines(journal.read())]
    assert any("cannot be looked up" in text and UNREADABLE.message in text for text in texts)
    record = world.run()
    assert record.settled is not None
    assert record.settled.state is RunState.FINISHED


def test_a_refusal_after_that_is_told_as_one() -> None:
    """The places are known again, and the first of many has nothing."""
    waiting = ("waiting", 1.0, None, {"retry_at": 2.0, "problem": UNREADABLE.message})
    refused = ("no_capacity", 4.0, 1, {"nodes": 2, "place": "here-a", "problem": "none left"})
    assert made(waiting).offers_problem == UNREADABLE.message
    record = made(waiting, intended(3.0), refused)
    assert (record.offers_problem, record.refusal) == ("", "none left")


def test_who_waits_in_vain_hears_that_nobody_was_asked(tmp_path: Path) -> None:
    """It pauses as a problem of this machine, not as a want of capacity."""
    record = unlisted(tmp_path, UNREADABLE, 10_000).run()
    assert record.settled is not None
    assert (record.settled.state, record.settled.exit_code) == (RunState.PAUSED, 3)
    assert UNREADABLE.message in record.settled.detail


def test_one_failed_look_up_does_not_rename_a_day_without_nodes() -> None:
    """The next one tells, and look-ups have a patience of their own."""
    policy = Policy(capacity_patience_s=60.0)
    refused = ("no_capacity", 2.0, 1, {"nodes": 1, "place": "here-a", "problem": "none left"})
    short = made(intended(1.0), refused, ("waiting", 2.0, None, {"retry_at": 3.0}))
    failed = NoOffers(problem=UNREADABLE.message, lasting=False)
    assert isinstance(next_launch(short, (), 100.0, policy, no_offers=failed), BackOff)
    settled = next_launch(short, (), 100.0, policy)
    assert isinstance(settled, Settle)
    assert settled.exit_code == NoCapacity.exit_code

    fails = ("waiting", 100.0, None, {"retry_at": 101.0, "problem": UNREADABLE.message})
    again = ("waiting", 130.0, None, {"retry_at": 131.0, "problem": UNREADABLE.message})
    record = made(intended(1.0), refused, fails, again)
    assert isinstance(next_launch(record, (), 159.0, policy, no_offers=failed), BackOff)
    settled = next_launch(record, (), 161.0, policy, no_offers=failed)
    assert isinstance(settled, Settle)
    assert settled.exit_code == EnvironmentFailure.exit_code


@pytest.mark.parametrize(
    "problem", [SpecError("script", "/job.py is not there"), MissingExtra("SkyPilot is missing")]
)
def test_what_no_wait_mends_fails_the_run_at_the_second_look(
    tmp_path: Path, problem: SpotguardError
) -> None:
    """As the same problem does when it comes up in the launch."""
    world = unlisted(tmp_path, problem, 10_000)
    begun_at = world.clock.now()
    record = world.run()
    assert record.settled is not None
    assert (record.settled.state, record.settled.exit_code) == (RunState.FAILED, 3)
    assert record.settled.detail == f"the launch failed: {problem.message}"
    assert world.clock.now() - begun_at <= 2 * world.policy.capacity_backoff_s


@pytest.mark.parametrize(
    "problem", [SpecError("script", "/job.py is not there"), MissingExtra("SkyPilot is missing")]
)
def test_a_file_that_is_gone_for_a_moment_ends_no_run(
    tmp_path: Path, problem: SpotguardError
) -> None:
    """It is being saved, say, or a package is renewed, while the run waits."""
    record = unlisted(tmp_path, problem, 1).run()
    assert record.settled is not None
    assert record.settled.state is RunState.FINISHED


@pytest.mark.parametrize("how", ["refused", "failed", "ahead", "gone", "slept"])
@pytest.mark.parametrize("books", [True, False])
def test_no_time_that_nobody_saw_is_billed_as_if_nodes_had_run(
    tmp_path: Path, how: str, books: bool
) -> None:
    """Nodes went after seconds, and the next controller looks hours later.

    What the launcher's books say counts. Without books the sum that is known and the highest that
    it can be are told; the guard that was set at the launch bounds it, and the budget holds.
    """
    budget_usd = 0.65
    world = World(
        tmp_path,
        total_steps=60,
        limits=Limits(budget_usd=budget_usd),
        policy=Policy(capacity_patience_s=86_400.0),
    )
    world.launcher.books = books
    if how == "gone":
        world.job.fates = {1: JobFate(how="notice", at_s=9)}
    elif how == "failed":
        world.launcher.fail_late("its set-up broke", nodes_ran=True)
    elif how != "ahead":
        world.launcher.refuse_late("none left", nodes_ran=True)
    if how == "ahead":
        intent = {**intended(5.0, attempt=2)[3], "ahead": True}
        record = made(*launched(0.0), ("launch_intended", 5.0, 2, intent), ("launched", 5.0, 2))
        gone = ClusterView(state=ClusterState.GONE, gone_at=9.0 if books else None)
        action = look_after_ahead(record, gone, 5_002.0, Policy(), at_rest=False)
        assert isinstance(action, GiveUp)
        assert action.gone == (Gone(9.0) if books else Gone(5.0, 5_002.0))
        return
    world.run_until(2.0 if how != "gone" else 8.0)
    if how == "slept":  # the same controller, on a machine that was asleep
        with world.journal() as journal:
            supervisor = world.supervisor(journal)
            supervisor.tick()
            world.clock.advance(5_000.0)
            supervisor.tick()
    else:
        world.clock.advance(5_000.0)
    record = world.run()
    now = world.clock.now()
    view = run_view(record, live=None, now=now, controller_alive=True, store_url="")
    assert view.spent_usd is not None
    assert view.spent_usd <= world.launcher.billed_usd() + 1e-9 <= budget_usd
    assert record.settled is not None
    if books or how == "gone":  # the fake cloud always knows when nodes that came went
        assert view.spent_usd == pytest.approx(world.launcher.billed_usd())
        assert view.spent_most_usd is None
        assert record.settled.state is (RunState.FAILED if how == "failed" else RunState.FINISHED)
        return
    assert view.spent_most_usd is not None
    assert view.spent_usd < view.spent_most_usd <= budget_usd + 1e-9
    assert any("nobody saw when some nodes went" in warning for warning in view.warnings)
    if how != "failed":
        assert "between $" in record.settled.detail
        assert "resume --budget" in record.settled.detail
    with world.journal() as journal:
        texts = [line.text for line in history_lines(journal.read())]
    assert any("nobody saw" in text for text in texts)
