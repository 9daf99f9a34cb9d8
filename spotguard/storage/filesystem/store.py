"""A folder as an object store: atomic, durable, and safe against other writers.

An object is written to a temporary file in the store's own hidden area, synced, and only then
given its name: by `link` when the name must be free (the kernel refuses a second one), by
`rename` otherwise. Nobody ever sees half an object, and a returned `put` survives a power cut.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
import tempfile
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import quote

from spotguard.errors import (
    AlreadyExists,
    NoObject,
    NotFound,
    StoreError,
    StoreFull,
    StoreUnavailable,
    UsageError,
)
from spotguard.shared.paths import expanded
from spotguard.storage.base import ObjectInfo, Reads
from spotguard.storage.buffers import size_of, targets_of, views_of, within
from spotguard.storage.filesystem.direct_io import is_cached, read_direct
from spotguard.storage.filesystem.fsync import make_durable_folder, sync_folder, write_durably
from spotguard.storage.filesystem.walk import folders_in, walk
from spotguard.storage.keys import RESERVED, check_folder, check_key, check_prefix

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from spotguard.storage.base import Content, Target

_STALE_AFTER_S = 86_400.0
_DISK_READS = Reads(threads=16, size_bytes=4 << 20)
"""However few the cores: the disk is never idle while some of them copy and prove."""
_CACHE_READS = Reads(threads=max(2, min(8, os.cpu_count() or 2)), size_bytes=16 << 20)
"""Nothing to wait for: more threads than cores would only wait for each other."""
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV})
_FOLDER_RACES = 20


class FileStore:
    """The folder `root` as a store; it need not exist yet.

    `if_match` is atomic among writers that opened the store by the same folder. Thread-safe.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._root = expanded(root).absolute()
        self._area = self._root / RESERVED
        self._durable: set[Path] = set()
        self._swept = False

    @property
    def url(self) -> str:
        """The folder as a `file://` URL."""
        return f"file://{quote(str(self._root))}"

    def folder_exists(self) -> bool:
        """Return whether the store's folder is there: it is made at the first write."""
        return self._root.is_dir()

    def best_reads(self, key: str) -> Reads:
        """Return many small ones; as few as there are cores if the file's middle is in memory."""
        try:
            with os.fdopen(_opened(self._path(key)), "rb", buffering=0) as file:
                middle = os.fstat(file.fileno()).st_size // 2
                return _CACHE_READS if is_cached(file.fileno(), middle) else _DISK_READS
        except OSError:
            return _DISK_READS  # who reads it will say why it cannot

    def put(
        self,
        key: str,
        data: Content,
        *,
        if_absent: bool = False,
        if_match: str | None = None,
    ) -> str:
        """Store `data` whole and durably, or not at all; return its etag."""
        if if_absent and if_match is not None:
            raise UsageError("put: if_absent and if_match exclude each other")
        target = self._path(key)
        with _translated("write", target):
            temp = self._temporary()
            try:
                etag = _etag(write_durably(temp, views_of(data), size_of(data)))
                if if_absent:
                    self._in_folder(temp, target, partial(self._create, key=key))
                else:
                    replace = partial(self._replace, key=key, if_match=if_match)
                    self._in_folder(temp, target, replace)
            finally:
                with contextlib.suppress(OSError):
                    temp.unlink(missing_ok=True)
        return etag

    def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        """Return the whole object, unless it has more than `max_bytes`."""
        path = self._path(key)
        with _translated("read", path), os.fdopen(_opened(path), "rb") as file:
            if max_bytes is None:
                return file.read()
            size_bytes = os.fstat(file.fileno()).st_size
            # Memory for as many bytes as are asked for is taken before the first is read.
            content = b"" if size_bytes > max_bytes else file.read(size_bytes + 1)
        return within(key, max_bytes, content, size_bytes)

    def get_into(self, key: str, offset: int, into: Target) -> None:
        """Fill `into` with the object's bytes from `offset`."""
        path = self._path(key)
        views = targets_of(into)
        told = None if isinstance(into, (memoryview, list)) else into.filled
        with _translated("read", path):
            descriptor = _opened(path)
            try:
                count = read_direct(descriptor, offset, views, told)
            finally:
                os.close(descriptor)
        size_bytes = sum(map(len, views))
        if count < size_bytes:
            raise StoreError(f"{path} ends before byte {offset + size_bytes}")

    def head(self, key: str) -> ObjectInfo | None:
        """Return what a listing would say of `key`, or None."""
        path = self._path(key)
        try:
            with _translated("read", path):
                status = path.stat()
        except NotFound:
            return None
        return _info(key, status) if stat.S_ISREG(status.st_mode) else None

    def list(self, prefix: str = "", *, start_after: str = "") -> Iterator[ObjectInfo]:
        """Yield the objects whose key starts with `prefix`, sorted; folders are read as needed."""
        check_prefix(prefix)
        return self._list(prefix, start_after)

    def list_folders(self, prefix: str) -> Sequence[str]:
        """Return, sorted, the prefixes one level below `prefix` that hold an object."""
        check_folder(prefix)
        with _translated("list", self._root / prefix):
            return [
                folder
                for folder in folders_in(self._root, prefix)
                if next(walk(self._root, folder, ""), None) is not None
            ]

    def delete(self, key: str) -> None:
        """Remove the object, and the folders that it leaves empty."""
        path = self._path(key)
        if self.head(key) is None:
            return
        with _translated("delete", path), self._locked(fcntl.LOCK_SH):
            path.unlink(missing_ok=True)
            sync_folder(path.parent)
        self._remove_empty(path.parent)

    def copy(self, source: str, target: str, *, if_absent: bool = False) -> str:
        """Make `target` an object with the bytes of `source`; return its etag."""
        return self.put(target, self.get(source), if_absent=if_absent)

    def archive(self, key: str) -> None:
        """Raise `UsageError`: a folder has no colder place."""
        raise UsageError(
            f"{self.url} is a folder, which has no archive to move {check_key(key)} to",
            hint="copy the run to a bucket, or delete old checkpoints: spotguard checkpoints prune",
        )

    def warm(self) -> None:
        """Do nothing: a folder has no connections."""

    def clean_up(self, prefix: str = "", *, older_than_s: float) -> int:
        """Remove temporary files that no writer has touched for so long; return how many.

        They have no keys, so those of other prefixes go with them.
        """
        check_prefix(prefix)
        return _sweep(self._area / "tmp", older_than_s)

    def _list(self, prefix: str, start_after: str) -> Iterator[ObjectInfo]:
        with _translated("list", self._root / prefix):
            for key in walk(self._root, prefix, start_after):
                info = self.head(key)
                if info:  # else deleted since its folder was read
                    yield info

    def _path(self, key: str) -> Path:
        return self._root / check_key(key)

    def _temporary(self) -> Path:
        """Return a free path in the hidden area, which is swept once for dead writers' files."""
        folder = self._area / "tmp"
        if not folder.is_dir():
            make_durable_folder(folder, within=self._root)
        if not self._swept:
            self._swept = True
            _sweep(folder, _STALE_AFTER_S)
        return folder / f"{os.getpid()}-{secrets.token_hex(8)}"

    def _in_folder(self, temp: Path, target: Path, place: Callable[[Path, Path], None]) -> None:
        """Run `place` in an existing folder: a deleter may remove it, empty, in between."""
        for _ in range(_FOLDER_RACES):
            with contextlib.suppress(FileNotFoundError):
                folder = target.parent
                if folder not in self._durable:
                    make_durable_folder(folder, within=self._root, known=self._durable)
                    above = (path for path in folder.parents if self._root in path.parents)
                    self._durable.update((folder, self._root, *above))
                place(temp, target)
                sync_folder(folder)
                return
            if not temp.exists():
                raise StoreUnavailable(f"cannot write {target}: what was to be stored was deleted")
            self._durable.clear()  # those above it may be others, too
        raise StoreUnavailable(f"cannot write {target}: its folder keeps vanishing")

    def _create(self, temp: Path, target: Path, key: str) -> None:
        try:
            target.hardlink_to(temp)
        except FileExistsError:
            # NFS repeats a request whose answer was lost: two names mean that we did win.
            if temp.stat().st_nlink != 2:
                raise _taken(target, key) from None
        except OSError as problem:
            if problem.errno not in _NO_LINKS:
                raise
            with self._locked(fcntl.LOCK_EX):  # FUSE mounts and the like have no hard links
                if target.exists():
                    raise _taken(target, key) from None
                temp.replace(target)

    def _replace(self, temp: Path, target: Path, key: str, if_match: str | None) -> None:
        # A plain write shares the lock: it must not slip in between a comparison and its rename.
        with self._locked(fcntl.LOCK_SH if if_match is None else fcntl.LOCK_EX):
            if if_match is not None:
                found = self.head(key)
                if found is None or found.etag != if_match:
                    raise AlreadyExists(f"{target} was changed by another writer")
            temp.replace(target)

    @contextlib.contextmanager
    def _locked(self, how: int) -> Iterator[None]:
        self._area.mkdir(parents=True, exist_ok=True)
        with (self._area / "lock").open("ab") as file:
            try:
                fcntl.flock(file, how)
            except OSError:
                if how == fcntl.LOCK_EX:  # only comparing writers cannot do without
                    raise
            yield

    def _remove_empty(self, folder: Path) -> None:
        while folder != self._root:
            try:
                folder.rmdir()
            except OSError:  # not empty, or somebody else was first
                return
            self._durable.discard(folder)
            folder = folder.parent


