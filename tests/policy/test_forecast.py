from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from spotguard.policy.decide import Model
from spotguard.policy.market.hazard import Hazard, pooled
from spotguard.policy.market.sightings import (
    GRANTED,
    LOST,
    REFUSED,
    Sighting,
    answers_of,
    newest_price,
    seen_by,
)
from spotguard.policy.simulation.forecast import Forecast, forecast, on_demand_forecast
from spotguard.policy.view import JobState, MarketPlace, Running, Seen, View

if TYPE_CHECKING:
    from typing import Any

HOUR = 3600.0
UP = Seen(up=True, age_s=HOUR, unseen_s=0.0)
DOWN = Seen(up=False, age_s=HOUR, unseen_s=0.0)
STEADY = Hazard(per_h=np.full((2, 9), 1e-6), source="a market that never changes")
RESTLESS = Hazard(per_h=np.full((2, 9), 0.8), source="one that changes all the time")


def _view(seen: Seen, *, spot: float | None = 1.0, **job: Any) -> View:
    told = {"work_left_s": 10 * HOUR, "left_s": 20 * HOUR, "start_s": 600.0, "nodes": 4}
    return View(
        job=JobState(**{**told, **job}),
        places=(MarketPlace(name="a", spot_usd_per_h=spot, on_demand_usd_per_h=4.0, seen=seen),),
    )


def _made(seen: Seen, hazard: Hazard = STEADY, **job: Any) -> Forecast:
    return forecast(_view(seen, **job), Model(hazard=hazard), 0)


def test_a_market_that_never_changes_leaves_no_doubt() -> None:
    """Spot that stays costs its price for the work and one start, and is done by then."""
    made = _made(UP)
    assert made.cost_usd == pytest.approx(4 * 1.0 * (10 + 1 / 6))
    assert made.cost_low_usd == pytest.approx(made.cost_high_usd)
    assert made.finish_s == pytest.approx(10 * HOUR + 600)
    assert made.late_share == 0
    assert made.on_demand_usd == pytest.approx(4 * 4.0 * (10 + 1 / 6))


def test_spot_that_stays_away_is_bought_on_demand_in_time() -> None:
    """Under a deadline the forecast buys on demand, as the policy does, and is not late."""
    made = _made(DOWN)
    assert made.cost_usd == pytest.approx(4 * 4.0 * (10 + 1 / 6), rel=0.01)
    assert made.finish_s <= 20 * HOUR + 1
    assert made.late_share == 0


def test_who_never_buys_on_demand_is_late_and_pays_little() -> None:
    """Without leave to buy on demand nothing is bought on demand, and all futures are late."""
    made = _made(DOWN, on_demand=False)
    assert made.cost_usd == 0
    assert made.late_share == 1
    assert made.finish_s > 20 * HOUR


def test_without_a_deadline_nothing_is_late() -> None:
    """Nobody says how many are late of what has no deadline; it waits, and pays only spot."""
    made = _made(UP, RESTLESS, left_s=None)
    assert made.late_share is None
    assert 4 * 10 < made.cost_usd < 4 * 4.0 * 10
    assert made.finish_high_s > made.finish_s > 10 * HOUR


def test_a_restless_market_makes_doubt() -> None:
    """The interval holds the mean, and 80 % of futures are neither alike nor everywhere."""
    made = _made(UP, RESTLESS)
    assert made.cost_low_usd < made.cost_usd < made.cost_high_usd
    assert made.finish_low_s < made.finish_high_s


def test_the_same_seed_gives_the_same_forecast() -> None:
    """A forecast depends on view, model and seed alone."""
    assert _made(UP, RESTLESS) == _made(UP, RESTLESS)


def test_on_demand_is_sure() -> None:
    """On demand there is no market: the price, the work and a start; what runs has no start."""
    view = _view(UP, left_s=5 * HOUR)
    made = on_demand_forecast(view)
    assert made.cost_usd == made.cost_high_usd == pytest.approx(4 * 4.0 * (10 + 1 / 6))
    assert made.late_share == 1
    runs = replace(view, running=Running(place="a", market="on_demand", nodes=4))
    assert on_demand_forecast(runs).cost_usd == pytest.approx(4 * 4.0 * 10)


def _saw(kind: str, at: float, **more: Any) -> Sighting:
    return Sighting(**{"at": at, "kind": kind, "place": "a", "accelerator": "H100", **more})


def test_eight_nodes_answer_for_one_and_not_the_other_way() -> None:
    """Nodes that were had speak for fewer, refused ones for more; other places for nothing."""
    saw = [
        _saw(GRANTED, 1.0, nodes=8),
        _saw(REFUSED, 2.0, nodes=2),
        _saw(LOST, 3.0, nodes=8, run="mine"),
        _saw(GRANTED, 4.0, nodes=8, place="b"),
        _saw(GRANTED, 5.0, nodes=8, market="on_demand"),
    ]
    assert answers_of(saw, place="a", nodes=1) == [(1.0, True)]
    assert answers_of(saw, place="a", nodes=4) == [(1.0, True), (2.0, False)]
    assert answers_of(saw, place="a", nodes=8) == [(1.0, True), (2.0, False), (3.0, False)]
    assert answers_of(saw, place="a", nodes=8, without_run="mine") == [(1.0, True), (2.0, False)]


def test_what_was_seen_becomes_evidence_that_fades() -> None:
    """A loss counts as one, half a day after a half-life; nothing of the future counts."""
    hazard = pooled("H100", 1)
    told = [(0.0, True), (HOUR, False), (90 * HOUR, True)]
    fresh, later = seen_by(told, HOUR, hazard), seen_by(told, 25 * HOUR, hazard)
    assert (fresh.up, fresh.taken, fresh.unseen_s) == (False, 1.0, 0.0)
    assert later.taken == pytest.approx(0.5)
    assert later.unseen_s == 24 * HOUR
    assert seen_by([], HOUR, hazard) == Seen()


def test_the_newest_price_counts() -> None:
    """Prices are told with their instant; a place without one has none."""
    saw = [_saw("price", 2.0, usd_per_h=3.0), _saw(GRANTED, 5.0), _saw("price", 1.0, usd_per_h=9.0)]
    assert newest_price(saw, "a") == (2.0, 3.0)
    assert newest_price(saw, "b") is None
