"""Shards: plain safetensors, aligned, and proven to the last bit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import permutations
from typing import TYPE_CHECKING

import numpy as np
import pytest
import xxhash
from safetensors import safe_open
from safetensors.numpy import save_file

from spotguard.checkpoint.shard import Block, ShardReader, parse_header, shard_file, write_shard
from spotguard.checkpoint.tensors import DTYPE_BYTES, ShardInfo
from spotguard.errors import (
    AlreadyExists,
    DamagedCheckpoint,
    StoreFull,
    StoreUnavailable,
    UnsupportedState,
)
from spotguard.events import keys
from spotguard.storage import FileStore
from spotguard.testing.stores import FaultyStore, MemoryStore
from tests.checkpoint.savings import blocks, flip, floats

if TYPE_CHECKING:
    from pathlib import Path

    from spotguard.storage.base import Buffer, ObjectStore

PREFIX = keys.checkpoint(10, 1)
FILE = shard_file(0, 2)
KEY = PREFIX + FILE


def written(store: ObjectStore, what: list[Block] | None = None) -> ShardInfo:
    """Write a shard; return its info."""
    return write_shard(store, PREFIX, FILE, what or blocks(10), metadata={"rank": "0"})


def test_bytes_come_back_writable_and_aligned() -> None:
    """Every tensor's bytes return as they were, each at a multiple of its element's size."""
    store = MemoryStore()
    info = written(store)
    loaded = ShardReader(store, PREFIX, info).verify_and_load()

    assert {name: bytes(view) for name, view in loaded.items()} == {
        block.name: bytes(block.data) for block in blocks(10)
    }
    assert not any(view.readonly for view in loaded.values() if view)
    assert min(t.start for t in info.tensors.values()) == 4096
    assert all(t.start % DTYPE_BYTES[t.dtype] == 0 for t in info.tensors.values())
    assert info.tensors["weight"].start % 64 == 0


def test_alignment_holds_in_any_order() -> None:
    """The caller's order does not matter: safetensors forbids gaps, so the writer sorts."""
    forms = [("U8", 1), ("BF16", 3), ("F32", 1), ("F64", 1), ("U8", 64)]
    for order in permutations(forms):
        what = [
            Block(name=f"{dtype}{n}", dtype=dtype, shape=(n,), data=bytes(DTYPE_BYTES[dtype] * n))
            for dtype, n in order
        ]
        info = written(MemoryStore(), what)
        assert all(t.start % DTYPE_BYTES[t.dtype] == 0 for t in info.tensors.values())


def test_safetensors_reads_what_we_write(tmp_path: Path) -> None:
    """The reference implementation opens a shard, metadata included."""
    written(FileStore(tmp_path))
    with safe_open(tmp_path / KEY, "numpy") as file:
        assert file.metadata() == {"rank": "0"}
        assert sorted(file.keys()) == ["bias", "empty", "flag", "part", "weight"]
        assert file.get_tensor("bias").tolist() == [10.0, 1.0, 2.0]
        assert file.get_tensor("flag").tolist() is True
        assert file.get_tensor("empty").shape == (0, 4)


def test_we_read_what_safetensors_writes(tmp_path: Path) -> None:
    """A file of the reference implementation passes our strict header reader."""
    tensors = {"a": np.arange(6, dtype=np.float64).reshape(2, 3), "b": np.array([True])}
    save_file(tensors, tmp_path / "x.safetensors", metadata={"by": "them"})
    raw = (tmp_path / "x.safetensors").read_bytes()

    found = parse_header(memoryview(raw), what="x")
    assert {name: (info.dtype, info.shape) for name, info in found.items()} == {
        "a": ("F64", (2, 3)),
        "b": ("BOOL", (1,)),
    }
    assert raw[found["a"].start : found["a"].end] == tensors["a"].tobytes()


def test_every_dtype_is_known_to_safetensors(tmp_path: Path) -> None:
    """Each dtype we write is one that the reference implementation opens."""
    what = [
        Block(name=dtype, dtype=dtype, shape=(2,), data=bytes(2 * size))
        for dtype, size in DTYPE_BYTES.items()
    ]
    written(FileStore(tmp_path), what)
    with safe_open(tmp_path / KEY, "numpy") as file:
        assert sorted(file.keys()) == sorted(DTYPE_BYTES)


def test_nothing_is_copied_on_the_way_to_the_store() -> None:
    """The store gets views of the caller's memory, not a joined copy."""

    class Watching(MemoryStore):
        def put(self, key: str, data: Buffer | object, **how: object) -> str:
            assert isinstance(data, Iterable)
            self.given = list(data)
            return "etag"

    store = Watching()
    memory = bytearray(1 << 16)
    write_shard(store, PREFIX, FILE, [Block(name="a", dtype="U8", shape=(1 << 16,), data=memory)])
    assert any(isinstance(item, memoryview) and item.obj is memory for item in store.given)


def test_numpy_views_are_buffers_too() -> None:
    """Shape and item type of a buffer do not matter, its bytes do."""
    array = np.arange(6, dtype="<f4").reshape(2, 3)
    store = MemoryStore()
    info = written(store, [Block(name="a", dtype="F32", shape=(2, 3), data=array.data)])
    assert bytes(ShardReader(store, PREFIX, info).verify_and_load()["a"]) == array.tobytes()


