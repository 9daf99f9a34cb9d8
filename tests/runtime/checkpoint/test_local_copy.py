from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

from spotguard.checkpoint.shard import shard_file
from spotguard.events import keys
from spotguard.runtime.checkpoint.local_copy import LocalCopy
from spotguard.runtime.checkpoint.staging import layout_of
from spotguard.testing import FaultyStore, MemoryStore
from tests.runtime.harness.lab import Rank, adapters

if TYPE_CHECKING:
    from pathlib import Path

    from spotguard.storage.base import ObjectStore


def saved_twice(near: ObjectStore) -> tuple[FaultyStore, torch.Tensor]:
    """Save two steps of a tensor, with a local copy; return the store and the newest value."""
    store = FaultyStore(MemoryStore())
    rank = Rank(store, local_copy=LocalCopy(near))
    rank.start()
    value = torch.randn(300_000)
    rank.later(1, state={"w": value})
    rank.saver.wait()
    value += 1
    rank.now(2, state={"w": value})
    assert rank.failed == []
    store.calls.clear()
    return store, value


def restored(store: ObjectStore, near: ObjectStore) -> Any:
    """Return what the next attempt gets."""
    found: dict[str, Any] = {"w": None}
    rank = Rank(store, attempt=2, local_copy=LocalCopy(near))
    rank.restore(adapters({"state": found}))
    return found["w"]


def test_data_comes_from_the_node_and_its_proof_from_the_store() -> None:
    """Only the newest is kept; of the store nothing but manifest and header are read."""
    near = MemoryStore()
    store, value = saved_twice(near)
    assert [info.key.split("/")[1] for info in near.list("")] == ["000000000002-000001"]

    assert torch.equal(restored(store, near), value)
    assert store.calls["get_into"] == 1, "the header"


@pytest.mark.parametrize("how", ["flipped", "short", "gone", "of another save", "unreadable"])
def test_a_bad_copy_costs_time_and_nothing_else(how: str) -> None:
    """Whatever is wrong with it, the store's bytes are what comes back."""
    near = FaultyStore(MemoryStore())
    store, value = saved_twice(near)
    [info] = near.list("")
    content = bytearray(near.get(info.key))
    if how == "flipped":
        content[-100] ^= 1
    if how == "of another save":
        content[4096:] = bytes(len(content) - 4096)
    if how == "gone":
        near.inner.delete(info.key)
    else:
        near.inner.put(info.key, content[:-1] if how == "short" else content)
    if how == "unreadable":
        near.fail("get_into")

    assert torch.equal(restored(store, near), value)
    assert store.calls["get_into"] > 1


def test_a_full_folder_costs_the_copy_not_the_save() -> None:
    """The checkpoint is committed, and no failure is reported."""
    near = FaultyStore(MemoryStore()).full()
    store, value = saved_twice(near)
    assert store.head(keys.manifest(keys.checkpoint(2, 1))) is not None
    assert torch.equal(restored(store, near), value)


def test_copies_of_ranks_that_are_no_more_are_let_go() -> None:
    """A node stays while ranks come and go: their shards would fill its memory."""
    near = MemoryStore()
    copy = LocalCopy(near)
    layout = layout_of([], {})

    def keep(step: int, attempt: int, rank: int, world: int) -> None:
        copy_of = copy if rank == 0 else LocalCopy(near)
        prefix = keys.checkpoint(step, attempt)
        copy_of.keep(prefix, shard_file(rank, world), layout, [])

    for step, attempt, world in ((10, 1, 4), (20, 2, 3), (30, 2, 2), (40, 2, 2), (35, 3, 3)):
        for rank in range(min(world, 2)):
            keep(step, attempt, rank, world)
        kept = [info.key for info in near.list("")]
        assert {keys.checkpoint(step, attempt) + shard_file(r, world) for r in (0, 1)} <= {*kept}
        assert len(kept) <= 4, "those of this save, and of the one before"
    assert [*near.list("")] == [
        info for info in near.list("") if info.key.startswith(keys.checkpoint(35, 3))
    ]


def test_what_a_killed_writer_left_in_the_folder_goes_with_the_next_save(tmp_path: Path) -> None:
    """It may be as large as the whole state, and the folder be the node's memory."""
    rank = Rank(local_copy=LocalCopy.at(str(tmp_path), "a-run"))
    rank.start()
    rank.now(1, state={"w": torch.zeros(8)})
    left, young = (tmp_path / ".spotguard" / "tmp" / name for name in ("left", "young"))
    for file in (left, young):
        file.write_bytes(b"half")
    os.utime(left, (time.time() - 3600, time.time() - 3600))

    rank.now(2, state={"w": torch.ones(8)})
    assert not left.exists()
    assert young.exists()
