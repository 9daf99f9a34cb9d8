from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from spotguard.policy.decide import CONSTANTS, GREEDY, RULES, Model, decide
from spotguard.policy.protocol import driver_of
from spotguard.policy.simulation.policy_players import Rollout, RuleOf, State, play
from spotguard.policy.simulation.windows import Windows
from spotguard.policy.view import JobState, MarketPlace, Running, Seen, View

if TYPE_CHECKING:
    from numpy.typing import NDArray


class _Reckless(RuleOf):
    """Wants a random thing at each tick."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.rng = np.random.default_rng(seed)

    def want(self, state: State) -> NDArray[np.int64]:
        """Return anything that may be wanted."""
        seen = min(state.tick, self.windows.up.shape[1] - 1)
        up = self.windows.up[:, seen]
        count, zones = up.shape
        wish = self.rng.integers(0, zones + 2, count)
        refused = (wish < zones) & ~up[np.arange(count), np.minimum(wish, zones - 1)]
        target: NDArray[np.int64] = np.where(refused, zones + 1, wish)
        return target


def _market(
    *, seed: int, work: float, ratio: float, start: float, zones: int, flicker: float
) -> Windows:
    rng = np.random.default_rng(seed)
    deadline = max(work * ratio, work + 2 * start + 2)
    ticks = int(np.ceil(deadline))
    up = (rng.random((6, ticks, zones)) < flicker).cumsum(1) % 2 == 0
    return Windows(
        up=up,
        price=rng.uniform(0.5, 3.0, (6, ticks, zones)),
        on_demand=2.5,
        work=work,
        deadline=deadline,
        start=start,
        tick_s=600.0,
        gang=8,
        accelerator="H100",
        names=tuple(f"zone-{zone}" for zone in range(zones)),
    )


MARKETS = st.builds(
    _market,
    seed=st.integers(0, 2**31),
    work=st.floats(1.0, 60.0),
    ratio=st.sampled_from([1.1, 1.25, 1.5, 2.0, 3.0]),
    start=st.sampled_from([0.33, 1.0, 1.03, 3.08]),
    zones=st.integers(1, 4),
    flicker=st.floats(0.02, 0.9),
)


@settings(max_examples=60, deadline=None)
@given(windows=MARKETS, seed=st.integers(0, 1000))
def test_whatever_is_wanted_the_guard_keeps_the_deadline(windows: Windows, seed: int) -> None:
    """No market and no wish, however foolish, makes a guarded job late."""
    assert not play(windows, _Reckless(seed)).late.any()


@pytest.mark.slow
@pytest.mark.same_everywhere
@settings(max_examples=8, deadline=None)
@given(windows=MARKETS)
def test_rollouts_keep_the_deadline(windows: Windows) -> None:
    """The default rule is never late."""
    assert not play(windows, Rollout(futures=8, screened=4)).late.any()


def _driven(windows: Windows, index: int, *, hide: bool, rule: str, whole_starts: bool) -> float:
    """Return how many ticks before the deadline the work was done by the JSON lines."""
    job = {
        "work_ticks": windows.work,
        "deadline_ticks": windows.deadline,
        "start_ticks": windows.start,
        "tick_s": windows.tick_s,
        "nodes": 8,
        "accelerator": "H100",
        "rule": rule,
    }
    places = [{"name": name, "on_demand_usd_per_h": windows.on_demand} for name in windows.names]
    driver = driver_of(json.dumps({"job": job, "places": places, "seed": 3}))
    start = float(np.ceil(windows.start)) if whole_starts else windows.start
    work, starting = windows.work, 0.0
    running: tuple[str, str] | None = None
    for tick in range(4 * len(windows.up[0]) + 20):
        seen = min(tick, len(windows.up[0]) - 1)
        up = dict(zip(windows.names, windows.up[index, seen], strict=True))
        if running is not None and running[1] == "spot" and not up[running[0]]:
            running = None
        told = {
            name: {
                "price": float(windows.price[index, seen, place]),
                "answers": None if hide and (tick + place) % 3 else bool(up[name]),
            }
            for place, name in enumerate(windows.names)
        }
        said = None if running is None else {"place": running[0], "market": running[1]}
        line = {"tick": tick, "places": told, "work_left_ticks": work, "running": said}
        action = json.loads(driver.tick(json.dumps(line)))
        before = running
        assert (action["action"] in ("buy", "wait")) == (running is None)
        if action["action"] in ("buy", "move"):
            asked = [action["place"], *action.get("then", ())]
            spot = action["market"] == "spot"
            got = next((name for name in asked if up[name]), None) if spot else action["place"]
            running = None if got is None else (got, action["market"])
        elif action["action"] in ("leave", "wait"):
            running = None
        if running is not None:
            starting = start if running != before else starting
            if starting + work <= 1.0:
                return windows.deadline - (tick + starting + work)
            work -= max(0.0, 1.0 - starting)
            starting = max(0.0, starting - 1.0)
    return -np.inf


# Late if the guard reckons a start with its own length where it takes a whole tick.
WHOLE_STARTS = _market(work=2.5, ratio=1.1, start=0.33, zones=2, flicker=0.5, seed=0)


@settings(max_examples=20, deadline=None)
@given(
    windows=MARKETS,
    hide=st.booleans(),
    rule=st.sampled_from([CONSTANTS, GREEDY]),
    whole_starts=st.booleans(),
)
@example(windows=WHOLE_STARTS, hide=False, rule=GREEDY, whole_starts=True)
def test_json_lines_keep_the_deadline(
    windows: Windows, hide: bool, rule: str, whole_starts: bool
) -> None:
    """No window is late, even where starts take whole ticks and most places are not seen."""
    assert _driven(windows, 0, hide=hide, rule=rule, whole_starts=whole_starts) >= -1e-6


@settings(max_examples=3, deadline=None)
@given(windows=MARKETS, hide=st.booleans())
def test_json_lines_keep_the_deadline_with_rollouts(windows: Windows, hide: bool) -> None:
    """The same of the default rule."""
    assert _driven(windows, 0, hide=hide, rule="rollout", whole_starts=True) >= -1e-6


@settings(max_examples=150, deadline=None)
@given(
    rule=st.sampled_from(RULES[1:]),
    left_usd=st.floats(0.0, 30.0),
    spot=st.floats(0.1, 5.0),
    running=st.sampled_from([None, "spot", "on_demand"]),
    nodes=st.integers(1, 8),
    elastic=st.booleans(),
)
def test_no_action_costs_more_than_the_budget_has(
    rule: str, left_usd: float, spot: float, running: str | None, nodes: int, elastic: bool
) -> None:
    """What is run until the next decision can be paid, whatever the rule and the deadline say."""
    seen = Seen(up=True, nodes=nodes, unseen_s=0.0)
    view = View(
        job=JobState(
            work_left_s=36_000,
            left_s=40_000,
            start_s=300,
            nodes=nodes,
            nodes_min=1 if elastic else None,
            budget_left_usd=left_usd,
        ),
        places=(MarketPlace(name="a", spot_usd_per_h=spot, on_demand_usd_per_h=4.0, seen=seen),),
        running=None if running is None else Running(place="a", market=running, nodes=nodes),
    )
    action = decide(view, Model.of("H100", nodes), 0, rule=rule).action
    word = type(action).__name__
    market = getattr(action, "market", running)
    count = getattr(action, "nodes", nodes)
    if word in ("Buy", "Move", "Stay"):
        price = spot if market == "spot" else 4.0
        assert price * count * view.tick_s / 3600 <= left_usd + 1e-6
    assert action.why


def test_nothing_is_left_for_a_place_that_has_not_answered() -> None:
    """Paid nodes are given up only for a place that said just now that it has nodes."""
    there = MarketPlace(name="a", spot_usd_per_h=None, on_demand_usd_per_h=9.0)
    silent = MarketPlace(name="b", spot_usd_per_h=1.0)
    view = View(
        job=JobState(work_left_s=36_000, left_s=200_000, start_s=300),
        places=(there, silent),
        running=Running(place="a", market="on_demand", nodes=1),
    )
    decision = decide(view, Model.of("H100", 1), 0, rule=CONSTANTS)
    assert type(decision.action).__name__ == "Stay"
    assert decision.action.probe == ("b",)


def _runs_on_spot(slack_s: float, **job: float) -> View:
    here = MarketPlace(
        name="a", spot_usd_per_h=1.0, on_demand_usd_per_h=9.0, seen=Seen(up=True, unseen_s=0.0)
    )
    return View(
        job=JobState(work_left_s=36_000, left_s=36_000 + slack_s, start_s=600, **job),  # type: ignore[arg-type]
        places=(
            here,
            MarketPlace(name="b", spot_usd_per_h=2.0),
            MarketPlace(name="c", spot_usd_per_h=9.5),
        ),
        running=Running(place="a", market="spot", nodes=1),
    )


def test_places_are_probed_before_only_sure_ones_may_be_bought() -> None:
    """With little slack what could take the nodes' place is found out, with much nobody asks."""
    model = Model.of("H100", 1)
    little, much = (
        decide(_runs_on_spot(slack_s), model, 0, rule=CONSTANTS).action
        for slack_s in (4000.0, 40_000.0)
    )
    assert little.probe == ("b",)
    assert much.probe == ()


