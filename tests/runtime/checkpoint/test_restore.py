from __future__ import annotations

import itertools
import math
import random
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spotguard.checkpoint import manifest as manifest_form
from spotguard.checkpoint.lineage import claim_attempt
from spotguard.checkpoint.manifest import Manifest, commit
from spotguard.checkpoint.shard import Block, shard_file, write_shard
from spotguard.errors import (
    ArchivedCheckpoint,
    CheckpointError,
    DamagedCheckpoint,
    StateMismatch,
    StoreUnavailable,
)
from spotguard.events import keys
from spotguard.events.states import CheckpointKind
from spotguard.runtime.checkpoint.tensor_reader import StoredTensors, _Box
from spotguard.runtime.state.tree import DTYPES
from spotguard.testing import FakeRendezvous, FaultyStore, MemoryStore
from tests.checkpoint.crashes.savings import (
    CountingStore,
    body_of,
    cut_into_pieces,
    sealed,
)
from tests.runtime.harness.lab import Rank, adapters, next_attempt, raw, together

if TYPE_CHECKING:
    from spotguard.runtime.state.tracked import Finish
    from spotguard.storage.base import ObjectStore, Target

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and shape of a part."""


def cut(length: int, pieces: int) -> list[tuple[int, int]]:
    """Return (start, size) of each rank's piece of a dimension, as FSDP2 cuts: some are empty."""
    size = math.ceil(length / pieces)
    starts = [min(rank * size, length) for rank in range(pieces)]
    return [(start, min(size, length - start)) for start in starts]


def grid(shape: tuple[int, ...], ranks: tuple[int, ...]) -> list[Box]:
    """Return each rank's box of a tensor cut along every dimension."""
    cuts = itertools.product(*(cut(n, k) for n, k in zip(shape, ranks, strict=True)))
    return [(tuple(s for s, _ in box), tuple(n for _, n in box)) for box in cuts]


def block(name: str, whole: torch.Tensor, box: Box) -> Block:
    """Return one rank's part as it is written."""
    offsets, shape = box
    part = whole[tuple(slice(o, o + n) for o, n in zip(offsets, shape, strict=True))]
    return Block(
        name=name, dtype=DTYPES[whole.dtype], shape=shape, data=raw(part),
        global_shape=tuple(whole.shape), offsets=offsets,
    )  # fmt: skip


def save(
    store: ObjectStore, tensors: dict[str, tuple[torch.Tensor, list[Box]]], *, step: int = 10
) -> Manifest:
    """Write a checkpoint whose tensors lie in boxes, one for each rank, and commit it."""
    world = max(len(boxes) for _, boxes in tensors.values())
    of_rank = [
        [block(name, t, boxes[rank]) for name, (t, boxes) in tensors.items() if rank < len(boxes)]
        for rank in range(world)
    ]
    return write(store, of_rank, step=step)


def write(
    store: ObjectStore, of_rank: list[list[Block]], *, step: int = 10, state: Any = None
) -> Manifest:
    """Write each rank's blocks as a shard and commit them."""
    world, prefix = len(of_rank), keys.checkpoint(step, 1)
    written = tuple(
        write_shard(store, prefix, shard_file(rank, world), blocks)
        for rank, blocks in enumerate(of_rank)
    )
    manifest = Manifest(
        run_id="a-run", attempt=1, step=step, kind=CheckpointKind.PERIODIC, created_at=1.0,
        parent=None, world_size=world, shards=written, state=state or {},
    )  # fmt: skip
    commit(store, manifest)
    return manifest


