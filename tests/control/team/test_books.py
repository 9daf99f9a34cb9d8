from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from spotguard.control.journal.team import membership
from spotguard.control.journal.team.books import Stake, TeamBooks, in_words, period_of
from spotguard.control.journal.team.budget import StoreClock, TeamBudget, Word
from spotguard.control.journal.team.stored_books import from_bytes, read_books, to_bytes
from spotguard.errors import EnvironmentFailure, SpecError, UsageError
from spotguard.events import keys
from spotguard.events.untrusted import Refused
from spotguard.shared.units import from_iso
from spotguard.spec.model import TeamCap
from spotguard.spec.model.team import SWEEP
from spotguard.storage import open_store
from spotguard.testing.clock import FakeClock
from tests.control.team.racing import StampedStore

if TYPE_CHECKING:
    from pathlib import Path

CAP = TeamCap(100.0)
NOVEMBER = from_iso("2026-11-25T12:00:00Z")
DECEMBER = from_iso("2026-12-01T00:00:00Z")


def word(spent: float, most: float | None, *, living: bool = False) -> Word:
    """What a run says of itself."""
    return Word(spent=spent, most=most, living=living)


def books_of(**stakes: Stake) -> TeamBooks:
    """November's books."""
    named = {name.replace("_", "-"): stake for name, stake in stakes.items()}
    return TeamBooks(cap=CAP, period="2026-11", stakes=named)


@pytest.mark.parametrize(
    ("raw", "usd", "per"),
    [
        (2000, 2000.0, "month"),
        ("$2,000", 2000.0, "month"),
        ("2000 / month", 2000.0, "month"),
        ("500/Week", 500.0, "week"),
        ("12.5 per day", 12.5, "day"),
        ({"usd": 7.0, "per": "week"}, 7.0, "week"),
    ],
)
def test_a_budget_is_read_as_people_write_it(raw: object, usd: float, per: str) -> None:
    """With or without the period, which is a month; and what is written is read again."""
    cap = TeamCap.parse(raw)
    assert (cap.usd, cap.per) == (usd, per)
    assert TeamCap.parse(str(cap)) == cap


@pytest.mark.parametrize("raw", ["", "0", "-3", "2000 / year", "nan / day", "a / day", True, None])
def test_what_is_no_budget_is_refused(raw: object) -> None:
    """Whatever it is, by the error that names the setting."""
    with pytest.raises(ValueError, match=r"not|no "):
        TeamCap.parse(raw)


@pytest.mark.parametrize("at_once", [[], {}, True, 2.7, 0, "2"])
def test_what_is_no_count_of_runs_is_refused(at_once: object) -> None:
    """Anybody can write it where a controller reads it, which takes it for a budget of none."""
    with pytest.raises(ValueError, match="no number"):
        TeamCap.parse({"usd": 1.0, "per": "sweep", "at_once": at_once})


def test_periods_have_names_by_which_they_sort_and_words() -> None:
    """By the calendar in UTC; a week of two years belongs to one of them."""
    assert [period_of(NOVEMBER, per) for per in ("month", "week", "day")] == [
        "2026-11",
        "2026-W48",
        "2026-11-25",
    ]
    assert period_of(from_iso("2027-01-01T00:00:00Z"), "week") == "2026-W53"
    assert [in_words(name) for name in ("2026-11", "2026-W48", "2026-11-25")] == [
        "November 2026",
        "week 48 of 2026",
        "2026-11-25",
    ]


def test_spending_moves_a_promise_and_takes_nothing_more() -> None:
    """What a run uses stays the same, also where less turns out to have been spent."""
    stake = Stake(spent_before_usd=5.0, spent_usd=10.0, promised_usd=20.0)
    for spent in (12.0, 29.9, 8.0):
        assert stake.at(spent).used_usd == pytest.approx(25.0)
    assert stake.at(40.0).used_usd == 35.0, "who overspent is not hidden"


def test_a_new_month_begins_with_what_is_still_promised() -> None:
    """Who is at rest is forgotten, who waits goes on to wait, nodes long gone hold nothing."""
    books = books_of(
        lives=Stake(spent_usd=30.0, promised_usd=40.0, launched=True, until_at=DECEMBER),
        waits=Stake(spent_usd=5.0, wants_usd=60.0, ticket=1),
        gone=Stake(promised_usd=20.0, launched=True, until_at=DECEMBER - 90_000),
        idle=Stake(spent_usd=9.0),
    )
    books = replace(books, at_rest_usd=3.0)
    assert books.turned(DECEMBER - 1) is books
    december = books.turned(DECEMBER)
    assert sorted(december.stakes) == ["lives", "waits"]
    assert (december.spent_usd, december.promised_usd) == (0.0, 40.0)
    assert december.turned(NOVEMBER) is december, "periods never go back"


