"""Buffers as flat byte views: what `put` takes, without a copy."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from spotguard.storage.base import Buffer, Content, Target


_LARGE_BYTES = 1 << 16


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
    views = [into] if isinstance(into, memoryview) else into
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


def byte_view(buffer: Buffer) -> memoryview:
    """Return `buffer` as a flat view of its bytes."""
    view = memoryview(buffer)
    # An empty view cannot be cast when its shape holds a zero.
    return view.cast("B") if view.nbytes else memoryview(b"")


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
