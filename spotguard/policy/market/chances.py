"""How likely a place has nodes now, and how long it has none, by what was seen of it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from spotguard.policy.market.hazard import Hazard
    from spotguard.policy.view import MarketPlace


def chance_up(place: MarketPlace, hazard: Hazard) -> float:
    """Return how likely the place has nodes now, from when it was last seen."""
    seen = place.seen
    mean_up_h, mean_down_h = mean_h(hazard, 1), mean_h(hazard, 0)
    # Shares follow the frailties' means: (a + D) / (a + E).
    quick = (1.5 + seen.taken) / (1.5 + seen.taken_expected)
    slow = (1.5 + seen.came) / (1.5 + seen.came_expected)
    up_h, down_h = mean_up_h / quick, mean_down_h / slow
    share = up_h / (up_h + down_h)
    if not math.isfinite(seen.unseen_s):
        return share
    fade = math.exp(-seen.unseen_s / 3600 * (1 / up_h + 1 / down_h))
    return share + ((1.0 if seen.up else 0.0) - share) * fade


def mean_h(hazard: Hazard, state: int) -> float:
    """Return how long a state lasts on average, in hours: 1 is to have nodes, 0 to have none."""
    middle_s = (np.arange(96) + 0.5) * 1800.0
    return max(0.05, float(0.5 * np.exp(-hazard.cumulative_many(state, middle_s)).sum()))
