"""A Slurm allocation's own end: it costs money until somebody cancels it.

SkyPilot's idle guard on Slurm was seen not to act for five minutes where the machine that had
launched the cluster was out of reach. So a node that has done its part cancels the allocation that
it is in, once the controller has had the time to do it better: to fetch logs, to count the money.
"""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from spotguard.shared.units import Clock

LINGER_S = 60.0
_EARLY_S = 5.0
"""The guard's clock began some seconds before ours."""
_LOOK_S = 0.2
_CANCEL_S = 30.0


def give_back(
    allocation: str,
    *,
    told: Callable[[], bool],
    over_at: float,
    clock: Clock,
    cancel: Callable[[str], bool] | None = None,
) -> bool:
    """Have the allocation that this node is part of cancelled; blocks up to a minute for that.

    Nothing is done once `told` says that somebody else ends the node: others of the allocation may
    still be saving, in a longer grace than `scancel` would leave them. From `over_at` (monotonic)
    on it is this attempt's own guard that tells, because nobody did.

    Returns:
        Whether it was cancelled.
    """
    until = min(clock.monotonic() + LINGER_S, over_at - _EARLY_S)
    while clock.monotonic() < until:
        if told():
            return False
        clock.sleep(_LOOK_S)
    return (cancel or scancel)(allocation)


def scancel(allocation: str) -> bool:
    """Ask Slurm for the end of a job. Where that fails, SkyPilot's own guard remains."""
    try:
        subprocess.run(["scancel", "--", allocation], timeout=_CANCEL_S, check=True)
    except (OSError, subprocess.SubprocessError) as problem:
        sys.stderr.write(f"spotguard: Slurm's job {allocation} was not cancelled: {problem}\n")
        return False
    return True
