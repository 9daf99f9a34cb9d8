"""Rules that play windows tick by tick: the policies of this package."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from spotguard.policy.market.hazard import Evidence, Hazard, pooled
from spotguard.policy.one_place import plan_for
from spotguard.policy.rollout import Problem, Thresholds, choose, tier_setting
from spotguard.policy.rule import GuardedJob, guarded, stepped, wanted

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from spotguard.policy.one_place import OnePlacePlan
    from spotguard.policy.simulation.windows import Windows

EVERY_TICKS = 6
AFTER_CHANGE_TICKS = 2


@dataclass
class State:
    """Where the jobs of all windows stand; one value per window."""

    tick: int
    running: NDArray[np.int64]
    starting: NDArray[np.float64]
    work: NDArray[np.float64]
    usd: NDArray[np.float64]
    finish: NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How the windows went. Cost per node in USD, finishing time in ticks."""

    usd: NDArray[np.float64]
    finish: NDArray[np.float64]
    late: NDArray[np.bool_]
    places: NDArray[np.int16]
    """(windows, ticks): zone, `zones` on demand, `zones + 1` nothing."""


class Player(Protocol):
    """Says where to be; the guard has the last word on it."""

    def begin(self, windows: Windows) -> None:
        """Get ready for these windows."""

    def want(self, state: State) -> NDArray[np.int64]:
        """Return the zone, `zones` for on demand, or `zones + 1` for nothing, per window."""


def play(windows: Windows, player: Player, *, with_guard: bool = True) -> Outcome:
    """Return how all windows go under a player."""
    count, ticks, zones = windows.up.shape
    state = State(
        tick=0,
        running=np.full(count, zones + 1),
        starting=np.zeros(count),
        work=np.full(count, windows.work),
        usd=np.zeros(count),
        finish=np.zeros(count),
    )
    player.begin(windows)
    places = np.full((count, ticks), zones + 1, dtype=np.int16)
    rows = np.arange(count)
    price = np.full((count, zones + 2), windows.on_demand)
    price[:, -1] = 0.0
    for tick in range(ticks + int(2 * windows.start) + 4):
        seen = min(tick, ticks - 1)
        state.tick = tick
        up = windows.up[:, seen]
        spot = state.running < zones
        taken = spot & ~up[rows, np.minimum(state.running, zones - 1)]
        state.running = np.where(taken, zones + 1, state.running)
        target = player.want(state)
        job = GuardedJob(windows.deadline - tick, state.work, windows.start, state.starting)
        if with_guard:
            target = guarded(state.running, target, job, zones)
        target = np.where(state.work > 0, target, zones + 1)
        if tick < ticks:
            places[:, tick] = target
        price[:, :zones] = windows.price[:, seen]
        was = state.work
        paid, state.work, state.starting = stepped(state.running, target, job, zones)
        state.usd += price[rows, target] * paid * windows.tick_s / 3600
        state.finish = np.where((was > 0) & (state.work <= 0), tick + paid, state.finish)
        state.running = target
        if not (state.work > 0).any():
            break
    late = (state.work > 0) | (state.finish > windows.deadline + 1e-6)
    return Outcome(usd=state.usd, finish=state.finish, late=late, places=places)


class RuleOf:
    """The rule with a setting; subclasses say how the setting is found."""

    def __init__(self, *, theta: float = 0.15) -> None:
        self.theta = theta

    def begin(self, windows: Windows) -> None:
        """Get ready for these windows."""
        self.windows = windows
        self.setting: Thresholds | None = None

    def settle(self, state: State) -> Thresholds:
        """Return cap and slack for this tick: the constants."""
        tier = tier_setting(self.windows.price[:, min(state.tick, self.windows.up.shape[1] - 1)])
        return Thresholds(cap=tier.cap, theta=np.full(len(tier.cap), self.theta))

    def want(self, state: State) -> NDArray[np.int64]:
        """Return where the rule wants to be."""
        windows = self.windows
        seen = min(state.tick, windows.up.shape[1] - 1)
        setting = self.settle(state)
        price, up = windows.price[:, seen], windows.up[:, seen]
        return rule_target(
            price=price,
            up=up,
            on_demand=np.full(len(price), windows.on_demand),
            running=state.running,
            pressed=(windows.deadline - state.tick - state.work) < setting.theta * state.work,
            cap=setting.cap,
        )


def rule_target(
    *,
    price: NDArray[np.float64],
    up: NDArray[np.bool_],
    on_demand: NDArray[np.float64],
    running: NDArray[np.int64],
    pressed: NDArray[np.bool_],
    cap: NDArray[np.float64],
) -> NDArray[np.int64]:
    """Return where the rule wants to be, as zones: the places are ranked by price, and back."""
    zones = price.shape[1]
    order = np.argsort(price, axis=1, kind="stable")
    rank = np.argsort(order, axis=1)
    rows = np.arange(len(price))
    ranked_up = np.take_along_axis(up, order, axis=1)
    cheapest = np.where(ranked_up.any(1), ranked_up.argmax(1), zones + 1)
    current = np.where(running < zones, rank[rows, np.minimum(running, zones - 1)], running)
    target = wanted(
        current,
        cheapest,
        (price <= cap[:, None] * (1 + 1e-9)).sum(1),
        (price < on_demand[:, None]).sum(1),
        pressed,
        zones,
    )
    return np.where(target < zones, order[rows, np.minimum(target, zones - 1)], target)


