"""Death at every single change of the store: the newest committed checkpoint is always there."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

import pytest

from spotguard.checkpoint.lineage import check_not_fenced, latest_valid
from spotguard.checkpoint.manifest import check_shards_intact
from spotguard.checkpoint.retention import Retention, prune
from spotguard.errors import AlreadyExists, StoreError, StoreFull
from spotguard.events import keys
from spotguard.storage import FileStore
from spotguard.testing.stores import FaultyStore, MemoryStore, SimulatedCrash
from tests.checkpoint.crashes.savings import claim, save

if TYPE_CHECKING:
    from pathlib import Path

    from spotguard.storage.base import ObjectStore

KEEP_2 = Retention(keep_last=2)


def life(store: ObjectStore, attempt: int, committed: list[int], *, saves: int) -> None:
    """Live one attempt: restore, claim, then save and prune; remember what was committed."""
    found, _ = latest_valid(store, verify=check_shards_intact)
    start = found.step if found else 0
    claim(store, attempt, found.prefix if found else None)
    for step in range(start + 10, start + 10 * saves + 1, 10):
        save(store, step, attempt)
        committed.append(step)
        prune(store, KEEP_2, attempt=attempt)


@pytest.mark.slow
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("kind", ["memory", "file"])
def test_no_crash_anywhere_loses_the_newest_committed(
    kind: str, after: bool, tmp_path: Path
) -> None:
    """Two attempts, seven saves, pruning: die before or after each change, in turn.

    What the last life had committed (or was about to, when only the answer was lost) is the
    newest restorable one, whole; and the next attempt goes on from it and tidies up.
    """
    for n in count(1, step=1 if kind == "memory" else 5):  # the disk syncs for each change
        inner = MemoryStore() if kind == "memory" else FileStore(tmp_path / str(n))
        committed: list[int] = [0]
        life(inner, 1, committed, saves=3)
        try:
            life(FaultyStore(inner).crash_at(n, after=after), 2, committed, saves=4)
            break
        except SimulatedCrash:
            pass

        found, skipped = latest_valid(inner, verify=check_shards_intact)
        assert found is not None
        assert skipped == []
        in_doubt = {committed[-1], committed[-1] + 10} if after else {committed[-1]}
        assert found.step in in_doubt, f"crash {n}"

        life(inner, 3, committed, saves=3)
        assert len(inner.list_folders(keys.CHECKPOINTS)) == 2, f"litter after crash {n}"
    assert n > 20


def test_a_failing_store_never_moves_the_newest_checkpoint() -> None:
    """Any single put that fails, tears or is refused leaves the checkpoint before as it was."""
    for nth in count(1):
        for fault in ("fail", "tear", "full"):
            inner = MemoryStore()
            claim(inner, 1)
            save(inner, 10)
            store = FaultyStore(inner)
            getattr(store, fault)(**({"op": "put"} if fault == "fail" else {}), nth=nth)
            try:
                save(store, 20)
            except StoreError:
                assert check_newest(inner) == 10
                # The same save again, once the store is well, succeeds...
                try:
                    save(store.heal(), 20)
                except AlreadyExists:  # ...unless a server that tears has half a manifest.
                    assert fault == "tear"
                    save(store, 21)
                    assert check_newest(inner) == 21
                    continue
            assert check_newest(inner) == 20
        if store.calls["put"] < nth:
            break
    assert nth > 3


def test_a_full_disk_can_be_lived_with() -> None:
    """While the store is full nothing is lost, and pruning still frees room."""
    store = FaultyStore(MemoryStore())
    claim(store, 1)
    for step in (10, 20, 30):
        save(store, step)
    store.full()
    with pytest.raises(StoreFull):
        save(store, 40)
    assert prune(store, KEEP_2, attempt=1) == [keys.checkpoint(10, 1)]
    assert check_newest(store) == 30


@pytest.mark.slow
def test_a_zombie_that_wakes_at_any_point_changes_nothing() -> None:
    """Attempt 1 commits and prunes between any two changes of attempt 2: history is unharmed."""
    for n in count(1):
        inner = MemoryStore()
        first: list[int] = [0]
        life(inner, 1, first, saves=3)
        woken: list[str] = []

        def wake(key: str, store: MemoryStore = inner) -> None:
            save(store, 40 + 10 * len(woken), attempt=1)  # noqa: B023  used in this round only
            woken.append(key)  # noqa: B023
            prune_unless_fenced(store)

        committed: list[int] = []
        store = FaultyStore(inner).before("*", wake, nth=n)
        life(store, 2, committed, saves=3)
        found, skipped = latest_valid(inner, verify=check_shards_intact)
        assert found is not None
        assert (found.step, found.attempt) == (committed[-1], 2)
        assert skipped == []
        if not woken:
            break
    assert n > 50


def prune_unless_fenced(store: ObjectStore) -> None:
    """Do what a well-behaved writer does after a commit."""
    from spotguard.errors import Fenced

    try:
        check_not_fenced(store, 1)
        prune(store, KEEP_2, attempt=1)
    except Fenced:
        pass


def check_newest(store: ObjectStore) -> int:
    """Return the step of the newest checkpoint whose every byte is right."""
    found, _ = latest_valid(store, verify=check_shards_intact)
    assert found is not None
    return found.step
