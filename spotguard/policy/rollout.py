"""Rollout-TSG: cap and slack of the rule are chosen by playing them in drawn futures.

The same futures are shared by all candidates. Each candidate plays some of them, the best play all
of them, and the least mean cost wins; the set in force is favoured a little, because noise would
otherwise buy moves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from spotguard.policy.market.futures import draw_futures
from spotguard.policy.rule import TINY

if TYPE_CHECKING:
    from spotguard.policy.market.hazard import Evidence, Hazard

THETAS = (0.0, 0.05, 0.1, 0.2, 0.4, 0.8)
TIER_THETA = 0.15
LEVELS = 5
"""At most so many caps are tried."""
SAME_PRICE = 1.01
"""Prices within a percent are one level."""
FUTURES = 32
SCREENED = 8
"""Futures that each candidate plays."""
FINALISTS = 6
IN_FORCE = 0.97
"""By so much the set in force is favoured."""
TIER = 0.97
STEPS = 144
"""A future is played in at most about so many steps."""
MASKED = 62
"""So many places, and on demand, fit in the bits of a whole number, which is the quicker way."""
FINE_STEPS = 1008
"""The same where a cost is to be told, not only compared: a week in steps of ten minutes."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What is to be decided, for any number of problems at once (first axis); times in ticks."""

    price: NDArray[np.float64]
    """(problems, zones) USD per node and hour, of spot."""
    on_demand: NDArray[np.float64]
    """(problems,) of the cheapest on-demand place."""
    up: NDArray[np.bool_]
    age_s: NDArray[Any]
    unseen_s: NDArray[np.float64]
    running: NDArray[np.int64]
    """(problems,) zone; `zones` on demand; `zones + 1` nothing."""
    starting: NDArray[np.float64]
    left: NDArray[np.float64]
    work: NDArray[np.float64]
    start: NDArray[np.float64]
    cost: NDArray[np.float64]
    """(problems, zones) USD per node and hour, from `place_cost`: places are compared by it."""
    on_demand_cost: NDArray[np.float64]
    """(problems,) the same of the on-demand place."""
    tick_s: float
    move_usd: NDArray[np.float64] | None = None
    """(problems, zones + 1): egress of the checkpoint in USD per node; the last is on demand."""
    buys_on_demand: bool = True
    """Whether on-demand nodes may be bought to keep the deadline."""

    def picked(self, which: NDArray[np.int64]) -> Problem:
        """Return some of the problems."""
        arrays: dict[str, Any] = {
            name: value[which]
            for name, value in vars(self).items()
            if isinstance(value, np.ndarray)
        }
        return replace(self, **arrays)


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """Cap and slack in force, per problem, and what they are expected to cost."""

    cap: NDArray[np.float64]
    """USD per node and hour up to which spot is bought without pressure."""
    theta: NDArray[np.float64]
    """Slack below this share of the work presses."""
    mean_usd: NDArray[np.float64] | None = None
    """Expected cost per node from now to the end."""
    usd: NDArray[np.float64] | None = None
    """(problems, futures) cost per node in each future."""
    finish_s: NDArray[np.float64] | None = None
    """(problems, futures) seconds until the work is done."""


def tier_setting(cost: NDArray[np.float64]) -> Thresholds:
    """Return the constants: the cheapest level of costs, and a slack of 0.15."""
    least = cost.min(axis=1)
    return Thresholds(cap=least * SAME_PRICE, theta=np.full(len(cost), TIER_THETA))


def choose(
    problem: Problem,
    *,
    in_force: Thresholds | None,
    hazard: Hazard,
    evidence: Evidence,
    rng: np.random.Generator,
    futures: int = FUTURES,
    screened: int = SCREENED,
) -> Thresholds:
    """Return the setting that costs least in drawn futures, per problem."""
    played = _Played(problem, hazard=hazard, evidence=evidence, futures=futures, rng=rng)
    caps, thetas, favour = _candidates(problem, in_force)
    within = (played.sorted_cost[:, None, :] <= caps[:, :, None] * (1 + TINY)).sum(2)
    first, _ = played.play(within, thetas, slice(0, screened))
    score = first.mean(2) * favour
    finalists = np.argsort(score, axis=1, kind="stable")[:, :FINALISTS]
    rows = np.arange(len(caps))[:, None]
    usd, finish = played.play(within[rows, finalists], thetas[rows, finalists], slice(0, futures))
    mean = usd.mean(2)
    best = np.argmin(mean * favour[rows, finalists], axis=1)
    one = np.arange(len(caps))
    winner = finalists[one, best]
    return Thresholds(
        cap=caps[one, winner],
        theta=thetas[one, winner],
        mean_usd=mean[one, best],
        usd=usd[one, best],
        finish_s=finish[one, best],
    )