def test_with_little_slack_all_cheaper_places_are_asked_in_turn() -> None:
    """A refusal then costs no tick that the deadline does not have."""
    model = Model(hazard=Model.of("H100", 1).hazard, cap_usd_per_h=1.5, theta=0.1)
    for slack_s, then in ((4000.0, ("b",)), (40_000.0, ())):
        view = _runs_on_spot(slack_s)
        unseen = tuple(replace(place, seen=Seen()) for place in view.places)
        action = decide(replace(view, running=None, places=unseen), model, 0, rethink=False).action
        assert (action.place, action.then) == ("a", then)  # type: ignore[union-attr]


@pytest.mark.parametrize("rule", RULES)
def test_the_same_seed_gives_the_same_decision(rule: str) -> None:
    """A decision depends on nothing but view, model and seed."""
    seen = Seen(up=True, unseen_s=0.0)
    view = View(
        job=JobState(
            work_left_s=36_000, left_s=80_000, start_s=300, nodes=8, budget_left_usd=900.0
        ),
        places=(
            MarketPlace(name="a", spot_usd_per_h=2.0, on_demand_usd_per_h=9.0, seen=seen),
            MarketPlace(name="b", spot_usd_per_h=1.5, on_demand_usd_per_h=9.0),
        ),
    )
    first, second = (decide(view, Model.of("H100", 8), 7, rule=rule) for _ in range(2))
    assert first.action == second.action
    assert first.model == second.model
