"""Saves go first: whatever else uses the network of a node looks here before it sends anything.

Each rank holds a shared lock on a file of its node for as long as a save of its own is in flight.
A lock goes with the process that holds it, so a rank that is killed leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_TRIES, _PAUSE_S = 5, 0.002
LEFT = ".left"
"""Ends the name of the file beside it that says, when the job is over, that it left in order."""


@contextmanager
def saving(path: str | None) -> Iterator[None]:
    """Within it others of this node wait; without a file, or where it fails, nobody does."""
    if path is None:
        yield
        return
    descriptor = None
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if descriptor is not None:
            _hold(descriptor)
        yield
    finally:
        if descriptor is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # a fork may hold the descriptor, too
            os.close(descriptor)


def _hold(descriptor: int) -> None:
    """Lock it. Who looks holds it for a moment, exclusively: no save waits longer than for that."""
    for _ in range(_TRIES):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_PAUSE_S)
        except OSError:  # a file system without locks
            return
        else:
            return


def is_saving(path: str) -> bool:
    """Tell whether a rank of this node has a save in flight."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # no rank has saved yet
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    else:
        return False
    finally:
        os.close(descriptor)
