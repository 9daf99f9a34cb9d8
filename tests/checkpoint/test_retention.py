"""Retention: what stays, and that nothing which could be needed ever goes."""

from __future__ import annotations

from typing import Any

import pytest

from spotguard.checkpoint.lineage import latest_valid, restorable
from spotguard.checkpoint.retention import Retention, discard_uncommitted, pin, prune, unpin
from spotguard.errors import AlreadyExists, Fenced, NotFound, StoreUnavailable
from spotguard.events import keys
from spotguard.events.states import CheckpointKind
from spotguard.testing.stores import FaultyStore, MemoryStore
from tests.checkpoint.crashes.savings import claim, flip, save

KEEP_2 = Retention(keep_last=2)


def steps(store: Any) -> list[int]:
    """Return the restorable steps, newest first."""
    return [ref.step for ref in restorable(store)]


def run_of(*step_numbers: int, **special: CheckpointKind) -> MemoryStore:
    """Return a store with attempt 1 and its checkpoints; `special` is e.g. `s20=BEST`."""
    store = MemoryStore()
    claim(store, 1)
    for step in step_numbers:
        save(store, step, kind=special.get(f"s{step}", CheckpointKind.PERIODIC))
    return store


def test_the_newest_stay_and_the_rest_goes_whole() -> None:
    """Of five, the newest three stay; no object of the others is left."""
    store = run_of(10, 20, 30, 40, 50)
    assert prune(store, Retention(), attempt=1) == [keys.checkpoint(s, 1) for s in (10, 20)]
    assert steps(store) == [50, 40, 30]
    assert len(store.list_folders(keys.CHECKPOINTS)) == 3
    assert prune(store, Retention(), attempt=1) == []


def test_best_final_milestones_and_pins_stay() -> None:
    """The newest best, every final, every Nth step and whatever is pinned outlive the rest."""
    best, final = CheckpointKind.BEST, CheckpointKind.FINAL
    store = run_of(10, 20, 30, 40, 50, 60, 70, 80, 90, s10=best, s20=best, s30=final)
    pin(store, keys.checkpoint(40, 1), why="for the paper")
    prune(store, Retention(keep_last=2, keep_every_steps=50), attempt=1)
    assert steps(store) == [90, 80, 50, 40, 30, 20]

    unpin(store, keys.checkpoint(40, 1))
    prune(store, Retention(keep_last=2, keep_every_steps=50), attempt=1)
    assert steps(store) == [90, 80, 50, 30, 20]


@pytest.mark.parametrize("keep_last", [2, 6])
def test_the_newest_checkpoint_with_finite_weights_stays(keep_last: int) -> None:
    """However many came after weights became NaN, one stays to go on from; a version before this
    did not look, so what it wrote counts as finite."""
    store = MemoryStore()
    claim(store, 1)
    for step in (10, 20, 30):
        save(store, step, counters={"finite": True} if step != 30 else {})
    for step in range(40, 120, 10):
        save(store, step, counters={"finite": False})
    prune(store, Retention(keep_last=keep_last), attempt=1, at_most=None)
    assert steps(store) == [*range(110, 110 - 10 * keep_last, -10), 30]


def test_only_what_exists_can_be_pinned() -> None:
    """A typo in a pin is an error, not a folder that looks like a checkpoint."""
    store = run_of(10)
    with pytest.raises(NotFound):
        pin(store, keys.checkpoint(11, 1))
    assert steps(store) == [10]


def test_damaged_checkpoints_do_not_count_as_kept() -> None:
    """Two whole ones stay behind any number of damaged ones."""
    store = run_of(10, 20, 30, 40, 50)
    flip(store, keys.manifest(keys.checkpoint(50, 1)), 700)
    store.delete(keys.checkpoint(40, 1) + "rank-00000-of-00002.safetensors")
    prune(store, KEEP_2, attempt=1)

    assert steps(store) == [50, 40, 30, 20]
    found, _ = latest_valid(store)
    assert found is not None
    assert found.step == 30


def test_a_fenced_attempt_deletes_nothing() -> None:
    """A zombie's pruning must not pull the ground from under the attempt that went on."""
    store = FaultyStore(run_of(10, 20, 30, 40))
    claim(store, 2, keys.checkpoint(20, 1))
    with pytest.raises(Fenced):
        prune(store, KEEP_2, attempt=1)
    assert store.calls["delete"] == 0


