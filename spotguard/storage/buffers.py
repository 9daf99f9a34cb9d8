"""Buffers as flat byte views: what `put` takes, without a copy."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
from typing import TYPE_CHECKING

from spotguard.errors import TooLarge

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from spotguard.storage.base import Buffer, Content, Target


_LARGE_BYTES = 1 << 16
_HUGE_PAGE_BYTES = 1 << 21
_HUGE, _EMPTY_AFTER_FORK = 14, 18
"""Advice on memory (madvise(2), Linux)."""


def views_of(data: Content) -> Iterator[memoryview]:
    """Yield `data` as byte views, empty ones left out; nothing is copied."""
    buffers = [data] if isinstance(data, (bytes, bytearray, memoryview)) else data
    return (view for view in map(byte_view, buffers) if view.nbytes)


def size_of(data: Content) -> int:
    """Return how many bytes `data` has in all; a stream is asked, not gone through."""
    if isinstance(data, (bytes, bytearray, memoryview)):
        return byte_view(data).nbytes
    if isinstance(data, (list, tuple)):
        return sum(byte_view(buffer).nbytes for buffer in data)
    return data.size_bytes


def targets_of(into: Target) -> list[memoryview]:
    """Return `into` as flat views of bytes to fill, empty ones left out."""
    if isinstance(into, memoryview):
        views = [into]
    else:
        views = into if isinstance(into, list) else into.views
    return [view for view in map(byte_view, views) if view.nbytes]


def cut(views: Iterable[memoryview], size_bytes: int) -> Iterator[tuple[memoryview, bool]]:
    """Yield the bytes of `views` in parts, as (part, whether it ends a piece of `size_bytes`).

    No part belongs to two pieces; the last piece ends with the last view, however long it is.
    """
    room = size_bytes
    part = None
    for view in views:
        while view:
            if part is not None:
                yield part, room == size_bytes
            part, view = view[:room], view[room:]
            room = room - len(part) or size_bytes
    if part is not None:
        yield part, True


def within(key: str, max_bytes: int | None, content: bytes, size_bytes: int | None = None) -> bytes:
    """Return what was read of an object, unless it, or what its store says of it, is too large."""
    if max_bytes is not None and max(len(content), size_bytes or 0) > max_bytes:
        raise TooLarge(f"{key} is too large: it has more than {max_bytes} bytes")
    return content


def byte_view(buffer: Buffer) -> memoryview:
    """Return `buffer` as a flat view of its bytes."""
    view = memoryview(buffer)
    # An empty view cannot be cast when its shape holds a zero.
    return view.cast("B") if view.nbytes else memoryview(b"")


def paged_memory(size_bytes: int) -> memoryview:
    """Return memory of at least `size_bytes` (a whole number of pages), fit for direct I/O.

    Where the system has huge pages it lies in them: a disk's requests hold so many pages at most,
    so that reading from it takes three quarters of the time, and hashing two thirds. A worker that
    is forked sees zeros: else the kernel would keep two of each page that is written to later.
    """
    room = -(-max(size_bytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
    if sys.platform != "linux":
        return memoryview(mmap.mmap(-1, room))
    memory = mmap.mmap(-1, room + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in (_HUGE, _EMPTY_AFTER_FORK):
        with contextlib.suppress(OSError):  # not all kernels know them
            memory.madvise(advice)
    view = memoryview(memory)
    first = -address_of(view) % _HUGE_PAGE_BYTES
    return view[first : first + room]


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copy `source` into `target`, both flat, writable and of one length.

    Large ones without the interpreter's lock, which a slice assignment keeps all the while.
    """
    if source.nbytes < _LARGE_BYTES:
        target[:] = source
    else:
        ctypes.memmove(address_of(target), address_of(source), source.nbytes)


def address_of(view: memoryview) -> int:
    """Return where the bytes of a writable view lie in memory."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
