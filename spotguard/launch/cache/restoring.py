"""Brings the cached folders back onto a node, before its script starts.

What is there already stays as it is: the workdir's files are the user's, as of now. Each file is
written beside its place, piece by piece and proven, and gets its name when it is whole. What
cannot be had is left out: a cache that misses something costs time, and nothing else.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from spotguard.errors import NotFound, SpotguardError, StoreError
from spotguard.events import keys
from spotguard.events.untrusted import Refused
from spotguard.launch.cache.listing import (
    MOST_BYTES,
    PIECE_BYTES,
    CachedFile,
    CachedLink,
    CacheListing,
    digest,
    together,
)
from spotguard.launch.cache.scan import TEMPORARY
from spotguard.storage.deadline import give_up_after
from spotguard.storage.small_objects import get_small

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from spotguard.storage.base import ObjectStore

_THREADS: Final = 8
_REQUEST_S: Final = 60.0
_MOST_FAILURES: Final = 16
"""So many requests in a row that fail: the store is not to be had, and nobody waits for it."""
_ROOM: Final = 1.1
"""So much of the files' size must be free, so that the job has room beside them."""


@dataclass
class BroughtBack:
    """What came back."""

    listing: CacheListing = field(default_factory=CacheListing)
    """All that the store has, restored or not."""
    later: CacheListing = field(default_factory=CacheListing)
    """What of it could not be brought back for want of time, room or a store that answers."""
    attempt: int | None = None
    """Whose it is; None if there is nothing."""
    files: int = 0
    size_bytes: int = 0
    there: int = 0
    """Files that were there already."""
    problems: list[str] = field(default_factory=list)
    """Each in a sentence."""


def newest(store: ObjectStore, *, before: int, node: int, key: str, about: str) -> BroughtBack:
    """Return what the nodes of the newest attempt before this one have kept, put together.

    Of a file that several nodes have, this node's own counts, else that of the lowest.

    Raises:
        StoreError: the store cannot be read.
    """
    found = BroughtBack()
    by_attempt: dict[int, list[tuple[int, str]]] = {}
    for info in store.list(keys.CACHE_LISTINGS):
        parsed = keys.parse_cache_listing(info.key)
        if parsed is not None and parsed[0] < before:
            by_attempt.setdefault(parsed[0], []).append((parsed[1], info.key))
    for attempt in sorted(by_attempt, reverse=True):
        listings = []
        for _, name in sorted(by_attempt[attempt], key=lambda each: (each[0] != node, each[0])):
            try:
                raw = get_small(store, name, most_bytes=MOST_BYTES)
                listings.append(CacheListing.opened(raw, key, about))
            except NotFound:
                continue
            except Refused as problem:
                found.problems.append(f"{name} was passed over: {problem}")
        if listings:
            found.attempt, found.listing = attempt, together(listings)
            break
    return found