def test_a_run_that_cannot_be_paid_this_month_holds_up_nobody_and_goes_on_in_the_next() -> None:
    """It says so; a smaller one passes; at the turn of the store's clock it is served."""
    clock = FakeClock(NOVEMBER)
    store = StampedStore(clock)
    store.put(keys.TEAM, to_bytes(replace(books_of(), at_rest_usd=50.0)))
    large = TeamBudget(store, FakeClock(0.0), "large")
    assert large.ask(word(0.0, 60.0)) == (
        "the team's $100.00 for November 2026 are spent or promised: $50.00 are left, and it needs "
        "$60.00; so it waits for the next month"
    )
    assert not TeamBudget(store, FakeClock(9e9), "small").ask(word(0.0, 50.0))
    clock.advance(DECEMBER - NOVEMBER)
    later = TeamBudget(store, FakeClock(0.0), "large")
    assert "promised to small" in later.ask(word(0.0, 60.0))
    assert not TeamBudget(store, FakeClock(0.0), "small").release(10.0)
    assert not later.ask(word(0.0, 60.0))


def test_a_clock_that_is_wrong_brings_no_early_month() -> None:
    """Years ahead or behind: the store's clock counts, also for the very first books."""
    store = StampedStore(FakeClock(NOVEMBER))
    for ahead_s in (1e8, -1e8):
        TeamBudget(store, FakeClock(NOVEMBER + ahead_s), "run", cap=CAP).ask(word(0.0, 5.0))
        found = read_books(store)
        assert found is not None
        assert found.books.period == "2026-11"


def test_the_stores_clock_is_asked_again_after_a_sleep() -> None:
    """A monotonic clock that stood still does not hold up the month."""
    clock = FakeClock(NOVEMBER)
    known = StoreClock(clock)
    known.ask(lambda: NOVEMBER)
    clock.advance(100)
    assert known.now(None) == NOVEMBER + 100
    clock.jump_wall(3600)
    assert known.now(None) is None


def test_a_lower_budget_lets_holders_finish_and_launch_nothing_beyond() -> None:
    """Who holds more than fits waits before its next launch, and gives its promise back."""
    books = books_of(
        one=Stake(promised_usd=50.0, launched=True), two=Stake(promised_usd=50.0, launched=True)
    ).under(TeamCap(60.0))
    waiting, why = books.asked("one", spent_usd=0.0, most_usd=50.0, priority=0)
    assert "$10.00 are left" in why
    assert waiting.stakes["one"].promised_usd == 0.0
    passed, why = waiting.asked("two", spent_usd=0.0, most_usd=50.0, priority=0)
    assert not why
    assert passed.promised_usd == 50.0


def test_another_kind_of_period_begins_with_nothing_spent() -> None:
    """A month's spending is not held against a week's budget; promises are."""
    books = replace(books_of(one=Stake(spent_usd=70.0, promised_usd=5.0)), at_rest_usd=20.0)
    weekly = books.under(TeamCap(50.0, "week")).turned(NOVEMBER)
    assert (weekly.period, weekly.spent_usd, weekly.promised_usd) == ("2026-W48", 0.0, 5.0)


def test_books_are_read_back_as_they_were_written() -> None:
    """Every field of them."""
    stake = Stake(
        spent_before_usd=1.0,
        spent_usd=2.0,
        promised_usd=3.0,
        launched=True,
        until_at=4.0,
        wants_usd=5.0,
        ticket=6,
        priority=-7,
        beat="8",
    )
    books = replace(books_of(run_1=stake), at_rest_usd=9.0, tickets=10)
    assert from_bytes(to_bytes(books)) == books
    assert from_bytes(to_bytes(TeamBooks())) == TeamBooks()


@pytest.mark.parametrize(
    "spoilt",
    [
        {"schema": 2},
        {"budget": {"usd": -1, "per": "month"}},
        {"budget": {"usd": 1, "per": "year"}},
        {"budget": {"usd": 1, "per": "sweep", "at_once": []}},
        {"budget": 7},
        {"period": "soon"},
        {"period": "2026-13"},
        {"period": None},
        {"at_rest_usd": -1},
        {"at_rest_usd": "much"},
        {"tickets": 1.5},
        {"runs": []},
        {"runs": {"../x": {}}},
        {"runs": {"x": {}}},
    ],
)
def test_books_that_make_no_sense_are_refused(spoilt: dict[str, object]) -> None:
    """By the one expected error, which says what is wrong."""
    body: dict[str, object] = {
        "schema": 1,
        "budget": None,
        "period": "",
        "at_rest_usd": 0,
        "tickets": 0,
        "runs": {},
    }
    with pytest.raises(Refused):
        from_bytes(json.dumps({**body, **spoilt}).encode())


