"""Folders below a store, reached by descriptors, so that no link there leads anywhere else.

Whoever may write into a shared folder could put a link in the place of a run's folder, or of the
store's own: what is written, or swept as old, through it would be somebody else's. So each folder
is opened from the one above it, and a link is refused. The store's own folder may be a link: that
one is the user's word.
"""

from __future__ import annotations

import contextlib
import os
import stat
from typing import TYPE_CHECKING

from spotguard.errors import StoreError
from spotguard.storage.filesystem.fsync import make_durable_folder, sync_opened

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_TO_PASS = getattr(os, "O_PATH", 0)
"""Linux: who only reads what is below a folder need not be allowed to list it."""


@contextlib.contextmanager
def opened(root: Path, parts: Sequence[str], *, to_write: bool = False) -> Iterator[int]:
    """Yield a descriptor of the folder that is `parts` below `root`.

    Raises:
        OSError: it is not there, or may not be opened.
        StoreError: there is a link on the way.
    """
    flags = _FOLDER | (0 if to_write else _TO_PASS)
    descriptor = _below(
        os.open(root, flags), root, parts, lambda above, name, path: _into(above, name, flags, path)
    )
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def made(root: Path, parts: Sequence[str], durable: set[Path] | None = None) -> Iterator[int]:
    """Yield a descriptor of that folder, made if need be, with its way down on the disk.

    Of those in `durable` that is known; the others are synced and added. None: not synced.

    Raises:
        OSError: as `opened`. FileNotFoundError: one that was known is gone; nothing is known then.
    """
    _make_root(root, durable)
    try:
        descriptor = _below(
            os.open(root, _FOLDER),
            root,
            parts,
            lambda above, name, path: _made_below(above, name, path, durable),
        )
        try:
            yield descriptor
        finally:
            os.close(descriptor)
    except FileNotFoundError:  # nothing is as it was: a folder may be another one by now
        if durable is not None:
            durable.clear()
        raise


def _below(
    descriptor: int, root: Path, parts: Sequence[str], into: Callable[[int, str, Path], int]
) -> int:
    """Return a descriptor of the folder that is `parts` below `root`, whose own one is closed.

    `into` opens a folder by the descriptor of the one above it.
    """
    path = root
    try:
        for name in parts:
            path = path / name
            below = into(descriptor, name, path)
            os.close(descriptor)
            descriptor = below
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _make_root(root: Path, durable: set[Path] | None) -> None:
    is_new = not root.exists()
    if durable is None:
        if is_new:
            make_durable_folder(root, within=root)
    elif root not in durable:
        make_durable_folder(root, within=root)
        durable.add(root)
    if is_new:
        with contextlib.suppress(OSError), opened(root.parent, ()) as above:
            root.chmod(_shared(above, root.stat().st_mode))


def _made_below(descriptor: int, name: str, path: Path, durable: set[Path] | None) -> int:
    """Return a descriptor of a folder in the one of `descriptor`, made if need be."""
    is_known = durable is not None and path in durable
    try:
        child = _into(descriptor, name, _FOLDER, path)
    except FileNotFoundError:
        if is_known:
            raise
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, dir_fd=descriptor)
        child = _into(descriptor, name, _FOLDER, path)
    share_as_folder(descriptor, child)
    if durable is not None and not is_known:
        sync_opened(descriptor)
        durable.add(path)
    return child


def share_as_folder(folder: int, entry: int) -> None:
    """Let the folder's group do with a new entry what it may do in the folder.

    Where a group shares a folder (its set-group-id bit is set, and the group may write), a second
    user would be locked out by the first one's umask. Only the owner can; others leave it alone.
    """
    mode = stat.S_IMODE(os.fstat(entry).st_mode)
    wanted = _shared(folder, os.fstat(entry).st_mode)
    if wanted != mode:
        with contextlib.suppress(OSError):
            os.fchmod(entry, wanted)


def _shared(folder: int, mode: int) -> int:
    """Return the mode of an entry with the given one, as the folder's group needs it."""
    above = os.fstat(folder).st_mode
    kept = stat.S_IMODE(mode)
    if not (above & stat.S_ISGID and above & stat.S_IWGRP):
        return kept
    if stat.S_ISDIR(mode):
        return kept | stat.S_ISGID | stat.S_IRWXG
    return kept | stat.S_IRGRP | stat.S_IWGRP


def _into(descriptor: int, name: str, flags: int, path: Path) -> int:
    """Return a descriptor of a folder in the one of `descriptor`."""
    try:
        return os.open(name, flags | os.O_NOFOLLOW, dir_fd=descriptor)
    except OSError:
        _refuse_link(descriptor, name, path)
        raise


def _refuse_link(folder: int, name: str, path: Path) -> None:
    """Raise `StoreError` if an entry of a folder is a link."""
    try:
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except OSError:
        return
    if stat.S_ISLNK(found.st_mode):
        raise StoreError(
            f"{path} is a link, and a store's links are not followed: whoever may write into the "
            "folder could have it lead anywhere",
            hint="put the folder itself there, or give the place that it leads to as --store",
        )
