"""What somebody who knew the whole window would have paid."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from spotguard.policy.simulation.windows import Windows

FINEST_S = 200.0
"""Work is counted in about so many seconds; rounding is in the omniscient's favour."""
FEWEST = 6
"""Short work is counted more finely, or all of it would be rounded away."""
_AT_ONCE = 32
_FAR = 1e18


def least_usd(windows: Windows) -> NDArray[np.float64]:
    """Return the least cost per node of each window, by dynamic programming from its end."""
    parts = [
        _least(windows, slice(begin, begin + _AT_ONCE))
        for begin in range(0, windows.count, _AT_ONCE)
    ]
    return np.concatenate(parts)


def _least(windows: Windows, which: slice) -> NDArray[np.float64]:
    """Return it for some windows. A value is the cost from a tick on, by place and work left.

    The last place is on demand. `idle` is the value with nothing running; a start is bought in
    one piece, for the ticks that it takes.
    """
    fine = max(1, round(windows.tick_s / FINEST_S), math.ceil(FEWEST / max(windows.work, 1e-6)))
    up, spot = windows.up[which], windows.price[which]
    count, ticks, zones = up.shape
    tick_h = windows.tick_s / 3600
    units = int(np.floor(windows.work * fine + 1e-6))
    full, rest = divmod(int(np.floor(windows.start * fine + 1e-6)), fine)
    amount = np.arange(units + 1)
    over = np.full((count, ticks, 1), windows.on_demand)
    rate = np.concatenate((np.where(up, spot, _FAR), over), axis=2) * tick_h
    value = np.full((count, zones + 1, units + 1), _FAR)
    value[..., 0] = 0.0
    idle = np.full((count, units + 1), _FAR)
    idle[:, 0] = 0.0
    later = [value] * (full + 1)  # of the ticks to come, the nearest first
    broken = windows.deadline - np.floor(windows.deadline)
    for tick in range(ticks - 1, -1, -1):
        length = fine if tick < ticks - 1 or broken < 1e-9 else int(np.ceil(broken * fine))
        paid = np.minimum(amount, length) / fine
        going = rate[:, tick, :, None] * paid + _less(later[0], length)
        if tick + full < ticks:
            starting = rate[:, tick : tick + full].sum(1)[:, :, None]
            used = np.minimum(amount + rest, fine) / fine
            first = rate[:, tick + full, :, None] * used
            fresh = starting + first + _less(later[full], fine - rest)
            idle = np.minimum(idle, fresh.min(1))
        value = np.minimum(going, idle[:, None])
        value[..., 0] = 0.0
        idle = idle.copy()
        idle[:, 0] = 0.0
        later = [value, *later[:full]]
    result: NDArray[np.float64] = idle[:, units]
    return result


def _less(value: NDArray[np.float64], done: int) -> NDArray[np.float64]:
    """Return the values after so many units of work were done."""
    if done == 0:
        return value
    kept = value.shape[-1]
    head = np.repeat(value[..., :1], min(done, kept), axis=-1)
    return np.concatenate((head, value[..., : max(0, kept - done)]), axis=-1)
