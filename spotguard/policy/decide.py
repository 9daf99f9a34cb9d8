"""One decision from one view: where to be until the next one. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from spotguard.policy import pacing
from spotguard.policy.action import ON_DEMAND, SPOT, Action, Buy, HoldOff, Leave, Move, Stay
from spotguard.policy.budget import affordable, fitting
from spotguard.policy.market.chances import chance_up
from spotguard.policy.market.hazard import Evidence, Hazard, pooled
from spotguard.policy.market.place_cost import cost_from_here, frailty, taken_as_lived
from spotguard.policy.one_place import plan_for
from spotguard.policy.rollout import SAME_PRICE, Problem, Thresholds, choose, tier_setting
from spotguard.policy.rule import GuardedJob, guarded, wanted
from spotguard.policy.view import MarketPlace, Seen
from spotguard.policy.words import Words, nothing_worth
from spotguard.shared.units import format_usd

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from spotguard.policy.one_place import OnePlacePlan
    from spotguard.policy.view import View

ROLLOUT, CONSTANTS, GREEDY, NEVER, PACING = "rollout", "constants", "greedy", "never", "pacing"
RULES = (ROLLOUT, CONSTANTS, GREEDY, NEVER, PACING)
NO_DEADLINE_WORKS = 4.0
"""Without a deadline, futures are drawn for so many times the work that is left."""
LIKELY = 0.5
"""A place that has not been asked now is tried before a dearer one that answers if it is likelier
up than this."""
UNLIKELY = 0.1
"""A place that has just refused is not asked before others that may have nodes."""
PROBE_STARTS = 4.0
"""With less slack than so many starts in vain, other places are probed while spot nodes run."""
NO_PLACE = MarketPlace(name="", spot_usd_per_h=1e9, seen=Seen(up=False, unseen_s=0.0))
"""Where no spot place can be bought, this one keeps the arrays from being empty; it is never
wanted, for it refuses now, and no futures are drawn of it."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """What the policy believes of the market, and the setting of the rule that is in force."""

    hazard: Hazard
    cap_usd_per_h: float | None = None
    theta: float | None = None
    accelerator: str | None = None
    """Whose bundled records `hazard` is from; None if it is from elsewhere."""
    gang: int = 1
    """For how many recorded nodes at once `hazard` holds."""

    @classmethod
    def of(cls, accelerator: str, nodes: int) -> Model:
        """Return the model that the bundled records give for an accelerator and a gang."""
        return cls(hazard=pooled(accelerator, nodes), accelerator=accelerator, gang=nodes)

    def hazards(self, least: int) -> Callable[[int], Hazard]:
        """Return the rates by the number of nodes, where `hazard` is that of `least` of them.

        Without bundled records, that of the least number stands for all.
        """
        return partial(self._hazard_of, least)

    def _hazard_of(self, least: int, nodes: int) -> Hazard:
        if self.accelerator is None or nodes <= least:
            return self.hazard
        return pooled(self.accelerator, round(self.gang * nodes / least))


@dataclass(frozen=True, kw_only=True)
class Decided:
    """An action, the model with the setting that led to it, and what is to be expected."""

    action: Action
    model: Model
    rethought: bool = False
    """Whether rollouts were made for it."""
    usd: NDArray[np.float64] | None = None
    """Cost of the rest, of all nodes, in each drawn future; None where none were drawn."""
    finish_s: NDArray[np.float64] | None = None


def decide(
    view: View, model: Model, seed: int, *, rule: str = ROLLOUT, rethink: bool = True
) -> Decided:
    """Return what to do now.

    Args:
        view: what is known.
        model: hazards, and the setting in force.
        seed: of the drawn futures; the same seed and view give the same decision.
        rule: one of `RULES`. All but `never` and `pacing` are guarded: they buy on demand where
            anything else could miss the deadline. To `pacing` the deadline is the time for which
            the money is to last, whatever is done by then. None spends more than the budget.
        rethink: let rollouts choose the setting anew; otherwise the one in force holds.

    Raises:
        ValueError: `rule` is none of them, or nodes are in none of the view's places.
    """
    if rule not in RULES:
        raise ValueError(f"rule must be one of {', '.join(RULES)}, not {rule!r}")
    if view.job.work_left_s <= 0:
        why = "the work is done"
        done = HoldOff(why=why) if view.running is None else Leave(why=why)
        return Decided(action=done, model=model)
    if not view.places:
        if view.running is not None:
            raise ValueError("the view has no place, not even the one where nodes are")
        return Decided(action=HoldOff(why="waits: no place may be asked now"), model=model)
    if rule == PACING:
        return Decided(action=_paced(view, model), model=model)
    case = Case(view, model.hazard)
    chosen: Thresholds | None = None
    plan = case.plan(model.hazard) if rule == ROLLOUT else None
    thinks = rule == ROLLOUT and plan is None and not case.no_spot and not case.settled()
    if thinks and (rethink or model.cap_usd_per_h is None):
        chosen = _rolled(case, model, seed)
        model = replace(model, cap_usd_per_h=float(chosen.cap[0]), theta=float(chosen.theta[0]))
    target = case.target(model, rule) if plan is None else case.planned(plan)
    action = affordable(view, case.action(target, model))
    return Decided(
        action=action,
        model=model,
        rethought=chosen is not None,
        usd=None if chosen is None or chosen.usd is None else chosen.usd[0] * view.job.nodes,
        finish_s=None if chosen is None or chosen.finish_s is None else chosen.finish_s[0],
    )


def problem_of(view: View, hazard: Hazard) -> Problem:
    """Return the view as one problem of the rollouts, its on-demand place the cheapest."""
    return Case(view, hazard).problem


def evidence_of(view: View, hazard: Hazard) -> Evidence:
    """Return what the places have shown, as one problem of the rollouts."""
    return Case(view, hazard).evidence


def _rolled(case: Case, model: Model, seed: int) -> Thresholds:
    force = None
    if model.cap_usd_per_h is not None and model.theta is not None:
        force = Thresholds(cap=np.array([model.cap_usd_per_h]), theta=np.array([model.theta]))
    return choose(
        case.problem,
        in_force=force,
        hazard=model.hazard,
        evidence=case.evidence,
        rng=np.random.default_rng(seed),
    )


class Case:
    """A view in the arrays of the rule: the spot places, then on demand, then nothing."""

    def __init__(self, view: View, hazard: Hazard) -> None:
        self.view, self.hazard = view, hazard
        job = view.job
        self.spot = view.spot_places or (NO_PLACE,)
        self.no_spot = not view.spot_places
        self.on_demand = min(
            (place for place in view.places if place.on_demand_usd_per_h is not None),
            key=lambda place: cost_from_here(view, place, ON_DEMAND, hazard),
            default=None,
        )
        if view.running is not None and view.running.market == ON_DEMAND:
            self.on_demand = next(
                (each for each in view.places if each.name == view.running.place), self.on_demand
            )
        self.zones = len(self.spot)
        self.answers = np.array([place.seen.answers is True for place in self.spot])
        self.unknown = np.array([place.seen.answers is None for place in self.spot])
        if view.running is None:
            self.running = self.zones + 1
        elif view.running.market == ON_DEMAND:
            self.running = self.zones
        else:
            names = [place.name for place in self.spot]
            known = view.running.place in names
            self.running = names.index(view.running.place) if known else self.zones + 1
        self.price = np.array([float(place.spot_usd_per_h or 0.0) for place in self.spot])
        self.cost = np.array([cost_from_here(view, place, SPOT, hazard) for place in self.spot])
        """What places are compared by; prices are for counting money."""
        self.on_demand_cost = math.inf
        if self.on_demand is not None:
            self.on_demand_cost = cost_from_here(view, self.on_demand, ON_DEMAND, hazard)
        self.problem = self._problem()
        seen = [place.seen for place in self.spot]
        self.evidence = Evidence((1, self.zones))
        self.evidence.changes[0] = [(each.came, taken_as_lived(job, each, hazard)) for each in seen]
        self.evidence.expected[0] = [(each.came_expected, each.taken_expected) for each in seen]

    def may_buy_over(self, rule: str = ROLLOUT) -> bool:
        """Tell whether on-demand nodes may be bought."""
        return rule != NEVER and self.view.job.on_demand and self.on_demand is not None

    def _problem(self) -> Problem:
        view, job = self.view, self.view.job
        tick_s = view.tick_s
        seen = [place.seen for place in self.spot]
        there = self.on_demand
        usd = float(self.price.max() * 3) if there is None else there.on_demand_usd_per_h or 0.0
        left_s = job.left_s
        if left_s is None:
            left_s = NO_DEADLINE_WORKS * job.work_left_s + 86_400.0
        starting = 0.0 if view.running is None else view.running.starting_s
        up = [each.up or index == self.running for index, each in enumerate(seen)]
        unseen = [
            0.0 if index == self.running else each.unseen_s for index, each in enumerate(seen)
        ]
        moves = [place.move_usd / job.nodes for place in self.spot]
        moves.append(0.0 if there is None else there.move_usd / job.nodes)
        return Problem(
            price=self.price[None],
            on_demand=np.array([usd]),
            cost=self.cost[None],
            on_demand_cost=np.array([usd if there is None else self.on_demand_cost]),
            up=np.array([up]),
            age_s=np.array([[each.age_s for each in seen]]),
            unseen_s=np.array([unseen]),
            running=np.array([self.running]),
            starting=np.array([starting / tick_s]),
            left=np.array([max(left_s, tick_s) / tick_s]),
            work=np.array([job.work_left_s / tick_s]),
            start=np.array([job.start_s / tick_s]),
            tick_s=tick_s,
            move_usd=np.array(moves)[None] if any(moves) else None,
            buys_on_demand=job.on_demand and there is not None and job.left_s is not None,
        )

    def settled(self) -> bool:
        """Tell whether it already runs where nothing is cheaper: there is nothing to choose."""
        return self.running < self.zones and bool(
            self.cost[self.running] <= min(self.cost.min() * SAME_PRICE, self.on_demand_cost)
        )

    def plan(self, hazard: Hazard) -> OnePlacePlan | None:
        """Return the plan for one spot place alone; None where there are more, or none is known.

        Nor is there one where it costs to bring the checkpoint, or where nobody asked the place.
        """
        job, problem = self.view.job, self.problem
        known = self.running == 0 or not self.unknown[0]
        cheaper = self.cost[0] < self.on_demand_cost
        if self.zones > 1 or not (problem.buys_on_demand and known and cheaper):
            return None
        if problem.move_usd is not None or job.left_s is None:
            return None
        seen = self.spot[0].seen
        return plan_for(
            hazard.scaled(
                back=frailty(seen.came, seen.came_expected),
                taken=frailty(taken_as_lived(job, seen, hazard), seen.taken_expected),
            ),
            spot=float(self.price[0]),
            on_demand=float(problem.on_demand[0]),
            left_s=job.left_s,
            work_s=job.work_left_s,
            start_s=job.start_s,
            tick_s=self.view.tick_s,
        )

    def planned(self, plan: OnePlacePlan) -> int:
        """Return where the plan wants to be, after the guard."""
        job, running = self.view.job, self.view.running
        assert job.left_s is not None
        # The plan ends where the guard does, or the guard would cut it short.
        kept_s = job.reserve_s + max(0.0, (job.guard_start_s or 0.0) - job.start_s)
        target = plan.wanted(
            left_s=job.left_s - kept_s,
            work_s=job.work_left_s + (0.0 if running is None else running.starting_s),
            running=self.running,
            up=self.running == 0 or bool(self.answers[0]),
            age_s=self.spot[0].seen.age_s,
        )
        return self._guarded(int(target))

    def target(self, model: Model, rule: str) -> int:
        """Return the place where the rule wants to be, after the guard."""
        job, zones = self.view.job, self.zones
        below_usd = self.on_demand_cost if self.may_buy_over(rule) else math.inf
        cap, theta = self.cost.min() * SAME_PRICE, 0.15
        if rule == ROLLOUT and self.no_spot:
            theta = 0.0  # on demand costs the same whenever it is bought
        elif rule == ROLLOUT and model.cap_usd_per_h is not None:
            cap, theta = model.cap_usd_per_h, model.theta or 0.0
        elif rule == CONSTANTS:
            cap = float(tier_setting(self.cost[None]).cap[0])
        elif rule in (GREEDY, NEVER):
            cap, theta = math.inf, 0.0
        # Nothing on spot is ever bought or kept that costs more than on demand.
        cap = min(cap, below_usd * (1 - 1e-9))
        usable = self._usable(model, cap)
        order = np.argsort(self.cost, kind="stable")
        rank = np.argsort(order)
        ranked = usable[order]
        cheapest = int(ranked.argmax()) if ranked.any() else zones + 1
        running = int(rank[self.running]) if self.running < zones else self.running
        work, left = float(self.problem.work[0]), float(self.problem.left[0])
        # Without a deadline nobody waits for it: what is dearer than on demand gives way to that.
        pressed = job.left_s is None or left - work < theta * work
        if job.left_s is None and self.running > zones:
            pressed = False
        wish = int(
            wanted(
                np.array(running),
                np.array(cheapest),
                int((self.cost <= cap * (1 + 1e-9)).sum()),
                int((self.cost < below_usd).sum()),
                np.array(pressed),
                zones,
            )
        )
        target = int(order[wish]) if wish < zones else wish
        if not self.may_buy_over(rule):
            return target if target != zones else self.running
        return target if job.left_s is None else self._guarded(target)

    def _guarded(self, target: int) -> int:
        """Return the target after the guard's last word; the job has a deadline."""
        job, zones = self.view.job, self.zones
        assert job.left_s is not None
        sure = target >= zones or bool(self.answers[target])
        steps = GuardedJob(
            job.left_s / self.view.tick_s,
            float(self.problem.work[0]),
            max(job.start_s, job.guard_start_s or 0.0) / self.view.tick_s,
            self.problem.starting[0],
            job.reserve_s / self.view.tick_s,
        )
        if not sure:  # it may not come, or not go on: no progress is counted on
            idle = int(guarded(np.array(self.running), np.array(zones + 1), steps, zones))
            return target if idle == zones + 1 else zones
        return int(guarded(np.array(self.running), np.array(target), steps, zones))

    def _usable(self, model: Model, cap: float) -> NDArray[np.bool_]:
        """Return the spot places that can be wanted: those that answer, and likely ones.

        Nobody leaves running nodes for a place that has not answered.
        """
        if self.running <= self.zones:
            return self.answers
        likely = np.array([chance_up(place, model.hazard) for place in self.spot])
        within = self.cost <= cap * (1 + 1e-9)
        if (self.answers & within).any():
            return self.answers | (self.unknown & (likely >= LIKELY))
        hopeful = self.unknown & (likely >= UNLIKELY)
        usable: NDArray[np.bool_] = self.answers | (hopeful if hopeful.any() else self.unknown)
        return usable

    def action(self, target: int, model: Model) -> Action:
        """Return the target as an action, with its reason in words."""
        job, running = self.view.job, self.view.running
        probe = self._probe(model)
        words = Words(self, model)
        if running is not None and self.running > self.zones and target != self.zones:
            return Stay(why="it runs in a place whose price nobody knows", probe=probe)
        if target == self.running:
            if running is None:
                return HoldOff(why=f"waits: {words.nothing()}", probe=probe)
            return Stay(why=words.stays(target), probe=probe)
        if target == self.zones + 1:
            return Leave(why=f"leaves: {words.nothing()}", probe=probe)
        market = SPOT if target < self.zones else ON_DEMAND
        place = self.spot[target] if market == SPOT else self.on_demand
        assert place is not None
        if running is not None:
            return Move(
                place=place.name,
                market=market,
                nodes=job.nodes,
                why=words.buys(target),
                probe=probe,
            )
        then = self._then(target, model)
        return Buy(
            place=place.name,
            market=market,
            nodes=job.nodes,
            why=words.buys(target),
            then=then,
            probe=probe,
        )

    def _probe(self, model: Model) -> tuple[str, ...]:
        """Return the places that could be wanted next; those seen now, too: they are not then."""
        if self.no_spot:
            return ()
        cap = math.inf if model.cap_usd_per_h is None else model.cap_usd_per_h
        spot = self.running < self.zones
        here = float(self.cost[self.running]) if spot else self.on_demand_cost
        pressed = self._pressed()
        if spot and here <= cap and not pressed:
            return ()
        # Should the nodes be taken while slack is short, only a place that is known to answer may
        # take their place: what answers is found out before.
        most = self.on_demand_cost if pressed or not spot else min(cap, here)
        return tuple(
            place.name
            for index, place in enumerate(self.spot)
            if index != self.running and self.cost[index] <= most
        )

    def _pressed(self) -> bool:
        """Tell whether the guard would soon let nothing unsure be bought."""
        job = self.view.job
        if job.left_s is None:
            return False
        start_s = max(job.start_s, job.guard_start_s or 0.0)
        slack_s = job.left_s - job.work_left_s - job.reserve_s
        return slack_s < PROBE_STARTS * (start_s + self.view.tick_s)

    def _then(self, target: int, model: Model) -> tuple[str, ...]:
        if target >= self.zones:
            return ()
        cap = math.inf if model.cap_usd_per_h is None else model.cap_usd_per_h
        if self._pressed():
            cap = max(cap, self.on_demand_cost / SAME_PRICE)
        other = [
            (float(self.cost[index]), place.name)
            for index, place in enumerate(self.spot)
            if index != target
            and (self.answers[index] or self.unknown[index])
            and self.cost[index] <= cap
        ]
        return tuple(name for _, name in sorted(other))


def _paced(view: View, model: Model) -> Action:
    """Return the action of priced pacing."""
    running = view.running
    best = pacing.best_choice(view, model.hazards(view.job.nodes_min or view.job.nodes))
    if best is None:
        why = nothing_worth(view)
        return HoldOff(why=f"waits: {why}") if running is None else Leave(why=f"leaves: {why}")
    price, market = format_usd(best.price_usd_per_h), best.market.replace("_", " ")
    why = (
        f"{best.nodes} node{'s' * (best.nodes > 1)} in {best.place} ({market}) at {price} "
        "per node and hour earn most for the money and the time that are left"
    )
    if running is not None and (running.place, running.market, running.nodes) == (
        best.place,
        best.market,
        best.nodes,
    ):
        return affordable(view, Stay(why=f"stays: {why}"))
    place, sort, nodes = best.place, best.market, best.nodes
    if running is None:
        bought = Buy(place=place, market=sort, nodes=nodes, why=f"buys: {why}")
        return fitting(view, bought)
    moved = Move(place=place, market=sort, nodes=nodes, why=f"moves: {why}")
    return fitting(view, moved)