class Stored:
    """A fresh checkpoint, to read parts of."""

    def __init__(self, tensors: dict[str, tuple[torch.Tensor, list[Box]]]) -> None:
        self.store = CountingStore()
        self.manifest = save(self.store, tensors)

    def part(self, name: str, box: Box, like: torch.Tensor) -> torch.Tensor:
        """Return what a rank whose part is `box` gets; all else in its memory is 1-bits."""
        target = torch.empty_like(like[cut_out(box)]).contiguous()
        if target.numel():
            target.view(-1).view(torch.uint8).fill_(255)
        return self.into(name, box, target)

    def into(self, name: str, box: Box, target: torch.Tensor) -> torch.Tensor:
        """Read a part of a tensor into `target` and return it."""
        self.store.reads.clear()
        tensors = StoredTensors(self.store, self.manifest)
        tensors._fill(name, target, _Box(*box))
        tensors.read()
        return target

    def whole(self, name: str) -> torch.Tensor:
        """Return a tensor in new memory."""
        tensors = StoredTensors(self.store, self.manifest)
        found = tensors.new(name)
        tensors.read()
        return found


def cut_out(box: Box) -> tuple[slice, ...]:
    """Return the slices of a box."""
    return tuple(slice(o, o + n) for o, n in zip(*box, strict=True))


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors agree in dtype, shape and every bit."""
    return (one.dtype, one.shape, raw(one)) == (other.dtype, other.shape, raw(other))


@pytest.mark.parametrize(
    ("shape", "before", "after"),
    [
        ((12, 3), (4, 1), (3, 1)),
        ((12, 3), (1, 1), (4, 1)),
        ((12, 3), (3, 1), (1, 1)),
        ((7, 5), (4, 1), (3, 1)),
        ((3, 5), (4, 1), (2, 1)),
        ((8, 6), (2, 2), (3, 1)),
        ((8, 6), (4, 1), (2, 3)),
        ((5, 7), (2, 3), (3, 2)),
        ((9,), (4,), (2,)),
        ((2, 3, 5), (2, 1, 3), (1, 3, 2)),
    ],
    ids=str,
)
def test_any_cut_is_restored_to_any_other(
    shape: tuple[int, ...], before: tuple[int, ...], after: tuple[int, ...]
) -> None:
    """Saved on N ranks, each of M ranks gets exactly its part, also of uneven and 2-D cuts."""
    whole = torch.randn(shape)
    stored = Stored({"w": (whole, grid(shape, before))})

    for box in grid(shape, after):
        assert equal(stored.part("w", box, whole), whole[cut_out(box)])
    assert equal(stored.whole("w"), whole)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.bool], ids=str)
@pytest.mark.parametrize(("before", "after"), [(4, 3), (1, 4), (3, 1)], ids=str)
@pytest.mark.parametrize("axis", [0, 1])
def test_resharding_keeps_every_bit(
    dtype: torch.dtype, before: int, after: int, axis: int, small_pieces: None
) -> None:
    """Small types too, nan payloads and denormals included, over many pieces."""
    bits = random.Random(before).randbytes(70 * 300)
    if dtype is torch.bool:
        bits = bytes(b & 1 for b in bits)
    whole = torch.frombuffer(bytearray(bits), dtype=dtype)
    whole = whole.view(70, -1)
    ways = [(n, 1) if axis == 0 else (1, n) for n in (before, after)]
    stored = Stored({"w": (whole, grid(tuple(whole.shape), ways[0]))})

    for box in grid(tuple(whole.shape), ways[1]):
        assert equal(stored.part("w", box, whole), whole[cut_out(box)])


def test_a_part_without_rows_is_restored_to_nothing() -> None:
    """Three rows over four ranks, then over five: idle ranks read no data."""
    whole = torch.randn(3, 2)
    stored = Stored({"w": (whole, grid((3, 2), (4, 1)))})

    for box in grid((3, 2), (5, 1)):
        assert equal(stored.part("w", box, whole), whole[cut_out(box)])
    assert all(start == 0 for _, start, _ in stored.store.reads), "the last rank has no row"


@pytest.mark.parametrize("value", [torch.tensor(3.5), torch.tensor(True), torch.empty(0, 4)])
def test_a_tensor_of_one_or_no_element_is_restored(value: torch.Tensor) -> None:
    """A step counter has no dimension to be cut along."""
    box = ((0,) * value.dim(), tuple(value.shape))
    stored = Stored({"w": (value, [box])})

    assert equal(stored.whole("w"), value)
    assert equal(stored.part("w", box, value), value)


LAYOUTS = {
    "channels last": lambda t: torch.empty_like(t).to(memory_format=torch.channels_last),
    "transposed": lambda t: torch.empty(*reversed(t.shape)).permute(3, 2, 1, 0),
    "every other": lambda t: torch.empty(*t.shape[:-1], 2 * t.shape[-1])[..., ::2],
    "conjugate": lambda t: torch.empty(t.shape, dtype=torch.complex64).conj(),
    "negative": lambda t: torch.empty(t.shape, dtype=torch.complex64).conj().imag,
    "of doubles": lambda t: torch.empty(t.shape, dtype=torch.float64),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [(1, 1, 1, 1), (4, 1, 1, 1), (1, 3, 1, 2)], ids=str)
def test_any_layout_of_the_target_is_filled_by_value(layout: str, ranks: tuple[int, ...]) -> None:
    """Strides, lazy conjugation and another dtype of the target: it keeps its own form."""
    whole = torch.randn(6, 5, 4, 3)
    target = LAYOUTS[layout](whole)
    if target.is_complex():
        whole = torch.complex(whole, torch.randn(6, 5, 4, 3))
    form = target.stride(), target.dtype, target.is_conj(), target.is_neg()
    stored = Stored({"w": (whole, grid((6, 5, 4, 3), ranks))})
    stored.into("w", ((0, 0, 0, 0), (6, 5, 4, 3)), target)

    assert torch.equal(target, whole.to(target.dtype))
    assert form == (target.stride(), target.dtype, target.is_conj(), target.is_neg())


@pytest.mark.slow
@pytest.mark.same_everywhere
@settings(deadline=None)  # the machine is shared
@given(
    shape=st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple),
    data=st.data(),
)
def test_no_cut_is_special(shape: tuple[int, ...], data: st.DataObject) -> None:
    """For any shape, any two grids of ranks, and parts listed in any order."""
    ranks = st.tuples(*(st.integers(1, 5) for _ in shape))
    boxes = data.draw(st.permutations(grid(shape, data.draw(ranks))))
    whole = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
    with pytest.MonkeyPatch.context() as patch:
        cut_into_pieces(patch)
        stored = Stored({"w": (whole, boxes)})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            manifest_form, "_HEADERS_AT_ONCE", 1
        )  # of a thousand readers each starts a thread
        for box in grid(shape, data.draw(ranks)):
            assert equal(stored.part("w", box, whole), whole[cut_out(box)])


def test_replicas_of_a_part_count_once() -> None:
    """Hybrid sharding stores each part on several ranks; any of them will do."""
    whole = torch.randn(6, 2)
    boxes = grid((6, 2), (2, 1))
    stored = Stored({"w": (whole, [*boxes, *boxes])})

    assert equal(stored.part("w", ((0, 0), (6, 2)), whole), whole)
    assert len([start for _, start, _ in stored.store.reads if start]) == 2


def test_an_empty_part_hides_no_other() -> None:
    """A rank without rows may say that its nothing begins at the start, where a real part does."""
    whole = torch.randn(3, 2)
    boxes: list[Box] = [((0, 0), (0, 2)), *grid((3, 2), (3, 1))]

    assert equal(Stored({"w": (whole, boxes)}).whole("w"), whole)


def test_a_missing_part_is_found_out() -> None:
    """What the shards do not hold is never filled with whatever is in memory."""
    whole = torch.randn(6, 2)
    stored = Stored({"w": (whole, grid((6, 2), (3, 1))[:2])})

    assert equal(stored.part("w", ((0, 0), (4, 2)), whole), whole[:4])
    with pytest.raises(DamagedCheckpoint, match="only parts of the tensor 'w'"):
        stored.whole("w")
    with pytest.raises(DamagedCheckpoint, match="no shard holds the tensor 'v'"):
        stored.whole("v")


def test_parts_of_different_tensors_are_never_put_together() -> None:
    """Shards that disagree in dtype or in the whole's shape are damage."""
    whole = torch.randn(6, 2)
    for other in (whole.double(), torch.randn(7, 2)):
        store = MemoryStore()
        parts = (block("w", whole, ((0, 0), (3, 2))), block("w", other, ((3, 0), (3, 2))))
        manifest = write(store, [[part] for part in parts])
        with pytest.raises(DamagedCheckpoint, match="parts of the tensor 'w' do not fit"):
            StoredTensors(store, manifest).new("w")


