"""The last word in every rule: nothing that could miss the deadline. Times are in steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from spotguard.policy.rule import TINY

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from spotguard.policy.rule import GuardedJob


def guarded(
    running: NDArray[np.int64], target: NDArray[np.int64], job: GuardedJob, zones: int
) -> NDArray[np.int64]:
    """Return the target, or on demand where anything else could miss the deadline.

    Spot only if what is left after this step, should the nodes then be taken, can still be done on
    demand with a start; nothing only if that holds without this step's progress.
    """
    nodes_progress = np.clip(1.0 - np.where(target == running, job.starting, job.start), 0.0, None)
    after = job.left - 1.0 - job.overhead - job.start + TINY
    spot_ok = after >= job.work - nodes_progress
    idle_ok = after >= job.work
    ok = np.where(target < zones, spot_ok, idle_ok | (target == zones))
    return np.where(ok, target, zones)
