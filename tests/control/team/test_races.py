from __future__ import annotations

import pytest

from spotguard.control.journal.team.budget import DEAD_S
from spotguard.control.journal.team.gate import RETRY_S
from spotguard.control.journal.team.stored_books import read_books
from tests.control.team.racing import ROUNDING_USD, Race

RACES = 2700


@pytest.mark.e2e
@pytest.mark.same_everywhere
def test_two_controllers_never_spend_one_sum_twice() -> None:
    """Two that each want more than half: never both, though they act between each other's writes.

    Each may pause or die before each operation of the store, and their clocks differ by a day.
    Who lives gets the money in the end, unless the other one's nodes may live.
    """
    lost = died = launched = between = 0
    for seed in range(RACES):
        race = Race(seed, cap_usd=100.0, budgets_usd=[60.0, 70.0])
        race.pauses, race.crashes = 0.02, 0.02
        for _ in range(6):
            race.turn(race.dice.choice(race.racers))
        lost += race.store.refused
        between += race.between
        race.crashes = race.pauses = 0.0
        living = [racer for racer in race.racers if not racer.dead]
        died += 2 - len(living)
        found = race.racers[0].dead or race.racers[1].dead
        launched += any(racer.phase == "trains" for racer in race.racers)
        books = read_books(race.store)
        said = books is not None and any(s.launched for s in books.books.stakes.values())
        if found and living and not said:
            for _ in range(int(DEAD_S / RETRY_S) + 4):
                if living[0].phase == "trains":
                    break
                race.turn(living[0])
                race.advance(RETRY_S)
            assert living[0].phase == "trains", seed
    assert min(lost, died, launched) > RACES // 100
    assert between > 10_000


@pytest.mark.e2e
@pytest.mark.same_everywhere
@pytest.mark.parametrize("per", ["day", "week", "month"])
def test_a_team_of_five_keeps_its_budget_over_many_periods(per: str) -> None:
    """Whatever is interrupted, resumed, killed, restarted or put to sleep: never above the cap.

    Neither what was spent in a period of the store's clock, nor that and what nodes may yet cost.
    """
    spent, periods = 0.0, 0
    step_s = {"day": 5e3, "week": 4e4, "month": 2e5}[per]
    for seed in range(20):
        race = Race(seed, cap_usd=100.0, budgets_usd=[20.0, 35.0, 50.0, 80.0, 99.0], per=per)
        race.pauses, race.crashes, race.longest_s = 0.02, 0.01, step_s / 10
        for _ in range(60):
            race.turn(race.dice.choice(race.racers))
            race.advance(race.dice.choice([1.0, RETRY_S, 100.0, step_s]))
            for racer in race.racers:
                if racer.dead and race.dice.random() < 0.1:
                    racer.starts()
        assert all(usd <= race.cap.usd + ROUNDING_USD for usd in race.spent_usd.values())
        spent += sum(race.spent_usd.values())
        periods += len(race.spent_usd)
    assert periods > 30
    assert spent > 20 * race.cap.usd


@pytest.mark.slow
@pytest.mark.same_everywhere
def test_the_store_without_stamps_keeps_the_budget_by_the_clocks_that_there_are() -> None:
    """Where a store does not say when it wrote, the first clock that turns counts for all."""
    for seed in range(200):
        race = Race(seed, cap_usd=100.0, budgets_usd=[60.0, 70.0], per="month")
        race.store._written = _Nothing()
        for _ in range(10):
            race.turn(race.dice.choice(race.racers))
            race.advance(race.dice.choice([1.0, RETRY_S]))


class _Nothing(dict[str, float]):
    """Knows no stamp."""

    def __getitem__(self, key: str) -> float:
        return None  # type: ignore[return-value]
