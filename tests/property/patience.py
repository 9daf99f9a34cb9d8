"""How long jobs may take, on a machine that may be busy with something else."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.runtime.harness.processes import Job

_LOOK_S = 0.25
"""Looking costs a file for each thread."""


class Patience:
    """Runs out while the jobs stand still, not while they wait for a core: that is no hang."""

    def __init__(
        self,
        jobs: Sequence[Job],
        seconds: float,
        *,
        now: Callable[[], float] = time.monotonic,
        queued_s: Callable[[int], float] | None = None,
    ) -> None:
        self._pids = [job.pid for job in jobs]
        self._left_s = seconds
        self._now = now
        self._queued_s = queued_s or queued_for_s
        self._looked = self._look()

    def is_over(self) -> bool:
        """Return whether they have stood still for too long; to be asked again and again."""
        if self._now() < self._looked[0] + _LOOK_S:
            return False
        before, self._looked = self._looked, self._look()
        passed_s = self._looked[0] - before[0]
        queued_s = sum(max(0.0, a - b) for a, b in zip(self._looked[1], before[1], strict=True))
        self._left_s -= max(0.0, passed_s - queued_s)
        return self._left_s < 0

    def _look(self) -> tuple[float, list[float]]:
        return self._now(), [self._queued_s(pid) for pid in self._pids]


def queued_for_s(pid: int) -> float:
    """Return how long a process's threads have waited for a core; 0 where nobody counts that."""
    waited_ns = 0
    for counts in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError, IndexError):  # a thread that ended, or no such file
            waited_ns += int(counts.read_text().split()[1])
    return waited_ns / 1e9
