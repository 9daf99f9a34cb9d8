"""Rules to compare with, as we read them in their papers; each plays windows tick by tick."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from spotguard.policy.market.hazard import AGE_EDGES_S, pooled
from spotguard.policy.simulation.policy_players import RuleOf, stay_or_cheapest

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from spotguard.policy.simulation.policy_players import State
    from spotguard.policy.simulation.windows import Windows


class Today(RuleOf):
    """What the controller did before: spot while slack is above a tenth of the work; no guard."""

    def want(self, state: State) -> NDArray[np.int64]:
        """Return where the rule wants to be."""
        windows = self.windows
        up, price = _now(windows, state)
        zones = price.shape[1]
        spot = stay_or_cheapest(windows, state, up, price)
        slack = windows.deadline - state.tick - state.work - windows.start
        return np.where(slack < 0.1 * state.work, zones, spot)


class UniformProgress(RuleOf):
    """Wu et al., NSDI 2024, in the cheapest zone that answers.

    On demand while progress is behind the straight line from begin to deadline, and from then on
    until it is ahead by two starts; spot while some answers.
    """

    def begin(self, windows: Windows) -> None:
        """Get ready for these windows."""
        super().begin(windows)
        self.catching_up = np.zeros(windows.count, dtype=bool)

    def want(self, state: State) -> NDArray[np.int64]:
        """Return where the rule wants to be."""
        windows = self.windows
        up, price = _now(windows, state)
        zones = price.shape[1]
        done = windows.work - state.work
        line = windows.work / windows.deadline
        behind = done < state.tick * line
        ahead = done >= (state.tick + 2 * windows.start) * line
        self.catching_up = np.where(self.catching_up, ~ahead, False)
        spot = stay_or_cheapest(windows, state, up, price)
        some = spot < zones
        on_demand = state.running == zones
        target = np.where(some & ~(on_demand & self.catching_up), spot, zones + 1)
        target = np.where((target > zones) & (behind | self.catching_up), zones, target)
        self.catching_up = self.catching_up | (target == zones) & behind
        chosen: NDArray[np.int64] = target
        return chosen


class SkyNomad(RuleOf):
    """Progress has a value that rises with the deadline's pressure; the best net value is taken.

    `value = on demand price x pressure`, with `pressure = work / time left`; a zone is worth
    `value x L / (L + start) - price` by its expected life L at its age, and a move pays a start.
    """

    def begin(self, windows: Windows) -> None:
        """Get ready for these windows."""
        super().begin(windows)
        hazard = pooled(windows.accelerator, windows.gang)
        ages_s = np.append(AGE_EDGES_S, 2 * AGE_EDGES_S[-1])
        grid = (np.arange(288) + 0.5) * 600.0
        self.ages_s = ages_s
        self.life = np.array(
            [
                np.exp(hazard.cumulative(1, age) - hazard.cumulative_many(1, age + grid)).sum()
                * 600.0
                / windows.tick_s
                for age in ages_s
            ]
        )
        self.age = np.zeros((windows.count, windows.up.shape[2]))

    def want(self, state: State) -> NDArray[np.int64]:
        """Return where the rule wants to be."""
        windows = self.windows
        up, price = _now(windows, state)
        zones = price.shape[1]
        self.age = np.where(up, self.age + 1, 0)
        life = np.interp(self.age * windows.tick_s, self.ages_s, self.life)
        pressure = state.work / np.maximum(windows.deadline - state.tick - windows.start, 1e-9)
        value = windows.on_demand * np.clip(pressure, 0.0, 1.0)
        net = value[:, None] * life / (life + windows.start) - price
        rows = np.arange(len(price))
        here = np.minimum(state.running, zones - 1)
        on_spot = state.running < zones
        bonus = value * windows.start / np.maximum(life.max(1), 1.0) + value * 0.05
        net[rows[on_spot], here[on_spot]] += bonus[on_spot]
        net = np.where(up, net, -np.inf)
        best = net.argmax(1)
        over = value - windows.on_demand + np.where(state.running == zones, bonus, 0.0)
        target = np.where(net[rows, best] > np.maximum(over, 0.0), best, zones + 1)
        chosen: NDArray[np.int64] = np.where((target > zones) & (over > 0), zones, target)
        return chosen


def _now(windows: Windows, state: State) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
    seen = min(state.tick, windows.up.shape[1] - 1)
    return windows.up[:, seen], windows.price[:, seen]