def outcomes(
    problem: Problem,
    setting: Thresholds,
    *,
    hazard: Hazard,
    evidence: Evidence,
    rng: np.random.Generator,
    futures: int,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return what a setting costs per node, and seconds until it is done: (problems, futures).

    In futures of their own: those in which a setting was chosen flatter it.
    """
    played = _Played(
        problem, hazard=hazard, evidence=evidence, futures=futures, rng=rng, most=FINE_STEPS
    )
    within = (played.sorted_cost <= setting.cap[:, None] * (1 + TINY)).sum(1)
    usd, finish = played.play(within[:, None], setting.theta[:, None], slice(0, futures))
    return usd[:, 0], finish[:, 0]


def _candidates(
    problem: Problem, in_force: Thresholds | None
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Return caps, slacks and favours of all candidates, each of shape (problems, candidates)."""
    problems = len(problem.price)
    levels = _levels(problem.cost, problem.on_demand_cost)
    caps = np.repeat(levels, len(THETAS), axis=1)
    thetas = np.tile(np.array(THETAS), (problems, LEVELS))
    favour = np.ones_like(caps)
    tier = tier_setting(problem.cost)
    extra = [(tier.cap, tier.theta, TIER)]
    if in_force is not None:
        extra.append((in_force.cap, in_force.theta, IN_FORCE))
    for cap, theta, worth in extra:
        caps = np.column_stack((caps, cap))
        thetas = np.column_stack((thetas, theta))
        favour = np.column_stack((favour, np.full(problems, worth)))
    return caps, thetas, favour


def _levels(cost: NDArray[np.float64], on_demand: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the distinct spot costs below on demand, at most `LEVELS`; repeated where fewer."""
    found = np.empty((len(cost), LEVELS))
    for row, (costs, dearest) in enumerate(zip(cost, on_demand, strict=True)):
        levels: list[float] = []
        for each in np.sort(costs[costs < dearest]):
            if levels and each <= levels[-1] * SAME_PRICE:
                levels[-1] = float(each)
            else:
                levels.append(float(each))
        levels = levels or [0.0]
        spread = np.linspace(0, len(levels) - 1, LEVELS).round().astype(int)
        found[row] = np.array(levels)[spread]
    return found


_Alive = Callable[[int, NDArray[np.int64], slice], NDArray[Any]]
"""Whether what runs is there at a step, in some futures: (problems, candidates, futures)."""


def _alive_by_mask(up: NDArray[np.bool_]) -> _Alive:
    """Return it for few places: a future's step is a whole number, with a bit for each rank."""
    zones = up.shape[-1]
    bits = up.astype(np.int64) @ (1 << np.arange(zones, dtype=np.int64))
    bits = (bits | (1 << zones))[:, :, None]  # on demand is always there

    def alive(step: int, running: NDArray[np.int64], futures: slice) -> NDArray[Any]:
        there: NDArray[Any] = (bits[step, :, :, futures] >> running) & 1
        return there

    return alive


def _alive_by_place(up: NDArray[np.bool_]) -> _Alive:
    """Return the same for any number of places."""
    always = np.ones((*up.shape[:-1], 1), dtype=bool)
    ranks = np.concatenate((up, always, ~always), axis=-1)[:, :, None]

    def alive(step: int, running: NDArray[np.int64], futures: slice) -> NDArray[Any]:
        there: NDArray[Any] = np.take_along_axis(
            ranks[step, :, :, futures], running[..., None], axis=-1
        )[..., 0]
        return there

    return alive


class _Played:
    """The drawn futures of some problems, and how a setting fares in them."""

    def __init__(
        self,
        problem: Problem,
        *,
        hazard: Hazard,
        evidence: Evidence,
        futures: int,
        rng: np.random.Generator,
        most: int = STEPS,
    ) -> None:
        self.problem = problem
        longest = float(problem.left.max())
        self.ticks = max(1, int(np.ceil(longest / most)))
        self.steps = max(1, int(np.ceil(longest / self.ticks)))
        self.order = np.argsort(problem.cost, axis=1, kind="stable")
        self.sorted_cost = np.take_along_axis(problem.cost, self.order, axis=1)
        up = draw_futures(
            hazard=hazard,
            evidence=evidence,
            up=problem.up,
            age_s=problem.age_s,
            unseen_s=problem.unseen_s,
            step_s=self.ticks * problem.tick_s,
            steps=self.steps,
            count=futures,
            rng=rng,
        )
        zones = up.shape[-1]
        rank = np.argsort(self.order, axis=1)
        up = np.take_along_axis(up, self.order[None, :, None, :], axis=3)
        self.alive = _alive_by_mask(up) if zones <= MASKED else _alive_by_place(up)
        self.cheapest = np.where(up.any(3), up.argmax(3), zones + 1)  # (steps, problems, futures)
        row = np.arange(len(rank))
        spot = problem.running < zones
        self.running = np.where(
            spot, rank[row, np.minimum(problem.running, zones - 1)], problem.running
        )
        self.zones = zones

    def play(
        self, within: NDArray[np.int64], thetas: NDArray[np.float64], futures: slice
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return cost per node and finishing time (s), of shape (problems, candidates, futures)."""
        job, zones, nothing = self.problem, self.zones, self.zones + 1
        cheapest = self.cheapest[:, :, None, futures]
        shape = (*within.shape, cheapest.shape[-1])
        scale = 1.0 / self.ticks
        flat = np.concatenate(
            (
                np.take_along_axis(job.price, self.order, axis=1),
                job.on_demand[:, None],
                np.zeros((len(job.price), 1)),
            ),
            axis=1,
        )
        offset = (np.arange(len(flat)) * flat.shape[1])[:, None, None]
        price = flat.ravel() * (self.ticks * job.tick_s / 3600)
        moving = self._moving()
        below = np.array([[[zones]]])
        if job.buys_on_demand:
            below = (self.sorted_cost < job.on_demand_cost[:, None]).sum(1)[:, None, None]
        within, theta = np.minimum(within[:, :, None], below), thetas[:, :, None]
        start = (job.start * scale)[:, None, None]
        running = np.broadcast_to(self.running[:, None, None], shape).copy()
        work = np.broadcast_to((job.work * scale)[:, None, None], shape).copy()
        starting = np.broadcast_to((job.starting * scale)[:, None, None], shape).copy()
        total = (job.left * scale)[:, None, None]
        usd = np.zeros(shape)
        finish = np.zeros(shape)
        last_resort = zones if job.buys_on_demand else nothing
        for step in range(self.steps):
            running = np.where(self.alive(step, running, futures), running, nothing)
            left = total - step
            after = left - (1.0 - TINY) - start
            found = cheapest[step] < within
            pressed = left - work < theta * work
            desperate = np.where(cheapest[step] < below, cheapest[step], last_resort)
            target = np.where(
                found & (running >= within),
                cheapest[step],
                np.where(
                    (running < below) | (running == zones),
                    running,
                    np.where(pressed, desperate, nothing),
                ),
            )
            same = target == running
            begun = np.where(same, starting, start)
            gain = np.maximum(1.0 - begun, 0.0)
            if job.buys_on_demand:
                need = np.where(target < zones, work - gain, work)
                target = np.where(after >= need, target, zones)
            same = target == running
            begun = np.where(same, starting, start)
            on = (target <= zones) & (work > 0)
            paid = np.where(on, np.minimum(begun + work, 1.0), 0.0)
            usd += price[offset + target] * paid
            if moving is not None:
                usd += np.where(on & ~same, moving[offset + target], 0.0)
            work = np.where(on, work - np.clip(1.0 - begun, 0.0, work), work)
            finish = np.where(on, step + paid, finish)
            starting = np.maximum(0.0, begun - 1.0)
            running = target
            if not on.any() and not (work > 0).any():
                break
        if job.buys_on_demand:
            usd += work * price[offset + zones]
        else:  # what is not done by then is late, whenever its nodes were lost
            finish = np.where(work > 0, np.maximum(finish, total), finish)
        return usd, (finish + work) * (self.ticks * job.tick_s)

    def _moving(self) -> NDArray[np.float64] | None:
        move = self.problem.move_usd
        if move is None:
            return None
        spot = np.take_along_axis(move[:, :-1], self.order, axis=1)
        return np.concatenate((spot, move[:, -1:], np.zeros((len(move), 1))), axis=1).ravel()
