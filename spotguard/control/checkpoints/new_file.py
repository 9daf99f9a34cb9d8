"""A large file of the user's that appears whole or not at all, even if this process is killed."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from typing import TYPE_CHECKING

from spotguard.errors import EnvironmentFailure, UsageError
from spotguard.shared.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_NAMELESS: int | None = getattr(os, "O_TMPFILE", None)
_NO_NAMELESS = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT})
_NO_RESERVING = frozenset({errno.EOPNOTSUPP, errno.EINVAL})


@contextlib.contextmanager
def new_file(target: Path, size_bytes: int, *, replace: bool) -> Iterator[int]:
    """Yield the descriptor of an empty file that becomes `target` when the block ends well.

    Until then it has no name, so that nothing is left of it whatever happens; where the filesystem
    cannot do that, it has a hidden one, which only a SIGKILL leaves behind.

    Raises:
        UsageError: `target` exists and is not to be replaced, or cannot be a file.
        EnvironmentFailure: it cannot be written, e.g. for lack of room (known before the block).
    """
    _check(target, replace=replace)
    try:
        descriptor, hidden = _open(target.parent)
        try:
            _reserve(descriptor, size_bytes)
            yield descriptor
            os.fsync(descriptor)
            _give_name(descriptor, hidden, target, replace=replace)
        finally:
            os.close(descriptor)
            if hidden is not None:
                hidden.unlink(missing_ok=True)
    except FileExistsError:  # it was not there at the beginning
        raise _exists(target) from None
    except OSError as problem:
        raise EnvironmentFailure(
            f"{target} cannot be written: {problem.strerror} "
            f"({format_bytes(size_bytes)} are needed)"
        ) from problem


def write_at(descriptor: int, data: memoryview, offset: int) -> None:
    """Write all of `data` at `offset`."""
    while data:
        count = os.pwrite(descriptor, data, offset)
        data = data[count:]
        offset += count


def _check(target: Path, *, replace: bool) -> None:
    if not target.parent.is_dir():
        raise UsageError(f"{target}: there is no folder {target.parent}", hint="make it first")
    if target.is_dir():
        raise UsageError(f"{target} is a folder", hint="give the name of a file")
    if not replace and os.path.lexists(target):
        raise _exists(target)


def _exists(target: Path) -> UsageError:
    return UsageError(
        f"{target} exists already; it was left as it is",
        hint="pass --force to replace it, or give another name",
    )


def _open(folder: Path) -> tuple[int, Path | None]:
    """Return a new file's descriptor, and its hidden name if it needs one."""
    if _NAMELESS is not None:
        try:
            return os.open(folder, _NAMELESS | os.O_RDWR | os.O_CLOEXEC, 0o666), None
        except OSError as problem:
            if problem.errno not in _NO_NAMELESS:
                raise
    hidden = _hidden(folder)
    return os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), hidden


def _hidden(folder: Path) -> Path:
    return folder / f".spotguard-{secrets.token_hex(8)}.partial"


def _reserve(descriptor: int, size_bytes: int) -> None:
    if not hasattr(os, "posix_fallocate"):  # macOS: a full disk is known later
        return
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
    except OSError as problem:
        if problem.errno not in _NO_RESERVING:
            raise


def _give_name(descriptor: int, hidden: Path | None, target: Path, *, replace: bool) -> None:
    if hidden is not None:
        if not replace and os.path.lexists(target):
            raise FileExistsError
        hidden.rename(target)
    elif not replace:
        _link(descriptor, target)  # refuses a name that is taken
    else:
        hidden = _hidden(target.parent)
        _link(descriptor, hidden)
        hidden.rename(target)
    _sync(target.parent)


def _link(descriptor: int, name: Path) -> None:
    folder = os.open(name.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # With a folder's descriptor Python calls linkat, which follows /proc's link to the file.
        os.link(f"/proc/self/fd/{descriptor}", name.name, dst_dir_fd=folder)
    finally:
        os.close(folder)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # some network folders cannot be synced, and need not
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
