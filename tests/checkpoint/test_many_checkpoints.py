"""Thousands of checkpoints: nothing that is done again and again asks for each of them."""

from __future__ import annotations

import pytest

from spotguard.checkpoint.lineage import latest_valid, list_all, restorable
from spotguard.checkpoint.retention import Retention, pin, prune
from spotguard.control.checkpoints.commands import list_checkpoints
from spotguard.control.checkpoints.find import OpenedRun, find_checkpoint
from spotguard.errors import DamagedCheckpoint
from spotguard.events import keys
from spotguard.storage.remote.store import RemoteStore
from spotguard.testing.bucket import MemoryBucket
from tests.checkpoint.crashes.savings import claim, save

COUNT = 120
PAGE = 20
ATTEMPTS = 6


@pytest.fixture
def bucket() -> MemoryBucket:
    """Return a bucket with many checkpoints of several attempts; it has short pages."""
    bucket = MemoryBucket(page_size=PAGE)
    store = RemoteStore(bucket)
    source = None
    for attempt in range(1, ATTEMPTS + 1):
        claim(store, attempt, source)
        for number in range(COUNT // ATTEMPTS):
            source = save(store, (attempt - 1) * COUNT // ATTEMPTS + number + 1, attempt)
    bucket.calls.clear()
    return bucket


def pages(objects: int) -> int:
    """Return how many requests list so many objects, and some folders beside."""
    return objects // PAGE + 2


def test_a_resume_asks_for_folders_and_for_the_newest(bucket: MemoryBucket) -> None:
    """However many there are: pages of folders, and a few requests for the one that it takes."""
    manifest, _ = latest_valid(RemoteStore(bucket))

    assert manifest is not None
    assert manifest.step == COUNT
    assert bucket.calls["page"] <= pages(COUNT) + 1
    assert bucket.calls["head"] + bucket.calls["get"] < 10


def test_a_prune_after_a_save_looks_closely_at_few(bucket: MemoryBucket) -> None:
    """Where thousands are to stay, it takes the listing, the claims, and the newest four."""
    gone = prune(RemoteStore(bucket), Retention(keep_last=2 * COUNT), attempt=ATTEMPTS)

    assert gone == []
    assert bucket.calls["page"] <= pages(3 * COUNT) + 2
    assert bucket.calls["head"] + bucket.calls["get"] <= ATTEMPTS + 4 * 4


def test_milestones_and_pins_cost_no_request(bucket: MemoryBucket) -> None:
    """What stays for its name or its pin is not read, save after save."""
    store = RemoteStore(bucket)
    for step in range(1, COUNT, 2):
        pin(store, keys.checkpoint(step, -(-step * ATTEMPTS // COUNT)))
    bucket.calls.clear()
    gone = prune(store, Retention(keep_last=3, keep_every_steps=2), attempt=ATTEMPTS)

    assert gone == []
    assert bucket.calls["head"] + bucket.calls["get"] <= ATTEMPTS + 3 * 4


def test_a_backlog_goes_a_few_at_a_time(bucket: MemoryBucket) -> None:
    """A save is not kept waiting by thousands of deletions, and in the end all are made."""
    store = RemoteStore(bucket)
    first = prune(store, Retention(keep_last=3), attempt=ATTEMPTS)
    assert len(first) == 4
    assert len(list(restorable(store))) == COUNT - 4

    for _ in range(COUNT // 4):
        prune(store, Retention(keep_last=3), attempt=ATTEMPTS)
    assert [ref.step for ref in restorable(store)] == [COUNT, COUNT - 1, COUNT - 2]
    assert len(list_all(store).refs) == 3


def test_all_of_a_backlog_goes_if_asked(bucket: MemoryBucket) -> None:
    """The command does not leave the rest for a next save that never comes."""
    prune(RemoteStore(bucket), Retention(keep_last=3), attempt=ATTEMPTS, at_most=None)
    assert len(list_all(RemoteStore(bucket)).refs) == 3


def test_the_newest_rows_cost_what_they_show(bucket: MemoryBucket) -> None:
    """A short list of many checkpoints asks only for those in it, and marks the right one."""
    run = OpenedRun(run_id="a-run", store=RemoteStore(bucket), at_rest=True)
    rows = list_checkpoints(run, newest=10)

    assert [row.step for row in rows] == list(range(COUNT, COUNT - 10, -1))
    assert [row.is_next for row in rows] == [True] + [False] * 9
    assert bucket.calls["head"] + bucket.calls["get"] <= ATTEMPTS + 10 * 4


def test_one_checkpoint_is_found_by_its_step(bucket: MemoryBucket) -> None:
    """Its folder is looked for, and only it is asked for its manifest."""
    assert find_checkpoint(RemoteStore(bucket), "33").step == 33
    assert bucket.calls["head"] == 1


def test_a_listing_tells_the_same_history(bucket: MemoryBucket) -> None:
    """Asked one by one or listed at once: the same checkpoints in the same order."""
    store = RemoteStore(bucket)
    bucket.delete(keys.manifest(keys.checkpoint(COUNT, ATTEMPTS)))
    bucket.delete(keys.claim(2))
    save(store, 999, 1)  # by a zombie
    listed = list(restorable(store, list_all(store)))
    assert listed == list(restorable(store))
    assert listed[0].step == COUNT - 1
    store.put(keys.claim(3), b"{")
    with pytest.raises(DamagedCheckpoint, match="claim"):
        list(restorable(store, list_all(store)))