class MeetingStore(CountingStore):
    """Answers a read only when as many readers have come as there are shards."""

    def __init__(self, readers: int) -> None:
        super().__init__()
        self.meeting = threading.Barrier(readers, timeout=10)

    def get_into(self, key: str, offset: int, into: Target) -> None:
        """Wait for the others at a header, then read."""
        if offset == 0:
            self.meeting.wait()
        super().get_into(key, offset, into)


def test_the_headers_of_many_shards_are_read_at_once() -> None:
    """On a bucket each takes two answers, and a run of 64 ranks has 64 of them."""
    store = MeetingStore(4)
    manifest = write(store, [[block(f"w{n}", torch.ones(2), ((0,), (2,)))] for n in range(4)])
    tensors = StoredTensors(store, manifest)
    assert [tensors.shape(f"w{n}") for n in range(4)] == [(2,)] * 4


def needed(manifest: Manifest, stored: list[Box], box: Box) -> set[tuple[str, int]]:
    """Return (key, offset) of every piece that holds a byte of `box`, found element by element."""
    found = set()
    for info, (offsets, shape) in zip(manifest.shards, stored, strict=True):
        for at in itertools.product(*(range(o, o + n) for o, n in zip(*box, strict=True))):
            inside = [a - o for a, o in zip(at, offsets, strict=True)]
            if all(0 <= a < n for a, n in zip(inside, shape, strict=True)):
                index = 0
                for a, n in zip(inside, shape, strict=True):
                    index = index * n + a
                for byte in (4 * index, 4 * index + 3):
                    start, _ = info.piece(byte // info.piece_bytes)
                    found.add((manifest.prefix + info.file, start))
    return found


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("shape", "before", "after"),
    [
        ((120, 90), (4, 1), (3, 1)),
        ((30, 900), (1, 4), (1, 3)),
        ((8, 9000), (1, 4), (1, 3)),
        ((120, 90), (4, 1), (1, 3)),
        ((3, 8, 2500), (1, 1, 4), (1, 1, 3)),
        ((3, 20, 500), (1, 4, 1), (1, 3, 1)),
        ((2, 3, 5000), (1, 1, 1), (1, 3, 2)),
    ],
    ids=str,
)
@pytest.mark.parametrize("strided", [False, True], ids=["in place", "beside"])
def test_only_the_pieces_that_are_needed_are_read(
    shape: tuple[int, ...],
    before: tuple[int, ...],
    after: tuple[int, ...],
    strided: bool,
    small_pieces: None,
) -> None:
    """Each rank reads what overlaps its own part, once, whether rows or columns are cut."""
    whole = torch.randn(shape)
    boxes = grid(shape, before)
    stored = Stored({"w": (whole, boxes)})
    for box in grid(shape, after):
        target = torch.empty(*box[1], 2)[..., 0] if strided else torch.empty(box[1])
        assert equal(stored.into("w", box, target), whole[cut_out(box)])
        read = stored.store.pieces()
        assert len(read) == len(set(read)), "read twice"
        assert set(read) == needed(stored.manifest, boxes, box)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let small tensors have many pieces."""
    cut_into_pieces(monkeypatch)


def flip(store: MemoryStore, key: str, rng: random.Random) -> None:
    """Flip one bit somewhere in an object."""
    data = bytearray(store.get(key))
    bit = rng.randrange(len(data) * 8)
    data[bit // 8] ^= 1 << bit % 8
    store.put(key, data)


def history(*steps: int) -> MemoryStore:
    """Return a store with a checkpoint at each step."""
    store = MemoryStore()
    rank = Rank(store, keep_last=10)
    rank.start()
    for step in steps:
        rank.now(step, s={"step": step, "weight": torch.full((50,), float(step))})
    return store


def shard_of(step: int) -> str:
    """Return the key of a checkpoint's only shard."""
    return keys.checkpoint(step, 1) + shard_file(0, 1)


