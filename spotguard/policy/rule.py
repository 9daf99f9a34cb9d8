"""One step of the rule (tier, slack, guard), for any number of cases at once.

Spot places stand in the order of their price: a place is its rank in that order. Two more ranks
follow: `zones` is on demand, `zones + 1` is nothing at all. All times are in steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

TINY = 1e-9


class GuardedJob(NamedTuple):
    """What the guard needs to know; each a number or an array that broadcasts with the others."""

    left: Any
    """Steps until the deadline, this one included."""
    work: Any
    """Steps of work."""
    start: Any
    """Steps that a start takes without progress, its 95th percentile."""
    starting: Any
    """Steps for which what runs is still starting."""
    overhead: Any = 0.0
    """Steps by which the last word is early: for ticks that do not end with the deadline."""


def wanted(
    running: NDArray[np.int64],
    cheapest: NDArray[np.int64],
    within: Any,
    below: Any,
    pressed: Any,
    zones: int,
) -> NDArray[np.int64]:
    """Return where the rule wants to be.

    Args:
        running: where it is.
        cheapest: the least rank that answers; `zones` or more if none does.
        within: how many ranks cost no more than the cap.
        below: how many ranks cost less than on demand; all where that may not be bought.
        pressed: whether slack is below theta times the work.
        zones: how many spot places there are.
    """
    found = cheapest < within
    on_demand, nothing = zones, zones + 1
    # Spot nodes that have become dearer than on demand are as good as none.
    kept = (running < below) | (running == on_demand)
    no_better = np.where(
        kept,
        running,
        np.where(pressed, np.where(cheapest < below, cheapest, on_demand), nothing),
    )
    return np.where(found & (running >= within), cheapest, no_better)


def guarded(
    running: NDArray[np.int64], target: NDArray[np.int64], job: GuardedJob, zones: int
) -> NDArray[np.int64]:
    """Return the target, or on demand where anything else could miss the deadline: the last word.

    Spot only if what is left after this step, should the nodes then be taken, can still be done on
    demand with a start; nothing only if that holds without this step's progress.
    """
    nodes_progress = np.clip(1.0 - np.where(target == running, job.starting, job.start), 0.0, None)
    after = job.left - 1.0 - job.overhead - job.start + TINY
    spot_ok = after >= job.work - nodes_progress
    idle_ok = after >= job.work
    ok = np.where(target < zones, spot_ok, idle_ok | (target == zones))
    return np.where(ok, target, zones)


def stepped(
    running: NDArray[np.int64], target: NDArray[np.int64], job: GuardedJob, zones: int
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Return the paid part of a step, the work that is left after it, and the start that is left.

    A step on nodes that finish the work earlier is paid until then.
    """
    on = target <= zones
    starting = np.where(target == running, job.starting, job.start)
    paid = np.where(on, np.clip(starting + job.work, 0.0, 1.0), 0.0)
    progress = np.where(on, np.clip(1.0 - starting, 0.0, job.work), 0.0)
    return paid, job.work - progress, np.maximum(0.0, starting - 1.0)