def test_the_checksum_is_that_of_the_file() -> None:
    """Anyone can check a shard with `xxhsum -H2` (XXH3, 128 bits)."""
    store = MemoryStore()
    info = written(store)
    assert info.checksum == f"xxh3_128:{xxhash.xxh3_128(store.get(KEY)).hexdigest()}"
    assert info.size_bytes == len(store.get(KEY))


def test_every_flipped_bit_is_found() -> None:
    """In the length, the header, its padding, the data: no single bit goes unnoticed."""
    store = MemoryStore()
    info = written(store)
    size_bits = info.size_bytes * 8
    for bit in [*range(0, size_bits, 401), *range(64), *range(size_bits - 64, size_bits)]:
        flip(store, KEY, bit)
        with pytest.raises(DamagedCheckpoint, match=KEY):
            ShardReader(store, PREFIX, info).verify_and_load()
        flip(store, KEY, bit)
    ShardReader(store, PREFIX, info).verify_and_load()


@pytest.mark.parametrize("kept", [0, 7, 8, 100, 4095, 4096, 4200, -1])
def test_every_truncation_is_found(kept: int) -> None:
    """A shard that is too short (or too long) is damaged, wherever it was cut."""
    store = MemoryStore()
    info = written(store)
    raw = store.get(KEY)
    for other in (raw[:kept], raw + b"\0"):
        store.put(KEY, other)
        with pytest.raises(DamagedCheckpoint, match="its manifest says"):
            ShardReader(store, PREFIX, info).verify_and_load()


def test_a_missing_shard_is_damage_but_a_failing_store_is_not() -> None:
    """Damage makes restore fall back; trouble with the store must not."""
    store = FaultyStore(MemoryStore())
    info = written(store)
    store.fail("get_into")
    with pytest.raises(StoreUnavailable):
        ShardReader(store, PREFIX, info).verify_and_load()
    store.heal().before("get_into", store.inner.delete)
    with pytest.raises(DamagedCheckpoint, match="vanished"):
        ShardReader(store, PREFIX, info).verify_and_load()
    with pytest.raises(DamagedCheckpoint, match="missing"):
        ShardReader(store, PREFIX, info).verify_and_load()


def test_a_lying_manifest_cannot_take_all_memory() -> None:
    """The claimed size is compared with the file's before any memory is taken."""
    store = MemoryStore()
    info = replace(written(store), size_bytes=1 << 60)
    with pytest.raises(DamagedCheckpoint):
        ShardReader(store, PREFIX, info).verify_and_load()


def test_header_and_manifest_must_agree() -> None:
    """A manifest that moves or renames a tensor of an intact file is refused."""
    store = MemoryStore()
    info = written(store)
    moved = replace(info.tensors["flag"], start=5000, end=5001)
    for tensors in (info.tensors | {"flag": moved}, info.tensors | {"more": moved}):
        with pytest.raises(DamagedCheckpoint, match="disagree"):
            ShardReader(store, PREFIX, replace(info, tensors=tensors)).verify_and_load()


def test_one_tensor_can_be_read_alone() -> None:
    """A range read fetches one tensor and nothing else."""
    store = FaultyStore(MemoryStore())
    reader = ShardReader(store, PREFIX, written(store))
    assert bytes(reader.read_range("bias")) == floats(10, 1, 2)
    assert bytes(reader.read_range("empty")) == b""
    assert store.calls["get"] == 0


@pytest.mark.parametrize(
    ("block", "problem"),
    [
        (Block(name="a", dtype="F32", shape=(3,), data=b"1234"), "needs 12"),
        (Block(name="a", dtype="C128", shape=(), data=b"1" * 16), "dtype 'C128'"),
        (Block(name="bias", dtype="U8", shape=(), data=b"1"), "taken"),
        (Block(name="__metadata__", dtype="U8", shape=(), data=b"1"), "taken"),
        (
            Block(name="a", dtype="U8", shape=(2,), data=b"12", global_shape=(2,), offsets=(1,)),
            "inside its global_shape",
        ),
        (
            Block(name="a", dtype="U8", shape=(2,), data=b"12", global_shape=(2, 2), offsets=(0,)),
            "inside its global_shape",
        ),
        (Block(name="a", dtype="U8", shape=(2,), data=b"12", global_shape=(2,)), "only one"),
    ],
)
def test_a_block_that_contradicts_itself_is_refused(block: Block, problem: str) -> None:
    """Nothing is written that the reader would refuse; the sentence names the tensor."""
    store = FaultyStore(MemoryStore())
    with pytest.raises(UnsupportedState, match=problem):
        written(store, [*blocks(1), block])
    assert store.mutations == 0


def test_a_committed_checkpoint_is_never_overwritten() -> None:
    """A second save of a step may replace a failed one's shards, never a committed one's."""
    store = MemoryStore()
    written(store, blocks(1))
    info = written(store, blocks(2))
    ShardReader(store, PREFIX, info).verify_and_load()

    store.put(keys.manifest(PREFIX), b"committed")
    with pytest.raises(AlreadyExists):
        written(store, blocks(3))
    ShardReader(store, PREFIX, info).verify_and_load()


def test_a_full_store_comes_through() -> None:
    """`StoreFull` reaches the caller, who can say so."""
    with pytest.raises(StoreFull):
        written(FaultyStore(MemoryStore()).full())
