"""What is kept of the place at which a script left its loop, in the body of a step or between two.

Nothing is decided there yet: it may have been `break`, or an error. It is saved when the script
ends, which may do anything until then: load its best weights, take an average of them, cast them
for a test. So the state is copied as the loop is left, into the memory of the periodic saves.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from typing import TYPE_CHECKING, NamedTuple

import torch

from spotguard.errors import SpotguardError
from spotguard.runtime.state.rng import gpus_in_use

if TYPE_CHECKING:
    from collections.abc import Callable

    from spotguard.runtime.checkpoint.captured import Between, Capture, Held
    from spotguard.runtime.checkpoint.saver import Saver

log = logging.getLogger("spotguard")

PATIENCE_S = 10.0
"""How long a save in flight, or a GPU, may hold up the copy. If it was an error that left the loop,
both would be waited for so long anyway, or may never end."""
NOT_COPIED = "weights have changed since the last step, after which they were not copied"
OTHER_WEIGHTS = (
    "the weights are others than after the last step, as in an evaluation of averaged ones, or "
    "after the loop: the last save counts"
)
_LOOK_S = 0.001


class LeftLoop(NamedTuple):
    """Where the loop was left."""

    finished: int
    """Steps done there: one more than at the last boundary, if the weights had changed."""
    held: Held | None = None
    """The state there, if it could be copied."""
    between: Between | None = None
    """Of a loop left between two steps: the boundary is there, once it was no error that left it.
    Until then it is where the step before ended, and what comes between comes again after it."""

    def held_for(self, finished: int) -> Held | None:
        """Return the copy if it is of this boundary.

        It is not while it may have been an error that left the loop: what it was at may be half
        done.
        """
        return self.held if self.finished == finished and self.between is None else None


def copied(saver: Saver, state: Callable[[], Capture | None]) -> Held | None:
    """Return a copy of the state; None if it cannot be had soon, or at all."""
    try:
        capture = state() if _devices_are_quiet() else None
        return saver.hold(capture, PATIENCE_S) if capture is not None else None
    except (SpotguardError, RuntimeError) as problem:  # a GPU may have failed, and the script by it
        log.debug("the state where the loop was left is not copied: %s", problem)
        return None


def _devices_are_quiet() -> bool:
    """Return whether all GPUs have done what they were given; one never has where a rank is gone.

    A copy would be queued behind that, and wait for ever.
    """
    done = [torch.cuda.current_stream(gpu).record_event() for gpu in gpus_in_use()]
    end = time.monotonic() + PATIENCE_S
    while not all(each.query() for each in done):
        if time.monotonic() > end:
            return False
        time.sleep(_LOOK_S)
    return True


def script_handles_error() -> bool:
    """Return whether the main thread is in an `except` or a `finally` for an exception.

    A loop that was left by an error looks like one that was left by `break` until the hook for
    exceptions is called, which such a block may put off for long. In the hook nothing handles it.
    """
    found = sys._current_exceptions().get(threading.main_thread().ident or 0)
    # Python 3.10 and 3.11 return what `sys.exc_info` would.
    return (found[1] if isinstance(found, tuple) else found) is not None
