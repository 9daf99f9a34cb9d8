"""Paths as people write them, and folders in the temporary one that go with their process."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from spotguard.errors import EnvironmentFailure

if TYPE_CHECKING:
    from collections.abc import Iterator

_LOCK = "lock"
_BEING_MADE_S = 3600.0
"""A folder without a lock may be new; earlier versions made some that were left behind."""


def scratch_folder(prefix: str) -> Path:
    """Return a new folder below the temporary one, which is removed when this process ends.

    A process that is killed, or leaves by `os._exit`, removes nothing: the next one that wants such
    a folder does. Each is locked by its process, and a lock goes with who holds it.

    Raises:
        OSError: it cannot be made.
    """
    above = Path(tempfile.gettempdir())
    for left in above.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            _remove_if_dead(left)
    made = Path(tempfile.mkdtemp(prefix=prefix))
    descriptor = os.open(made / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with contextlib.suppress(OSError):  # a file system without locks: nobody removes it, then
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    atexit.register(_remove_own, made, os.getpid())
    return made


@contextlib.contextmanager
def scratch(prefix: str) -> Iterator[Path]:
    """Have a `scratch_folder` within the block."""
    made = scratch_folder(prefix)
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _remove_own(made: Path, pid: int) -> None:
    if os.getpid() == pid:  # and not a fork of it
        shutil.rmtree(made, ignore_errors=True)


def _remove_if_dead(left: Path) -> None:
    """Remove a folder whose process has ended; one of another user's, or a link, is left alone."""
    found = left.lstat()
    if found.st_uid != os.getuid() or not left.is_dir() or left.is_symlink():
        return
    try:
        descriptor = os.open(left / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        if time.time() - found.st_mtime > _BEING_MADE_S:
            shutil.rmtree(left, ignore_errors=True)
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(left, ignore_errors=True)
    finally:
        os.close(descriptor)


def expanded(path: str | os.PathLike[str]) -> Path:
    """Return a path with its `~` resolved; `~nobody` is an ordinary name, as it is for a shell."""
    return Path(os.path.expanduser(path))  # noqa: PTH111 - Path's own raises RuntimeError there


def home_folder() -> Path:
    """Return the user's home: `$HOME`, else what the system's list of users has.

    Raises:
        EnvironmentFailure: neither names one, as for a container's user without an entry.
    """
    try:
        return Path.home()
    except RuntimeError:
        raise EnvironmentFailure(
            f"user {os.getuid()} has no home folder: HOME is not set, and the system does not "
            "know the user",
            hint="set HOME, or SPOTGUARD_HOME, to a folder that may be written",
        ) from None
