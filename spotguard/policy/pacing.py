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
    from collections.abc import Callable, Iterable, Iterator

    from spotguard.policy.market.hazard import Hazard
    from spotguard.policy.view import JobState, MarketPlace, Running, View

KAPPA = 0.8
KAPPA_AT_END = 0.7
"""By then no cheaper place has time to come back, and money that is left over buys nothing."""
END_H = 12.0
"""From so long before the deadline on, `KAPPA` falls."""
FADED = 0.3
AHEAD_H = 1.0
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
    """For how long they last; infinite where it does not matter."""


def expected_life_h(
    place: MarketPlace, hazard: Hazard, most_h: float, *, age_s: float | None = None
) -> float:
    """Return for how long the spot nodes of a place last, on average, at most `most_h`.

    Args:
        place: where they are.
        hazard: how often so many nodes are taken.
        most_h: nobody is interested in more.
        age_s: for how long they have been there; None if that is what was seen of the place.
    """
    seen = place.seen
    frailty = (SHAPE + seen.taken) / (SHAPE + seen.taken_expected)
    if age_s is None:
        age_s = seen.age_s if seen.up else 0.0
    steps = max(1, math.ceil(most_h / LIFE_STEP_H))
    step_h = most_h / steps
    middle_s = age_s + (np.arange(steps) + 0.5) * step_h * 3600
    passed = hazard.cumulative_many(1, middle_s) - hazard.cumulative(1, age_s)
    return float(step_h * np.exp(-frailty * passed).sum())


def dollar_price(job: JobState, least_usd_per_h: float) -> float:
    """Return what a dollar must earn, in node-hours of one node's speed.

    `rate = money / time; n = clip(rate / p, 1, N); lambda = kappa alpha n^(alpha-1) / p`, faded to
    `FADED` of it while the pace pays for half of all nodes up to all of them. `kappa` is below 1
    for the time in which the cheapest place has no nodes, and falls towards the deadline.
    """
    if job.budget_left_usd is None:
        return 0.0
    hours = NO_DEADLINE_H if job.left_s is None else max(job.left_s, 1.0) / 3600
    rate = max(0.0, job.budget_left_usd) / hours
    nodes = min(max(rate / least_usd_per_h, 1.0), float(job.nodes))
    kappa = KAPPA_AT_END + (KAPPA - KAPPA_AT_END) * min(hours / END_H, 1.0)
    full: float = kappa * job.alpha * nodes ** (job.alpha - 1) / least_usd_per_h
    plenty = (rate / (least_usd_per_h * job.nodes) - 0.5) / 0.5
    return full * (1 - (1 - FADED) * min(max(plenty, 0.0), 1.0))


def best_choice(view: View, hazard_of: Callable[[int], Hazard]) -> Choice | None:
    """Return the nodes to be on now, what runs included; None if nothing is worth its price.

    Args:
        view: what is known.
        hazard_of: rates by the number of nodes: of many at once, some are lost sooner.
    """
    job, running = view.job, view.running
    left_h = math.inf if job.left_s is None else job.left_s / 3600
    prices = [place.spot_usd_per_h for place in view.places if place.spot_usd_per_h]
    prices += [place.on_demand_usd_per_h for place in view.places if place.on_demand_usd_per_h]
    if not prices or left_h <= 0:
        return None
    price = dollar_price(job, min(prices))
    options = [
        choice
        for place in view.places
        for choice in _of_place(view, place, hazard_of, price, left_h)
    ]
    best = max(options, key=lambda each: each.worth, default=None)
    current = _current(view, price)
    if running is None or current is None:
        return best if best is not None and best.worth > 0 else None
    if best is None or _same(best, running):
        return current
    ahead_h = min(best.life_h, AHEAD_H, left_h)
    if (best.worth - current.worth) * ahead_h > best.nodes**job.alpha * job.start_s / 3600:
        return best
    return current


def _of_place(
    view: View,
    place: MarketPlace,
    hazard_of: Callable[[int], Hazard],
    dollar: float,
    left_h: float,
) -> list[Choice]:
    """Return the best number of nodes of each market of a place; none where it has too few."""
    job = view.job
    ahead_h = min(LONGEST_H, max(left_h, 1 / 60))
    found: list[tuple[str, float, Iterable[tuple[int, float]]]] = []
    if place.spot_usd_per_h and place.seen.answers:
        most = job.nodes if place.seen.nodes is None else min(place.seen.nodes, job.nodes)
        sizes = _sizes(job, place.spot_usd_per_h, most, left_h)
        lives = _lives_h(job, place, hazard_of, sizes, ahead_h)
        found.append((SPOT, place.spot_usd_per_h, zip(sizes, lives, strict=True)))
    if place.on_demand_usd_per_h and job.on_demand:
        sizes = _sizes(job, place.on_demand_usd_per_h, job.nodes, left_h)
        sure = ((nodes, ahead_h) for nodes in sizes)
        found.append((ON_DEMAND, place.on_demand_usd_per_h, sure))
    best = []
    for market, price, options in found:
        choices = (
            Choice(
                place=place.name,
                market=market,
                nodes=nodes,
                price_usd_per_h=price,
                life_h=life_h,
                worth=nodes**job.alpha * max(life_h - job.start_s / 3600, 0.0) / life_h
                - dollar * nodes * price,
            )
            for nodes, life_h in options
        )
        chosen = max(choices, key=lambda each: each.worth, default=None)
        best += [] if chosen is None else [chosen]
    return best


def _sizes(job: JobState, price: float, most: int, left_h: float) -> range:
    """Return the numbers of nodes that are neither too few nor far above the pace of the money."""
    least = job.nodes_min or job.nodes
    if job.budget_left_usd is not None and math.isfinite(left_h):
        pace = MOST * job.budget_left_usd / max(left_h, 1e-9) / price
        most = min(most, max(least, round(pace)))
    return range(least, most + 1)


def _lives_h(
    job: JobState,
    place: MarketPlace,
    hazard_of: Callable[[int], Hazard],
    sizes: range,
    most_h: float,
) -> Iterator[float]:
    """Return for how long so many spot nodes last.

    It was seen how long the fewest have been there; all beyond them are taken to have just come.
    """
    least = job.nodes_min or job.nodes
    before: tuple[Hazard, float] | None = None
    for nodes in sizes:
        hazard = hazard_of(nodes)
        if before is None or before[0] is not hazard or nodes == least + 1:
            age_s = None if nodes == least else 0.0
            life_h = expected_life_h(place, hazard, most_h, age_s=age_s)
            before = (hazard, max(life_h, 1e-9))
        yield before[1]


def _current(view: View, dollar: float) -> Choice | None:
    """Return what runs, as worth what it earns from now on; None if nothing does."""
    running = view.running
    place = next((each for each in view.places if running and each.name == running.place), None)
    if running is None or place is None:
        return None
    price = place.spot_usd_per_h if running.market == SPOT else place.on_demand_usd_per_h
    if price is None:
        return None
    return Choice(
        place=place.name,
        market=running.market,
        nodes=running.nodes,
        price_usd_per_h=price,
        worth=running.nodes**view.job.alpha - dollar * running.nodes * price,
        life_h=math.inf,
    )


def _same(choice: Choice, running: Running) -> bool:
    return (choice.place, choice.market, choice.nodes) == (
        running.place,
        running.market,
        running.nodes,
    )