class Rollout(RuleOf):
    """Cap and slack are chosen anew by rollouts, of all windows that are due at a tick at once."""

    def __init__(
        self,
        *,
        seed: int = 0,
        futures: int = 32,
        every: int = EVERY_TICKS,
        hazard: Hazard | None = None,
        screened: int = 8,
    ) -> None:
        super().__init__()
        self.seed, self.futures, self.every, self.hazard = seed, futures, every, hazard
        self.screened = screened

    def begin(self, windows: Windows) -> None:
        """Get ready for these windows."""
        super().begin(windows)
        count, _, zones = windows.up.shape
        self.rng = np.random.default_rng(self.seed)
        self.rates = self.hazard or pooled(windows.accelerator, windows.gang)
        self.evidence = Evidence((count, zones))
        self.table = self.rates.step_table(windows.tick_s, 4096)
        self.age = np.zeros((count, zones), dtype=np.int64)
        self.before: NDArray[np.bool_] | None = None
        self.ran = np.full(count, zones + 1)
        self.due = np.zeros(count)
        tier = tier_setting(windows.price[:, 0])
        self.caps, self.thetas = tier.cap, tier.theta
        self.plans: list[OnePlacePlan | None] = []

    def want(self, state: State) -> NDArray[np.int64]:
        """Return where the rule wants to be; with one place alone, where its plan wants to be."""
        wish = super().want(state)
        for index, plan in enumerate(self.plans):
            if plan is not None and state.work[index] > 0:
                wish[index] = plan.wanted(
                    left_s=(self.windows.deadline - state.tick) * self.windows.tick_s,
                    work_s=(state.work[index] + state.starting[index]) * self.windows.tick_s,
                    running=state.running[index],
                    up=self.before is not None and self.before[index, 0],
                    age_s=self.age[index, 0] * self.windows.tick_s,
                )
        return wish

    def _plan(self, state: State, index: int) -> OnePlacePlan | None:
        windows = self.windows
        seen = min(state.tick, windows.up.shape[1] - 1)
        return plan_for(
            self.rates,
            spot=float(windows.price[index, seen, 0]),
            on_demand=windows.on_demand,
            left_s=max(0.0, windows.deadline - state.tick) * windows.tick_s,
            work_s=float(state.work[index]) * windows.tick_s,
            start_s=windows.start * windows.tick_s,
            tick_s=windows.tick_s,
        )

    def settle(self, state: State) -> Thresholds:
        """Return cap and slack for this tick."""
        windows = self.windows
        seen = min(state.tick, windows.up.shape[1] - 1)
        up, price = windows.up[:, seen], windows.price[:, seen]
        zones = up.shape[1]
        if self.before is not None:
            self.evidence.fade(windows.tick_s)
            changed = up != self.before
            rows = self.before.astype(np.int64)
            expected = self.table[rows, np.minimum(self.age, 4095)]
            for kind in (0, 1):
                self.evidence.changes[..., kind] += changed & (rows == kind)
                self.evidence.expected[..., kind] += np.where(rows == kind, expected, 0.0)
            self.age = np.where(changed, 0, self.age + 1)
        self.before = up
        lost = (self.ran <= zones) & (state.running == zones + 1)
        self.ran = state.running
        self.due = np.where(lost, np.minimum(self.due, state.tick + AFTER_CHANGE_TICKS), self.due)
        least = price.min(1)
        here = np.take_along_axis(price, np.minimum(state.running, zones - 1)[:, None], 1)[:, 0]
        cheapest = (state.running < zones) & (here <= least * 1.01)
        due = (self.due <= state.tick) & ~cheapest & (state.work > 0)
        if zones == 1:  # rollouts only where there is no plan
            self.plans = [self._plan(state, index) for index in range(len(due))]
            due &= np.array([plan is None for plan in self.plans])
        which: NDArray[np.int64] = np.flatnonzero(due)
        if len(which):
            self._choose(which, state, up, price)
        return Thresholds(cap=self.caps, theta=self.thetas)

    def _choose(
        self,
        which: NDArray[np.int64],
        state: State,
        up: NDArray[np.bool_],
        price: NDArray[np.float64],
    ) -> None:
        windows = self.windows
        one = np.ones(len(price))
        problem = Problem(
            price=price,
            on_demand=one * windows.on_demand,
            cost=price,
            on_demand_cost=one * windows.on_demand,
            up=up,
            age_s=self.age * windows.tick_s,
            unseen_s=np.zeros(up.shape),
            running=state.running,
            starting=state.starting,
            left=one * (windows.deadline - state.tick),
            work=state.work,
            start=one * windows.start,
            tick_s=windows.tick_s,
        ).picked(which)
        part = Evidence(up[which].shape)
        part.changes, part.expected = self.evidence.changes[which], self.evidence.expected[which]
        force = Thresholds(cap=self.caps[which], theta=self.thetas[which]) if state.tick else None
        chosen = choose(
            problem,
            in_force=force,
            hazard=self.rates,
            evidence=part,
            rng=self.rng,
            futures=self.futures,
            screened=self.screened,
        )
        self.caps[which], self.thetas[which] = chosen.cap, chosen.theta
        self.due[which] = state.tick + self.every


class Greedy(RuleOf):
    """The cheapest place that answers; on demand when the guard says so."""

    def want(self, state: State) -> NDArray[np.int64]:
        """Return where the rule wants to be."""
        windows = self.windows
        seen = min(state.tick, windows.up.shape[1] - 1)
        up, price = windows.up[:, seen], windows.price[:, seen]
        return stay_or_cheapest(windows, state, up, price)


def stay_or_cheapest(
    windows: Windows, state: State, up: NDArray[np.bool_], price: NDArray[np.float64]
) -> NDArray[np.int64]:
    """Return where it runs while that lives, else the cheapest spot place; never on demand."""
    return rule_target(
        price=price,
        up=up,
        on_demand=np.full(len(price), windows.on_demand),
        running=np.where(state.running == price.shape[1], price.shape[1] + 1, state.running),
        pressed=np.zeros(len(price), dtype=bool),
        cap=np.full(len(price), windows.on_demand),
    )
