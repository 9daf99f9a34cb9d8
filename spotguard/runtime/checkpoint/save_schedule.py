"""When the next periodic save is due: at a step that all ranks know beforehand.

The first rank measures; each next step is told over the rendezvous right after a save, and always
lies some steps ahead, so that the others have heard of it before they can reach it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from spotguard.runtime.distributed.rendezvous import LostContact
from spotguard.shared.hazard import HazardByAge

if TYPE_CHECKING:
    from spotguard.runtime.distributed.rendezvous import Coordinator
    from spotguard.runtime.process.settings import SaveEvery

LEAD_STEPS = 3
_WORD_TIMEOUT_S = 60.0
_SHORTEST_S = 1.0
LONGEST_S = 1800.0
_LEAST_PER_H = 1e-3
"""Nodes that are never taken fail all the same, once in a thousand hours."""


def best_interval_s(cost_s: float, age_s: float, hazard: HazardByAge | None = None) -> float:
    """Return the seconds between saves that lose least time: `sqrt(2 * cost / hazard)`.

    J. W. Young, "A first order approximation to the optimum checkpoint interval", 1974. Without a
    hazard of the place, that of all recorded markets stands for it.
    """
    per_h = max(_LEAST_PER_H, (hazard or HazardByAge()).per_h(age_s))
    return math.sqrt(2 * cost_s / (per_h / 3600))


class SaveSchedule:
    """Knows whether a save is due at a step; the same answer on every rank."""

    def __init__(
        self,
        every: SaveEvery,
        coordinator: Coordinator,
        rank: int,
        world_size: int,
        hazard: HazardByAge | None = None,
    ) -> None:
        self._every = every
        self._hazard = hazard
        self._coordinator = coordinator
        self._rank = rank
        self._world_size = world_size
        self._round = 0
        self._last = 0
        self._next: int | None = None

    def start(self, finished: int) -> None:
        """Plan the first save of an attempt: soon, because it measures what a save costs."""
        self._last = finished
        self._next = finished + (self._every.steps or LEAD_STEPS)

    def due(self, finished: int) -> bool:
        """Return True if the state after `finished` steps is to be saved."""
        if self._next is None and finished >= self._last + LEAD_STEPS - 1:
            self._next = self._hear()
        return self._next is not None and finished >= self._next

    def saved(
        self, finished: int, *, step_s: float, stall_s: float, duration_s: float, age_s: float
    ) -> None:
        """Plan the save after the one that was just begun at `finished`.

        Args:
            finished: Steps done.
            step_s: Seconds a step takes.
            stall_s: Seconds a save holds up the loop.
            duration_s: Seconds from a save's begin to its commit.
            age_s: Age of this attempt.
        """
        if self._every.steps is not None:
            self._last, self._next = finished, finished + self._every.steps
            return
        seconds = self._every.seconds or self._automatic_s(stall_s, duration_s, age_s)
        self._plan(finished, seconds, step_s)

    def put_off(self, finished: int, *, step_s: float) -> None:
        """Plan the save that was due at `finished` anew, for soon: it could not begin."""
        if self._every.steps is not None:
            self._last, self._next = finished, finished + min(LEAD_STEPS, self._every.steps)
            return
        self._plan(finished, _SHORTEST_S, step_s)

    def _plan(self, finished: int, seconds: float, step_s: float) -> None:
        """Have the next save in about so many seconds: the first rank tells the others."""
        self._round += 1
        self._last = finished
        self._next = None
        if self._rank == 0:
            self._next = finished + max(LEAD_STEPS, round(seconds / max(step_s, 1e-6)))
            if self._world_size > 1:
                self._coordinator.set(f"schedule/{self._round}", str(self._next))

    def _automatic_s(self, stall_s: float, duration_s: float, age_s: float) -> float:
        # The background write slows the steps meanwhile; a tenth of it is what CPUs show.
        best = best_interval_s(stall_s + 0.1 * duration_s, age_s, self._hazard)
        return min(max(best, _SHORTEST_S, 2 * duration_s), LONGEST_S)

    def _hear(self) -> int:
        word = self._coordinator.get(f"schedule/{self._round}", _WORD_TIMEOUT_S)
        if word is None:
            raise LostContact("the first rank did not say when to save next")
        return int(word)
