"""Whole controllers, in memory, whose runs share one sum: who waits, who says so, who goes on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest

from spotguard.control.journal.fold import limits_to_json
from spotguard.control.journal.record import Kind, Limits
from spotguard.control.journal.team.books import TeamBooks
from spotguard.control.journal.team.budget import DEAD_S, TeamBudget, Word
from spotguard.control.journal.team.gate import (
    RELEASE_PATIENCE_S,
    RETRY_S,
    release_at_rest,
)
from spotguard.control.journal.team.stored_books import read_books, to_bytes
from spotguard.control.status.history_words import history_lines
from spotguard.control.status.make_view import run_summary, run_view
from spotguard.events import keys
from spotguard.events.states import RunState
from spotguard.spec.model import TeamCap
from spotguard.testing.clock import FakeClock
from spotguard.testing.job import JobFate
from spotguard.testing.launcher import FAKE_OFFER
from spotguard.testing.stores import FaultyStore, MemoryStore, SimulatedCrash
from tests.control.world import World

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from spotguard.control.journal.journal import Journal
    from spotguard.control.journal.record import RunRecord
    from spotguard.control.supervisor.supervisor import Supervisor
    from spotguard.storage.base import ObjectStore


@dataclass
class Member:
    """One run of the team and its controller."""

    world: World
    journal: Journal
    supervisor: Supervisor

    @property
    def record(self) -> RunRecord:
        """What its journal says."""
        return self.supervisor.record

    @property
    def state(self) -> RunState:
        """How it stands."""
        return run_summary(self.record, now=self.world.clock.now()).state

    def told(self) -> list[str]:
        """What `history` tells."""
        return [line.text for line in history_lines(self.journal.events())]


class Team:
    """Runs of one store, whose controllers look one after the other."""

    def __init__(self, folder: Path, cap_usd: float) -> None:
        self.folder = folder
        self.root = MemoryStore()
        self.cap = TeamCap(cap_usd)
        self.members: list[Member] = []

    def add(
        self,
        *,
        budget_usd: float | None = 1.0,
        priority: int = 0,
        root: ObjectStore | None = None,
        **world: Any,
    ) -> Member:
        """Begin another run."""
        name = f"run-{len(self.members)}"
        folder = self.folder / name
        folder.mkdir()
        limits = Limits(budget_usd=budget_usd)
        made = World(folder, limits=limits, **world)
        if self.members:
            behind_s = self.members[0].world.clock.now() - made.clock.now()
            made.clock.advance(behind_s)
        team = TeamBudget(root or self.root, made.clock, name, cap=self.cap, priority=priority)
        journal = made.journal()
        member = Member(made, journal, made.supervisor(journal, budgets=[team]))
        self.members.append(member)
        return member

    def go_on(self, seconds: float, *, without: tuple[Member, ...] = ()) -> None:
        """Let time pass for all, looking every half a second."""
        for _ in range(int(seconds * 2)):
            for member in self.members:
                if member.record.settled is None and member not in without:
                    member.supervisor.tick()
                member.world.clock.sleep(0.5)

    def books(self) -> TeamBooks:
        """What stands in the store."""
        found = read_books(self.root)
        assert found is not None
        return found.books


@pytest.fixture
def team(tmp_path: Path) -> Iterator[Team]:
    """A team that may spend a dollar and a half."""
    made = Team(tmp_path, 1.5)
    yield made
    for member in made.members:
        member.journal.close()


def test_a_run_that_does_not_fit_waits_says_so_and_goes_on_by_itself(team: Team) -> None:
    """`status`, `runs` and `history` give the sum, the month, the holder; the books end exact."""
    first, second = team.add(), team.add()
    team.go_on(5)
    assert (first.state, second.state) == (RunState.RUNNING, RunState.WAITING)
    why = second.record.queued
    assert why == (
        "the team's $1.50 for November 2023 are spent or promised: $0.50 are left, and it needs "
        "$1.00 (place 1 of 1 in the queue, promised to run-0)"
    )
    now = second.world.clock.now()
    view = run_view(second.record, live=None, now=now, controller_alive=True, store_url="x")
    assert view.state_detail == f"waits: {why}"
    assert run_summary(second.record, now=now).queued == why
    assert f"waits: {why}" in second.told()
    assert second.world.launcher.started == []
    team.go_on(80)
    assert [each.state for each in team.members] == [RunState.FINISHED] * 2
    assert second.told().count(f"waits: {why}") == 1, "it is told once, however often it asks"
    spent = sum(member.world.launcher.billed_usd() for member in team.members)
    assert team.books().at_rest_usd == pytest.approx(spent)
    assert team.books().stakes == {}


def test_the_queue_is_served_by_priority_and_then_by_who_asked_first(team: Team) -> None:
    """The later one of a higher priority goes first; of equals, the earlier one."""
    team.add()
    team.go_on(2)
    slow, later, urgent = team.add(), team.add(), team.add(priority=5)
    team.go_on(3)
    assert team.books().queue == ["run-3", "run-1", "run-2"]
    assert "place 1 of 3" in urgent.record.queued or "place 1 of 1" in urgent.record.queued
    team.go_on(150)
    begun = [each.record.attempts[0].intended_at for each in (urgent, slow, later)]
    assert begun == sorted(begun)
    assert {each.state for each in team.members} == {RunState.FINISHED}


def test_an_interrupted_run_keeps_what_it_was_promised(team: Team) -> None:
    """Its next nodes are paid before a run that waits, however urgent that is."""
    first = team.add(fates={1: JobFate(how="lose", at_s=9)})
    team.go_on(2)
    second = team.add(priority=100)
    team.go_on(60)
    assert len(first.record.attempts) == 2
    assert [first.state] == [RunState.FINISHED]
    assert second.record.attempts[0].intended_at >= first.record.attempts[-1].intended_at


@pytest.mark.parametrize("operation", [2, 3])
def test_a_crash_between_promise_and_launch_gives_the_money_back(
    team: Team, operation: int
) -> None:
    """The controller dies with the promise written and nothing launched: others have it soon."""
    faulty = FaultyStore(team.root)
    first = team.add(root=faulty)
    faulty.crash_at(operation, after=operation == 2)
    with pytest.raises(SimulatedCrash):
        team.go_on(1)
    assert team.books().promised_usd == 1.0
    assert first.world.launcher.started == []
    second = team.add()
    team.go_on(DEAD_S - RETRY_S, without=(first,))
    assert [second.state] == [RunState.WAITING]
    team.go_on(4 * RETRY_S + 40, without=(first,))
    assert [second.state] == [RunState.FINISHED]


def test_who_slept_between_promise_and_launch_launches_nothing_by_what_others_have() -> None:
    """What it was promised was given to another one: its word before the launch says so."""
    store, cap = MemoryStore(), TeamCap(1.5)
    slow, quick = FakeClock(), FakeClock()
    first = TeamBudget(store, slow, "run-0", cap=cap)
    second = TeamBudget(store, quick, "run-1", cap=cap)
    word = Word(spent=0.0, most=1.0, living=False)
    assert not first.ask(word)
    for _ in range(int(DEAD_S / RETRY_S) + 1):
        assert second.ask(word)
        quick.advance(RETRY_S)
    assert not second.ask(word)
    assert "was given back before the launch" in first.launch(word)
    assert "promised to run-1" in first.ask(word)
    assert not second.launch(word)


def test_a_store_that_cannot_be_reached_pays_nothing(team: Team) -> None:
    """The run waits and says why, and goes on once the store is back."""
    faulty = FaultyStore(team.root)
    first = team.add(root=faulty)
    faulty.fail("put", times=None)
    team.go_on(3)
    assert [first.state] == [RunState.WAITING]
    assert first.record.queued.startswith("the team's ledger cannot be reached: ")
    assert first.world.launcher.started == []
    faulty.heal()
    team.go_on(RETRY_S + 30)
    assert [first.state] == [RunState.FINISHED]


def test_an_end_that_the_store_does_not_take_is_told(team: Team) -> None:
    """The run comes to rest all the same, and says that its promise is not given back."""
    faulty = FaultyStore(team.root)
    first = team.add(root=faulty)
    team.go_on(5)
    faulty.fail("put", times=None)
    team.go_on(30)
    assert RunState.FINISHED not in [first.state]
    team.go_on(RELEASE_PATIENCE_S + 30)
    assert first.record.settled is not None
    detail = first.record.settled.detail
    assert "is not given back: spotguard team " in detail
    assert "--give-back job-1 (the team's ledger cannot be reached" in detail


def test_books_that_are_damaged_pay_nothing(team: Team) -> None:
    """The run waits and names the file."""
    raw = bytearray(to_bytes(TeamBooks(cap=team.cap)))
    raw[5] ^= 1
    team.root.put(keys.TEAM, bytes(raw))
    first = team.add()
    team.go_on(3)
    assert [first.state] == [RunState.WAITING]
    assert f"see {keys.TEAM} in {team.root.url}" in first.record.queued


def test_a_run_without_a_budget_of_its_own_waits_and_says_the_way_out(team: Team) -> None:
    """It could spend all, so it is launched only once it has one."""
    first = team.add(budget_usd=None)
    team.go_on(3)
    assert [first.state] == [RunState.WAITING]
    assert "it has no budget of its own; stop it, then: spotguard resume run-0" in (
        first.record.queued
    )


def test_who_waits_can_be_stopped_and_leaves_the_queue(team: Team) -> None:
    """Its place is not kept, and nothing was bought."""
    team.add()
    second = team.add()
    team.go_on(3)
    second.world.write(Kind.USER_STOP)
    team.go_on(1)
    assert [second.state] == [RunState.STOPPED]
    assert team.books().queue == []
    assert "run-1" not in team.books().stakes


def test_a_run_of_a_team_without_a_budget_asks_nobody(team: Team) -> None:
    """No books are begun, and a store that fails holds up nothing."""
    faulty = FaultyStore(team.root)
    team.cap = None  # type: ignore[assignment]
    first = team.add(budget_usd=None, root=faulty)
    faulty.fail("head", times=None)
    team.go_on(40)
    assert [first.state] == [RunState.FINISHED]
    assert read_books(team.root) is None


def test_nodes_that_live_when_the_team_gets_its_budget_are_counted(team: Team) -> None:
    """What they may cost is not there for others."""
    cap, team.cap = team.cap, None  # type: ignore[assignment]
    first = team.add(total_steps=1000)
    team.go_on(5)
    team.root.put(keys.TEAM, to_bytes(TeamBooks(cap=cap)))
    team.go_on(301)
    assert team.books().promised_usd == pytest.approx(1.0, abs=0.2)
    second = team.add()
    team.go_on(3)
    assert (first.state, second.state) == (RunState.RUNNING, RunState.WAITING)


def test_nodes_without_a_budget_of_their_own_are_counted_from_then_on(team: Team) -> None:
    """What they may cost is unknown, and what they do cost is not there for others."""
    cap, team.cap = team.cap, None  # type: ignore[assignment]
    first = team.add(budget_usd=None, total_steps=1000)
    team.go_on(5)
    team.root.put(keys.TEAM, to_bytes(TeamBooks(cap=cap)))
    team.go_on(301)
    before_usd = team.books().spent_usd
    team.go_on(301)
    assert team.books().spent_usd > before_usd
    first.world.write(Kind.USER_STOP)
    team.go_on(120)
    assert first.record.settled is not None
    assert team.books().at_rest_usd > before_usd


def test_nodes_that_somebody_held_for_gone_stand_in_the_books_again(team: Team) -> None:
    """`--give-back` of a run that lives: the next word of its controller says what it may cost."""
    first = team.add(total_steps=10_000)
    team.go_on(5)
    team.root.put(keys.TEAM, to_bytes(team.books().given_back("run-0")))
    team.go_on(301)
    [stake] = team.books().stakes.values()
    assert stake.launched
    assert stake.used_usd == pytest.approx(1.0, abs=0.01)
    assert first.state is RunState.RUNNING


def test_who_waits_neither_decides_nor_writes_all_the_time(
    team: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may wait for weeks: it asks every 15 s, and shows every minute that it lives."""
    team.add(total_steps=10_000)
    team.go_on(2)
    second = team.add()
    team.go_on(2)
    beats, looks = set(), 0
    look = second.supervisor._lookout.look

    def counted(**more: Any) -> Any:
        nonlocal looks
        looks += 1
        return look(**more)

    monkeypatch.setattr(second.supervisor._lookout, "look", counted)
    for _ in range(300):
        team.go_on(1)
        beats.add(team.books().stakes["run-1"].beat)
    assert second.state is RunState.WAITING
    assert looks <= 300 / RETRY_S + 1
    assert 4 <= len(beats) <= 7


