"""A maximum price, and places that sell no spot nodes: nothing is bought that nobody offers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from spotguard.policy.decide import RULES, Model
from spotguard.policy.market.hazard import pooled
from spotguard.policy.protocol import answered
from spotguard.policy.simulation.forecast import forecast
from spotguard.policy.view import JobState, MarketPlace, View

HOUR = 3600.0


def _asked(places: list[Any], *, left_s: float = HOUR, **job: Any) -> dict[str, Any]:
    """Return the action for a tick at which all places answer."""
    header = {"job": {"work_s": HOUR, **job}, "places": places}
    names = [place if isinstance(place, str) else place["name"] for place in places]
    tick = {"work_left_s": left_s, "places": dict.fromkeys(names, True)}
    (line,) = answered([json.dumps(header), json.dumps(tick)])
    told: dict[str, Any] = json.loads(line)
    return told


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("deadline", [{}, {"deadline_s": 4 * HOUR}])
def test_spot_above_the_maximum_is_not_bought(rule: str, deadline: dict[str, float]) -> None:
    """Whatever the rule; the reason names the maximum and the cheapest price."""
    places = [{"name": "a", "spot_usd_per_h": 1.0}, {"name": "b", "spot_usd_per_h": 2.0}]
    told = _asked(places, rule=rule, max_usd_per_h=0.5, **deadline)
    assert told["action"] == "wait"
    assert "within the maximum of $0.50 per node and hour, the cheapest costs $1.00" in told["why"]
    assert "probe" not in told


@pytest.mark.parametrize("rule", RULES)
def test_a_place_without_a_price_sells_nothing(rule: str) -> None:
    """A place of which no price is known is not bought at one that was made up."""
    told = _asked(["a"], rule=rule)
    assert told["action"] == "wait"
    assert "no place is known to sell spot nodes" in told["why"]


@pytest.mark.parametrize("rule", RULES[:3])
def test_without_spot_it_is_on_demand_in_time(rule: str) -> None:
    """Dear spot keeps nobody from on demand where waiting would miss the deadline."""
    places = [{"name": "a", "spot_usd_per_h": 1.0, "on_demand_usd_per_h": 3.0}]
    told = _asked(places, rule=rule, max_usd_per_h=0.5, deadline_s=1.2 * HOUR)
    assert (told["action"], told["market"]) == ("buy", "on_demand")


def test_pacing_buys_on_demand_rather_than_above_the_maximum() -> None:
    """The maximum is of spot nodes alone."""
    places = [{"name": "a", "spot_usd_per_h": 1.0, "on_demand_usd_per_h": 3.0}]
    told = _asked(places, rule="pacing", max_usd_per_h=0.5, deadline_s=4 * HOUR, budget_usd=6)
    assert (told["action"], told["market"]) == ("buy", "on_demand")
    told = _asked(places, rule="pacing", max_usd_per_h=1.0, deadline_s=4 * HOUR, budget_usd=6)
    assert (told["action"], told["market"]) == ("buy", "spot")


def _view(**job: Any) -> View:
    place = MarketPlace(name="a", spot_usd_per_h=1.0, on_demand_usd_per_h=4.0)
    told = {"work_left_s": 10 * HOUR, "left_s": 20 * HOUR, "start_s": 600.0, "max_usd_per_h": 0.5}
    return View(job=JobState(**{**told, **job}), places=(place,))


def test_a_forecast_has_no_price_that_nobody_asks() -> None:
    """What is dearer than the maximum is forecast on demand, or not at all."""
    model = Model(hazard=pooled("H100", 1))
    assert forecast(_view(), model, 0).cost_usd == pytest.approx(4 * (10 + 1 / 6), rel=0.01)
    with pytest.raises(ValueError, match=r"no spot place is within the maximum of \$0.50"):
        forecast(_view(on_demand=False), model, 0)
