"""Shards: plain safetensors files, whose tensor data begins on a page and is proven by a hash."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import xxhash

from spotguard.checkpoint.header import build_header
from spotguard.checkpoint.tensors import (
    DTYPE_BYTES,
    ShardInfo,
    TensorInfo,
    check_tensor,
    piece_bytes_for,
)
from spotguard.errors import AlreadyExists, DamagedCheckpoint, UnsupportedState
from spotguard.events import keys
from spotguard.storage.buffers import byte_view, cut

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from spotguard.storage.base import Buffer, ObjectStore, ObjectStream

_LINE_BYTES = 64


@dataclass(frozen=True, kw_only=True)
class Block:
    """One tensor to write: its name, its form and its bytes (little-endian, row-major)."""

    name: str
    dtype: str
    """A safetensors name: a key of `DTYPE_BYTES`."""
    shape: tuple[int, ...]
    data: Buffer
    """Read when the shard is written; not copied before."""
    global_shape: tuple[int, ...] | None = None
    """Shape of the whole tensor, if this is one rank's part."""
    offsets: tuple[int, ...] | None = None
    """Where the part begins in the whole."""

    @property
    def spec(self) -> TensorSpec:
        """Return the form without the bytes."""
        return TensorSpec(
            name=self.name,
            dtype=self.dtype,
            shape=tuple(self.shape),
            global_shape=self.global_shape,
            offsets=self.offsets,
        )


def shard_file(rank: int, world_size: int) -> str:
    """Return the file name of a rank's shard."""
    return f"rank-{rank:05d}-of-{world_size:05d}.safetensors"


