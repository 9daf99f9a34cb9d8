"""Buffers as flat byte views: what `put` takes, without a copy."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from spotguard.storage.base import Buffer, Content


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


def byte_view(buffer: Buffer) -> memoryview:
    """Return `buffer` as a flat view of its bytes."""
    view = memoryview(buffer)
    # An empty view cannot be cast when its shape holds a zero.
    return view.cast("B") if view.nbytes else memoryview(b"")
