"""The largest micro-batch that fits into memory, in few tries."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

MOST_TRIES = 10
_CLOSE_ENOUGH = 1.08
"""When the smallest that failed is larger than the largest that fitted by less, it is found."""
_MARGIN_FROM = 20
_MARGIN = 0.95
"""Of what fitted, this part is taken, since memory is cut into pieces as a run goes on; of fewer
than 20 samples all, since one of them is more than the margin."""


class Found(NamedTuple):
    """What the search found."""

    size: int
    """Samples of a micro-batch, with the margin; 0 if not even one fits."""
    tried: tuple[tuple[int, bool], ...]
    """Each size in the order in which it was tried, and whether it fitted."""


def largest_that_fits(most: int, fits: Callable[[int], bool]) -> Found:
    """Return a size from 1 to `most`, at least 80 % of the largest that fits, in ten tries.

    From `most` it goes down, first by halves (from more than 1024 by quarters), then faster; then
    between what fitted and what did not. Where of tens of thousands few fit, it may find less.
    """
    tried: list[tuple[int, bool]] = []
    step = 2.0 if most <= 1024 else 4.0
    low, high, candidate = 0, most + 1, most
    while len(tried) < MOST_TRIES and high - low > 1 and (not low or high / low > _CLOSE_ENOUGH):
        fitted = fits(candidate)
        tried.append((candidate, fitted))
        low, high = (candidate, high) if fitted else (low, candidate)
        if low:
            candidate = min(max(round(math.sqrt(low * high)), low + 1), high - 1)
        else:
            step = step * 1.5 if len(tried) > 3 else step
            is_last = len(tried) == MOST_TRIES - 1
            candidate = 1 if is_last else max(1, int(high / step))
    if low < most and low >= _MARGIN_FROM:
        low = int(low * _MARGIN)
    return Found(low, tuple(tried))
