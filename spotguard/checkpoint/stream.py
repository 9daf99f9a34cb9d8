"""A shard's bytes in order and in little memory: for tools that read more than they can hold."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spotguard.checkpoint.reading import proven_pieces

if TYPE_CHECKING:
    from collections.abc import Iterator

    from spotguard.checkpoint.reading import ShardReader
    from spotguard.checkpoint.tensors import TensorInfo


@dataclass(frozen=True)
class ShardChunk:
    """Some proven bytes of a tensor."""

    name: str
    start: int
    """Where they begin, counted in bytes from the tensor's own first one."""
    data: memoryview
    """Whole elements; valid until the next chunk is asked for."""


def read_chunks(reader: ShardReader) -> Iterator[ShardChunk]:
    """Yield all tensors' bytes in the order of the file; needs one piece of memory.

    A tensor is aligned for its dtype and pieces are whole pages, so no cut goes through an element.

    Raises:
        DamagedCheckpoint: the next bytes are not as promised; those yielded before are.
        StoreError: it could not be read at all, which says nothing about its bytes.
    """
    tensors = reader.tensors
    spans = sorted((info.start, name) for name, info in tensors.items() if info.size_bytes)
    for start, piece in proven_pieces(reader):
        for name, low, high in _overlaps(tensors, spans, start, start + len(piece)):
            yield ShardChunk(name, low - tensors[name].start, piece[low - start : high - start])


def _overlaps(
    tensors: dict[str, TensorInfo], spans: list[tuple[int, str]], start: int, end: int
) -> Iterator[tuple[str, int, int]]:
    """Yield (tensor, from, to) of the tensors that have bytes between `start` and `end`."""
    index = max(bisect_right(spans, start, key=lambda span: span[0]) - 1, 0)
    while index < len(spans) and spans[index][0] < end:
        first, name = spans[index]
        low, high = max(first, start), min(tensors[name].end, end)
        if low < high:
            yield name, low, high
        index += 1
