"""What the rest of a job will cost, and when it will be done, with how much doubt."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from spotguard.policy.decide import evidence_of, problem_of
from spotguard.policy.rollout import Thresholds, choose, outcomes
from spotguard.policy.words import no_spot_place

if TYPE_CHECKING:
    from spotguard.policy.decide import Model
    from spotguard.policy.view import View

FUTURES = 96
LOW, HIGH = 0.1, 0.9


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """From now until the work is done. The interval is of 80 %; money is of all nodes."""

    cost_usd: float
    """The mean."""
    cost_low_usd: float
    cost_high_usd: float
    finish_s: float
    """Mean seconds from now."""
    finish_low_s: float
    finish_high_s: float
    late_share: float | None
    """Of the futures; 0 is none of `FUTURES`, which does not prove that it cannot be. None without
    a deadline."""
    on_demand_usd: float | None
    """The same work bought on demand now; None if nobody sells it."""


def forecast(view: View, model: Model, seed: int) -> Forecast:
    """Return what is to be expected: under a deadline by the default policy, else by waiting.

    With a deadline that on-demand nodes may keep, cap and slack are those of the rollouts. Without
    one, any spot place is bought once it answers, and nothing on demand.

    Raises:
        ValueError: nothing may be bought, neither spot (no price, or none within the maximum) nor
            on demand.
    """
    job = view.job
    problem, evidence = problem_of(view, model.hazard), evidence_of(view, model.hazard)
    rng = np.random.default_rng(seed)
    if not view.spot_places:
        if not problem.buys_on_demand:
            raise ValueError(no_spot_place(view))
        setting = Thresholds(cap=np.array([0.0]), theta=np.array([0.0]))
    elif problem.buys_on_demand:
        force = None
        if model.cap_usd_per_h is not None and model.theta is not None:
            force = Thresholds(cap=np.array([model.cap_usd_per_h]), theta=np.array([model.theta]))
        setting = choose(problem, in_force=force, hazard=model.hazard, evidence=evidence, rng=rng)
    else:
        setting = Thresholds(cap=np.array([math.inf]), theta=np.array([0.0]))
    usd, finish = outcomes(
        problem, setting, hazard=model.hazard, evidence=evidence, rng=rng, futures=FUTURES
    )
    cost, done = usd[0] * job.nodes, finish[0]
    low, high = (float(each) for each in np.quantile(cost, (LOW, HIGH)))
    early, late = (float(each) for each in np.quantile(done, (LOW, HIGH)))
    priced = any(place.on_demand_usd_per_h is not None for place in view.places)
    over = float(problem.on_demand[0]) * job.nodes * (job.work_left_s + job.start_s) / 3600
    return Forecast(
        cost_usd=float(cost.mean()),
        cost_low_usd=low,
        cost_high_usd=high,
        finish_s=float(done.mean()),
        finish_low_s=early,
        finish_high_s=late,
        late_share=None if job.left_s is None else float((done > job.left_s + 1.0).mean()),
        on_demand_usd=over if priced else None,
    )


def on_demand_forecast(view: View) -> Forecast:
    """Return what the work costs on demand, undisturbed, in the cheapest place or where it runs."""
    job, running = view.job, view.running
    here = None if running is None else running.place
    prices = [
        (place.name != here, place.on_demand_usd_per_h)
        for place in view.places
        if place.on_demand_usd_per_h is not None
    ]
    price = min(prices)[1] if prices else 0.0
    finish_s = job.work_left_s + (job.start_s if running is None else running.starting_s)
    usd = price * job.nodes * finish_s / 3600
    return Forecast(
        cost_usd=usd,
        cost_low_usd=usd,
        cost_high_usd=usd,
        finish_s=finish_s,
        finish_low_s=finish_s,
        finish_high_s=finish_s,
        late_share=None if job.left_s is None else float(finish_s > job.left_s + 1.0),
        on_demand_usd=usd,
    )