@pytest.mark.parametrize("seed", range(40))
def test_a_flipped_bit_anywhere_falls_back_and_says_so(seed: int) -> None:
    """In the shard or the manifest, one bit is enough: the one before is restored, by name."""
    rng = random.Random(seed)
    store = history(10, 20, 30)
    flip(store, rng.choice([shard_of(30), keys.manifest(keys.checkpoint(30, 1))]), rng)
    found: dict[str, Any] = {}
    restored = next_attempt(store, s=found)

    assert found["step"] == 20
    assert found["weight"].eq(20).all()
    [(prefix, problem)] = restored.skipped
    assert prefix == keys.checkpoint(30, 1)
    assert problem


def test_several_damaged_ones_are_all_named() -> None:
    """It goes back as far as it must."""
    store = history(10, 20, 30, 40)
    store.delete(shard_of(40))
    store.put(shard_of(30), store.get(shard_of(30))[:-1])
    found: dict[str, Any] = {}
    restored = next_attempt(store, s=found)

    assert found["step"] == 20
    assert [prefix for prefix, _ in restored.skipped] == [keys.checkpoint(s, 1) for s in (40, 30)]
    assert "missing" in restored.skipped[0][1]


def test_when_all_are_damaged_nothing_starts_from_scratch() -> None:
    """Weeks of training are not silently begun anew: a clear error says what to do."""
    store = history(10, 20)
    for step in (10, 20):
        flip(store, shard_of(step), random.Random(step))
    with pytest.raises(
        DamagedCheckpoint, match="all 2 checkpoints of this run are damaged"
    ) as problem:
        next_attempt(store, s={})

    assert "start a new run" in problem.value.hint