def _opened(path: Path) -> int:
    """Return a descriptor of a file; of anything else there is no object: a pipe has no end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise IsADirectoryError(errno.EISDIR, "no plain file")
    return descriptor


def _taken(target: Path, key: str) -> StoreError:
    if target.is_dir():
        return StoreUnavailable(f"cannot write {target}: a folder is in its place")
    return AlreadyExists(f"{key} exists already in {target.parent}")


def _etag(status: os.stat_result) -> str:
    return f"{status.st_mtime_ns}-{status.st_size}-{status.st_ino}"


def _info(key: str, status: os.stat_result) -> ObjectInfo:
    return ObjectInfo(
        key=key, size_bytes=status.st_size, etag=_etag(status), modified_at=status.st_mtime
    )


def _sweep(folder: Path, older_than_s: float) -> int:
    """Remove temporary files that no living writer can still own; return how many."""
    removed = 0
    with contextlib.suppress(OSError):
        oldest_at = _now_there(folder) - older_than_s
        for leftover in folder.iterdir():
            with contextlib.suppress(OSError):
                if leftover.stat().st_mtime < oldest_at:
                    leftover.unlink()
                    removed += 1
    return removed


def _now_there(folder: Path) -> float:
    """Return the time by the clock that stamps files there: this machine's may be days off."""
    with tempfile.TemporaryFile(dir=folder) as file:
        return os.fstat(file.fileno()).st_mtime


@contextlib.contextmanager
def _translated(verb: str, path: Path) -> Iterator[None]:
    """Turn what the kernel says into the store's own errors."""
    try:
        yield
    except OSError as problem:
        raise _as_store_error(problem, verb, path) from problem


def _as_store_error(problem: OSError, verb: str, path: Path) -> StoreError:
    if verb == "read" and isinstance(problem, (FileNotFoundError, NotADirectoryError)):
        return NotFound(f"there is no {path}")
    if verb == "read" and isinstance(problem, IsADirectoryError):
        return NoObject(f"{path} is no plain file")
    why = (problem.strerror or str(problem)).lower()
    if problem.errno in _NO_ROOM:
        return StoreFull(
            f"no room left to {verb} {path}: {why}",
            hint="free space there or choose another store; what was committed is untouched",
        )
    return StoreUnavailable(
        f"cannot {verb} {path}: {why}",
        hint="check that the folder exists, is mounted and may be written by you",
    )
