"""Shards: plain safetensors, aligned, and proven to the last bit."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from itertools import permutations
from typing import TYPE_CHECKING

import numpy as np
import pytest
import safetensors
import xxhash
from packaging.version import Version
from safetensors import safe_open
from safetensors.numpy import save_file

from spotguard.checkpoint.header import parse_header
from spotguard.checkpoint.reading import ShardReader, Want, check_intact, read_wanted
from spotguard.checkpoint.shard import Block, shard_file, write_shard
from spotguard.checkpoint.stream import read_chunks
from spotguard.checkpoint.tensors import DTYPE_BYTES, ShardInfo, TensorInfo
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
from tests.checkpoint.crashes.savings import CountingStore, blocks, cut_into_pieces, flip

if TYPE_CHECKING:
    from pathlib import Path

    from spotguard.storage.base import Buffer, ObjectStore

PREFIX = keys.checkpoint(10, 1)
FILE = shard_file(0, 2)
KEY = PREFIX + FILE


def written(store: ObjectStore, what: list[Block] | None = None) -> ShardInfo:
    """Write a shard; return its info."""
    return write_shard(store, PREFIX, FILE, what or blocks(10), metadata={"rank": "0"})


def placed(store: ObjectStore, info: ShardInfo) -> dict[str, TensorInfo]:
    """Return what the shard's header says."""
    return ShardReader(store, PREFIX, info).tensors


def loaded(store: ObjectStore, info: ShardInfo) -> dict[str, bytes]:
    """Return all tensors' bytes, each proven."""
    reader = ShardReader(store, PREFIX, info)
    found = {name: b"" for name in reader.tensors}
    for chunk in read_chunks(reader):
        found[chunk.name] += bytes(chunk.data)
    return found


def random_bytes(size: int) -> bytes:
    """Return bytes that repeat nowhere."""
    return random.Random(size).randbytes(size)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let small tensors have many pieces."""
    cut_into_pieces(monkeypatch)


def test_bytes_come_back_and_are_aligned() -> None:
    """Every tensor's bytes return as they were, each at a multiple of its element's size."""
    store = MemoryStore()
    info = written(store)
    tensors = placed(store, info)

    assert loaded(store, info) == {block.name: bytes(block.data) for block in blocks(10)}
    assert min(t.start for t in tensors.values()) == info.header_bytes == 4096
    assert all(t.start % DTYPE_BYTES[t.dtype] == 0 for t in tensors.values())
    assert tensors["weight"].start % 64 == 0


def test_alignment_holds_in_any_order() -> None:
    """The caller's order does not matter: safetensors forbids gaps, so the writer sorts."""
    forms = [("U8", 1), ("BF16", 3), ("F32", 1), ("F64", 1), ("U8", 64)]
    for order in permutations(forms):
        what = [
            Block(name=f"{dtype}{n}", dtype=dtype, shape=(n,), data=bytes(DTYPE_BYTES[dtype] * n))
            for dtype, n in order
        ]
        store = MemoryStore()
        tensors = placed(store, written(store, what))
        assert all(t.start % DTYPE_BYTES[t.dtype] == 0 for t in tensors.values())


def test_safetensors_reads_what_we_write(tmp_path: Path) -> None:
    """The reference implementation opens a shard, metadata included."""
    written(FileStore(tmp_path))
    with safe_open(tmp_path / KEY, "numpy") as file:
        assert file.metadata()["rank"] == "0"
        assert sorted(file.keys()) == ["bias", "empty", "flag", "part", "weight"]
        assert file.get_tensor("bias").tolist() == [10.0, 1.0, 2.0]
        assert file.get_tensor("flag").tolist() is True
        assert file.get_tensor("empty").shape == (0, 4)


def test_we_read_what_safetensors_writes(tmp_path: Path) -> None:
    """A file of the reference implementation passes our strict header reader."""
    tensors = {"a": np.arange(6, dtype=np.float64).reshape(2, 3), "b": np.array([True])}
    save_file(tensors, tmp_path / "x.safetensors", metadata={"by": "them"})
    raw = (tmp_path / "x.safetensors").read_bytes()

    found = parse_header(memoryview(raw), len(raw), what="x")
    assert {name: (info.dtype, info.shape) for name, info in found.items()} == {
        "a": ("F64", (2, 3)),
        "b": ("BOOL", (1,)),
    }
    assert raw[found["a"].start : found["a"].end] == tensors["a"].tobytes()


