from __future__ import annotations

import tracemalloc
from dataclasses import replace

import pytest

from spotguard.checkpoint.manifest import load_manifest
from spotguard.checkpoint.shard import Block, ShardReader, write_shard
from spotguard.checkpoint.stream import CHUNK_BYTES, read_pieces
from spotguard.checkpoint.tensors import DTYPE_BYTES
from spotguard.errors import DamagedCheckpoint, StoreUnavailable
from spotguard.testing import FaultyStore, MemoryStore
from tests.checkpoint.savings import flip, floats, save


@pytest.mark.parametrize("chunk_bytes", [8, 24, 4096, 4100, 1 << 20])
def test_the_pieces_of_a_tensor_are_its_bytes_in_whole_elements(chunk_bytes: int) -> None:
    """However small the chunks, nothing is lost, repeated or cut through an element."""
    store = MemoryStore()
    prefix = save(store, 10)
    (shard, _) = load_manifest(store, prefix).shards
    expected = ShardReader(store, prefix, shard).verify_and_load()
    found = {name: bytearray() for name in shard.tensors}
    header = bytearray()
    for piece in read_pieces(store, prefix, shard, chunk_bytes=chunk_bytes):
        if piece.name is None:
            assert piece.start == len(header)
            header += piece.data
            continue
        assert piece.start == len(found[piece.name])
        assert piece.data.nbytes % DTYPE_BYTES[shard.tensors[piece.name].dtype] == 0
        found[piece.name] += piece.data
    assert {name: bytes(data) for name, data in found.items()} == {
        name: bytes(data) for name, data in expected.items()
    }
    assert len(header) == 4096


def test_no_chunk_cuts_through_an_element_of_a_foreign_layout() -> None:
    """A file whose tensors are not aligned, as other writers make them, is read in whole floats."""
    store = MemoryStore()
    blocks = [Block(name="a", dtype="F32", shape=(5,), data=floats(1, 2, 3, 4, 5))]
    shard = write_shard(store, "x/", "s.safetensors", blocks)
    sizes = [
        piece.data.nbytes
        for piece in read_pieces(store, "x/", shard, chunk_bytes=4096 + 7)
        if piece.name == "a"
    ]
    assert sizes == [4, 16]


def test_every_flipped_bit_is_found_at_the_latest_at_the_end() -> None:
    """Header, padding and data alike."""
    store = MemoryStore()
    prefix = save(store, 10)
    (shard, _) = load_manifest(store, prefix).shards
    key = prefix + shard.file
    for bit in (0, 70, 9 * 8, 2000 * 8, 4096 * 8 + 3, -1):
        flip(store, key, bit)
        with pytest.raises(DamagedCheckpoint, match="its hash is"):
            list(read_pieces(store, prefix, shard, chunk_bytes=512))
        flip(store, key, bit)
    assert list(read_pieces(store, prefix, shard))


def test_a_missing_or_short_shard_is_damage_but_a_failing_store_is_not() -> None:
    """A store that is down says nothing about the checkpoint."""
    inner = MemoryStore()
    prefix = save(inner, 10)
    (shard, other) = load_manifest(inner, prefix).shards
    with pytest.raises(StoreUnavailable):
        list(read_pieces(FaultyStore(inner).fail("get_into"), prefix, shard))
    store = FaultyStore(inner).before("get_into", inner.delete)
    with pytest.raises(DamagedCheckpoint, match="vanished"):
        list(read_pieces(store, prefix, shard))
    inner.put(prefix + other.file, inner.get(prefix + other.file)[:-1])
    with pytest.raises(DamagedCheckpoint, match="bytes, its manifest says"):
        list(read_pieces(inner, prefix, other))


def test_a_header_that_contradicts_the_manifest_is_damage() -> None:
    """Other programs believe the header: a shard that they would read differently is not whole."""
    store = MemoryStore()
    prefix = save(store, 10)
    (shard, _) = load_manifest(store, prefix).shards
    info = shard.tensors["weight"]
    swapped = replace(info, shape=info.shape[::-1])
    lying = replace(shard, tensors={**shard.tensors, "weight": swapped})
    with pytest.raises(DamagedCheckpoint, match="header and its manifest disagree"):
        list(read_pieces(store, prefix, lying))


class FrugalStore(MemoryStore):
    """Reads a range without a copy of its own."""

    def get_into(self, key: str, offset: int, into: memoryview) -> None:
        """Fill `into` from the object."""
        into[:] = memoryview(self.get(key))[offset : offset + into.nbytes]


def test_a_large_shard_needs_little_memory() -> None:
    """Many chunks pass through the memory of one."""
    store, size = FrugalStore(), 4 * CHUNK_BYTES
    block = Block(name="a", dtype="U8", shape=(size,), data=bytes(size))
    shard = write_shard(store, "x/", "s.safetensors", [block])
    tracemalloc.start()
    try:
        total = sum(piece.data.nbytes for piece in read_pieces(store, "x/", shard))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert total == shard.size_bytes
    assert peak < 1.5 * CHUNK_BYTES
