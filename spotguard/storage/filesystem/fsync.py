"""Files and folders that survive a power cut once the call has returned."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from typing import TYPE_CHECKING

from spotguard.storage.filesystem.direct_io import write_direct

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable
    from pathlib import Path

_SMALL_WRITES_BYTES = 1 << 16
"""Smaller buffers are gathered up to this size; larger ones go to the kernel as they are."""
_TICK_NS = 10_000_000
"""Of the slowest kernels, which count a hundred a second."""
_LARGE_BYTES = 8 << 20
"""Files from this size on bypass the page cache."""


def write_durably(descriptor: int, views: Iterable[memoryview], size_bytes: int) -> os.stat_result:
    """Write the `size_bytes` of `views` to an empty file, on the disk; close it."""
    with os.fdopen(descriptor, "wb", buffering=_SMALL_WRITES_BYTES) as file:
        if size_bytes >= _LARGE_BYTES:
            write_direct(file.fileno(), views, size_bytes)
        else:
            for view in views:
                file.write(view)
            file.flush()
        _stamp(file.fileno())
        os.fsync(file.fileno())
        return os.fstat(file.fileno())


def _stamp(descriptor: int) -> None:
    """Date a file by the file system's clock, finely enough that no two versions look the same.

    On NFS that is the server's: this machine's own may be wrong, and all clocks of a run are
    compared by the stamps of its store. A kernel's stamp is as coarse as its tick.
    """
    os.utime(descriptor)
    within_tick_ns = time.time_ns() % _TICK_NS
    stamp_ns = os.fstat(descriptor).st_mtime_ns + within_tick_ns
    os.utime(descriptor, ns=(stamp_ns, stamp_ns))


def make_durable_folder(folder: Path, *, within: Path, known: Collection[Path] = ()) -> None:
    """Make `folder` and its parents; sync the entries of the new ones and of all below `within`.

    Of those in `known` they are on the disk already, unless they are gone.
    """
    try:
        folder.mkdir()
    except FileExistsError:
        pass
    except FileNotFoundError:  # nothing is as it was: a folder may be another one by now
        known = ()
    chain = [folder, *folder.parents]
    below = [path for path in chain if within in (path, *path.parents)]
    fresh = [path for path in chain if (path in below and path not in known) or not path.exists()]
    with contextlib.suppress(FileExistsError):  # also raised when it vanishes in between
        folder.mkdir(parents=True)
    for path in reversed(fresh):
        with contextlib.suppress(PermissionError):  # above the store we may not be able to look
            sync_folder(path.parent)


def sync_opened(descriptor: int) -> None:
    """Put the entries of an open folder on the disk."""
    try:
        os.fsync(descriptor)
    except OSError as problem:
        if problem.errno != errno.EINVAL:  # CIFS cannot sync folders, and need not
            raise


def sync_folder(folder: Path) -> None:
    """Put the entries of `folder` on the disk; a folder deleted meanwhile has none to lose."""
    with contextlib.suppress(FileNotFoundError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            sync_opened(descriptor)
        finally:
            os.close(descriptor)