# ---------------------------------------------------------------- what a person does


def test_the_first_run_gives_the_store_its_budget_and_later_ones_keep_it(tmp_path: Path) -> None:
    """Another sum, no own budget, one above all, unknown prices: refused, and nothing changes."""
    root = str(tmp_path)
    membership.join(root, None, budget_usd=None, allow_unknown_price=False)
    assert membership.look(root).budget_usd is None
    assert list(tmp_path.iterdir()) == []
    membership.join(root, CAP, budget_usd=20.0, allow_unknown_price=False)
    for cap, budget_usd, unknown, said in (
        (TeamCap(200.0), 20.0, False, "team.budget: given .*200.* share .100.00 / month"),
        (None, None, False, "budget: not given"),
        (None, 100.01, False, "budget: given .100.01"),
        (None, 20.0, True, "allow_unknown_price"),
    ):
        with pytest.raises(SpecError, match=said):
            membership.join(root, cap, budget_usd=budget_usd, allow_unknown_price=unknown)
    assert membership.look(root).budget_usd == 100.0
    outlook = membership.outlook(root, None, budget_usd=20.0, allow_unknown_price=False)
    assert "$100.00 are left" in outlook


def test_a_budget_is_changed_for_all_and_a_lost_promise_taken_back(tmp_path: Path) -> None:
    """By the words of a person, who is told what there is."""
    root = str(tmp_path)
    membership.set_cap(root, CAP)
    store = open_store(root)
    first = TeamBudget(store, FakeClock(), "run-1", priority=3)
    assert not first.ask(word(0.0, 80.0))
    assert not first.launch(word(0.0, 80.0, living=True))
    assert TeamBudget(store, FakeClock(), "run-2").ask(word(0.0, 30.0))
    [holds, waits] = membership.look(root).runs
    assert (holds.run_id, holds.promised_usd, holds.launched, holds.place) == (
        *("run-1", 80.0, True, None),
    )
    assert (waits.run_id, waits.wants_usd, waits.place) == ("run-2", 30.0, 1)
    with pytest.raises(UsageError, match="run-9"):
        membership.give_back(root, "run-9")
    assert membership.give_back(root, "run-1").promised_usd == 0.0
    assert "was given back" in first.launch(word(0.0, 80.0))
    assert membership.set_cap(root, TeamCap(20.0, "day")).per == "day"
    assert membership.set_cap(root, None).left_usd is None


@pytest.mark.parametrize("cap", [CAP, None])
def test_a_sweeps_budget_is_no_teams_to_change(tmp_path: Path, cap: TeamCap | None) -> None:
    """It has one period: under a month's budget or none, what was spent would be forgotten."""
    store = open_store(str(tmp_path / "sweeps" / "lr-1"))
    stake = Stake(spent_usd=30.0)
    books = TeamBooks(cap=TeamCap(50.0, SWEEP), period=SWEEP, stakes={"run-1": stake})
    store.put(keys.TEAM, to_bytes(books))
    with pytest.raises(UsageError, match="budget of a sweep") as refused:
        membership.set_cap(store.url, cap)
    assert refused.value.hint == "spotguard sweep lr-1 --budget USD"
    stands = membership.look(store.url)
    assert (stands.per, stands.budget_usd, stands.spent_usd) == (SWEEP, 50.0, 30.0)


def test_books_that_nobody_can_read_are_told(tmp_path: Path) -> None:
    """With the file and the way out; no run is begun."""
    (tmp_path / keys.TEAM).write_bytes(b"{}")
    with pytest.raises(EnvironmentFailure, match=keys.TEAM):
        membership.join(str(tmp_path), CAP, budget_usd=1.0, allow_unknown_price=False)


def test_what_was_spent_before_is_no_part_of_what_is_asked_for(tmp_path: Path) -> None:
    """A run that spent much in other months may be resumed under a smaller cap."""
    store = open_store(str(tmp_path))
    store.put(keys.TEAM, to_bytes(TeamBooks(cap=CAP)))
    given = {"budget_usd": 150.0, "allow_unknown_price": False}
    with pytest.raises(SpecError, match="given"):
        membership.check_budget(str(tmp_path), **given)  # type: ignore[arg-type]
    assert membership.check_budget(str(tmp_path), spent_usd=60.0, **given)  # type: ignore[arg-type]
