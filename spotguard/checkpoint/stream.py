"""A shard read in pieces, in little memory: for tools that read much more than they can hold.

`ShardReader` proves a shard before anyone sees its bytes, for which it holds all of it. Here the
bytes pass by once, and the proof comes at the end: whoever uses them must be able to take it back.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

import xxhash

from spotguard.checkpoint.shard import MAX_HEADER_BYTES, ShardReader
from spotguard.checkpoint.strict_json import loads_plain
from spotguard.checkpoint.tensors import DTYPE_BYTES
from spotguard.errors import DamagedCheckpoint, NotFound

if TYPE_CHECKING:
    from collections.abc import Iterator

    from spotguard.checkpoint.tensors import ShardInfo, TensorInfo
    from spotguard.storage.base import ObjectStore

CHUNK_BYTES = 8 << 20
_LENGTH_BYTES = 8


@dataclass(frozen=True)
class Piece:
    """Some bytes of a shard."""

    name: str | None
    """The tensor that they belong to; None for the header."""
    start: int
    """Where they begin, counted in bytes from the tensor's own first one."""
    data: memoryview
    """Whole elements; valid until the next piece is asked for."""


def read_pieces(
    store: ObjectStore, checkpoint_prefix: str, shard: ShardInfo, *, chunk_bytes: int = CHUNK_BYTES
) -> Iterator[Piece]:
    """Yield all bytes of a shard in their order; the last step proves them.

    Needs `chunk_bytes` of memory, and as much again for the header.

    Raises:
        DamagedCheckpoint: missing, of another size or hash, or its header disagrees. It may come
            after all pieces: until the iteration has ended, nothing is proven.
        StoreError: it could not be read at all, which says nothing about its bytes.
    """
    key = checkpoint_prefix + shard.file
    ShardReader(store, checkpoint_prefix, shard).check_size()
    spans = sorted((info.start, name) for name, info in shard.tensors.items() if info.size_bytes)
    digest = xxhash.xxh3_128()
    header = bytearray()
    data_start = min((start for start, _ in spans), default=shard.size_bytes)
    memory = memoryview(bytearray(min(chunk_bytes, shard.size_bytes)))
    for start, end in _cuts(shard, [shard.tensors[name] for _, name in spans], chunk_bytes):
        chunk = memory[: end - start]
        _read(store, key, start, chunk)
        digest.update(chunk)
        if len(header) < min(data_start, MAX_HEADER_BYTES):
            header += chunk[: data_start - start]
        for name, low, high in _overlaps(shard, spans, start, end):
            first = shard.tensors[name].start
            yield Piece(name, low - first, chunk[low - start : high - start])
        if start < data_start:
            yield Piece(None, start, chunk[: data_start - start])
    if (found := f"xxh3_128:{digest.hexdigest()}") != shard.checksum:
        raise DamagedCheckpoint(
            f"{key} is damaged: its hash is {found}, its manifest says {shard.checksum}"
        )
    _check_header(memoryview(header), shard, key)


def _read(store: ObjectStore, key: str, start: int, into: memoryview) -> None:
    try:
        store.get_into(key, start, into)
    except NotFound as problem:
        raise DamagedCheckpoint(f"{key} vanished while it was read") from problem


def _cuts(
    shard: ShardInfo, ordered: list[TensorInfo], chunk_bytes: int
) -> Iterator[tuple[int, int]]:
    """Yield the borders of the chunks; none cuts through an element of a tensor."""
    starts = [info.start for info in ordered]
    at = 0
    while at < shard.size_bytes:
        end = min(at + chunk_bytes, shard.size_bytes)
        index = bisect_right(starts, end) - 1
        if index >= 0 and end < ordered[index].end:
            end -= (end - starts[index]) % DTYPE_BYTES[ordered[index].dtype]
        yield at, end
        at = end


def _overlaps(
    shard: ShardInfo, spans: list[tuple[int, str]], start: int, end: int
) -> Iterator[tuple[str, int, int]]:
    """Yield (tensor, from, to) of the tensors that have bytes between `start` and `end`."""
    index = max(bisect_right(spans, start, key=lambda span: span[0]) - 1, 0)
    while index < len(spans) and spans[index][0] < end:
        first, name = spans[index]
        low, high = max(first, start), min(shard.tensors[name].end, end)
        if low < high:
            yield name, low, high
        index += 1


def _check_header(header: memoryview, shard: ShardInfo, key: str) -> None:
    """Raise `DamagedCheckpoint` unless other readers of safetensors see what the manifest says."""
    length = int.from_bytes(header[:_LENGTH_BYTES], "little")
    data_start = _LENGTH_BYTES + length
    if data_start > len(header):
        raise DamagedCheckpoint(f"{key} has an impossible header length ({length} bytes)")
    found = loads_plain(header[_LENGTH_BYTES:data_start], what=f"{key}: header")
    promised = {
        name: {
            "dtype": info.dtype,
            "shape": list(info.shape),
            "data_offsets": [info.start - data_start, info.end - data_start],
        }
        for name, info in shard.tensors.items()
    }
    if isinstance(found, dict):
        found.pop("__metadata__", None)
    if found != promised:
        raise DamagedCheckpoint(f"{key}: its header and its manifest disagree")