def test_every_dtype_is_known_to_safetensors(tmp_path: Path) -> None:
    """Each dtype we write is one that the reference implementation opens, two since 0.7 at most."""
    is_old = Version(safetensors.__version__) < Version("0.7")
    known = DTYPE_BYTES.keys() - ({"F8_E8M0", "C64"} if is_old else set())
    what = [
        Block(name=dtype, dtype=dtype, shape=(2,), data=bytes(2 * size))
        for dtype, size in DTYPE_BYTES.items()
        if dtype in known
    ]
    written(FileStore(tmp_path), what)
    with safe_open(tmp_path / KEY, "numpy") as file:
        assert sorted(file.keys()) == sorted(known)


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
    assert loaded(store, info)["a"] == array.tobytes()


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 8192, 20_000])
def test_the_hashes_are_those_of_the_files_pieces(size: int, small_pieces: None) -> None:
    """Anyone can check header and pieces with XXH3-128, whatever the size leaves for the last."""
    store = MemoryStore()
    info = written(store, [Block(name="a", dtype="U8", shape=(size,), data=random_bytes(size))])
    raw = store.get(KEY)
    assert info.size_bytes == len(raw) == 4096 + size
    assert info.header_hash == xxhash.xxh3_128(raw[:4096]).hexdigest()
    starts = range(4096, len(raw), 4096)
    assert info.piece_hashes == tuple(
        xxhash.xxh3_128(raw[start : start + 4096]).hexdigest() for start in starts
    )
    assert ShardInfo.from_json(info.to_json(), "x") == info


def test_how_the_caller_cuts_the_data_changes_nothing(small_pieces: None) -> None:
    """Many small views or one large one: the same file, the same hashes."""
    raw = random_bytes(30_000)
    forms = [
        [Block(name="a", dtype="U8", shape=(30_000,), data=raw)],
        [
            Block(name=f"{start:05d}", dtype="U8", shape=(64,), data=raw[start : start + 64])
            for start in range(0, 29_952, 64)
        ]
        + [Block(name="rest", dtype="U8", shape=(48,), data=raw[29_952:])],
    ]
    one, many = (written(MemoryStore(), form) for form in forms)
    assert one.piece_hashes == many.piece_hashes


def test_every_flipped_bit_is_found() -> None:
    """In the length, the header, its padding, the data: no single bit goes unnoticed."""
    store = MemoryStore()
    info = written(store)
    size_bits = info.size_bytes * 8
    for bit in [*range(0, size_bits, 401), *range(64), *range(size_bits - 64, size_bits)]:
        flip(store, KEY, bit)
        with pytest.raises(DamagedCheckpoint, match=KEY):
            loaded(store, info)
        flip(store, KEY, bit)
    loaded(store, info)


def test_damage_is_named_with_its_bytes(small_pieces: None) -> None:
    """The sentence says which part of which file is not what was written."""
    store = MemoryStore()
    info = written(store, [Block(name="a", dtype="U8", shape=(9000,), data=bytes(9000))])
    flip(store, KEY, (4096 + 5000) * 8)
    with pytest.raises(
        DamagedCheckpoint, match=f"{KEY} is damaged: the hash of bytes 8192 to 12288"
    ):
        check_intact(ShardReader(store, PREFIX, info))
    flip(store, KEY, 4000 * 8)
    with pytest.raises(DamagedCheckpoint, match="the hash of its header"):
        check_intact(ShardReader(store, PREFIX, info))


@pytest.mark.parametrize("kept", [0, 7, 8, 100, 4095, 4096, 4200, -1])
def test_every_truncation_is_found(kept: int) -> None:
    """A shard that is too short (or too long) is damaged, wherever it was cut."""
    store = MemoryStore()
    info = written(store)
    raw = store.get(KEY)
    for other in (raw[:kept], raw + b"\0"):
        store.put(KEY, other)
        with pytest.raises(DamagedCheckpoint, match="its manifest says"):
            loaded(store, info)


