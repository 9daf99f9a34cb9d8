"""What a place costs from here, and that each comparison of places asks for it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from spotguard.errors import UsageError
from spotguard.policy.action import ON_DEMAND, SPOT, HoldOff, Leave, Move, Stay
from spotguard.policy.decide import CONSTANTS, GREEDY, ROLLOUT, Case, Model, decide
from spotguard.policy.market.place_cost import cost_from_here
from spotguard.policy.protocol import driver_of
from spotguard.policy.view import JobState, MarketPlace, Running, Seen, View

HOUR = 3600.0
UP = Seen(up=True, unseen_s=0.0, age_s=4 * HOUR)
MODEL = Model.of("H100", 8)


def _view(*places: MarketPlace, running: tuple[str, str] | None = None, **job: Any) -> View:
    told = {"work_left_s": 10 * HOUR, "left_s": 40 * HOUR, "start_s": 600.0, "nodes": 8, **job}
    runs = None if running is None else Running(place=running[0], market=running[1], nodes=8)
    return View(job=JobState(**told), places=places, running=runs)


def _place(name: str, spot: float, *, over: float | None = 10.0, **told: Any) -> MarketPlace:
    known = {"seen": UP, **told}
    return MarketPlace(name=name, spot_usd_per_h=spot, on_demand_usd_per_h=over, **known)


@pytest.mark.parametrize("rule", [ROLLOUT, CONSTANTS])
@pytest.mark.parametrize("move_usd", [16.0, 64.0, 160.0])
def test_a_move_that_pays_for_its_egress_is_made(rule: str, move_usd: float) -> None:
    """$8.74 an hour is left for $1.86, though the checkpoint costs much to bring."""
    places = (_place("dear", 8.74), _place("cheap", 1.86, move_usd=move_usd))
    action = decide(_view(*places, running=("dear", SPOT)), MODEL, 0, rule=rule).action
    assert isinstance(action, Move)
    assert action.place == "cheap"


@pytest.mark.parametrize("rule", [ROLLOUT, CONSTANTS])
def test_a_move_that_costs_more_than_it_saves_is_not_made(rule: str) -> None:
    """Ten cents an hour less are not worth $160 of egress, whatever the bare price says."""
    places = (_place("here", 1.96), _place("far", 1.86, move_usd=160.0))
    action = decide(_view(*places, running=("here", SPOT)), MODEL, 0, rule=rule).action
    assert isinstance(action, Stay)
    assert action.probe == ()


def test_the_checkpoint_lies_where_the_nodes_are() -> None:
    """Egress is paid to get elsewhere, never to stay; it is spread over the work that is left."""
    place = _place("a", 2.0, move_usd=80.0)
    stays, comes, ends = (
        cost_from_here(view, place, SPOT, MODEL.hazard)
        for view in (
            _view(place, running=("a", SPOT)),
            _view(place),
            _view(place, work_left_s=HOUR),
        )
    )
    assert 2.0 < stays < 2.5
    assert comes == pytest.approx(stays + 10.0 / 4)
    assert ends == pytest.approx(stays + 10.0)


def test_a_place_that_is_soon_lost_costs_what_its_lives_lose() -> None:
    """Nodes that live little longer than a start train for little of what is paid."""
    steady = _place("a", 2.0)
    restless = _place("b", 2.0, seen=replace(UP, age_s=0.0, taken=12.0, taken_expected=1.0))
    lies = _place("c", 2.0, seen=replace(UP, lied=4.0, lived_h=0.25))
    view = _view(steady, restless, lies)
    first, second, third = (cost_from_here(view, p, SPOT, MODEL.hazard) for p in view.places)
    assert first < 1.2 * 2.0
    assert second > 1.5 * first
    assert third > 3 * first
    assert Case(view, MODEL.hazard).evidence.changes[0, 2, 1] > 10  # so do drawn futures


@pytest.mark.parametrize("rule", [ROLLOUT, CONSTANTS, GREEDY])
@pytest.mark.parametrize(("left_h", "kind"), [(40.0, Leave), (10.3, Move)])
def test_spot_dearer_than_on_demand_is_not_kept(rule: str, left_h: float, kind: type) -> None:
    """With time it is left and waited for, else given up for on demand; nor is it bought."""
    places = (_place("a", 22.4), _place("b", 11.0))
    told: dict[str, Any] = {"left_s": left_h * HOUR}
    action = decide(_view(*places, running=("a", SPOT), **told), MODEL, 0, rule=rule).action
    if rule != GREEDY:  # which never waits where something is to be had
        assert isinstance(action, kind)
    assert not isinstance(action, Stay)
    assert getattr(action, "market", ON_DEMAND) == ON_DEMAND
    idle = decide(_view(*places, **told), MODEL, 0, rule=rule).action
    assert isinstance(idle, HoldOff) or idle.market == ON_DEMAND  # type: ignore[union-attr]


def test_without_a_deadline_what_is_dearer_gives_way_to_on_demand() -> None:
    """Where no on-demand node may be bought it goes on: the user wants no other."""
    place = _place("a", 22.4)
    view = _view(place, running=("a", SPOT), left_s=None)
    moved = decide(view, MODEL, 0).action
    assert isinstance(moved, Move)
    assert moved.market == ON_DEMAND
    never = replace(view, job=replace(view.job, on_demand=False))
    assert isinstance(decide(never, MODEL, 0).action, Stay)


def test_one_place_alone_is_judged_by_what_it_showed() -> None:
    """A zone that keeps nodes for minutes is not returned to where a usual one is."""
    usual = _place("a", 2.0, seen=replace(UP, age_s=0.0))
    restless = replace(usual, seen=replace(usual.seen, taken=20.0, taken_expected=1.0))
    told: dict[str, Any] = {"running": ("a", ON_DEMAND), "left_s": 12 * HOUR}
    back, kept = (decide(_view(each, **told), MODEL, 0).action for each in (usual, restless))
    assert isinstance(back, Move)
    assert isinstance(kept, Stay)


def _lied_to(rule: str, *, ticks: int) -> list[str]:
    """Return where nodes were bought: `a` always answers, and takes them within the tick."""
    job = {"work_h": 12, "deadline_h": 30, "start_s": 600, "accelerator": "H100", "rule": rule}
    places = [
        {"name": "a", "price": 1.5, "on_demand_usd_per_h": 10},
        {"name": "b", "price": 2.0, "on_demand_usd_per_h": 10},
    ]
    driver = driver_of(json.dumps({"job": job, "places": places}))
    bought, running, left_s = [], None, 12 * HOUR
    for tick in range(ticks):
        line = {"tick": tick, "places": {"a": True, "b": True}, "work_left_s": left_s}
        action = json.loads(driver.tick(json.dumps({**line, "running": running})))
        if action["action"] in ("buy", "move"):
            bought.append(action["place"])
            running = action["place"] if action["place"] == "b" else None
        left_s -= 600.0 if running == "b" else 0.0
    return bought


@pytest.mark.parametrize("rule", [ROLLOUT, CONSTANTS, GREEDY])
def test_a_place_that_takes_its_nodes_at_once_is_not_bought_again_and_again(rule: str) -> None:
    """Own losses are evidence, though the place answers: the steady neighbour is taken."""
    bought = _lied_to(rule, ticks=40)
    assert 1 <= bought.count("a") <= 3
    assert bought[-1] == "b"


def _driver(**job: Any) -> Any:
    told = {"work_h": 2, "start_s": 600, "rule": GREEDY, **job}
    places = [{"name": "a", "price": 1, "on_demand_usd_per_h": 4}]
    return driver_of(json.dumps({"job": told, "places": places}))


@pytest.mark.parametrize("gap", [1, 3, 6])
def test_time_is_kept_for_the_longest_gap_between_ticks(gap: int) -> None:
    """Nodes that are taken while nobody asks make nobody late, once such a gap was seen."""
    driver, deadline = _driver(deadline_h=5), 30
    left, running, tick = 12, None, 0
    market = None
    while market != ON_DEMAND:
        line = {"tick": tick, "places": {"a": True}, "work_left_ticks": left, "running": running}
        action = json.loads(driver.tick(json.dumps(line)))
        market = action.get("market", market)
        running = None  # whatever is bought is taken before it has done anything
        tick += gap
    assert tick - gap + 1 + left <= deadline  # a start, and all of the work
    assert tick - gap >= deadline - 2 - left - 2 * gap  # and no sooner than that


def test_the_budget_is_kept_over_the_longest_gap_between_ticks() -> None:
    """What the budget could not pay until a tick as late as one was is not bought."""
    driver = _driver(budget_usd=2.5, deadline_h=40)
    spent, running, told = 0.0, None, []
    for tick in (0, 6, 12, 18, 24):
        line = {"tick": tick, "places": {"a": True}, "work_left_h": 10, "spent_usd": spent}
        action = json.loads(driver.tick(json.dumps({**line, "running": running})))
        told.append(action["action"])
        running = "a" if action["action"] in ("buy", "stay") else None
        spent += 1.0 if running else 0.0
    assert spent <= 2.5
    assert told[:2] == ["buy", "stay"]


@pytest.mark.parametrize("clock", ["t_s", "tick"])
def test_a_clock_that_goes_back_is_refused(clock: str) -> None:
    """In one sentence that names the field; a clock that stands still is none that goes back."""
    driver = _driver(deadline_h=5)
    line = {"places": {"a": True}, "work_left_h": 2, "running": None}
    for at in (0, 2, 2):
        driver.tick(json.dumps({**line, clock: at}))
    with pytest.raises(UsageError, match=r"t_s must not go back: .* since the job began"):
        driver.tick(json.dumps({**line, clock: 1}))