@pytest.mark.parametrize("damaged", [False, True])
def test_when_all_are_archived_the_way_back_is_said(damaged: bool) -> None:
    """They are whole, only out of reach for hours: nobody should look for a backup."""
    store = history(10, 20, 30)
    for step in (10, 20, 30):
        store.archive(shard_of(step))
    if damaged:
        store.delete(shard_of(30))
    with pytest.raises(ArchivedCheckpoint) as problem:
        next_attempt(store, s={})

    count, newest = (2, 20) if damaged else (3, 30)
    assert f"can be read now: {count} archived" in problem.value.message
    assert (", 1 damaged" in problem.value.message) is damaged
    assert keys.checkpoint(newest, 1) in problem.value.message
    assert "aws s3api restore-object" in problem.value.hint
    assert "backup" not in problem.value.hint


def test_a_store_that_fails_is_not_a_damaged_checkpoint() -> None:
    """Not being able to read says nothing about the bytes: no fallback, no lost work."""
    store = FaultyStore(history(10, 20)).fail("get_into")
    with pytest.raises(StoreUnavailable):
        Rank(store, attempt=2).start(s={})


def test_nothing_to_restore_is_a_fresh_start() -> None:
    """Neither an empty store nor an attempt that died before its first save is an error."""
    store = MemoryStore()
    first = Rank(store).start(s={"a": 1})
    assert (first.manifest, first.prefix, first.skipped) == (None, None, [])
    again = next_attempt(store, s={"a": 1})

    assert again.prefix is None


def test_all_ranks_restore_what_the_first_one_chose() -> None:
    """Also when the newest is damaged: two ranks never go on from different checkpoints."""
    store, words = history(10, 20), FakeRendezvous()
    flip(store, shard_of(20), random.Random(1))
    found: list[dict[str, Any]] = [{} for _ in range(3)]
    team = [Rank(store, rank, 3, coordinator=words.rank(rank)) for rank in range(3)]
    chosen = together(
        *(
            lambda one=one, mine=mine: one.restore(adapters({"s": mine}))
            for one, mine in zip(team, found, strict=True)
        )
    )

    assert {one.prefix for one in chosen} == {keys.checkpoint(10, 1)}
    assert [mine["step"] for mine in found] == [10, 10, 10]
    assert chosen[0].skipped == chosen[1].skipped == chosen[2].skipped
    assert [one.steps_back for one in chosen] == [10, 10, 10]


