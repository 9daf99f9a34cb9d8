"""One budget for all points of a sweep: never above it, never more at once, and an end to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spotguard.control.journal.record import BudgetOf, Limits
from spotguard.control.journal.team.books import TeamBooks
from spotguard.control.journal.team.budget import TeamBudget
from spotguard.control.journal.team.stored_books import from_bytes, read_books, to_bytes
from spotguard.events.states import RunState
from spotguard.spec.model import TeamCap
from spotguard.spec.model.team import SWEEP
from spotguard.testing.clock import FakeClock
from spotguard.testing.stores import MemoryStore
from tests.control.team.test_waiting import Member
from tests.control.world import World

if TYPE_CHECKING:
    from pathlib import Path

AT_ONCE = 2
CAP = TeamCap(10.0, SWEEP, AT_ONCE)
RUNS = [f"s-{number:02d}" for number in range(1, 6)]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(RUNS),
            st.sampled_from(["ask", "launch", "spend", "rest"]),
            st.floats(0.1, 6.0),
        ),
        max_size=30,
    )
)
@settings(max_examples=50)
def test_whatever_its_points_do_the_sum_and_the_count_hold(
    acts: list[tuple[str, str, float]],
) -> None:
    """What is spent and promised is never above the budget, and never more go on than may."""
    books = TeamBooks(cap=CAP).turned(0.0)
    spent = dict.fromkeys(RUNS, 0.0)
    for run_id, act, usd in acts:
        stake = books.stakes.get(run_id)
        left = stake.promised_usd if stake is not None else 0.0
        if act == "ask" and not left:
            books, _ = books.asked(run_id, spent_usd=spent[run_id], most_usd=usd, priority=0)
        elif act == "launch" and left:
            books, _ = books.launching(
                run_id, spent_usd=spent[run_id], most_usd=left, until_at=None
            )
        elif act == "spend":  # a controller sees to it that no more is spent than was promised
            spent[run_id] += min(usd, left)
            books = books.told(
                run_id, spent_usd=spent[run_id], most_usd=None, living=True, launched=False
            )
        elif act == "rest":
            books = books.released(run_id, spent[run_id])
        assert books.used_usd <= CAP.usd + 1e-6
        assert sum(spent.values()) <= CAP.usd + 1e-6
        assert sum(each.holds for each in books.stakes.values()) <= AT_ONCE
    assert from_bytes(to_bytes(books)).turned(9e9) == books


def test_it_is_no_budget_of_a_team() -> None:
    """Nobody gives one to a store by these words, and its books never turn."""
    with pytest.raises(ValueError, match="not a sum"):
        TeamCap.parse("10 / sweep")
    assert TeamBooks(cap=CAP).turned(0.0).period == SWEEP


class Points:
    """Points of a sweep of a team, whose controllers look one after the other."""

    def __init__(self, folder: Path, cap: TeamCap, team: TeamCap | None = None) -> None:
        self.clock = FakeClock()
        self.sweep, self.team = MemoryStore(), MemoryStore()
        self.members: list[Member] = []
        for name in RUNS[:3]:
            (folder / name).mkdir()
            world = World(folder / name, limits=Limits(budget_usd=1.0))
            budgets = [
                TeamBudget(self.sweep, world.clock, name, cap=cap),
                TeamBudget(self.team, world.clock, name, cap=team),
            ]
            journal = world.journal()
            supervisor = world.supervisor(journal, budgets=budgets)
            self.members.append(Member(world, journal, supervisor))

    def go_on(self, seconds: float) -> list[RunState]:
        """Let time pass for all; return how they stand."""
        for _ in range(int(seconds)):
            for member in self.members:
                if member.record.settled is None:
                    member.supervisor.tick()
                member.world.clock.sleep(1.0)
        return [member.state for member in self.members]

    def close(self) -> None:
        """Close the journals."""
        for member in self.members:
            member.journal.close()


def test_so_many_go_on_at_once_and_the_next_when_one_has_ended(tmp_path: Path) -> None:
    """It says whose turn it waits for; at the end nothing is promised to anybody."""
    points = Points(tmp_path, TeamCap(10.0, SWEEP, AT_ONCE))
    assert points.go_on(5) == [RunState.RUNNING, RunState.RUNNING, RunState.WAITING]
    waits = points.members[2].record.queued
    assert (
        waits == "2 of the sweep's runs go on, as many as may at once (place 1 of 1 in the queue)"
    )
    assert points.go_on(80) == [RunState.FINISHED] * 3
    found = read_books(points.sweep)
    assert found is not None
    assert not found.books.stakes
    points.close()


def test_who_can_never_be_paid_any_more_ends_and_says_so(tmp_path: Path) -> None:
    """There is no next month of a sweep. It may go on once somebody gives the sweep more."""
    points = Points(tmp_path, TeamCap(1.0 + 1e-3, SWEEP, 1))
    assert points.go_on(120) == [RunState.FINISHED, RunState.PAUSED, RunState.PAUSED]
    for member in points.members[1:]:
        assert member.record.settled is not None
        assert member.record.settled.exit_code == 20
        assert member.record.settled.lacks_budget_of is BudgetOf.SWEEP
        assert member.record.settled.detail.startswith("of the sweep's $1.00 only $0.9")
        assert member.world.launcher.started == []
    points.close()


def test_a_sweep_does_not_pass_by_its_teams_budget(tmp_path: Path) -> None:
    """Both have to pay; who waits for the team holds no money of it."""
    points = Points(tmp_path, TeamCap(10.0, SWEEP, 3), TeamCap(1.5))
    assert points.go_on(5) == [RunState.RUNNING, RunState.WAITING, RunState.WAITING]
    assert points.members[1].record.queued.startswith("the team's $1.50")
    assert points.go_on(150) == [RunState.FINISHED] * 3
    for store in (points.sweep, points.team):
        found = read_books(store)
        assert found is not None
        assert not found.books.stakes
        billed = sum(member.world.launcher.billed_usd() for member in points.members)
        assert found.books.at_rest_usd == pytest.approx(billed)
    points.close()
