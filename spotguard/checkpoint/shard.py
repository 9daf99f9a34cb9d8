"""Shards: plain safetensors files, whose tensor data begins on a page and is proven by a hash."""

from __future__ import annotations

import json
import math
import mmap
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import xxhash

from spotguard.checkpoint.fields import Fields
from spotguard.checkpoint.strict_json import loads_plain
from spotguard.checkpoint.tensors import (
    DTYPE_BYTES,
    ShardInfo,
    TensorInfo,
    check_placement,
    check_tensor,
)
from spotguard.errors import AlreadyExists, DamagedCheckpoint, NotFound, UnsupportedState
from spotguard.events import keys
from spotguard.storage.buffers import byte_view

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from spotguard.storage.base import Buffer, ObjectStore, Stream

PAGE_BYTES = 4096
"""Tensor data begins at a multiple of this: fit for direct I/O and for mapping."""
MAX_HEADER_BYTES = 100_000_000
"""What readers of safetensors accept."""
_LENGTH_BYTES = 8
_LINE_BYTES = 64
_PIECE_BYTES = 4 << 20


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
        self.header = _header(placed, metadata or {})
        self.tensors = {
            name: replace(
                info, start=len(self.header) + info.start, end=len(self.header) + info.end
            )
            for name, info in placed.items()
        }
        """Name -> dtype, shape and absolute byte offsets."""
        self.data_bytes = max((info.end for info in placed.values()), default=0)
        """Bytes of all tensors; they follow the header without a gap."""

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
    go_on: Callable[[int], None] = lambda end: None,
) -> ShardInfo:
    """Write a shard whose tensors' bytes are `data`: one after the other in `layout`'s order.

    `go_on(end)` is called before the data up to byte `end` is read; it may wait until that is
    there, or raise to give the write up.
    """
    content = _Hashed([layout.header, *data], lambda end: go_on(end - len(layout.header)))
    assert content.size_bytes == len(layout.header) + layout.data_bytes
    _put_uncommitted(store, checkpoint_prefix, file_name, content)
    return ShardInfo(
        file=file_name,
        size_bytes=content.size_bytes,
        checksum=f"xxh3_128:{content.hexdigest()}",
        tensors=layout.tensors,
    )


class _Hashed:
    """A stream that hashes its buffers piece by piece as they are handed to the store.

    A piece fits the processor's cache, so the store's own copy of it costs no second trip to
    memory; and where one thread gathers and another writes, the hash costs no time at all.
    """

    def __init__(self, buffers: Iterable[Buffer], go_on: Callable[[int], None]) -> None:
        self._views = [byte_view(buffer) for buffer in buffers]
        self._go_on = go_on
        self._digest = xxhash.xxh3_128()

    @property
    def size_bytes(self) -> int:
        return sum(view.nbytes for view in self._views)

    def __iter__(self) -> Iterator[memoryview]:
        self._digest = xxhash.xxh3_128()
        end = 0
        for view in self._views:
            for start in range(0, len(view), _PIECE_BYTES):
                piece = view[start : start + _PIECE_BYTES]
                end += len(piece)
                self._go_on(end)
                self._digest.update(piece)
                yield piece

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


def _put_uncommitted(
    store: ObjectStore, checkpoint_prefix: str, file_name: str, content: Stream
) -> None:
    """Store a shard, over what a failed save left behind, but never over a committed one."""
    key = checkpoint_prefix + file_name
    try:
        store.put(key, content, if_absent=True)
    except AlreadyExists:
        if store.head(keys.manifest(checkpoint_prefix)) is not None:
            raise
        store.put(key, content)


