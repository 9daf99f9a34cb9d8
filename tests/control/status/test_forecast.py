from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import pytest

from spotguard.cli.views import formats
from spotguard.control.journal.record import Limits
from spotguard.control.status.forecast import plan_forecast, run_forecast
from spotguard.control.supervisor.placement.seen_places import place_name
from spotguard.events.states import Market
from spotguard.launch.base import Offer
from spotguard.policy.market.sightings import Sighting
from spotguard.spec.model import JobSpec, build_spec
from tests.control.made import Line, ended, launched, made, training

if TYPE_CHECKING:
    from pathlib import Path

    from spotguard.control.journal.record import RunRecord

HOUR = 3600.0
SPOT = Offer(
    infra="gcp",
    region="us-east4",
    zone="us-east4-b",
    instance_type="a3-highgpu-1g",
    market=Market.SPOT,
    price_usd_per_h=2.0,
    on_demand_usd_per_h=9.0,
)
OVER = replace(SPOT, market=Market.ON_DEMAND, price_usd_per_h=9.0)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have no earlier runs."""
    monkeypatch.setenv("SPOTGUARD_HOME", str(tmp_path))


def _spec(**fields: Any) -> JobSpec:
    given = {"script": "/job.py", "workdir": "/", "name": "job", "store": "/store"}
    told = {"infra": "gcp", "gpus": "H100", "work_s": "20h", "deadline_s": "30h"}
    return build_spec({**given, **told, "on_demand": "deadline", **fields})


def test_a_plan_tells_what_it_will_cost_and_on_what_that_rests() -> None:
    """Between spot and on demand, in time, from a record that has an age."""
    told = plan_forecast(_spec(), [SPOT, OVER], [], now=2e9)
    assert told is not None
    assert told.none is None
    assert told.cost_low_usd is not None
    assert told.cost_usd is not None
    assert told.cost_high_usd is not None
    assert 20 * 2.0 < told.cost_low_usd <= told.cost_usd <= told.cost_high_usd < 31 * 9.0
    assert told.on_demand_usd == pytest.approx(9.0 * (20 + 1 / 6))
    assert told.late_pct == 0
    assert told.market == "H100 as recorded in 6 zones of gcp"
    assert told.market_at is not None
    assert told.market_at < 2e9
    words = dict(formats.forecast(told, now=2e9, budget_usd=30.0))
    assert words["forecast"].endswith("; the budget may end it before")
    assert "20 h 00 min of work, by --work" in words["rests on"]
    assert words["rests on"].endswith(" old")


@pytest.mark.parametrize(
    ("fields", "offers", "why"),
    [
        ({"gpus": "B300"}, [SPOT], "nothing recorded for this GPU"),
        ({"gpus": None}, [SPOT], "nothing recorded for nodes without a GPU"),
        (
            {"work_s": None},
            [SPOT],
            "how long the training takes is not known yet; say it: --work 20h",
        ),
        ({}, [replace(SPOT, price_usd_per_h=None)], "no price is known"),
        ({}, [OVER], "no price is known"),
        (
            {"max_price_usd_per_h": 0.5, "on_demand": "never"},
            [SPOT],
            "no spot place is within the maximum of $0.50 per node and hour, "
            "the cheapest costs $2.00",
        ),
        (
            {"on_demand": "fallback-after 20m"},
            [SPOT],
            "none is made for --on-demand fallback-after",
        ),
    ],
)
def test_rather_no_forecast_than_a_guess(
    fields: dict[str, Any], offers: list[Offer], why: str
) -> None:
    """What is not known is said, in one sentence, and there is no number."""
    told = plan_forecast(_spec(**fields), offers, [], now=0.0)
    assert told is not None
    assert told.none == why
    assert told.cost_usd is None
    assert formats.forecast(told, now=0.0, budget_usd=None) == [("forecast", f"no forecast: {why}")]


def test_a_plan_counts_the_egress_of_the_checkpoint() -> None:
    """Each start reads it from the store, which may be in another cloud."""
    here, there = (
        plan_forecast(_spec(store=store), [SPOT, OVER], [], now=2e9, state_bytes=1e12)
        for store in ("gs://bucket/runs", "s3://bucket/runs?region=us-east-1")
    )
    assert here is not None
    assert there is not None
    assert here.cost_usd is not None
    assert there.cost_low_usd is not None
    assert there.cost_usd is not None
    assert there.cost_usd >= here.cost_usd + 90  # of $0.09 a GB, at least once


def test_nodes_of_this_machine_are_no_market() -> None:
    """Nothing at all is said of them."""
    assert plan_forecast(_spec(infra="local"), [SPOT], [], now=0.0) is None


def test_own_sightings_make_a_market() -> None:
    """Of a GPU that is recorded nowhere, once there are enough: how often nodes are taken is then
    what was recorded of others, which is said, with its age.
    """
    saw = [
        Sighting(at=100.0 * each, kind="granted", place=place_name(SPOT), accelerator="B300")
        for each in range(1, 11)
    ]
    told = plan_forecast(_spec(gpus="B300"), [SPOT], saw, now=2000.0)
    assert told is not None
    recorded = "all recorded accelerators as recorded in 14 zones of aws, gcp"
    assert (told.none, told.market) == (None, f"{recorded} and 10 sightings of your own runs")
    assert told.market_at is not None
    assert told.market_at == datetime(2023, 2, 15, tzinfo=timezone.utc).timestamp(), "the oldest"
    on_demand = [replace(each, market="on_demand") for each in saw]
    nothing = plan_forecast(_spec(gpus="B300"), [SPOT], on_demand, now=2000.0)
    assert nothing is not None
    assert nothing.none == "nothing recorded for this GPU", "nobody saw a spot node"
    too_few = plan_forecast(_spec(gpus="B300"), [SPOT], saw[1:], now=2000.0)
    assert too_few is not None
    assert too_few.none == "nothing recorded for this GPU"


def test_a_new_sighting_makes_an_old_record_no_younger() -> None:
    """The forecast is as old as the rates and the prices that it rests on."""
    saw = [Sighting(at=1.99e9, kind="granted", place=place_name(SPOT), accelerator="H100")]
    told = plan_forecast(_spec(), [SPOT, OVER], saw, now=2e9)
    alone = plan_forecast(_spec(), [SPOT, OVER], [], now=2e9)
    assert told is not None
    assert alone is not None
    assert told.market == "H100 as recorded in 6 zones of gcp and 1 sighting of your own runs"
    assert told.market_at == alone.market_at
    noted = Sighting(at=1.5e9, kind="price", place=place_name(SPOT), usd_per_h=2.0)
    unpriced = replace(SPOT, price_usd_per_h=None)
    other = replace(SPOT, zone="elsewhere")
    told = plan_forecast(_spec(), [unpriced, other, OVER], [noted], now=2e9)
    assert told is not None
    assert told.market == "H100 as recorded in 6 zones of gcp and spot prices noted earlier"
    assert told.market_at == 1.5e9


def test_on_demand_is_foretold_without_a_market() -> None:
    """The price times the time, and no doubt."""
    told = plan_forecast(_spec(gpus="B300", market="on_demand"), [OVER], [], now=0.0)
    assert told is not None
    assert told.cost_usd == told.cost_low_usd == pytest.approx(9.0 * (20 + 1 / 6))
    assert told.market == "the price on demand"


def _run(*lines: Line, **fields: Any) -> RunRecord:
    record = made(*lines, limits=Limits(nodes_max=2, nodes_min=2, deadline_at=100 * HOUR))
    attempts = tuple(replace(attempt, offer=SPOT) for attempt in record.attempts)
    return replace(record, spec=_spec(**fields).to_json(), attempts=attempts)


def test_a_run_is_foretold_from_its_own_pace() -> None:
    """What is spent counts, what is left goes at the pace that was seen, not at what was said."""
    progress = {"step": 500, "total_steps": 1000, "step_s": 72.0}
    trains = (*launched(0.0), training(600.0), ("progress", 10 * HOUR, 1, progress))
    told = run_forecast(_run(*trains), [], now=10 * HOUR)
    assert told is not None
    assert told.work_s == pytest.approx(500 * 72.0)
    assert told.work_from == "its own pace"
    assert told.cost_usd is not None
    assert told.cost_usd > 2 * 2.0 * 20 * 0.99, "10 h are paid, 10 h are left"
    assert told.finish_at is not None
    assert told.finish_at >= 20 * HOUR - 1


def test_before_its_first_step_a_run_goes_by_what_was_said() -> None:
    """And without a word of anybody there is no forecast."""
    said = run_forecast(_run(*launched(0.0)), [], now=60.0)
    assert said is not None
    assert (said.none, said.work_from) == (None, "--work")
    unsaid = run_forecast(_run(*launched(0.0), work_s=None), [], now=60.0)
    assert unsaid is not None
    assert unsaid.none is not None
    assert "--work" in unsaid.none


def test_nodes_on_demand_do_not_hide_the_same_places_spot() -> None:
    """A run that made do with on-demand nodes is foretold from both prices."""
    lines = (*launched(0.0), training(600.0), ended(2 * HOUR, "preempted"), *launched(2 * HOUR, 2))
    run = _run(*lines)
    over = replace(OVER, zone=SPOT.zone)
    run = replace(run, attempts=(run.attempts[0], replace(run.attempts[1], offer=over)))
    told = run_forecast(run, [], now=3 * HOUR)
    assert told is not None
    assert told.none is None


def test_a_settled_run_has_no_future() -> None:
    """What has come to rest costs nothing more."""
    settled = ("settled", 90.0, None, {"state": "paused", "detail": "so", "exit_code": 11})
    lines = (*launched(0.0), ended(80.0, "vanished"), settled)
    assert run_forecast(_run(*lines), [], now=100.0) is None