def test_a_fresh_start_is_told_to_all() -> None:
    """No checkpoint is a choice, too."""
    words = FakeRendezvous()
    first = Rank(MemoryStore(), 0, 2, coordinator=words.rank(0)).restore({})
    second = Rank(MemoryStore(), 1, 2, coordinator=words.rank(1)).restore({})

    assert first.manifest is None
    assert second.manifest is None


def test_a_silent_first_rank_is_an_error() -> None:
    """Without its word nobody starts from something else."""
    words = FakeRendezvous(patience_s=0.01)
    with pytest.raises(ConnectionError, match="no word of restore/1 from rank 0"):
        Rank(MemoryStore(), 1, 2, coordinator=words.rank(1)).restore({})


def test_a_newer_format_is_refused() -> None:
    """An older spotguard does not silently fall back over what a newer one wrote."""
    store = history(10)
    prefix = keys.checkpoint(20, 1)
    manifest = Manifest(
        run_id="a-run", attempt=1, step=20, kind=CheckpointKind.PERIODIC, created_at=1.0,
        parent=None, world_size=1, shards=(), state={},
    )  # fmt: skip
    store.put(keys.manifest(prefix), sealed(body_of(manifest) | {"schema": 99}))
    with pytest.raises(StateMismatch, match="schema 99"):
        next_attempt(store, s={})


def test_a_zombies_commit_is_never_restored() -> None:
    """What an old attempt commits after the next one claimed is outside, whatever its step."""
    store = history(10)
    next_attempt(store, s={})
    zombie = Rank(store)
    claim = zombie.saver.capture(99, CheckpointKind.PERIODIC, adapters({"s": {"step": 99}}), {})
    with pytest.raises(Exception, match="fenced"):
        zombie.saver.save_now(claim)
    forced = Manifest(
        run_id="a-run", attempt=1, step=99, kind=CheckpointKind.PERIODIC, created_at=1.0,
        parent=None, world_size=1, shards=(), state={"s": {"step": 99}},
    )  # fmt: skip
    commit(store, forced)
    found: dict[str, Any] = {}
    next_attempt(store, s=found)

    assert found["step"] == 10


def test_a_claim_without_a_commit_changes_nothing() -> None:
    """Attempts that die young leave the history as it is."""
    store = history(10)
    for attempt in (2, 3, 4):
        claim_attempt(store, attempt, keys.checkpoint(10, 1))
    found: dict[str, Any] = {}
    next_attempt(store, s=found)

    assert found["step"] == 10


# ---------------------------------------------------------------------- votes


class Row:
    """A rank's own row of a matrix that is spread over the ranks."""

    def __init__(self, rank: int) -> None:
        self.value = torch.zeros(1, 3)
        self._box = _Box((rank, 0), (1, 3))

    def pack(self, name: str, into: Any) -> Any:
        """Nothing is saved here."""

    def restore(self, name: str, tree: Any, reading: Any) -> Finish:
        """Have the row read."""
        reading._fill(tree["name"], self.value, self._box)
        return lambda: None


def rows(*steps: int) -> MemoryStore:
    """Return a store whose checkpoints hold one row for each of two ranks, and a dict."""
    store = MemoryStore()
    claim_attempt(store, 1, None)
    state = {"w": {"$": "tensor", "name": "w", "sharded": True}}
    for step in steps:
        whole = torch.full((2, 3), float(step))
        of_rank = [[block("w", whole, ((rank, 0), (1, 3)))] for rank in range(2)]
        write(store, of_rank, step=step, state={**state, "s": {"step": step}})
    return store


def damage(store: MemoryStore, step: int, rank: int) -> None:
    """Flip a bit of what only this rank reads."""
    key = keys.checkpoint(step, 1) + shard_file(rank, 2)
    data = bytearray(store.get(key))
    data[-1] ^= 1
    store.put(key, data)


