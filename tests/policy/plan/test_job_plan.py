from __future__ import annotations

import json

import pytest

from spotguard.events.states import Market
from spotguard.launch.base import Offer, Skipped
from spotguard.policy.plan.job import LOST_S, plan_job
from spotguard.shared.hazard import expected_interruptions
from spotguard.spec.model import JobSpec
from spotguard.spec.nodes import NodeRange


def spec(**changes: object) -> JobSpec:
    """Return a small spec."""
    base = JobSpec(script="/w/job.py", workdir="/w", name="job", store="/s", nodes=NodeRange(1, 3))
    return base.replace(**changes)


def offer(**changes: object) -> Offer:
    """Return a priced place."""
    fields: dict[str, object] = {
        "infra": "aws",
        "region": "us-east-2",
        "zone": "us-east-2a",
        "instance_type": "p3.2xlarge",
        "market": Market.SPOT,
        "price_usd_per_h": 1.0,
        "on_demand_usd_per_h": 4.0,
    }
    return Offer(**{**fields, **changes})  # type: ignore[arg-type]


def test_a_plan_lists_what_would_be_tried_in_order() -> None:
    """The most nodes first, on each the places in the launcher's order, other markets left out."""
    offers = [
        offer(zone="a"),
        offer(zone="b", market=Market.ON_DEMAND),
        offer(zone="c", price_usd_per_h=2.0),
    ]
    plan = plan_job(spec(), offers)
    assert [(row.nodes, row.zone) for row in plan.candidates] == [
        (3, "a"),
        (3, "c"),
        (2, "a"),
        (2, "c"),
        (1, "a"),
        (1, "c"),
    ]
    assert [row.zone for row in plan_job(spec(market="on_demand"), offers).candidates] == ["b"] * 3


def test_a_candidate_says_what_it_costs() -> None:
    """Rates are of all nodes, the price of one; the budget is told in hours."""
    row = plan_job(spec(budget_usd=30), [offer()]).candidates[0]
    assert (row.nodes, row.price_usd_per_h, row.rate_usd_per_h) == (3, 1.0, 3.0)
    assert (row.on_demand_rate_usd_per_h, row.saved_pct, row.hours_bought) == (12.0, 75.0, 10.0)
    assert row.place == "aws us-east-2 us-east-2a"


def test_an_unknown_price_stays_unknown() -> None:
    """No price: no rate, no hours, no saving; never zero."""
    row = plan_job(spec(budget_usd=30), [offer(price_usd_per_h=None, region=None)]).candidates[0]
    assert (row.rate_usd_per_h, row.hours_bought, row.saved_pct) == (None, None, None)
    assert row.place == "aws us-east-2a"


@pytest.mark.parametrize(("nproc", "expected"), [(1, [22, 32, 64]), (8, [3, 4, 8])])
def test_accumulation_follows_the_nodes(nproc: int, expected: list[int]) -> None:
    """Fewer nodes accumulate more, so that the global batch stays what the script says."""
    plan = plan_job(spec(nproc_per_node=nproc), [offer()], batches=(512, 8))
    assert [row.accumulation for row in plan.candidates] == expected
    assert (plan.global_batch, plan.micro_batch) == (512, 8)
    assert plan_job(spec(), [offer()]).candidates[0].accumulation is None


def test_the_json_is_plain_and_versioned() -> None:
    """`plan --json` is one JSON object with a schema, unknown as null."""
    body = json.loads(json.dumps(plan_job(spec(), [offer(price_usd_per_h=None)]).to_json()))
    assert body["schema"] == 1
    assert body["nodes"] == "1:3"
    assert body["candidates"][0]["price_usd_per_h"] is None
    assert body["candidates"][0]["market"] == "spot"


def test_a_plan_tells_what_interruptions_cost() -> None:
    """On clouds' spot nodes by the recorded rate, for as long as the money lasts; else a day."""
    day = plan_job(spec(), [offer()]).candidates[0]
    assert day.interruptions == pytest.approx(expected_interruptions(24.0))
    assert day.interruptions_usd == pytest.approx(expected_interruptions(24.0) * 3 * LOST_S / 3600)
    short = plan_job(spec(budget_usd=6, deadline_s=3600 * 9), [offer()]).candidates[0]
    assert short.interruptions == pytest.approx(expected_interruptions(2.0))
    until = plan_job(spec(deadline_s=3600 * 9), [offer()])
    assert until.span_h == 9.0
    assert until.candidates[0].interruptions == pytest.approx(expected_interruptions(9.0))
    rich = plan_job(spec(deadline_s=3600 * 9, budget_usd=900), [offer()]).candidates[0]
    assert rich.interruptions == pytest.approx(expected_interruptions(9.0))


def test_interruptions_are_told_only_where_they_are_known() -> None:
    """Nobody takes on-demand nodes; of a Slurm cluster and unknown prices nothing is made up."""
    bought = plan_job(spec(market="on_demand"), [offer(market=Market.ON_DEMAND)]).candidates[0]
    assert (bought.interruptions, bought.interruptions_usd) == (0.0, 0.0)
    queued = plan_job(spec(), [offer(infra="slurm")]).candidates[0]
    assert (queued.interruptions, queued.interruptions_usd) == (None, None)
    unpriced = plan_job(spec(), [offer(price_usd_per_h=None)]).candidates[0]
    assert unpriced.interruptions is not None
    assert unpriced.interruptions_usd is None


def test_on_demand_comes_last_and_only_where_it_is_allowed() -> None:
    """All spot places on all numbers of nodes first; who is skipped is told for these markets."""
    offers = [offer(zone="b", market=Market.ON_DEMAND), offer(zone="a")]
    skipped = [Skipped(place="aws/x", market=market, why="no") for market in Market]
    plan = plan_job(spec(on_demand="deadline"), offers, skipped=skipped)
    assert [(c.market, c.nodes) for c in plan.candidates] == [
        (market, nodes) for market in ("spot", "on_demand") for nodes in (3, 2, 1)
    ]
    assert plan.skipped == tuple(skipped)
    never = plan_job(spec(), offers, skipped=skipped)
    assert {c.market for c in never.candidates} == {"spot"}
    assert [place.market for place in never.skipped] == [Market.SPOT]
