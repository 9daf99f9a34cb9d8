"""What the ranks of a node tell its other processes by locks on files: that they save, and live.

A lock goes with the process that holds it, so a rank that is killed leaves nothing behind.

Saves go first: a rank holds a shared lock as long as a save of its own is in flight, and whatever
else uses the network of the node looks there before it sends anything.

A rank's script may be a wrapper, such as `subprocess.call` or `uv run`: the process that trains is
then another one than the agent has started. It holds a lock as long as it lives.
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
    from pathlib import Path

_TRIES, _PAUSE_S = 5, 0.002
_LONGEST = 64
_HAS_LEFT = "left"
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


_held: list[int] = []
"""Descriptors that are never closed: each holds a lock until this process ends."""


def live(path: str | None) -> None:
    """Say that this process is the rank, until it ends; forks of it are not."""
    if path is None or _held:
        return
    with contextlib.suppress(OSError):  # no room, or a file system without locks
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        _held.append(descriptor)
        # A lock of POSIX: other than that of `flock` it is not inherited by a fork.
        fcntl.lockf(descriptor, fcntl.LOCK_SH)
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())


def say_left() -> None:
    """Say that this rank, which `live` has named, was told to stop and leaves."""
    for descriptor in _held:
        with contextlib.suppress(OSError):
            os.write(descriptor, f"{_HAS_LEFT}\n".encode())


class RankLife:
    """What the file of a rank tells about the process that trains, which need not be there yet."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def pid(self) -> int | None:
        """The process that trains; None if none does, or none does any more."""
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.read(descriptor, _LONGEST).split(b"\n")[0]
            return int(pid) if pid.isdigit() else None
        except OSError:  # a file system without locks
            return None
        finally:
            os.close(descriptor)
        return None

    @property
    def has_left(self) -> bool:
        """True if it has said that it was told to stop, and leaves."""
        with contextlib.suppress(OSError):
            return _HAS_LEFT in self._path.read_text("utf-8").split()
        return False
