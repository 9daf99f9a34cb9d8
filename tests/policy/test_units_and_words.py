"""The JSON lines' units, and reasons that say what happened."""

from __future__ import annotations

import json
from typing import Any

import pytest

from spotguard.policy.decide import PACING, ROLLOUT
from spotguard.policy.protocol import answered, driver_of

HOUR = 3600.0


def _action(
    job: dict[str, Any], places: list[dict[str, Any]], tick: dict[str, Any], **header: Any
) -> dict[str, Any]:
    """Return the action for one tick at which, if nothing else is said, all places answer."""
    up = {place["name"]: {"answers": True} for place in places}
    line = {"work_left_s": HOUR, "places": up, **tick}
    told = {"job": {"work_s": HOUR, **job}, "places": places, **header}
    (answer,) = answered([json.dumps(told), json.dumps(line)])
    action: dict[str, Any] = json.loads(answer)
    return action


def test_spot_that_costs_nothing_is_bought() -> None:
    """Under pacing it earns most of all, beside nodes on demand and alone."""
    job = {"rule": PACING, "budget_usd": 20, "deadline_s": 10 * HOUR, "nodes": 4, "nodes_min": 1}
    free = {"name": "a", "spot_usd_per_h": 0}
    for place in ({**free, "on_demand_usd_per_h": 3.0}, free):
        action = _action(job, [place], {})
        assert (action["action"], action["market"], action["nodes"]) == ("buy", "spot", 4)


@pytest.mark.parametrize("usd", [15.0, 17.0])
def test_the_maximum_is_per_gang_like_the_prices(usd: float) -> None:
    """Eight nodes for $16 an hour are within a maximum of $17, not of $15."""
    job = {"nodes": 8, "max_usd_per_h": usd, "rule": "greedy"}
    action = _action(job, [{"name": "a", "spot_usd_per_h": 16}], {}, price_per="gang")
    assert action["action"] == ("buy" if usd > 16 else "wait")


@pytest.mark.parametrize("egress", [2.0, {"r": {"r": 0.0, "q": 2.0}}])
def test_a_region_told_in_a_tick_counts(egress: Any) -> None:
    """Egress between places is by their regions, whoever tells of them."""
    job = {"work_s": HOUR, "checkpoint_gb": 100, "egress_usd_per_gb": egress, "rule": "greedy"}
    driver = driver_of(json.dumps({"job": job}))
    regions = {"a": "r", "b": "r", "c": "q"}
    places = {name: {"price": 1.0, "region": region} for name, region in regions.items()}
    driver.tick(json.dumps({"work_left_s": HOUR, "places": places, "running": "a"}))
    assert driver.session.view is not None
    moves = {place.name: place.move_usd for place in driver.session.view.places}
    assert moves == {"a": 0.0, "b": 0.0, "c": 200.0}


def test_nodes_of_eight_are_eight() -> None:
    """Two nodes of eight are lost as often as sixteen of one, as in the controller."""
    gangs = []
    for accelerator, nodes in (("H100:8", 2), ("H100", 16), ("H100:80GB", 2)):
        job = {"work_s": HOUR, "nodes": nodes, "accelerator": accelerator}
        driver = driver_of(json.dumps({"job": job, "places": [{"name": "a", "price": 1}]}))
        driver.tick(json.dumps({"work_left_s": HOUR}))
        assert driver.session.model is not None
        gangs.append(driver.session.model.gang)
    assert gangs == [16, 16, 2]


SPOT = {"name": "a", "spot_usd_per_h": 1.0}
BOTH = {**SPOT, "on_demand_usd_per_h": 3.0}
DEAR = {**BOTH, "spot_usd_per_h": 5.0}


@pytest.mark.parametrize(
    ("job", "place", "tick", "why"),
    [
        (
            {"rule": ROLLOUT},
            DEAR,
            {},
            "waits: spot in a at $5.00 per node and hour is no cheaper than on demand at $3.00, "
            "and there is no deadline",
        ),
        (
            {"rule": PACING, "deadline_s": HOUR},
            BOTH,
            {"t_s": 3600},
            "waits: the deadline has passed",
        ),
        (
            {"rule": PACING, "deadline_s": HOUR},
            BOTH,
            {"t_s": 3600, "running": "a"},
            "leaves: the deadline has passed",
        ),
        (
            {"rule": PACING, "budget_usd": 9},
            SPOT,
            {"places": {"a": False}},
            "waits: no spot place is known to answer now",
        ),
        (
            {"deadline_s": HOUR},
            BOTH,
            {"t_s": 4000},
            "buys on demand in a at $3.00 per node and hour: the deadline has passed, and nothing "
            "is done sooner",
        ),
        (
            {"budget_usd": 100},
            {"name": "a"},
            {"running": "a"},
            "nobody knows the price of what runs, nor whether the budget pays another step",
        ),
    ],
)
def test_reasons_say_what_happened(
    job: dict[str, Any], place: dict[str, Any], tick: dict[str, Any], why: str
) -> None:
    """Not what happens otherwise."""
    assert _action(job, [place], tick)["why"] == why