def outside_file(rank: int, world_size: int) -> str:
    """Return the file name of the header of what a rank's base has outside the store."""
    return f"rank-{rank:05d}-of-{world_size:05d}.outside.safetensors"


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """The form of one tensor of a shard, without its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    global_shape: tuple[int, ...] | None = None
    offsets: tuple[int, ...] | None = None


class ShardLayout:
    """What is where in a shard file: computed once for a set of tensors, used for every save.

    Raises:
        UnsupportedState: a dtype cannot be stored, or a name is taken.
    """

    def __init__(
        self, specs: Sequence[TensorSpec], metadata: Mapping[str, str] | None = None
    ) -> None:
        self.order: tuple[int, ...] = tuple(
            sorted(range(len(specs)), key=lambda i: _rank(specs[i]))
        )
        """Indices of `specs` in the order of the file."""
        placed = _place([specs[index] for index in self.order])
        self.header = build_header(placed, metadata or {})
        self.header_hash: str = xxhash.xxh3_128_hexdigest(self.header)
        self.tensors = {
            name: replace(
                info, start=len(self.header) + info.start, end=len(self.header) + info.end
            )
            for name, info in placed.items()
        }
        """Name -> dtype, shape and absolute byte offsets."""
        self.data_bytes = max((info.end for info in placed.values()), default=0)
        """Bytes of all tensors; they follow the header without a gap."""
        self.piece_bytes = piece_bytes_for(self.data_bytes)

    def offset(self, name: str) -> int:
        """Return where a tensor begins, counted from the start of the data."""
        return self.tensors[name].start - len(self.header)


def write_shard(
    store: ObjectStore,
    checkpoint_prefix: str,
    file_name: str,
    blocks: Iterable[Block],
    *,
    metadata: Mapping[str, str] | None = None,
) -> ShardInfo:
    """Write `blocks` as one safetensors file, durably; return what the manifest says of it.

    The bytes are hashed and handed to the store from where they are, without a copy. Blocks the
    caller's thread until the store has them.

    Raises:
        UnsupportedState: a block's dtype, shape and bytes do not fit together.
        AlreadyExists: the checkpoint is committed; nothing changes it any more.
        StoreError: the store failed; without a manifest nothing counts.
    """
    blocks = list(blocks)
    layout = ShardLayout([block.spec for block in blocks], metadata)
    for block in blocks:
        _check_bytes(block, layout.tensors[block.name])
    data = [blocks[index].data for index in layout.order]
    return write_layout(store, checkpoint_prefix, file_name, layout, data)


def write_layout(
    store: ObjectStore,
    checkpoint_prefix: str,
    file_name: str,
    layout: ShardLayout,
    data: Sequence[Buffer],
    *,
    go_on: Callable[[int], str | None] = lambda end: None,
) -> ShardInfo:
    """Write a shard whose tensors' bytes are `data`: one after the other in `layout`'s order.

    `go_on(end)` is called before the data up to byte `end` is read; it may wait until that is
    there, or raise to give the write up. If `data` is one buffer, it may return the hash of the
    piece that ends there, which need not be computed again then.
    """
    content = _Hashed(layout, data, go_on)
    assert content.size_bytes == len(layout.header) + layout.data_bytes
    _put_uncommitted(store, checkpoint_prefix, file_name, content)
    return _info_of(layout, file_name, content)


def refer_to_layout(
    store: ObjectStore, folder: str, file_name: str, layout: ShardLayout, data: Sequence[Buffer]
) -> ShardInfo:
    """Write a base's header alone: its data, which is hashed here, is in files outside the store.

    `layout`'s metadata says where (`spotguard.checkpoint.outside`).
    """
    content = _Hashed(layout, data, lambda end: None)
    for _ in content:
        pass
    store.put(folder + file_name, layout.header)
    return replace(_info_of(layout, file_name, content), folder=folder, outside=True)


def _info_of(layout: ShardLayout, file_name: str, content: _Hashed) -> ShardInfo:
    return ShardInfo(
        file=file_name,
        size_bytes=content.size_bytes,
        header_bytes=len(layout.header),
        header_hash=layout.header_hash,
        piece_hashes=tuple(content.piece_hashes),
        piece_bytes=layout.piece_bytes,
    )


class _Hashed:
    """A stream that hashes its data piece by piece as it is handed to the store.

    A piece fits the processor's cache, so the store's own copy of it costs no second trip to
    memory; and where one thread gathers and another writes, the hash costs no time at all.
    """

    def __init__(
        self, layout: ShardLayout, data: Iterable[Buffer], go_on: Callable[[int], str | None]
    ) -> None:
        self._header = layout.header
        self._piece_bytes = layout.piece_bytes
        self._views = [byte_view(buffer) for buffer in data]
        self._go_on = go_on
        self.piece_hashes: list[str] = []
        """Of the last time that it was gone through."""

    @property
    def size_bytes(self) -> int:
        return len(self._header) + sum(view.nbytes for view in self._views)

    def __iter__(self) -> Iterator[Buffer]:
        yield self._header
        self.piece_hashes = []
        digest, end = xxhash.xxh3_128(), 0
        for part, ends_piece in cut(self._views, self._piece_bytes):
            end += len(part)
            known = self._go_on(end)
            if known is None:
                digest.update(part)
            if ends_piece:
                self.piece_hashes.append(known or digest.hexdigest())
                digest.reset()
            yield part


def _put_uncommitted(
    store: ObjectStore, checkpoint_prefix: str, file_name: str, content: ObjectStream
) -> None:
    """Store a shard, over what a failed save left behind, but never over a committed one."""
    key = checkpoint_prefix + file_name
    try:
        store.put(key, content, if_absent=True)
    except AlreadyExists:
        if store.head(keys.manifest(checkpoint_prefix)) is not None:
            raise
        store.put(key, content)


def _rank(spec: TensorSpec) -> tuple[bool, int]:
    """Sort key of an order that aligns each tensor: the format forbids gaps.

    Tensors of whole 64-byte lines come first, so all of them begin on one; the rest follow by
    falling element size, so each begins at a multiple of its own.
    """
    element_bytes = DTYPE_BYTES.get(spec.dtype, 0)
    return element_bytes * math.prod(spec.shape) % _LINE_BYTES != 0, -element_bytes


def _place(specs: Sequence[TensorSpec]) -> dict[str, TensorInfo]:
    """Return where each tensor goes, counted from the start of the data."""
    tensors: dict[str, TensorInfo] = {}
    start = 0
    for spec in specs:
        if spec.name in tensors or spec.name == "__metadata__":
            raise UnsupportedState(f"the tensor name {spec.name!r} is taken")
        size_bytes = DTYPE_BYTES.get(spec.dtype, 0) * math.prod(spec.shape)
        info = TensorInfo(
            dtype=spec.dtype,
            shape=spec.shape,
            start=start,
            end=start + size_bytes,
            global_shape=spec.global_shape,
            offsets=spec.offsets,
        )
        try:
            check_tensor(info, f"tensor {spec.name!r}")
        except DamagedCheckpoint as problem:
            raise UnsupportedState(problem.message) from problem
        tensors[spec.name] = info
        start = info.end
    return tensors


def _check_bytes(block: Block, info: TensorInfo) -> None:
    given = byte_view(block.data).nbytes
    if given != info.size_bytes:
        raise UnsupportedState(
            f"tensor {block.name!r} has {given} bytes, but {block.dtype} {list(block.shape)[:8]} "
            f"needs {info.size_bytes}"
        )
