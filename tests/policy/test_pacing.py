"""Priced pacing: what a change of elastic nodes must earn before it is made."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from spotguard.policy.decide import Model
from spotguard.policy.market.hazard import AGE_EDGES_S, Hazard, pooled
from spotguard.policy.pacing import best_choice, dollar_price
from spotguard.policy.view import JobState, MarketPlace, Running, Seen, View


def _rates(per_h: float) -> Hazard:
    return Hazard(per_h=np.full((2, len(AGE_EDGES_S)), per_h), source="made up")


def _job(**changes: float) -> JobState:
    told = {"left_s": 86_400.0, "budget_left_usd": 1000.0, **changes}
    return JobState(work_left_s=1.0, start_s=300.0, nodes=16, nodes_min=1, on_demand=False, **told)  # type: ignore[arg-type]


def _view(runs: int | None, free: int) -> View:
    """Return a view of a place with `free` nodes at a dollar, of which `runs` are ours."""
    seen = Seen(up=True, unseen_s=0.0, nodes=free)
    running = None if runs is None else Running(place="a", market="spot", nodes=runs)
    place = MarketPlace(name="a", spot_usd_per_h=1.0, seen=seen)
    return View(job=_job(), places=(place,), running=running)


def test_one_more_node_is_no_reason_for_a_start() -> None:
    """A start of twelve nodes is more than the thirteenth earns while such a change must pay."""
    few = best_choice(_view(12, 13), lambda _: _rates(0.2))
    many = best_choice(_view(4, 16), lambda _: _rates(0.2))
    assert few is not None
    assert many is not None
    assert few.nodes == 12
    assert many.nodes > 12


def test_many_nodes_are_lost_sooner_than_few() -> None:
    """Where so many are soon taken that a start does not pay, fewer are bought."""
    restless = best_choice(_view(None, 16), lambda n: _rates(0.1 if n <= 8 else 30.0))
    quiet = best_choice(_view(None, 16), lambda _: _rates(0.1))
    assert restless is not None
    assert quiet is not None
    assert restless.nodes == 8
    assert quiet.nodes > 8


def test_nodes_that_have_long_been_there_are_preferred() -> None:
    """Of two places alike, the one whose many nodes have been there for hours is taken."""
    falling = Hazard(per_h=np.tile(np.geomspace(3.0, 0.05, len(AGE_EDGES_S)), (2, 1)), source="")
    long, short = (10 * 3600.0,) * 16, (10 * 3600.0, *(0.0,) * 15)
    places = tuple(
        MarketPlace(
            name=name,
            spot_usd_per_h=1.0,
            seen=Seen(up=True, unseen_s=0.0, nodes=16, age_s=10 * 3600.0, nodes_age_s=ages_s),
        )
        for name, ages_s in (("short", short), ("long", long))
    )
    best = best_choice(View(job=_job(), places=places), lambda _: falling)
    assert best is not None
    assert best.place == "long"


def test_a_long_start_is_still_worth_it() -> None:
    """Where a start takes an hour, its price is spread over a longer time, not never paid."""
    view = _view(None, 16)
    slow = View(job=replace(view.job, start_s=3600.0), places=view.places)
    best = best_choice(slow, lambda _: _rates(0.1))
    assert best is not None
    assert best.nodes > 8


def test_some_nodes_lost_are_not_all_lost() -> None:
    """The fewest that may run are lost together, each beyond them alone."""
    some = best_choice(_view(16, 16), lambda n: _rates(0.0 if n <= 15 else 1e6))
    every = best_choice(_view(16, 16), lambda _: _rates(1e6))
    assert some is not None
    assert every is not None
    assert some.worth > 5.0
    assert every.worth < 0.1


def test_rates_are_those_of_the_number_of_nodes() -> None:
    """Bundled records tell of each size, a model from elsewhere of one alone."""
    hazards = Model.of("H100", 1).hazards(1)
    assert hazards(16) is pooled("H100", 16)
    assert hazards(40) is hazards(16)  # more were never asked for
    assert Model.of("H100", 8).hazards(1)(2) is pooled("H100", 16)  # nodes of eight
    own = _rates(0.1)
    assert Model(hazard=own).hazards(1)(16) is own


def test_a_dollar_need_earn_less_towards_the_end() -> None:
    """Money that is left over buys nothing, and nothing cheaper comes back in time."""
    day, hour = 86_400.0, 3600.0
    early = dollar_price(_job(left_s=day, budget_left_usd=48.0), 1.0)
    late = dollar_price(_job(left_s=hour, budget_left_usd=2.0), 1.0)  # the same pace
    assert late < early
