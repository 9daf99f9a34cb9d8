"""What somebody who knew the whole window would have paid."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from spotguard.policy.simulation.windows import Windows

FINE = 6
"""Work is counted in this part of a tick; rounding is in the omniscient's favour."""


def least_usd(windows: Windows) -> NDArray[np.float64]:
    """Return the least cost per node of each window, by dynamic programming from its end."""
    return np.array([_least(windows, index) for index in range(windows.count)])


def _least(windows: Windows, index: int) -> float:
    up, price = windows.up[index], windows.price[index]
    tick_h = windows.tick_s / 3600
    ticks, zones = up.shape
    units = int(np.floor(windows.work * FINE + 1e-6))
    start_units = int(np.floor(windows.start * FINE + 1e-6))
    full, rest = divmod(start_units, FINE)
    amount = np.arange(units + 1)
    far = 1e18
    # value[place][work]: cost from here with nodes of that place running and started
    # The last place is on demand, the one after it nothing.
    value = np.full((zones + 2, units + 1), far)
    value[:, 0] = 0.0
    later = [value.copy() for _ in range(full + 1)]  # of the ticks to come, nearest first
    last = windows.deadline - np.floor(windows.deadline)
    for tick in range(ticks - 1, -1, -1):
        length = FINE if tick < ticks - 1 or last < 1e-9 else int(np.ceil(last * FINE))
        rate = np.append(np.where(up[tick], price[tick], far), windows.on_demand)
        ahead = later[0]
        now = np.full((zones + 2, units + 1), far)
        done = np.maximum(amount - length, 0)
        paid = np.minimum(amount, length) / FINE * tick_h
        best_free = ahead[zones + 1]
        for place in range(zones + 1):
            if rate[place] >= far:
                continue
            going = rate[place] * paid + ahead[place][done]
            now[place] = going
        # Starting anew: whole ticks of starting, then one with `rest` units of start in it.
        fresh = np.full(units + 1, far)
        if tick + full < ticks:
            for place in range(zones + 1):
                cost = 0.0
                for step in range(full):
                    known = up[tick + step, place] if place < zones else True
                    each = price[tick + step, place] if place < zones else windows.on_demand
                    cost += each * tick_h if known else far
                if cost >= far or (place < zones and not up[tick + full, place]):
                    continue
                each = price[tick + full, place] if place < zones else windows.on_demand
                gained = np.maximum(amount - max(0, FINE - rest), 0)
                used = np.minimum(amount + rest, FINE) / FINE * tick_h
                option = cost + each * used + later[full][place][gained]
                fresh = np.minimum(fresh, option)
        now[zones + 1] = np.minimum(best_free, fresh)
        now[: zones + 1] = np.minimum(now[: zones + 1], now[zones + 1])
        now[:, 0] = 0.0
        later = [now, *later[:full]]
    return float(later[0][zones + 1][units])