class Pair:
    """Two ranks that restore together; looks at each one's dict whenever it says or hears."""

    def __init__(self, store: ObjectStore) -> None:
        self.rows = [Row(rank) for rank in range(2)]
        self.found: list[dict[str, Any]] = [{"step": -1}, {"step": -1}]
        self.seen: list[dict[str, Any]] = []
        words = FakeRendezvous(before=lambda rank, *_: self.seen.append(dict(self.found[rank])))
        self.team = [Rank(store, rank, 2, coordinator=words.rank(rank)) for rank in range(2)]

    def restore(self) -> list[Any]:
        """Return what each rank restored, or raised."""

        def of(rank: int) -> Any:
            mine = {"w": self.rows[rank], **adapters({"s": self.found[rank]})}
            return lambda: self.team[rank].restore(mine)

        return together(of(0), of(1))


@pytest.mark.parametrize("damaged", [0, 1])
def test_damage_that_one_rank_finds_makes_both_fall_back(damaged: int) -> None:
    """Nobody goes on from what is not whole for all; both can say which, and why."""
    store = rows(10, 20)
    damage(store, 20, damaged)
    pair = Pair(store)
    first, second = pair.restore()

    assert [step["step"] for step in pair.found] == [10, 10]
    assert [row.value.tolist() for row in pair.rows] == [[[10.0] * 3]] * 2
    assert first.prefix == second.prefix == keys.checkpoint(10, 1)
    assert first.skipped == second.skipped
    [(prefix, problem)] = second.skipped
    assert prefix == keys.checkpoint(20, 1)
    assert f"{shard_file(damaged, 2)} is damaged: the hash of bytes" in problem
    assert problem.startswith("rank 1: ") == (damaged == 1)
    assert first.steps_back == second.steps_back == 10


def test_nothing_but_tensors_changes_before_all_ranks_agree() -> None:
    """While they talk, each rank's own objects are as the script made them."""
    store = rows(10, 20, 30)
    damage(store, 30, 1)
    damage(store, 20, 0)
    pair = Pair(store)
    restored = pair.restore()

    assert [one.prefix for one in restored] == [keys.checkpoint(10, 1)] * 2
    assert len(restored[1].skipped) == 2
    assert len(pair.seen) > 10
    assert all(seen == {"step": -1} for seen in pair.seen)


def test_all_ranks_say_that_all_are_archived() -> None:
    """The first one found it out; the others have the same sentence."""
    store = rows(10, 20)
    for step in (10, 20):
        store.archive(keys.checkpoint(step, 1) + shard_file(1, 2))
    first, second = Pair(store).restore()

    assert isinstance(first, ArchivedCheckpoint)
    assert isinstance(second, ArchivedCheckpoint)
    assert (first.message, first.hint) == (second.message, second.hint)


def test_when_none_is_whole_for_all_no_rank_starts_from_scratch() -> None:
    """Each checkpoint is whole for one of them: both stop with the same sentence."""
    store = rows(10, 20)
    damage(store, 20, 1)
    damage(store, 10, 0)
    pair = Pair(store)
    first, second = pair.restore()

    assert isinstance(first, DamagedCheckpoint)
    assert isinstance(second, DamagedCheckpoint)
    assert first.message == second.message
    assert "all 2 checkpoints of this run are damaged" in second.message
    assert pair.found == [{"step": -1}] * 2


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_cannot_go_on_does_not_leave_the_others_waiting(failing: int) -> None:
    """A store that fails for one rank ends the restore of all, at once and with the reason."""
    pair = Pair(rows(10, 20))
    broken = FaultyStore(pair.team[failing].store).fail("get_into")
    pair.team[failing].store = broken
    results = pair.restore()

    assert isinstance(results[failing], StoreUnavailable)
    other = results[1 - failing]
    assert isinstance(other, CheckpointError)
    assert other.message.startswith(f"rank {failing} could not restore: ")
    assert pair.found == [{"step": -1}] * 2


