"""What a manifest says of shards and of the tensors in them, and what must hold for both."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from spotguard.checkpoint.fields import Fields
from spotguard.errors import DamagedCheckpoint

if TYPE_CHECKING:
    from spotguard.checkpoint.strict_json import Json

DTYPE_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
    "C64": 8,
}
"""Bytes of one element of each safetensors dtype that a shard can hold."""

HASH = "xxh3_128"
"""What proves a shard's bytes: no two contents meet by chance, and it is as fast as memory."""
HASH_PATTERN = r"[0-9a-f]{32}"
PAGE_BYTES = 4096
"""Tensor data begins at a multiple of this: fit for direct I/O and for mapping."""
PIECE_BYTES = 1 << 20
"""Least bytes of data under one hash: fits a core's own cache between copying and hashing."""
_MOST_PIECES = 4096
MAX_HEADER_BYTES = 100_000_000
"""What readers of safetensors accept."""
_LENGTH_BYTES = 8
_MAX_PIECE_BYTES = 1 << 28
SHARD_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}\.safetensors"
"""A shard's file name: one part of a key, never a path."""
FOLDER_PATTERN = r"frozen/[0-9]{6}/"
"""Where a shard lies that many checkpoints refer to, below the run's own prefix."""


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """One tensor, or a rank's part of one, inside a shard."""

    dtype: str
    """A name of `DTYPE_BYTES`."""
    shape: tuple[int, ...]
    start: int
    """Offset of its first byte in the file."""
    end: int
    """Offset behind its last byte in the file."""
    global_shape: tuple[int, ...] | None = None
    """Shape of the whole tensor, if this is a part of one that is spread over shards."""
    offsets: tuple[int, ...] | None = None
    """Where this part begins in the whole tensor, one for each dimension."""

    @property
    def size_bytes(self) -> int:
        """Return the bytes that dtype and shape ask for."""
        return DTYPE_BYTES[self.dtype] * math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class ShardInfo:
    """One shard file: how long it is and what its bytes hash to. Its header says what is in it."""

    file: str
    size_bytes: int
    header_bytes: int
    """Where the data begins: behind the length, the JSON and its padding."""
    header_hash: str
    """32 hex digits: XXH3-128 of the first `header_bytes`."""
    piece_hashes: tuple[str, ...]
    """The same of each piece of the data."""
    piece_bytes: int
    """Bytes of each piece but the last, which has what is left."""
    folder: str | None = None
    """Where it lies if it is a base: what no step changes, stored once for many checkpoints."""
    outside: bool = False
    """True of a base whose header alone is stored: its data is in files that the script names."""

    @property
    def stored_bytes(self) -> int:
        """Return how many bytes of it are in the run store."""
        return self.header_bytes if self.outside else self.size_bytes

    def key(self, checkpoint_prefix: str) -> str:
        """Return where it lies in the store, as a shard of the checkpoint at this prefix."""
        return (self.folder or checkpoint_prefix) + self.file

    def within(self, folder: str) -> ShardInfo:
        """Return the same as a base, which lies in this folder."""
        return replace(self, folder=folder)

    def piece(self, index: int) -> tuple[int, int]:
        """Return where a piece begins and ends in the file."""
        start = self.header_bytes + index * self.piece_bytes
        return start, min(start + self.piece_bytes, self.size_bytes)

    def span(self, pieces: range) -> tuple[int, int]:
        """Return where pieces that follow each other begin and end in the file."""
        return self.piece(pieces[0])[0], self.piece(pieces[-1])[1]

    def piece_at(self, offset: int) -> int:
        """Return the index of the piece that holds the byte `offset` of the file."""
        return (offset - self.header_bytes) // self.piece_bytes

    def to_json(self) -> Json:
        """Return the manifest's words for it."""
        return {
            "file": self.file,
            "size_bytes": self.size_bytes,
            "hash": HASH,
            "header_bytes": self.header_bytes,
            "header_hash": self.header_hash,
            "piece_bytes": self.piece_bytes,
            "piece_hashes": list(self.piece_hashes),
            **({"folder": self.folder} if self.folder else {}),
            **({"outside": True} if self.outside else {}),
        }

    @classmethod
    def from_json(cls, value: Json, where: str) -> ShardInfo:
        """Return what `to_json` described; `DamagedCheckpoint` if it cannot be."""
        fields = Fields(value, where)
        where = fields.where = f"{where} ({fields.text('file', SHARD_PATTERN)})"
        fields.text("hash", HASH)
        info = cls(
            file=fields.text("file"),
            size_bytes=fields.integer("size_bytes", low=_LENGTH_BYTES),
            header_bytes=fields.integer(
                "header_bytes", low=_LENGTH_BYTES, high=MAX_HEADER_BYTES + _LENGTH_BYTES
            ),
            header_hash=fields.text("header_hash", HASH_PATTERN),
            piece_hashes=fields.texts_like("piece_hashes", HASH_PATTERN),
            piece_bytes=fields.integer("piece_bytes", low=PAGE_BYTES, high=_MAX_PIECE_BYTES),
            folder=fields.later_text("folder", FOLDER_PATTERN),
            outside=fields.later_flag("outside"),
        )
        if info.outside and info.folder is None:
            fields.refuse("outside", "false, as it is no base")
        if info.piece_bytes % PAGE_BYTES:
            fields.refuse("piece_bytes", f"a multiple of {PAGE_BYTES}")
        if info.header_bytes % PAGE_BYTES:
            fields.refuse("header_bytes", f"a multiple of {PAGE_BYTES}")
        if info.header_bytes > info.size_bytes:
            fields.refuse("header_bytes", f"at most size_bytes ({info.size_bytes})")
        pieces = -(-(info.size_bytes - info.header_bytes) // info.piece_bytes)
        if len(info.piece_hashes) != pieces:
            fields.refuse("piece_hashes", f"a list of {pieces} hashes, one for each piece of data")
        return info


def piece_bytes_for(data_bytes: int) -> int:
    """Return how long the pieces of a shard with so many bytes of data should be.

    1 MB, and twice as much as often as the manifest would hold more than 4096 hashes else.
    """
    piece_bytes = PIECE_BYTES
    while data_bytes > piece_bytes * _MOST_PIECES and piece_bytes < _MAX_PIECE_BYTES:
        piece_bytes *= 2
    return piece_bytes


def check_tensor(info: TensorInfo, where: str) -> None:
    """Raise `DamagedCheckpoint` unless dtype, shape, bytes and part agree with each other."""
    if info.dtype not in DTYPE_BYTES:
        raise DamagedCheckpoint(f"{where} has the unknown dtype {ascii(info.dtype)[:40]}")
    if info.end - info.start != info.size_bytes:
        raise DamagedCheckpoint(
            f"{where} has {info.end - info.start} bytes, but {info.dtype} {list(info.shape)[:8]} "
            f"needs {info.size_bytes if info.size_bytes < 10**30 else 'far more'}"
        )
    if info.start % DTYPE_BYTES[info.dtype]:
        raise DamagedCheckpoint(f"{where} is not aligned for its dtype")
    if (info.global_shape is None) != (info.offsets is None):
        raise DamagedCheckpoint(f"{where} has only one of global_shape and offsets")
    if info.global_shape is None or info.offsets is None:
        return
    if not len(info.shape) == len(info.global_shape) == len(info.offsets) or any(
        offset + size > whole
        for offset, size, whole in zip(info.offsets, info.shape, info.global_shape, strict=True)
    ):
        raise DamagedCheckpoint(f"{where} does not lie inside its global_shape")


def check_placement(tensors: dict[str, TensorInfo], size_bytes: int, where: str) -> None:
    """Raise `DamagedCheckpoint` unless all tensors lie inside the file without overlap."""
    spans = sorted((info.start, info.end, name) for name, info in tensors.items())
    if spans and max(end for _, end, _ in spans) > size_bytes:
        raise DamagedCheckpoint(f"{where} is shorter ({size_bytes} bytes) than its tensors say")
    filled = [span for span in spans if span[1] > span[0]]
    for (_, end, first), (start, _, second) in pairwise(filled):
        if start < end:
            raise DamagedCheckpoint(
                f"{where}: tensors {ascii(first)[:60]} and {ascii(second)[:60]} overlap"
            )
