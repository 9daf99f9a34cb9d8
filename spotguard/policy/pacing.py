"""Priced pacing: as much work as a budget and a time buy, with a number of nodes that may change.

A price `lambda` stands for what a dollar must earn: it follows from the pace at which the money
that is left can be spent over the time that is left. Each place is worth the speed of the nodes
that it gives, less its restarts, less what they cost at that price.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from spotguard.policy.action import ON_DEMAND, SPOT
from spotguard.policy.market.hazard import SHAPE

if TYPE_CHECKING:
    from spotguard.policy.market.hazard import Hazard
    from spotguard.policy.view import JobState, MarketPlace, Running, View

KAPPA = 0.8
FADED = 0.3
AHEAD_H = 6.0
"""A change must pay for itself within this."""
NO_DEADLINE_H = 168.0
"""Without a deadline the money is to last a week."""
MOST = 1.2
"""No more nodes than this times what the pace pays for."""
LIFE_STEP_H = 1 / 6
LONGEST_H = 48.0


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Nodes of a place, and what they are worth per hour in units of one node's speed."""

    place: str
    market: str
    nodes: int
    price_usd_per_h: float
    worth: float
    life_h: float


def expected_life_h(place: MarketPlace, hazard: Hazard, most_h: float) -> float:
    """Return for how long the spot nodes of a place last, on average, at most `most_h`."""
    seen = place.seen
    frailty = (SHAPE + seen.taken) / (SHAPE + seen.taken_expected)
    age_s = seen.age_s if seen.up else 0.0
    steps = max(1, math.ceil(most_h / LIFE_STEP_H))
    step_h = most_h / steps
    middle_s = age_s + (np.arange(steps) + 0.5) * step_h * 3600
    passed = hazard.cumulative_many(1, middle_s) - hazard.cumulative(1, age_s)
    return float(step_h * np.exp(-frailty * passed).sum())


def dollar_price(job: JobState, least_usd_per_h: float) -> float:
    """Return what a dollar must earn, in node-hours of one node's speed.

    `rate = money / time; n = clip(rate / p, 1, N); lambda = kappa alpha n^(alpha-1) / p`, faded to
    `FADED` of it while the pace pays for half of all nodes up to all of them.
    """
    if job.budget_left_usd is None:
        return 0.0
    hours = NO_DEADLINE_H if job.left_s is None else max(job.left_s, 1.0) / 3600
    rate = max(0.0, job.budget_left_usd) / hours
    nodes = min(max(rate / least_usd_per_h, 1.0), float(job.nodes))
    full: float = KAPPA * job.alpha * nodes ** (job.alpha - 1) / least_usd_per_h
    plenty = (rate / (least_usd_per_h * job.nodes) - 0.5) / 0.5
    return full * (1 - (1 - FADED) * min(max(plenty, 0.0), 1.0))


def best_choice(view: View, hazard: Hazard) -> Choice | None:
    """Return the nodes to be on now, what runs included; None if nothing is worth its price."""
    job, running = view.job, view.running
    left_h = math.inf if job.left_s is None else job.left_s / 3600
    prices = [place.spot_usd_per_h for place in view.places if place.spot_usd_per_h]
    prices += [place.on_demand_usd_per_h for place in view.places if place.on_demand_usd_per_h]
    if not prices or left_h <= 0:
        return None
    price = dollar_price(job, min(prices))
    options = [
        choice for place in view.places for choice in _of_place(view, place, hazard, price, left_h)
    ]
    best = max(options, key=lambda each: each.worth, default=None)
    current = _current(view, hazard, price, left_h)
    if running is None or current is None:
        return best if best is not None and best.worth > 0 else None
    if best is None or _same(best, running):
        return current
    ahead_h = min(best.life_h, AHEAD_H, left_h)
    if (best.worth - current.worth) * ahead_h > best.nodes**job.alpha * job.start_s / 3600:
        return best
    return current


def _of_place(
    view: View, place: MarketPlace, hazard: Hazard, dollar: float, left_h: float
) -> list[Choice]:
    choices = []
    if place.spot_usd_per_h and place.seen.answers:
        life_h = expected_life_h(place, hazard, min(LONGEST_H, max(left_h, 1 / 60)))
        most = view.job.nodes if place.seen.nodes is None else place.seen.nodes
        choices += _sizes(
            view.job, place.name, SPOT, place.spot_usd_per_h, life_h, most, dollar, left_h
        )
    if place.on_demand_usd_per_h and view.job.on_demand:
        choices += _sizes(
            view.job,
            place.name,
            ON_DEMAND,
            place.on_demand_usd_per_h,
            min(left_h, LONGEST_H),
            view.job.nodes,
            dollar,
            left_h,
        )
    return choices


def _sizes(
    job: JobState,
    name: str,
    market: str,
    price: float,
    life_h: float,
    most: int,
    dollar: float,
    left_h: float,
) -> list[Choice]:
    """Return the best number of nodes of a place; none where it has too few."""
    if job.budget_left_usd is not None and math.isfinite(left_h):
        pace = MOST * job.budget_left_usd / max(left_h, 1e-9) / price
        most = min(most, max(job.nodes_min or 1, round(pace)))
    most = min(most, job.nodes)
    useful = max(life_h - job.start_s / 3600, 0.0) / max(life_h, 1e-9)
    return (
        [
            max(
                (
                    Choice(
                        place=name,
                        market=market,
                        nodes=nodes,
                        price_usd_per_h=price,
                        life_h=life_h,
                        worth=nodes**job.alpha * useful - dollar * nodes * price,
                    )
                    for nodes in range(job.nodes_min or job.nodes, most + 1)
                ),
                key=lambda each: each.worth,
            )
        ]
        if most >= (job.nodes_min or job.nodes)
        else []
    )


def _current(view: View, hazard: Hazard, dollar: float, left_h: float) -> Choice | None:
    running = view.running
    for place in view.places:
        if running is None or place.name != running.place:
            continue
        spot = running.market == SPOT
        price = place.spot_usd_per_h if spot else place.on_demand_usd_per_h
        life_h = (
            expected_life_h(place, hazard, min(LONGEST_H, left_h)) if spot else min(left_h, 48.0)
        )
        if price is None:
            return None
        return Choice(
            place=place.name,
            market=running.market,
            nodes=running.nodes,
            price_usd_per_h=price,
            worth=running.nodes**view.job.alpha - dollar * running.nodes * price,
            life_h=life_h,
        )
    return None


def _same(choice: Choice, running: Running) -> bool:
    return (choice.place, choice.market, choice.nodes) == (
        running.place,
        running.market,
        running.nodes,
    )
