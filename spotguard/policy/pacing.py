"""Priced pacing: as much work as a budget and a time buy, with a number of nodes that may change.

A price `lambda` stands for what a dollar must earn: it follows from the pace at which the money
that is left can be spent over the time that is left. Each node that a place gives is worth the
speed that it adds, less what it costs at that price, for as long as it is likely to last; a change
is worth a start less.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from spotguard.policy.action import ON_DEMAND, SPOT
from spotguard.policy.market.chances import chance_up
from spotguard.policy.market.hazard import SHAPE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from spotguard.policy.market.hazard import Hazard
    from spotguard.policy.view import JobState, MarketPlace, View

KAPPA = 0.8
KAPPA_AT_END = 0.7
"""By then no cheaper place has time to come back, and money that is left over buys nothing."""
END_H = 12.0
"""From so long before the deadline on, `KAPPA` falls."""
FADED = 0.3
AHEAD_STARTS = 18.0
"""A change must pay for its start within so many times a start."""
NO_DEADLINE_H = 168.0
"""Without a deadline the money is to last a week."""
MOST = 1.2
"""No more nodes than this times what the pace pays for."""
LIFE_STEP_H = 1 / 6


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Nodes of a place, and what they are worth, in node-hours of one node's speed."""

    place: str
    market: str
    nodes: int
    price_usd_per_h: float
    worth: float
    """In the time within which a change must pay, less a start unless they run already."""


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
    job = view.job
    left_h = math.inf if job.left_s is None else job.left_s / 3600
    spot = view.spot_places
    told = [place.spot_usd_per_h for place in spot]
    told += [place.on_demand_usd_per_h for place in view.places]
    prices = [each for each in told if each is not None]
    if not prices or left_h <= 0:
        return None
    paid = [each for each in prices if each > 0]
    dollar = dollar_price(job, min(paid)) if paid else 0.0
    if paid:
        dollar = min(dollar, _earned_by_dearest(view, hazard_of(job.nodes), dollar))
    ahead_h = min(max(AHEAD_STARTS * job.start_s, view.tick_s) / 3600, left_h)
    worth = _Worth(job, dollar, ahead_h, hazard_of)
    options = [
        option
        for place in view.places
        for market, price, most in _offers(job, place, left_h, spot=place in spot)
        for option in worth.bought(place, market, price, most)
    ]
    best = max(options, key=lambda each: each.worth, default=None)
    if best is not None and best.worth <= 0:
        best = None
    current = _current(view, worth)
    if current is None or (best is not None and best.worth > current.worth):
        return best
    return current


def _earned_by_dearest(view: View, hazard: Hazard, most: float) -> float:
    """Return what a dollar earns in the dearest place that the money can pay when no other has any.

    Where the money pays all nodes all the time, by cheap places while they have nodes and by that
    one else, a dollar that must earn more would stay unspent. `most` where the money pays less.
    """
    job = view.job
    if job.budget_left_usd is None or job.left_s is None:
        return most
    offers = [(place.spot_usd_per_h, _share_up(place, hazard)) for place in view.spot_places]
    if job.on_demand:
        offers += [(place.on_demand_usd_per_h, 1.0) for place in view.places]
    rate_usd = job.budget_left_usd / (max(job.left_s, 1.0) / 3600) / job.nodes
    away, usd = 1.0, 0.0
    prices = [price for price, _ in offers if price]
    for price, share in sorted((p, s) for p, s in offers if p):
        usd += away * share * price
        away *= 1 - share
        if usd + away * price <= rate_usd:
            # So that all nodes there are worth more than half of them in the cheapest place.
            gain = (1 - 0.5**job.alpha) * job.nodes ** (job.alpha - 1)
            most = min(most, gain / (price - 0.5 * min(prices)))
    return most


def _share_up(place: MarketPlace, hazard: Hazard) -> float:
    """Return the share of time in which a place has nodes, in the long run."""
    return chance_up(replace(place, seen=replace(place.seen, unseen_s=math.inf)), hazard)


def _offers(
    job: JobState, place: MarketPlace, left_h: float, *, spot: bool
) -> Iterator[tuple[str, float, int]]:
    """Return market, price and the most nodes of what can be bought in a place.

    `spot` tells whether its spot nodes are within the maximum price.
    """
    if spot and place.spot_usd_per_h is not None and place.seen.answers:
        there = job.nodes if place.seen.nodes is None else min(place.seen.nodes, job.nodes)
        yield SPOT, place.spot_usd_per_h, _most(job, place.spot_usd_per_h, there, left_h)
    if place.on_demand_usd_per_h is not None and job.on_demand:
        price = place.on_demand_usd_per_h
        yield ON_DEMAND, price, _most(job, price, job.nodes, left_h)


def _most(job: JobState, price: float, there: int, left_h: float) -> int:
    """Return how many nodes are not far above the pace of the money."""
    if job.budget_left_usd is None or math.isinf(left_h) or price == 0:
        return there
    pace = MOST * job.budget_left_usd / max(left_h, 1e-9) / price
    return min(there, max(job.nodes_min or job.nodes, round(pace)))


@dataclass(frozen=True)
class _Worth:
    """What nodes are worth in the time within which a change must pay."""

    job: JobState
    dollar: float
    ahead_h: float
    hazard_of: Callable[[int], Hazard]

    def bought(self, place: MarketPlace, market: str, price: float, most: int) -> Iterator[Choice]:
        """Return each number of nodes up to the most, less a start."""
        start_h = self.job.start_s / 3600
        for nodes, worth in self.kept(place, market, price, most):
            yield Choice(
                place=place.name,
                market=market,
                nodes=nodes,
                price_usd_per_h=price,
                worth=worth - nodes**self.job.alpha * start_h,
            )

    def kept(
        self, place: MarketPlace, market: str, price: float, most: int
    ) -> Iterator[tuple[int, float]]:
        """Return each number of nodes up to the most, with its worth while it lasts.

        A node is worth what it adds to the speed, less its price, for as long as it lasts: who has
        many and loses some goes on with the others. The fewest that may run are lost together.
        """
        least = self.job.nodes_min or self.job.nodes
        total, life_h = 0.0, self.ahead_h
        known: tuple[Hazard, float | None, float] | None = None
        for fewer, nodes in pairwise((0, *range(least, most + 1))):
            if market == SPOT:
                hazard, age_s = self.hazard_of(nodes), _age_s(place, nodes)
                if known is None or known[0] is not hazard or known[1] != age_s:
                    known = hazard, age_s, expected_life_h(place, hazard, self.ahead_h, age_s=age_s)
                life_h = min(life_h, known[2])
            speed = nodes**self.job.alpha - fewer**self.job.alpha
            total += (speed - self.dollar * (nodes - fewer) * price) * life_h
            yield nodes, total


def _age_s(place: MarketPlace, nodes: int) -> float | None:
    """Return for how long so many nodes have been there; None if only the fewest are known of."""
    ages_s = place.seen.nodes_age_s
    return ages_s[nodes - 1] if nodes <= len(ages_s) else None


def _current(view: View, worth: _Worth) -> Choice | None:
    """Return what runs, as worth what it earns from now on; None if nothing does."""
    running = view.running
    place = next((each for each in view.places if running and each.name == running.place), None)
    if running is None or place is None:
        return None
    price = place.spot_usd_per_h if running.market == SPOT else place.on_demand_usd_per_h
    if price is None:
        return None
    earned = dict(worth.kept(place, running.market, price, running.nodes))
    return Choice(
        place=place.name,
        market=running.market,
        nodes=running.nodes,
        price_usd_per_h=price,
        worth=earned.get(running.nodes, 0.0),
    )
