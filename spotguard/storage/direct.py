"""Large files written past the page cache: 2-7 times faster than buffered writes and fsync.

The disk wants whole pages from aligned memory. What lies so already (a staging buffer) goes to
the disk as it is; anything else passes through a few aligned chunks. One thread gathers and
another writes, so that copying and hashing cost no time of their own.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import queue
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_PAGE_BYTES = 4096
_CHUNK_BYTES = 8 << 20
_CHUNKS = 3  # one is filled, one is written, one waits in between
_O_DIRECT: int = getattr(os, "O_DIRECT", 0)  # Linux only; elsewhere the same code writes buffered
_UNSUPPORTED = frozenset({errno.EINVAL, errno.EOPNOTSUPP})


def write_direct(descriptor: int, views: Iterable[memoryview], size_bytes: int) -> None:
    """Write `views`, `size_bytes` in all, one after the other to an empty file; not yet synced.

    Where the filesystem refuses direct writes, they are buffered ones. Needs 24 MB.
    """
    _reserve(descriptor, size_bytes)
    with contextlib.suppress(OSError):
        _set_direct(descriptor, on=True)
    writer = _Writer(descriptor)
    try:
        for piece, own in _pieces(views, writer.free):
            writer.give(piece, own)
    finally:
        writer.finish()
    if writer.problem is not None:
        raise writer.problem


class _Writer:
    """A thread that writes pieces in order; `free` hands out chunks that it is done with."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._pieces: queue.Queue[tuple[memoryview, bool] | None] = queue.Queue(_CHUNKS)
        self._chunks: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        for _ in range(_CHUNKS):
            self._chunks.put(memoryview(mmap.mmap(-1, _CHUNK_BYTES)))
        self.problem: OSError | None = None
        self._thread = threading.Thread(target=self._run, name="spotguard-disk", daemon=True)
        self._thread.start()

    def free(self) -> memoryview:
        """Return a chunk to fill; waits for one to be written."""
        return self._chunks.get()

    def give(self, piece: memoryview, own: bool) -> None:
        """Queue a piece; `own` if it lies in a chunk of ours. Raises what a write raised."""
        if self.problem is not None:
            raise self.problem
        self._pieces.put((piece, own))

    def finish(self) -> None:
        """Return when all is written, or a write has failed."""
        self._pieces.put(None)
        self._thread.join()

    def _run(self) -> None:
        offset = 0
        while (item := self._pieces.get()) is not None:
            piece, own = item
            if self.problem is None:
                try:
                    _write_piece(self._descriptor, piece, offset)
                except OSError as problem:
                    self.problem = problem
            offset += len(piece)
            if own:  # also after a failure: whoever fills chunks must not wait for ever
                self._chunks.put(memoryview(piece.obj))


def _pieces(
    views: Iterable[memoryview], free: Callable[[], memoryview]
) -> Iterator[tuple[memoryview, bool]]:
    """Yield the bytes of `views` in whole, aligned pages (but for the end), as (piece, ours)."""
    chunk, filled = free(), 0
    for view in views:
        rest = view
        while rest:
            if filled % _PAGE_BYTES == 0 and len(rest) >= _PAGE_BYTES and _is_aligned(rest):
                if filled:
                    yield chunk[:filled], True
                    chunk, filled = free(), 0
                size = min(len(rest) - len(rest) % _PAGE_BYTES, _CHUNK_BYTES)
                yield rest[:size], False
                rest = rest[size:]
                continue
            part = rest[: _CHUNK_BYTES - filled]
            chunk[filled : filled + len(part)] = part
            filled += len(part)
            rest = rest[len(part) :]
            if filled == _CHUNK_BYTES:
                yield chunk, True
                chunk, filled = free(), 0
    if filled:
        yield chunk[:filled], True


def _is_aligned(view: memoryview) -> bool:
    """Return True if `view` begins on a page; only writable memory can be asked."""
    if view.readonly:
        return False
    return ctypes.addressof(ctypes.c_char.from_buffer(view)) % _PAGE_BYTES == 0


def _reserve(descriptor: int, size_bytes: int) -> None:
    """Take the room at once: a full disk is known before the first byte, and files lie whole."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(descriptor, 0, size_bytes)
        except OSError as problem:
            if problem.errno not in _UNSUPPORTED:
                raise


def _write_piece(descriptor: int, piece: memoryview, offset: int) -> None:
    whole = len(piece) - len(piece) % _PAGE_BYTES
    _write_all(descriptor, piece[:whole], offset)
    if whole < len(piece):  # only the last piece has a part of a page
        _set_direct(descriptor, on=False)
        _write_all(descriptor, piece[whole:], offset + whole)


def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        try:
            count = os.pwrite(descriptor, data, offset)
        except OSError as problem:
            if problem.errno != errno.EINVAL or not _set_direct(descriptor, on=False):
                raise
            continue  # this disk wants another alignment, or a short write broke it
        data = data[count:]
        offset += count


def _set_direct(descriptor: int, *, on: bool) -> bool:
    """Switch direct writes on or off; return whether that changed anything."""
    before = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    after = before | _O_DIRECT if on else before & ~_O_DIRECT
    fcntl.fcntl(descriptor, fcntl.F_SETFL, after)
    return before != after
