"""What nodes of a place cost from here: the one number by which places are compared. Pure.

It is the price of an hour that trains: price, the egress of the checkpoint from where it lies now,
and what the lives of the place's nodes lose, each of them a start and the work that is not saved.
Whoever compares places asks `cost_from_here`; bare prices are for counting money only.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from spotguard.policy.action import ON_DEMAND, SPOT
from spotguard.policy.market.hazard import SHAPE

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from spotguard.policy.market.hazard import Hazard
    from spotguard.policy.view import JobState, MarketPlace, Seen, View

EGRESS_SPREAD_S = 4 * 3600.0
"""Over so long a stay, or the work that is left where that is less, egress is spread."""
LIES_SELDOM = 0.05
"""The odds that a place's answers say nothing of how long its nodes live, before any is seen."""
LIE_TELLS = 12.0
"""By so much each loss raises them after which the place answers again at once: an honest place
would have to take the nodes and to get new ones within one tick."""
LONGEST_LIFE_H = 24.0
"""Nobody is interested in longer lives: prices change meanwhile."""
LEAST_USEFUL = 1e-3
_LIFE_STEP_H = 1 / 3


def cost_from_here(view: View, place: MarketPlace, market: str, hazard: Hazard) -> float:
    """Return USD per node and per hour of training, of nodes in a place; infinite without a price.

    Args:
        view: what is known, and what runs now.
        place: where the nodes are or would be.
        market: `SPOT` or `ON_DEMAND`.
        hazard: how often spot nodes are taken.
    """
    job, running = view.job, view.running
    price = place.spot_usd_per_h if market == SPOT else place.on_demand_usd_per_h
    if price is None:
        return math.inf
    here = running is not None and (running.place, running.market) == (place.name, market)
    move_usd = 0.0 if here else place.move_usd / job.nodes
    work_s = max(job.work_left_s, 1.0)
    if market == ON_DEMAND:
        # Nobody takes these nodes, so they are started once. Who runs nothing starts anyway.
        useful = 1.0 if here or running is None else work_s / (work_s + job.start_s)
    else:
        useful = useful_share(job, place.seen, hazard)
    return price / useful + move_usd / min(EGRESS_SPREAD_S, work_s) * 3600


def useful_share(job: JobState, seen: Seen, hazard: Hazard) -> float:
    """Return the share of paid time that trains on spot nodes of a place.

    Each life loses a start and the work that is not saved.
    """
    lost_h = (job.start_s + job.undone_s) / 3600
    market_h, own_h, lies = lives_h(job, seen, hazard)
    by_market, by_own = (max(0.0, 1 - lost_h / each) for each in (market_h, own_h))
    return max((1 - lies) * by_market + lies * min(by_own, by_market), LEAST_USEFUL)


def frailty(changes: float, expected: float) -> float:
    """Return how many times as often as recorded a place changes."""
    return (SHAPE + changes) / (SHAPE + expected)


def lives_h(job: JobState, seen: Seen, hazard: Hazard) -> tuple[float, float, float]:
    """Return how long nodes of a place live by the market, by their own past, and the odds's share.

    The last is how likely it is that the market's record, which rests on what places answer, says
    nothing of this one: it took own nodes, and answered again at once.
    """
    frailties = np.array([frailty(seen.taken, seen.taken_expected)])
    age_s = np.array([seen.age_s if seen.up else 0.0])
    market_h = float(market_lives_h(hazard, frailties, age_s)[0])
    start_h = max(job.start_s, 1.0) / 3600
    # Gamma-exponential: own losses and hours are added to one life as long as a start.
    own_h = (start_h + seen.lived_h) / (1 + seen.lied)
    odds = LIES_SELDOM * (LIE_TELLS**seen.lied - 1)
    odds *= (start_h / (start_h + seen.lived_h)) ** (1 + seen.lied)
    return market_h, own_h, odds / (1 + odds)


def taken_as_lived(job: JobState, seen: Seen, hazard: Hazard) -> float:
    """Return the losses that explain the market's record of a place and its own nodes' lives."""
    market_h, own_h, lies = lives_h(job, seen, hazard)
    mean_h = (1 - lies) * market_h + lies * min(own_h, market_h)
    return market_h / mean_h * (SHAPE + seen.taken) - SHAPE


def market_lives_h(
    hazard: Hazard, frailties: NDArray[np.float64], ages_s: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return for how long places go on to have nodes, by the market alone, at most a day each."""
    middle_s = (np.arange(round(LONGEST_LIFE_H / _LIFE_STEP_H)) + 0.5) * _LIFE_STEP_H * 3600
    ages = ages_s.ravel()
    later = hazard.cumulative_many(1, (ages[:, None] + middle_s).ravel()).reshape(len(ages), -1)
    passed = later - hazard.cumulative_many(1, ages)[:, None]
    lives: NDArray[np.float64] = _LIFE_STEP_H * np.exp(-frailties.ravel()[:, None] * passed).sum(1)
    return lives.clip(_LIFE_STEP_H / 4).reshape(ages_s.shape)