def test_a_first_rank_whose_store_fails_says_so_to_all() -> None:
    """Also before it has named a checkpoint."""
    pair = Pair(rows(10))
    pair.team[0].store = FaultyStore(pair.team[0].store).fail("list_folders")
    first, second = pair.restore()

    assert isinstance(first, StoreUnavailable)
    assert "rank 0 could not restore" in second.message


def trained(width: int = 5) -> tuple[Any, torch.optim.Optimizer]:
    """Return a model that has taken a step, and its optimizer."""
    model = torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.Linear(width, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_a_changed_model_is_told_in_one_sentence() -> None:
    """Missing, unexpected and reshaped names, all at once, and how to go on all the same."""
    model, optimizer = trained()
    rank = Rank()
    rank.start()
    rank.now(1, model=model, optimizer=optimizer)
    changed = torch.nn.ModuleDict({"0": torch.nn.Linear(3, 7), "2": torch.nn.Linear(5, 2)})
    with pytest.raises(StateMismatch) as caught:
        next_attempt(rank.store, model=changed, optimizer=optimizer)

    assert "missing from the checkpoint: 2.bias, 2.weight" in caught.value.message
    assert "not in the script: 1.bias, 1.weight" in caught.value.message
    assert "reshaped: 0.weight (5, 3) → (7, 3), 0.bias (5,) → (7,)" in caught.value.message
    assert "strict=False" in str(caught.value.hint)


def test_what_fits_is_restored_without_the_rest_on_request() -> None:
    """A grown layer begins anew, moments included; the others go on; the difference is told."""
    model, optimizer = trained(5)
    rank = Rank()
    rank.start()
    rank.now(1, model=model, optimizer=optimizer, old={"a": 1})
    other, its_optimizer = trained(5)
    other[0] = torch.nn.Linear(3, 9)
    its_optimizer = torch.optim.AdamW([*other.parameters()], lr=0.5)
    before = other[0].weight.detach().clone()
    found = Rank(rank.store, attempt=2).restore(
        adapters({"model": other, "optimizer": its_optimizer, "new": {"b": 2}}), strict=False
    )

    assert torch.equal(other[0].weight, before)
    assert torch.equal(other[1].weight, model[1].weight)
    assert list(its_optimizer.state) == [other[1].weight, other[1].bias]
    moments = optimizer.state[model[1].weight]["exp_avg"]
    assert torch.equal(its_optimizer.state[other[1].weight]["exp_avg"], moments)
    assert its_optimizer.param_groups[0]["lr"] == 0.1
    assert ["new is new" in d or "reshaped" in d for d in found.differences] == [True, True]
    its_optimizer.zero_grad()
    loss = torch.nn.functional.linear(other[0](torch.ones(4, 3))[:, :5], other[1].weight).sum()
    torch.autograd.backward(loss)
    its_optimizer.step()


def test_what_the_chosen_checkpoint_lacks_is_as_the_script_made_it() -> None:
    """A damaged one was tried before it: of its bytes nothing stays, the same on every rank."""
    rank = Rank(keep_last=3)
    rank.start()
    old, its_optimizer = trained(5)
    rank.now(1, model=old, optimizer=its_optimizer)
    grown, _ = trained(5)
    grown.append(torch.nn.Linear(2, 4))
    rank.now(2, model=grown)
    [key] = [
        info.key
        for info in rank.store.list(keys.checkpoint(2, 1))
        if info.key.endswith("safetensors")
    ]
    data = bytearray(rank.store.get(key))
    data[-1] ^= 1
    rank.store.put(key, data)
    mine, _ = trained(5)
    mine.append(torch.nn.Linear(2, 4))
    head = [each.detach().clone() for each in mine[2].parameters()]
    found = Rank(rank.store, attempt=2).restore(adapters({"model": mine}), strict=False)

    assert found.prefix == keys.checkpoint(1, 1)
    assert torch.equal(mine[0].weight, old[0].weight)
    assert all(torch.equal(a, b) for a, b in zip(mine[2].parameters(), head, strict=True))
