from __future__ import annotations

import tracemalloc
from typing import TYPE_CHECKING

import pytest

from spotguard.checkpoint.manifest import load_manifest, shard_readers
from spotguard.checkpoint.reading import ShardReader
from spotguard.checkpoint.shard import Block, write_shard
from spotguard.checkpoint.stream import ShardChunk, read_chunks
from spotguard.checkpoint.tensors import DTYPE_BYTES, PIECE_BYTES
from spotguard.errors import DamagedCheckpoint, StoreUnavailable
from spotguard.storage.buffers import targets_of
from spotguard.testing import FaultyStore, MemoryStore
from tests.checkpoint.crashes.savings import cut_into_pieces, flip, save

if TYPE_CHECKING:
    from spotguard.storage.base import Target


@pytest.mark.parametrize("piece_bytes", [4096, 8192, PIECE_BYTES])
def test_the_chunks_of_a_tensor_are_its_bytes_in_whole_elements(
    piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However small the pieces, nothing is lost, repeated or cut through an element."""
    cut_into_pieces(monkeypatch, piece_bytes)
    store = MemoryStore()
    sizes = {"F64": 1000, "BF16": 5001, "U8": 13, "F32": 3, "I16": 0, "BOOL": 9000}
    blocks = [
        Block(name=dtype, dtype=dtype, shape=(n,), data=bytes(i % 251 for i in range(n * size)))
        for dtype, n in sizes.items()
        for size in [DTYPE_BYTES[dtype]]
    ]
    reader = ShardReader(store, "x/", write_shard(store, "x/", "s.safetensors", blocks))
    found = {name: bytearray() for name in reader.tensors}
    order = []
    for chunk in read_chunks(reader):
        assert chunk.start == len(found[chunk.name])
        assert chunk.data.nbytes % DTYPE_BYTES[chunk.name] == 0
        order.append(reader.tensors[chunk.name].start + chunk.start)
        found[chunk.name] += chunk.data
    assert {name: bytes(data) for name, data in found.items()} == {
        block.name: block.data for block in blocks
    }
    assert order == sorted(order), "not in the order of the file"


def test_every_flipped_bit_is_found_and_nothing_of_its_piece_is_given() -> None:
    """Header, padding and data alike: what was yielded is proven."""
    store = MemoryStore()
    prefix = save(store, 10)
    reader = shard_readers(store, load_manifest(store, prefix))[0]
    key = prefix + reader.info.file
    for bit in (0, 70, 9 * 8, 2000 * 8, 4096 * 8 + 3, -1):
        flip(store, key, bit)
        given: list[ShardChunk] = []
        fresh = ShardReader(store, prefix, reader.info)
        with pytest.raises(DamagedCheckpoint, match=f"{key} is damaged: the hash of"):
            given.extend(read_chunks(fresh))
        assert given == []
        flip(store, key, bit)
    assert list(read_chunks(ShardReader(store, prefix, reader.info)))


def test_a_missing_or_short_shard_is_damage_but_a_failing_store_is_not() -> None:
    """A store that is down says nothing about the checkpoint."""
    inner = MemoryStore()
    prefix = save(inner, 10)
    shard, other = load_manifest(inner, prefix).shards
    for nth in (1, 2):
        with pytest.raises(StoreUnavailable):
            list(
                read_chunks(
                    ShardReader(FaultyStore(inner).fail("get_into", nth=nth), prefix, shard)
                )
            )
    store = FaultyStore(inner).before("get_into", inner.delete, nth=2)
    with pytest.raises(DamagedCheckpoint, match="vanished"):
        list(read_chunks(ShardReader(store, prefix, shard)))
    inner.put(prefix + other.file, inner.get(prefix + other.file)[:-1])
    with pytest.raises(DamagedCheckpoint, match="bytes, its manifest says"):
        list(read_chunks(ShardReader(inner, prefix, other)))


class FrugalStore(MemoryStore):
    """Reads a range without a copy of its own."""

    def get_into(self, key: str, offset: int, into: Target) -> None:
        """Fill `into` from the object."""
        for view in targets_of(into):
            view[:] = memoryview(self.get(key))[offset : offset + len(view)]
            offset += len(view)


def test_a_large_shard_needs_little_memory() -> None:
    """Many pieces pass through the memory of one (which is mapped, and so not traced)."""
    store, size = FrugalStore(), 4 * PIECE_BYTES
    block = Block(name="a", dtype="U8", shape=(size,), data=bytes(size))
    reader = ShardReader(store, "x/", write_shard(store, "x/", "s.safetensors", [block]))
    tracemalloc.start()
    try:
        total = sum(chunk.data.nbytes for chunk in read_chunks(reader))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert total == size
    assert peak < PIECE_BYTES / 2