def test_a_run_that_comes_to_rest_elsewhere_gives_its_promise_back(team: Team) -> None:
    """Its machine died, its nodes are gone, and another machine has adopted it."""
    first = team.add(total_steps=10_000)
    team.go_on(5)
    first.world.write(Kind.SETTLED, {"state": "paused", "detail": "adopted", "exit_code": 75})
    assert team.books().promised_usd > 0.9
    record = replace(first.world.record(), run_id="run-0")
    assert not release_at_rest(record, team.root, first.world.clock)
    assert team.books().stakes == {}
    assert team.books().at_rest_usd > 0
    faulty = FaultyStore(team.root)
    faulty.fail("get", times=None)
    assert not release_at_rest(record, faulty, first.world.clock), "no books are known of there"


def test_nodes_ahead_that_the_team_does_not_pay_hold_up_nothing(team: Team) -> None:
    """The ledger is away when a notice comes: the attempt that trains is looked after as ever."""
    faulty = FaultyStore(team.root)
    on_aws = replace(FAKE_OFFER, infra="aws")
    first = team.add(
        root=faulty,
        fates={1: JobFate(how="grace", at_s=20.0, for_s=30.0)},
        launcher={"offers": (on_aws, replace(on_aws, zone="b")), "teardown_s": 5.0},
        total_steps=60,
        boot_s=12.0,
    )
    team.go_on(18)
    assert first.record.current is not None
    faulty.fail("put", times=None)
    team.go_on(24)
    kinds = [entry.kind for entry in first.journal.events()]
    assert kinds.count(Kind.GIVEN_UP.value) in (1, 2), "it is tried again, and not all the time"
    assert first.record.ahead is None
    assert len(first.world.launcher.started) == 1
    faulty.heal()
    team.go_on(120)
    assert first.state is RunState.FINISHED


def test_a_run_that_is_resumed_as_it_comes_to_rest_gives_its_money_back_again(team: Team) -> None:
    """The same controller goes on with it: what it was promised the second time is not kept."""
    member = team.add(budget_usd=1.0)
    member.world.write(Kind.USER_STOP)
    team.go_on(1.0)
    assert member.record.settled is not None
    member.world.write(Kind.RESUMED, {"limits": limits_to_json(Limits(budget_usd=1.0))})
    member.supervisor.tick()
    assert member.state is not RunState.STOPPED
    team.go_on(3.0)
    assert team.books().promised_usd > 0.5
    team.go_on(120.0)
    assert member.record.settled is not None
    assert member.record.settled.state is RunState.FINISHED
    assert team.books().promised_usd == 0.0
    assert team.books().spent_usd == pytest.approx(member.world.spent_usd())