class ShardReader:
    """Reads one shard of a checkpoint and proves it before anyone sees its bytes."""

    def __init__(self, store: ObjectStore, checkpoint_prefix: str, info: ShardInfo) -> None:
        self._store = store
        self._key = checkpoint_prefix + info.file
        self._info = info

    def check_size(self) -> None:
        """Raise `DamagedCheckpoint` if the file is missing or has another size. Cheap."""
        found = self._store.head(self._key)
        if found is None:
            raise DamagedCheckpoint(f"{self._key} is missing")
        if found.size_bytes != self._info.size_bytes:
            raise DamagedCheckpoint(
                f"{self._key} has {found.size_bytes} bytes, its manifest says "
                f"{self._info.size_bytes}"
            )

    def verify_and_load(self) -> dict[str, memoryview]:
        """Return each tensor's bytes, after one read of the file and proof of all of it.

        The views are writable, share one page-aligned buffer, and keep it alive.

        Raises:
            DamagedCheckpoint: missing, of another size or hash, or its header disagrees.
            StoreError: it could not be read at all, which says nothing about its bytes.
        """
        self.check_size()  # before memory is taken for whatever size the manifest claims
        file = self._read(0, self._info.size_bytes)
        found = f"xxh3_128:{xxhash.xxh3_128(file).hexdigest()}"
        if found != self._info.checksum:
            raise DamagedCheckpoint(
                f"{self._key} is damaged: its hash is {found}, its manifest says "
                f"{self._info.checksum}"
            )
        self._check_header(file)
        return {name: file[info.start : info.end] for name, info in self._info.tensors.items()}

    def read_range(self, name: str) -> memoryview:
        """Return one tensor's bytes by itself, unproven: the hash covers whole files only."""
        info = self._info.tensors[name]
        self.check_size()
        return self._read(info.start, info.end - info.start)

    def _read(self, start: int, size_bytes: int) -> memoryview:
        if size_bytes == 0:
            return memoryview(bytearray())
        pages = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        view = memoryview(pages)
        try:
            self._store.get_into(self._key, start, view)
        except NotFound as problem:
            raise DamagedCheckpoint(f"{self._key} vanished while it was read") from problem
        return view

    def _check_header(self, file: memoryview) -> None:
        found = parse_header(file, what=self._key)
        promised = {name: (i.dtype, i.shape, i.start) for name, i in self._info.tensors.items()}
        if {name: (i.dtype, i.shape, i.start) for name, i in found.items()} != promised:
            raise DamagedCheckpoint(f"{self._key}: its header and its manifest disagree")


def parse_header(file: memoryview, *, what: str) -> dict[str, TensorInfo]:
    """Return the tensors of a whole safetensors file, every offset checked.

    Raises:
        DamagedCheckpoint: it is not a well-formed safetensors file; `what` names it.
    """
    if len(file) < _LENGTH_BYTES:
        raise DamagedCheckpoint(f"{what} is too short for a safetensors file")
    length = int.from_bytes(file[:_LENGTH_BYTES], "little")
    data_start = _LENGTH_BYTES + length
    if length > MAX_HEADER_BYTES or data_start > len(file):
        raise DamagedCheckpoint(f"{what} has an impossible header length ({length} bytes)")
    header = loads_plain(file[_LENGTH_BYTES:data_start], what=f"{what}: header")
    if not isinstance(header, dict):
        raise DamagedCheckpoint(f"{what}: header is not an object")
    header.pop("__metadata__", None)
    tensors = {
        name: _tensor_of_header(value, data_start, f"{what}: tensor {ascii(name)[:80]}")
        for name, value in header.items()
    }
    check_placement(tensors, len(file), what)
    return tensors


def _tensor_of_header(value: object, data_start: int, where: str) -> TensorInfo:
    fields = Fields(value, where)
    span = fields.sizes("data_offsets")
    if len(span) != 2:
        fields.refuse("data_offsets", "two offsets")
    info = TensorInfo(
        dtype=fields.text("dtype"),
        shape=fields.sizes("shape"),
        start=data_start + span[0],
        end=data_start + span[1],
    )
    check_tensor(info, where)
    return info


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


def _header(tensors: Mapping[str, TensorInfo], metadata: Mapping[str, str]) -> bytes:
    """Return the length and the header, padded with spaces to whole pages."""
    body: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    for name, info in tensors.items():
        span = [info.start, info.end]
        body[name] = {"dtype": info.dtype, "shape": list(info.shape), "data_offsets": span}
    text = json.dumps(body, separators=(",", ":")).encode()
    padded = text.ljust(-(-(len(text) + _LENGTH_BYTES) // PAGE_BYTES) * PAGE_BYTES - _LENGTH_BYTES)
    if len(padded) > MAX_HEADER_BYTES:
        raise UnsupportedState(f"{len(tensors)} tensors are too many for one shard's header")
    return len(padded).to_bytes(_LENGTH_BYTES, "little") + padded
