"""What a manifest says of shards and of the tensors in them, and what must hold for both."""

from __future__ import annotations

import math
from dataclasses import dataclass
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

CHECKSUM_PATTERN = r"xxh3_128:[0-9a-f]{32}"
SHARD_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}\.safetensors"
"""A shard's file name: one part of a key, never a path."""


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

    def to_json(self) -> Json:
        """Return the manifest's words for it."""
        body: Json = {
            "dtype": self.dtype,
            "shape": self.shape,
            "start": self.start,
            "end": self.end,
        }
        if self.global_shape is not None:
            body |= {"global_shape": self.global_shape, "offsets": self.offsets}
        return body

    @classmethod
    def from_json(cls, value: Json, where: str) -> TensorInfo:
        """Return what `to_json` described; `DamagedCheckpoint` if it cannot be."""
        fields = Fields(value, where)
        info = cls(
            dtype=fields.text("dtype"),
            shape=fields.sizes("shape"),
            start=fields.integer("start"),
            end=fields.integer("end"),
            global_shape=fields.maybe_sizes("global_shape"),
            offsets=fields.maybe_sizes("offsets"),
        )
        check_tensor(info, where)
        return info


@dataclass(frozen=True, kw_only=True)
class ShardInfo:
    """One shard file: how long it is, what its bytes hash to, what is where in it."""

    file: str
    size_bytes: int
    checksum: str
    """`xxh3_128:` and 32 hex digits, over the whole file."""
    tensors: dict[str, TensorInfo]

    def to_json(self) -> Json:
        """Return the manifest's words for it."""
        return {
            "file": self.file,
            "size_bytes": self.size_bytes,
            "checksum": self.checksum,
            "tensors": {name: info.to_json() for name, info in self.tensors.items()},
        }

    @classmethod
    def from_json(cls, value: Json, where: str) -> ShardInfo:
        """Return what `to_json` described; `DamagedCheckpoint` if it cannot be."""
        fields = Fields(value, where)
        where = f"{where} ({fields.text('file', SHARD_PATTERN)})"
        info = cls(
            file=fields.text("file", SHARD_PATTERN),
            size_bytes=fields.integer("size_bytes", low=1),
            checksum=fields.text("checksum", CHECKSUM_PATTERN),
            tensors={
                name: TensorInfo.from_json(item, f"{where}: tensor {ascii(name)[:80]}")
                for name, item in fields.object("tensors").items()
            },
        )
        check_placement(info.tensors, info.size_bytes, where)
        return info


def check_tensor(info: TensorInfo, where: str) -> None:
    """Raise `DamagedCheckpoint` unless dtype, shape, bytes and part agree with each other."""
    if info.dtype not in DTYPE_BYTES:
        raise DamagedCheckpoint(f"{where} has the unknown dtype {ascii(info.dtype)[:40]}")
    if info.end - info.start != info.size_bytes:
        raise DamagedCheckpoint(
            f"{where} has {info.end - info.start} bytes, but {info.dtype} {list(info.shape)[:8]} "
            f"needs {info.size_bytes if info.size_bytes < 10**30 else 'far more'}"
        )
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