def bring_back(
    store: ObjectStore,
    restored: BroughtBack,
    folders: Sequence[tuple[str, Path]],
    *,
    stop: Callable[[], bool],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Write the listed files below `folders` (as in the setting, and where). Blocks.

    Never raises for what cannot be restored: `restored` tells. `stop` ends it early; `progress`
    hears of the bytes done, and of how many there are.
    """
    roots = dict(folders)
    wanted = [file for file in restored.listing.files if file.folder in roots]
    links = tuple(link for link in restored.listing.links if link.folder in roots)
    missing = [file for file in wanted if not os.path.lexists(_place(roots, file))]
    restored.there = len(wanted) - len(missing)
    restored.later = CacheListing(tuple(missing), links)
    if not _has_room(missing, roots, restored):
        return
    work = _Work(store, restored, stop, progress, sum(file.size_bytes for file in missing))
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="spotguard-cache") as pool:
        list(pool.map(lambda file: work.restore(file, roots[file.folder]), missing))
    if work.is_given_up:
        restored.problems.append("the store does not answer; the rest is left out")
    if not stop():
        for link in links:
            _make_link(link, roots[link.folder])
        links = ()
    later = tuple(file for file in missing if file in work.later)
    restored.later = CacheListing(later, links)


class _Work:
    """Restores files in several threads."""

    def __init__(
        self,
        store: ObjectStore,
        restored: BroughtBack,
        stop: Callable[[], bool],
        progress: Callable[[int, int], None],
        total_bytes: int,
    ) -> None:
        self._store = store
        self._restored = restored
        self._stop = stop
        self._progress = progress
        self._total_bytes = total_bytes
        self._done_bytes = 0
        self._failures = 0
        """Of the store, in a row."""
        self._lock = threading.Lock()
        self.later: set[CachedFile] = set()
        """What another node may be able to have."""

    @property
    def is_given_up(self) -> bool:
        """Tell whether the store fails again and again."""
        return self._failures >= _MOST_FAILURES

    def restore(self, file: CachedFile, root: Path) -> None:
        """Write one file, unless something is in the way."""
        if self._is_over():
            self._put_off(file)
            return
        try:
            self._write(file, root)
        except (OSError, SpotguardError, Refused) as problem:
            if not isinstance(problem, (NotFound, Refused)):
                self._put_off(file)
            with self._lock:
                self._restored.problems.append(f"{file.folder}/{file.path}: {problem}")

    def _is_over(self) -> bool:
        return self.is_given_up or self._stop()

    def _put_off(self, file: CachedFile) -> None:
        with self._lock:
            self.later.add(file)

    def _write(self, file: CachedFile, root: Path) -> None:
        target = root / file.path
        _make_parent(target, root)
        descriptor, name = tempfile.mkstemp(prefix=TEMPORARY, dir=target.parent)
        try:
            with os.fdopen(descriptor, "wb", buffering=0) as written:
                for piece in file.pieces:
                    if self._is_over():
                        self._put_off(file)
                        return
                    data = self._piece(piece)
                    written.write(data)
                    self._done(len(data))
                if written.tell() != file.size_bytes:
                    raise Refused("its pieces do not add up to it")
                os.fchmod(descriptor, file.mode)
            os.utime(name, ns=(time.time_ns(), file.mtime_ns))
            with contextlib.suppress(FileExistsError):  # another node of a shared disk was faster
                os.link(name, target, follow_symlinks=False)
        finally:
            Path(name).unlink(missing_ok=True)
        with self._lock:
            self._restored.files += 1
            self._restored.size_bytes += file.size_bytes

    def _piece(self, piece: str) -> bytes:
        try:
            with give_up_after(_REQUEST_S):
                data = get_small(self._store, keys.cache_piece(piece), most_bytes=PIECE_BYTES)
        except NotFound:
            raise
        except StoreError:
            with self._lock:
                self._failures += 1
            raise
        self._failures = 0
        if digest(data) != piece:
            raise Refused("a piece of it is damaged")
        return data

    def _done(self, size_bytes: int) -> None:
        with self._lock:
            self._done_bytes += size_bytes
            self._progress(self._done_bytes, self._total_bytes)


def _place(roots: Mapping[str, Path], file: CachedFile) -> Path:
    return roots[file.folder] / file.path


def _has_room(
    files: Sequence[CachedFile], roots: Mapping[str, Path], restored: BroughtBack
) -> bool:
    need = sum(file.size_bytes for file in files) * _ROOM
    for root in {roots[file.folder] for file in files}:
        there = next(each for each in (root, *root.parents) if each.exists())
        if shutil.disk_usage(there).free < need:
            restored.problems.append(f"there is no room for {need / 1e9:.1f} GB at {there}")
            return False
    return True


def _make_parent(target: Path, root: Path) -> None:
    """Make the folders above a file; `Refused` where one of them is a link on this node."""
    root.mkdir(parents=True, exist_ok=True)
    there = next(folder for folder in target.parents if folder.exists())
    if there.resolve() != root.resolve() / there.relative_to(root):
        raise Refused("a link on this node leads elsewhere")
    target.parent.mkdir(parents=True, exist_ok=True)


def _make_link(link: CachedLink, root: Path) -> None:
    place = root / link.path
    with contextlib.suppress(OSError, Refused):  # it is there, or something else is
        _make_parent(place, root)
        place.symlink_to(link.target)
