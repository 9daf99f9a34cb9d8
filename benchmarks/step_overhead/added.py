"""What a callback adds to a step: two trainings take turns, step by step, with it and without it.

Others' load and the clock of a core change by the second, and make whole trainings differ by more
than what is looked for. Two steps back to back see the same of them. Both stay on one core, as each
alone would: moved from core to core at each turn, their steps take half as long again.
"""

from __future__ import annotations

import argparse
import os
import statistics
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

STEP_S = 0.02
"""Of which what is added is a share."""
_WARM_UP_STEPS = 40
_LEAST_STEPS = 100


@dataclass
class Side:
    """One of the two trainings."""

    turn: threading.Semaphore
    others_turn: threading.Semaphore
    step_s: list[float] = field(default_factory=list)
    """The processor seconds that its thread took for each step."""
    _began_at: float | None = None

    def step_ended(self) -> None:
        """Note what the step took, and let the other do one; blocks until it has."""
        if self._began_at is not None:
            self.step_s.append(time.thread_time() - self._began_at)
        self.others_turn.release()
        self.turn.acquire()
        self._began_at = time.thread_time()

    def ended(self) -> None:
        """Let the other do all its steps."""
        self.others_turn.release(1 << 20)


def enough_steps(text: str) -> int:
    """Return the steps of each training, as an option's value.

    Raises:
        argparse.ArgumentTypeError: they leave nothing to compare.
    """
    if not text.isdecimal() or int(text) < _LEAST_STEPS:
        raise argparse.ArgumentTypeError(
            f"{text!r}: give a whole number from {_LEAST_STEPS}; the first {_WARM_UP_STEPS} are "
            "not compared"
        )
    return int(text)


def compare(bare: Callable[[Side], None], ours: Callable[[Side], None]) -> str:
    """Train both, `ours` in this thread; return in a sentence what it takes more in a step.

    Each calls `step_ended` of its side at the same place in each step, of as many steps.
    """
    if hasattr(os, "sched_setaffinity"):  # which threads that are started from here on share
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    mine, others = threading.Semaphore(0), threading.Semaphore(0)
    sides = Side(others, mine), Side(mine, others)

    def train_bare() -> None:
        try:
            bare(sides[0])
        finally:
            sides[0].ended()

    thread = threading.Thread(target=train_bare)
    thread.start()
    try:
        ours(sides[1])
    finally:
        sides[1].ended()
        thread.join()
    return _told(*(side.step_s[_WARM_UP_STEPS:] for side in sides))


def _told(bare: list[float], ours: list[float]) -> str:
    pairs = sorted(zip(bare, ours, strict=False), key=sum)
    quiet = pairs[: len(pairs) // 4]
    added = [[mine - others for others, mine in of] for of in (quiet, pairs)]
    low, middle, high = statistics.quantiles(added[1], n=4)
    return (
        f"a bare step takes {1e6 * statistics.median(b for b, _ in quiet):.0f} us of processor "
        f"time; added: {_share(statistics.median(added[0]))} of a step of 20 ms in the quietest "
        f"quarter of {len(pairs)} pairs; in all {_share(middle)}, half of them "
        f"[{_share(low)} .. {_share(high)}]; load {os.getloadavg()[0]:.1f}"
    )


def _share(seconds: float) -> str:
    return f"{1e6 * seconds:.0f} us = {seconds / STEP_S:.2%}"