def test_a_missing_shard_is_damage_but_a_failing_store_is_not() -> None:
    """Damage makes restore fall back; trouble with the store must not."""
    store = FaultyStore(MemoryStore())
    info = written(store)
    for nth in (1, 2):  # the header, the data
        store.heal().fail("get_into", nth=nth)
        with pytest.raises(StoreUnavailable):
            loaded(store, info)
    store.heal().before("get_into", store.inner.delete)
    with pytest.raises(DamagedCheckpoint, match="vanished"):
        loaded(store, info)
    with pytest.raises(DamagedCheckpoint, match="missing"):
        loaded(store, info)


def test_a_lying_manifest_cannot_take_all_memory() -> None:
    """The claimed size is compared with the file's before any memory is taken."""
    store = MemoryStore()
    info = replace(written(store), size_bytes=1 << 60)
    with pytest.raises(DamagedCheckpoint):
        loaded(store, info)


def test_a_tensor_that_no_piece_proves_is_refused() -> None:
    """A manifest that takes a tensor's bytes for header would leave them out of the pieces."""
    store = MemoryStore()
    info = written(store, [Block(name="a", dtype="U8", shape=(9000,), data=bytes(9000))])
    raw = store.get(KEY)
    forged = replace(
        info,
        header_bytes=8192,
        header_hash=xxhash.xxh3_128_hexdigest(raw[:8192]),
        piece_hashes=(xxhash.xxh3_128_hexdigest(raw[8192:]),),
    )
    with pytest.raises(DamagedCheckpoint, match="tensor 'a' is in the header"):
        placed(store, forged)


def test_one_tensor_can_be_read_alone(small_pieces: None) -> None:
    """Its pieces are read once each, and nothing else; damage elsewhere does not matter."""
    data = random_bytes(20_000)
    store = CountingStore()
    info = written(
        store,
        [
            Block(name="a", dtype="U8", shape=(12_800,), data=data[:12_800]),
            Block(name="b", dtype="U8", shape=(6400,), data=data[12_800:19_200]),
        ],
    )
    reader = ShardReader(store, PREFIX, info)
    place = reader.tensors["b"]
    flip(store, KEY, 4096 * 8)
    store.reads.clear()
    low, high = memoryview(bytearray(400)), memoryview(bytearray(6000))
    read_wanted([(reader, [Want(place.start, low), Want(place.start + 400, high)])])
    assert bytes(low) + bytes(high) == data[12_800:19_200]
    assert store.pieces() == [(KEY, 4096 + 3 * 4096), (KEY, 4096 + 4 * 4096)]
    with pytest.raises(DamagedCheckpoint, match="bytes 4096 to 8192"):
        read_wanted([(reader, [Want(reader.tensors["a"].start, low)])])


def test_bytes_that_are_wanted_twice_are_given_twice(small_pieces: None) -> None:
    """Also where whole pieces go straight to one place: the other one gets them too."""
    data = random_bytes(20_000)
    store = CountingStore()
    reader = ShardReader(
        store, PREFIX, written(store, [Block(name="a", dtype="U8", shape=(20_000,), data=data)])
    )
    spans = [(0, 20_000), (0, 20_000), (4096, 8192), (5000, 5001), (8191, 16_385)]
    targets = [memoryview(bytearray(high - low)) for low, high in spans]
    wants = [Want(4096 + low, target) for (low, _), target in zip(spans, targets, strict=True)]
    for order in (wants, wants[::-1]):
        store.reads.clear()
        for target in targets:
            target[:] = bytes(len(target))
        read_wanted([(reader, order)])
        assert [bytes(target) for target in targets] == [data[low:high] for low, high in spans]
        assert len(store.pieces()) == len(set(store.pieces())) == 5


def test_wanting_nothing_reads_nothing() -> None:
    """Tensors without elements need no piece."""
    store = FaultyStore(MemoryStore())
    reader = ShardReader(store, PREFIX, written(store))
    read_wanted([(reader, [Want(4096, memoryview(bytearray()))])])
    read_wanted([])
    assert store.calls["get_into"] == 0


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
    loaded(store, info)

    store.put(keys.manifest(PREFIX), b"committed")
    with pytest.raises(AlreadyExists):
        written(store, blocks(3))
    loaded(store, info)


def test_a_full_store_comes_through() -> None:
    """`StoreFull` reaches the caller, who can say so."""
    with pytest.raises(StoreFull):
        written(FaultyStore(MemoryStore()).full())
