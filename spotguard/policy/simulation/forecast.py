"""What the rest of a job will cost, and when it will be done, with how much doubt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from spotguard.policy.decide import Model, evidence_of, problem_of
from spotguard.policy.recorded import zones_of
from spotguard.policy.rollout import Thresholds, choose, outcomes

if TYPE_CHECKING:
    from spotguard.policy.view import View

FUTURES = 96


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """From now until the work is done, by the default policy. The interval is of 80 %."""

    cost_usd: float
    """Mean, of all nodes."""
    cost_low_usd: float
    cost_high_usd: float
    finish_s: float
    """Mean seconds from now."""
    finish_low_s: float
    finish_high_s: float
    late_share: float
    """Of the futures; 0 is none of `FUTURES`, which does not prove that it cannot be."""
    on_demand_usd: float
    """The same work bought on demand now."""
    market: str
    """Which record it rests on."""
    recorded_at: str
    """When that was recorded: its first day."""


def forecast(view: View, model: Model, seed: int) -> Forecast | None:
    """Return what is to be expected; None if nothing is recorded for this accelerator.

    Needs a deadline: without one nobody knows when the policy would stop waiting.
    """
    zones = zones_of(view.job.accelerator)
    if not zones or view.job.left_s is None or view.job.work_left_s <= 0:
        return None
    problem, evidence = problem_of(view), evidence_of(view)
    rng = np.random.default_rng(seed)
    force = None
    if model.cap_usd_per_h is not None and model.theta is not None:
        force = Thresholds(cap=np.array([model.cap_usd_per_h]), theta=np.array([model.theta]))
    setting = choose(problem, in_force=force, hazard=model.hazard, evidence=evidence, rng=rng)
    usd, finish = outcomes(
        problem, setting, hazard=model.hazard, evidence=evidence, rng=rng, futures=FUTURES
    )
    cost, done = usd[0] * view.job.nodes, finish[0]
    low, high = (float(each) for each in np.quantile(cost, (0.1, 0.9)))
    early, late = (float(each) for each in np.quantile(done, (0.1, 0.9)))
    over = float(problem.on_demand[0]) * view.job.nodes
    return Forecast(
        cost_usd=float(cost.mean()),
        cost_low_usd=low,
        cost_high_usd=high,
        finish_s=float(done.mean()),
        finish_low_s=early,
        finish_high_s=late,
        late_share=float((done > view.job.left_s + 1.0).mean()),
        on_demand_usd=over * (view.job.work_left_s + view.job.start_s) / 3600,
        market=model.hazard.source,
        recorded_at=min(str(zone.start) for zone in zones)[:10],
    )
