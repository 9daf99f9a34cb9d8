from __future__ import annotations

import numpy as np
import pytest

from spotguard.policy.market.futures import draw_futures
from spotguard.policy.market.hazard import Evidence, fitted, pooled
from spotguard.policy.market.memory import PlaceAnswer, remembered
from spotguard.policy.market.recorded import DATASETS, recorded
from spotguard.policy.simulation.omniscient import least_usd
from spotguard.policy.simulation.policy_players import Rollout, RuleOf, play
from spotguard.policy.simulation.windows import cut
from spotguard.policy.view import Seen


def test_bundled_records_are_whole() -> None:
    """Each data set opens, and has a price and a capacity at each tick."""
    sizes = {name: [len(zone.capacity) for zone in recorded(name)] for name in DATASETS}
    assert sizes["aws_v100_2023-02"] == [9304] * 5
    assert sizes["gcp_h100x16_2025-10"] == [950] * 6
    for name in DATASETS:
        for zone in recorded(name):
            assert len(zone.spot_usd_per_h) == len(zone.capacity)
            assert 0 < zone.spot_usd_per_h.max() < zone.on_demand_usd_per_h
            assert 0 <= zone.capacity.min() <= zone.capacity.max() <= zone.nodes_max


def test_rates_are_found_again() -> None:
    """From a market of known rates, the fit finds these rates."""
    rng = np.random.default_rng(5)
    states = []
    for _ in range(6):
        flips = rng.random(40_000) < 600 / 3600 * 0.4
        states.append((np.cumsum(flips) % 2 == 0, 600.0))
    found = fitted(states, "made")
    assert found.per_h[:, 1:5] == pytest.approx(0.4, rel=0.25)


def test_large_gangs_are_taken_more_often() -> None:
    """Sixteen nodes are rarer and are taken sooner than one."""
    one, sixteen = pooled("H100", 1), pooled("H100", 16)
    assert sixteen.cumulative(1, 4 * 3600) > one.cumulative(1, 4 * 3600)
    assert "H100" in sixteen.source
    assert "all recorded" in pooled("B300", 4).source


def test_futures_begin_with_what_was_seen() -> None:
    """The first step is certain where a zone has answered, and the long run elsewhere."""
    hazard = pooled("V100", 1)
    made = draw_futures(
        hazard=hazard,
        evidence=Evidence((1, 3)),
        up=np.array([[True, False, False]]),
        age_s=np.zeros((1, 3)),
        unseen_s=np.array([[0.0, 0.0, np.inf]]),
        step_s=600.0,
        steps=5,
        count=400,
        rng=np.random.default_rng(1),
    )
    assert made.shape == (5, 1, 400, 3)
    assert made[0, 0, :, 0].all()
    assert not made[0, 0, :, 1].any()
    assert 0.1 < made[0, 0, :, 2].mean() < 0.9


def test_what_was_seen_fades() -> None:
    """An interruption counts half a day later, and a place is told by its own behaviour."""
    hazard = pooled("V100", 1)
    seen = remembered(Seen(), PlaceAnswer(up=True), 0.0, hazard)
    seen = remembered(seen, PlaceAnswer(up=False), 600.0, hazard)
    assert seen.taken == 1
    assert seen.age_s == 0
    later = remembered(seen, PlaceAnswer(up=None), 86_400.0, hazard)
    assert later.taken == pytest.approx(0.5)
    assert later.unseen_s == 86_400
    assert later.answers is None


def test_how_long_so_many_nodes_have_been_there() -> None:
    """Nodes that went and came back are as new; what cannot be counted is unknown."""
    hazard = pooled("H100", 1)
    seen = Seen()
    for nodes in (3, 1, 2):
        seen = remembered(seen, PlaceAnswer(up=True, nodes=nodes), 600.0, hazard)
    assert seen.nodes_age_s == (1200.0, 0.0)
    unseen = remembered(seen, PlaceAnswer(up=None), 600.0, hazard)
    again = remembered(unseen, PlaceAnswer(up=True, nodes=2), 600.0, hazard)
    assert again.nodes_age_s == (2400.0, 1200.0)
    gone = remembered(again, PlaceAnswer(up=False, nodes=0), 600.0, hazard)
    assert gone.nodes_age_s == ()
    uncounted = remembered(again, PlaceAnswer(up=True), 600.0, hazard)
    assert uncounted.nodes_age_s == ()
    assert uncounted.age_s == 3000.0


def test_rollouts_beat_the_constants_where_prices_differ() -> None:
    """On recorded H100 gangs the chosen cap is cheaper than the fixed one."""
    windows = cut(
        recorded("gcp_h100x16_2025-10"),
        gang=16,
        work_h=12,
        deadline_h=18,
        start_s=600,
        begins=[0, 300, 600],
    )
    least = least_usd(windows)
    constants, rollout = play(windows, RuleOf()), play(windows, Rollout(futures=16))
    assert rollout.usd.sum() < constants.usd.sum()
    assert (rollout.usd >= least - 1e-6).all()
    assert (constants.usd >= least - 1e-6).all()
