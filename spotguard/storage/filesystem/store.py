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
from spotguard.storage.filesystem.folders import made, opened, share_as_folder
from spotguard.storage.filesystem.fsync import sync_opened, write_durably
from spotguard.storage.filesystem.walk import folders_in, walk
from spotguard.storage.keys import RESERVED, check_folder, check_key, check_prefix

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from spotguard.storage.base import Content, Target

_STALE_AFTER_S = 86_400.0
_DISK_READS = Reads(threads=16, size_bytes=4 << 20)
"""However few the cores: the disk is never idle while some of them copy and prove."""
_CACHE_READS = Reads(threads=max(2, min(8, os.cpu_count() or 2)), size_bytes=16 << 20)
"""Nothing to wait for: more threads than cores would only wait for each other."""
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS})
_FOLDER_RACES = 20


class FileStore:
    """The folder `root` as a store; it need not exist yet. Links below it are not followed.

    `if_match` is atomic among writers that opened the store by the same folder. Thread-safe.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._root = expanded(root).absolute()
        self._area = self._root / RESERVED
        self._durable: set[Path] = set()
        self._swept = False
        self._has_links = False
        """They were tried."""

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
            with os.fdopen(self._opened(key), "rb", buffering=0) as file:
                middle = os.fstat(file.fileno()).st_size // 2
                return _CACHE_READS if is_cached(file.fileno(), middle) else _DISK_READS
        except (OSError, StoreError):
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
        if if_absent:
            self.check_conditions()
        with _translated("write", target), self._temporary() as (area, temp):
            etag = _etag(write_durably(_new_file(area, temp), views_of(data), size_of(data)))
            if if_absent:
                self._in_folder(area, temp, target, partial(self._create, target, key))
            else:
                place = partial(self._replace, target, key, if_match)
                self._in_folder(area, temp, target, place)
        return etag

    def check_conditions(self) -> None:
        """Make sure that the folder decides which of two racing writers is first.

        Raises:
            StoreError: it does not: it has no hard links, as mounted buckets have none.
        """
        if self._has_links:
            return
        with _translated("write", self._area), self._temporary() as (area, temp):
            os.close(_new_file(area, temp))
            probe = f"{temp}-probe"
            try:
                self._link(area, temp, area, probe)
                with contextlib.suppress(FileExistsError):
                    self._link(area, temp, area, probe)
                    raise self._unsafe("gives a name twice")
            finally:
                with contextlib.suppress(OSError):
                    os.unlink(probe, dir_fd=area)
        self._has_links = True

    def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        """Return the whole object, unless it has more than `max_bytes`."""
        path = self._path(key)
        with _translated("read", path), os.fdopen(self._opened(key), "rb") as file:
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
            descriptor = self._opened(key)
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
            with _translated("read", path), self._folder(path) as folder:
                status = os.stat(path.name, dir_fd=folder, follow_symlinks=False)
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
        with (
            _translated("delete", path),
            contextlib.suppress(FileNotFoundError),  # somebody else was first
            self._locked(fcntl.LOCK_SH),
            self._folder(path, to_write=True) as folder,
        ):
            os.unlink(path.name, dir_fd=folder)
            sync_opened(folder)
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
        try:
            with opened(self._root, (RESERVED, "tmp"), to_write=True) as area:
                return _sweep(area, older_than_s)
        except OSError:
            return 0

    def _list(self, prefix: str, start_after: str) -> Iterator[ObjectInfo]:
        with _translated("list", self._root / prefix):
            for key in walk(self._root, prefix, start_after):
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # deleted since
                    status = os.lstat(f"{self._root}/{key}")
                    if stat.S_ISREG(status.st_mode):
                        yield _info(key, status)

    def _path(self, key: str) -> Path:
        return self._root / check_key(key)

    def _folder(self, path: Path, *, to_write: bool = False) -> AbstractContextManager[int]:
        """Open the folder in which an object lies."""
        parts = path.relative_to(self._root).parts[:-1]
        return opened(self._root, parts, to_write=to_write)

    def _opened(self, key: str) -> int:
        """Return a descriptor of a file; of anything else there is no object: a pipe has no end."""
        path = self._path(key)
        with self._folder(path) as folder:
            try:
                flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
                descriptor = os.open(path.name, flags, dir_fd=folder)
            except OSError as problem:
                if problem.errno == errno.ELOOP:
                    raise IsADirectoryError(errno.EISDIR, "a link") from None
                raise
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise IsADirectoryError(errno.EISDIR, "no plain file")
        return descriptor

    @contextlib.contextmanager
    def _temporary(self) -> Iterator[tuple[int, str]]:
        """Yield the hidden area's folder, and a free name in it whose file is removed at the end.

        The area is swept once for dead writers' files.
        """
        with made(self._root, (RESERVED, "tmp")) as area:
            if not self._swept:
                self._swept = True
                _sweep(area, _STALE_AFTER_S)
            temp = f"{os.getpid()}-{secrets.token_hex(8)}"
            try:
                yield area, temp
            finally:
                with contextlib.suppress(OSError):
                    os.unlink(temp, dir_fd=area)

    def _in_folder(
        self, area: int, temp: str, target: Path, place: Callable[[int, str, int], None]
    ) -> None:
        """Run `place` in an existing folder: a deleter may remove it, empty, in between."""
        parts = target.relative_to(self._root).parts[:-1]
        for _ in range(_FOLDER_RACES):
            with (
                contextlib.suppress(FileNotFoundError),
                made(self._root, parts, self._durable) as folder,
            ):
                place(area, temp, folder)
                sync_opened(folder)
                return
            if not _exists(area, temp):
                raise StoreUnavailable(f"cannot write {target}: what was to be stored was deleted")
        raise StoreUnavailable(f"cannot write {target}: its folder keeps vanishing")

    def _create(self, target: Path, key: str, area: int, temp: str, folder: int) -> None:
        try:
            self._link(area, temp, folder, target.name)
        except FileExistsError:
            # NFS repeats a request whose answer was lost: two names mean that we did win.
            if os.stat(temp, dir_fd=area).st_nlink != 2:
                raise _taken(target, key) from None

    def _link(self, area: int, temp: str, folder: int, name: str) -> None:
        try:
            os.link(temp, name, src_dir_fd=area, dst_dir_fd=folder, follow_symlinks=False)
        except OSError as problem:
            if problem.errno in _NO_LINKS:
                raise self._unsafe("has no hard links") from problem
            raise

    def _unsafe(self, what: str) -> StoreError:
        """Return what is told of a folder that cannot tell which of two writers is first."""
        return StoreError(
            f"the folder of {self.url} {what}, so two nodes could both believe that they had won, "
            "as on a mounted bucket",
            hint="give a bucket by its own URL, e.g. --store s3://BUCKET/PREFIX (gs://, az://), or "
            "a folder on a disk or NFS",
        )

    def _replace(
        self, target: Path, key: str, if_match: str | None, area: int, temp: str, folder: int
    ) -> None:
        # A plain write shares the lock: it must not slip in between a comparison and its rename.
        with self._locked(fcntl.LOCK_SH if if_match is None else fcntl.LOCK_EX):
            if if_match is not None:
                found = self.head(key)
                if found is None or found.etag != if_match:
                    raise AlreadyExists(f"{target} was changed by another writer")
            os.replace(temp, target.name, src_dir_fd=area, dst_dir_fd=folder)

    @contextlib.contextmanager
    def _locked(self, how: int) -> Iterator[None]:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        with made(self._root, (RESERVED,)) as area:
            descriptor = os.open("lock", flags, 0o666, dir_fd=area)
            share_as_folder(area, descriptor)
        try:
            try:
                fcntl.flock(descriptor, how)
            except OSError:
                if how == fcntl.LOCK_EX:  # only comparing writers cannot do without
                    raise
            yield
        finally:
            os.close(descriptor)

    def _remove_empty(self, folder: Path) -> None:
        while folder != self._root:
            try:
                with self._folder(folder) as above:
                    os.rmdir(folder.name, dir_fd=above)
            except (OSError, StoreError):  # not empty, or somebody else was first
                return
            self._durable.discard(folder)
            folder = folder.parent


def _new_file(folder: int, name: str) -> int:
    """Return a descriptor of a new file in a folder, whose group may do what it may do there."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(name, flags, 0o666, dir_fd=folder)
    share_as_folder(folder, descriptor)
    return descriptor


def _exists(folder: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


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


def _sweep(folder: int, older_than_s: float) -> int:
    """Remove temporary files that no living writer can still own; return how many."""
    removed = 0
    with contextlib.suppress(OSError), os.scandir(folder) as found:
        oldest_at = _now_there(folder) - older_than_s
        for leftover in list(found):
            with contextlib.suppress(OSError):
                if leftover.stat(follow_symlinks=False).st_mtime < oldest_at:
                    os.unlink(leftover.name, dir_fd=folder)
                    removed += 1
    return removed


def _now_there(folder: int) -> float:
    """Return the time by the clock that stamps files there: this machine's may be days off."""
    name = f"{os.getpid()}-{secrets.token_hex(8)}"
    descriptor = _new_file(folder, name)
    try:
        os.unlink(name, dir_fd=folder)
        return os.fstat(descriptor).st_mtime
    finally:
        os.close(descriptor)


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