def test_what_a_new_attempt_goes_on_from_survives_a_prune_at_the_same_moment() -> None:
    """The old writer checked, the new one claims, then the old one deletes: the source stays."""
    store = FaultyStore(run_of(10, 20, 30))
    found, _ = latest_valid(store)  # attempt 2 looks
    assert found is not None
    save(store, 40)  # attempt 1 commits once more, and prunes
    store.before("delete", lambda _key: claim(store.inner, 2, found.prefix))
    prune(store, KEEP_2, attempt=1)

    assert steps(store) == [30]
    again, skipped = latest_valid(store)
    assert again == found
    assert skipped == []


def test_zombie_commits_go_once_the_new_history_stands_alone() -> None:
    """Checkpoints outside the history stay until enough whole ones are inside of it."""
    store = run_of(10, 20, 30, 40)
    claim(store, 2, None)  # a start from nothing
    save(store, 5, attempt=2)
    assert prune(store, KEEP_2, attempt=2) == []

    save(store, 6, attempt=2)
    pin(store, keys.checkpoint(30, 1))
    assert prune(store, KEEP_2, attempt=2) == [keys.checkpoint(s, 1) for s in (10, 20, 40)]
    assert steps(store) == [6, 5]


def test_leftovers_of_dead_saves_go_but_not_of_running_ones() -> None:
    """Shards without a manifest go if no save can be writing them any more."""
    store = run_of(10, 20)
    claim(store, 2, keys.checkpoint(20, 1))
    save(store, 30, attempt=2)
    for step, attempt in [(25, 1), (99, 1), (27, 2), (31, 2), (1, 3)]:
        store.put(keys.checkpoint(step, attempt) + "rank-00000-of-00002.safetensors", b"half")

    assert prune(store, Retention(), attempt=2) == [
        keys.checkpoint(25, 1),
        keys.checkpoint(27, 2),
        keys.checkpoint(99, 1),
    ]
    assert store.list_folders(keys.CHECKPOINTS)[0] == keys.checkpoint(1, 3)
    assert store.list_folders(keys.CHECKPOINTS)[-1] == keys.checkpoint(31, 2)


def test_a_later_attempts_checkpoints_are_never_touched() -> None:
    """Even without a claim, what a higher number wrote is not ours to delete."""
    store = run_of(10, 20, 30)
    save(store, 5, attempt=2)
    prune(store, KEEP_2, attempt=1)
    assert keys.checkpoint(5, 2) in store.list_folders(keys.CHECKPOINTS)


def test_a_store_that_fails_in_the_middle_costs_nothing() -> None:
    """A failed delete leaves whole checkpoints, and the next prune finishes the work."""
    inner = run_of(10, 20, 30, 40, 50)
    store = FaultyStore(inner).fail("delete", nth=2)
    with pytest.raises(StoreUnavailable):
        prune(store, KEEP_2, attempt=1)
    assert steps(inner) == [50, 40, 30, 20]

    assert prune(store, KEEP_2, attempt=1) == [keys.checkpoint(s, 1) for s in (10, 20, 30)]
    assert len(inner.list_folders(keys.CHECKPOINTS)) == 2


@pytest.mark.parametrize(("last", "every"), [(1, None), (0, None), (-1, None), (2, 0), (2, -5)])
def test_settings_that_leave_nothing_are_refused(last: int, every: int | None) -> None:
    """Two checkpoints are the least: the newest may prove damaged."""
    with pytest.raises(ValueError, match=r"Retention\.keep_(last|every_steps) is -?\d+, the least"):
        Retention(keep_last=last, keep_every_steps=every)


def test_a_failed_save_gives_its_room_back() -> None:
    """`discard_uncommitted` removes the shards of a save that failed, never a checkpoint."""
    store = run_of(10)
    prefix = keys.checkpoint(20, 1)
    store.put(prefix + "rank-00000-of-00002.safetensors", b"half")
    discard_uncommitted(store, prefix)
    assert store.list_folders(keys.CHECKPOINTS) == [keys.checkpoint(10, 1)]
    with pytest.raises(AlreadyExists):
        discard_uncommitted(store, keys.checkpoint(10, 1))
    assert steps(store) == [10]
