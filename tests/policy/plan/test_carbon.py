"""Estimates of energy and CO2e: each number has a source, what is unknown is none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from spotguard.control.status.footprint import run_footprint
from spotguard.events.states import Market
from spotguard.launch.base import Offer
from spotguard.policy.plan.carbon.estimate import draw, greener_first, machine
from spotguard.policy.plan.carbon.factors import device, grid, pue
from tests.control.made import ended, intended, made, training

EIGHT = machine("A100:8", None, processes=8, is_local=False)


def _offer(region: str, price: float | None, market: Market = Market.SPOT) -> Offer:
    return Offer(
        infra="aws",
        region=region,
        zone=None,
        instance_type="p4d.24xlarge",
        market=market,
        price_usd_per_h=price,
        on_demand_usd_per_h=None,
    )


def test_a_node_is_power_times_pue_times_grid() -> None:
    """Eight A100 at 400 W in Ohio."""
    causes = draw("aws", "us-east-2", EIGHT)
    assert causes is not None
    assert causes.kwh_per_h == pytest.approx(8 * 0.4 * 1.15)
    assert causes.g_per_h == pytest.approx(8 * 0.4 * 1.15 * 484.6, rel=1e-3)
    assert all(factor.source and factor.year > 2015 for factor in causes.factors)


def test_what_was_not_looked_up_says_so() -> None:
    """Whoever repeats a number is told whether anybody has seen its source."""
    assert grid("gcp", "us-central1").verified
    assert not grid("aws", "us-east-2").verified
    assert grid("aws", "mars-1").verified
    assert pue("aws").verified
    assert not pue("gcp").verified
    told = device("V100")
    assert told is not None
    assert not told.verified


def test_unknown_devices_cause_no_number() -> None:
    """Neither zero nor a guess."""
    assert device("TPU-v9") is None
    assert draw("aws", "us-east-2", machine("TPU-v9:4", None, processes=4, is_local=False)) is None
    assert draw("aws", None, machine(None, None, processes=4, is_local=False)) is None


def test_an_unknown_region_is_the_world() -> None:
    """And says so; an unknown cloud has the average data centre."""
    assert grid("aws", "mars-1").name == "grid, region unknown"
    assert grid("gcp", "europe-west9").value < 60
    assert pue("slurm").value > pue("gcp").value >= 1.0


def test_green_breaks_ties_and_nothing_else() -> None:
    """Within 5 % of the price; a greener place that costs more stays where it is."""
    ohio, paris, virginia = (
        _offer("us-east-2", 1.00),
        _offer("eu-west-3", 1.04),
        _offer("us-east-1", 1.2),
    )
    assert greener_first([ohio, paris, virginia], lambda _: EIGHT) == [paris, ohio, virginia]
    dear = replace(paris, price_usd_per_h=1.06)
    assert greener_first([ohio, dear, virginia], lambda _: EIGHT) == [ohio, dear, virginia]
    on_demand = replace(paris, market=Market.ON_DEMAND)
    assert greener_first([ohio, on_demand], lambda _: EIGHT) == [ohio, on_demand]
    unpriced = replace(paris, price_usd_per_h=None)
    assert set(greener_first([ohio, unpriced, virginia], lambda _: EIGHT)) == {
        ohio,
        unpriced,
        virginia,
    }


def _progress(at: float, **counters: float) -> Any:
    return ("progress", at, 1, {"step": 1, "metrics": counters})


def test_what_gpus_counted_is_measured() -> None:
    """From the first to the last value, times the PUE; if one is missing, it is estimated."""
    names = {f"spotguard/node0/gpu{gpu}/energy_j": 1e6 for gpu in range(3)}
    later = {name: value + 3.6e6 for name, value in names.items()}
    kind, at, number, data = intended(0.0, nodes=1, infra="gcp")
    lines = ((kind, at, number, data), ("launched", 0.0, 1), training(1.0))
    record = made(*lines, _progress(10.0, **names), _progress(3600.0, **later))
    record.spec.update(gpus="A100:3", infra="gcp")
    told = run_footprint(record, 3600.0)
    assert told.measured
    assert told.energy_kwh == pytest.approx(3 * 1.09)
    record.spec.update(gpus="A100:4")
    estimated = run_footprint(record, 3600.0)
    assert not estimated.measured
    assert estimated.energy_kwh == pytest.approx(4 * 0.4 * 1.09)


def test_one_unknown_attempt_makes_the_run_unknown() -> None:
    """A sum over the known ones would look like all of it."""
    record = made(intended(0.0), ("launched", 0.0, 1), training(1.0), ended(9.0, "preempted"))
    record.spec.update(gpus="TPU-v9")
    assert run_footprint(record, 10.0).energy_kwh is None
