from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from spotguard.events import keys
from spotguard.runtime.checkpoint.local_copy import LocalCopy
from spotguard.testing import FaultyStore, MemoryStore
from tests.runtime.harness.lab import Rank, adapters

if TYPE_CHECKING:
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
