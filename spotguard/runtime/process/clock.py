"""What time it is in the run: by the controller's clock, and steadily from there on.

This node's own clock may be wrong, and may jump. It is compared once, through the store, with the
controller's; what the job writes down, and what it counts down, is by this one.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from spotguard.errors import StoreError
from spotguard.events import keys
from spotguard.shared.steady_clock import SteadyClock
from spotguard.shared.units import format_duration, to_iso
from spotguard.storage.deadline import give_up_after
from spotguard.storage.patterns.clock_comparison import seconds_ahead

if TYPE_CHECKING:
    from spotguard.runtime.process.settings import Settings
    from spotguard.storage.base import ObjectStore

log = logging.getLogger("spotguard")

_COMPARE_S = 10.0
_SAME_S = 0.05
"""A time server draws clocks along by less: the same word must mean the same instant again."""
RUN_CLOCK = SteadyClock()
"""This process's. Nobody else turns it."""


def now() -> float:
    """Return the run's time, in epoch seconds."""
    return RUN_CLOCK.now()


def of_machine(at: float) -> float:
    """Return the run's time for an instant that this machine's own clock told."""
    ahead_s = RUN_CLOCK.machine_ahead_s
    return at - ahead_s if abs(ahead_s) > _SAME_S else at


def compare(store: ObjectStore, theirs: str, mine: str) -> float:
    """Set the clock right by the one that wrote `theirs`; return the seconds it was ahead.

    A store that cannot be asked leaves the clock as it is. Blocks for some requests.
    """
    try:
        with give_up_after(_COMPARE_S):
            ahead_s = seconds_ahead(store, theirs, mine, RUN_CLOCK)
    except StoreError as problem:
        log.warning("this node's clock cannot be compared with the controller's: %s", problem)
        return 0.0
    RUN_CLOCK.turn_back(ahead_s or 0.0)
    return ahead_s or 0.0


def compare_with_controller(store: ObjectStore, settings: Settings, attempt: int) -> str:
    """Set the clock right by the controller's; return what to tell of it, once for each node."""
    if settings.clock_key is None:
        return ""
    mine = keys.clock(attempt, node=settings.node, rank=settings.rank)
    ahead_s = compare(store, settings.clock_key, mine)
    if ahead_s == 0 or settings.local_rank != 0:
        return ""
    words = f"{format_duration(abs(ahead_s))} {'ahead of' if ahead_s > 0 else 'behind'}"
    return (
        f"the clock of node {settings.node} is {words} the controller's: "
        "limits and times of this run are kept by the controller's"
    )


def told_at(machine_at: float | None) -> str | None:
    """Return the run's time, as ISO 8601, for what this machine's own clock told before."""
    return None if machine_at is None else to_iso(of_machine(machine_at))
