from __future__ import annotations

import itertools
import math
import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spotguard.checkpoint.lineage import claim_attempt
from spotguard.checkpoint.manifest import Manifest, commit
from spotguard.checkpoint.shard import Block, shard_file, write_shard
from spotguard.errors import DamagedCheckpoint, StateMismatch, StoreUnavailable
from spotguard.events import keys
from spotguard.events.states import CheckpointKind
from spotguard.runtime import restoring
from spotguard.runtime.restoring import StoredTensors
from spotguard.testing import FakeRendezvous, FaultyStore, MemoryStore
from tests.runtime.lab import Rank, adapters, next_attempt, raw

if TYPE_CHECKING:
    from spotguard.storage.base import ObjectStore

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
        name=name, dtype="F32", shape=shape, data=raw(part),
        global_shape=tuple(whole.shape), offsets=offsets,
    )  # fmt: skip


def save(
    store: ObjectStore, tensors: dict[str, tuple[torch.Tensor, list[Box]]], *, step: int = 10
) -> Manifest:
    """Write a checkpoint whose tensors lie in boxes, one for each rank, and commit it."""
    world = max(len(boxes) for _, boxes in tensors.values())
    shards = tuple(
        write_shard(
            store,
            keys.checkpoint(step, 1),
            shard_file(rank, world),
            [
                block(name, t, boxes[rank])
                for name, (t, boxes) in tensors.items()
                if rank < len(boxes)
            ],
        )
        for rank in range(world)
    )
    manifest = Manifest(
        run_id="a-run", attempt=1, step=step, kind=CheckpointKind.PERIODIC, created_at=1.0,
        parent=None, world_size=world, shards=shards, state={},
    )  # fmt: skip
    commit(store, manifest)
    return manifest


def stored(tensors: dict[str, tuple[torch.Tensor, list[Box]]]) -> StoredTensors:
    """Return the tensors of a fresh checkpoint."""
    store = MemoryStore()
    manifest = save(store, tensors)
    return StoredTensors(store, manifest.prefix, manifest)


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
    tensors = stored({"w": (whole, grid(shape, before))})

    for offsets, size in grid(shape, after):
        part = whole[tuple(slice(o, o + n) for o, n in zip(offsets, size, strict=True))]
        assert torch.equal(tensors._assemble("w", offsets, size), part)
    assert torch.equal(tensors.fetch("w"), whole)


@given(
    shape=st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple),
    data=st.data(),
)
def test_no_cut_is_special(shape: tuple[int, ...], data: st.DataObject) -> None:
    """For any shape, any two grids of ranks, and parts listed in any order."""
    ranks = st.tuples(*(st.integers(1, 5) for _ in shape))
    boxes = data.draw(st.permutations(grid(shape, data.draw(ranks))))
    whole = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
    tensors = stored({"w": (whole, boxes)})

    for offsets, size in grid(shape, data.draw(ranks)):
        part = whole[tuple(slice(o, o + n) for o, n in zip(offsets, size, strict=True))]
        assert torch.equal(tensors._assemble("w", offsets, size), part)


def test_replicas_of_a_part_count_once() -> None:
    """Hybrid sharding stores each part on several ranks; any of them will do."""
    whole = torch.randn(6, 2)
    boxes = grid((6, 2), (2, 1))
    tensors = stored({"w": (whole, [*boxes, *boxes])})

    assert torch.equal(tensors.fetch("w"), whole)


def test_an_empty_part_hides_no_other() -> None:
    """A rank without rows may say that its nothing begins at the start, where a real part does."""
    whole = torch.randn(3, 2)
    boxes: list[Box] = [((0, 0), (0, 2)), *grid((3, 2), (3, 1))]

    assert torch.equal(stored({"w": (whole, boxes)}).fetch("w"), whole)


def test_a_missing_part_is_found_out() -> None:
    """What the shards do not hold is never filled with whatever is in memory."""
    whole = torch.randn(6, 2)
    tensors = stored({"w": (whole, grid((6, 2), (3, 1))[:2])})

    assert torch.equal(tensors._assemble("w", (0, 0), (4, 2)), whole[:4])
    with pytest.raises(DamagedCheckpoint, match="only parts of the tensor 'w'"):
        tensors.fetch("w")
    with pytest.raises(DamagedCheckpoint, match="no shard holds the tensor 'v'"):
        tensors.fetch("v")


def test_only_the_shards_that_are_needed_are_read() -> None:
    """Of a large model each rank reads what overlaps its own part."""
    store = FaultyStore(MemoryStore())
    whole = torch.randn(8, 2)
    manifest = save(store, {"w": (whole, grid((8, 2), (4, 1)))})
    tensors = StoredTensors(store, manifest.prefix, manifest)
    tensors._assemble("w", (0, 0), (2, 2))

    assert store.calls["get_into"] == 1


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
    chosen = [restoring.choose(store, words.rank(rank), rank) for rank in range(3)]
    for one, mine in zip(chosen, found, strict=True):
        restoring.apply(one, adapters({"s": mine}))

    assert {one.prefix for one in chosen} == {keys.checkpoint(10, 1)}
    assert [mine["step"] for mine in found] == [10, 10, 10]


def test_a_fresh_start_is_told_to_all() -> None:
    """No checkpoint is a choice, too."""
    words = FakeRendezvous()
    first = restoring.choose(MemoryStore(), words.rank(0), 0)
    second = restoring.choose(MemoryStore(), words.rank(1), 1)

    assert first.manifest is None
    assert second.manifest is None


def test_a_silent_first_rank_is_an_error() -> None:
    """Without its word nobody starts from something else."""
    words = FakeRendezvous(patience_s=0.01)
    with pytest.raises(ConnectionError, match="did not say what to restore"):
        restoring.choose(MemoryStore(), words.rank(1), 1)


def test_a_newer_format_is_refused() -> None:
    """An older spotguard does not silently fall back over what a newer one wrote."""
    store = history(10)
    prefix = keys.checkpoint(20, 1)
    manifest = Manifest(
        run_id="a-run", attempt=1, step=20, kind=CheckpointKind.PERIODIC, created_at=1.0,
        parent=None, world_size=1, shards=(), state={}, schema=99,
    )  # fmt: skip
    store.put(keys.manifest(prefix), manifest.to_json())
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
