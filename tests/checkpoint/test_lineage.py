"""Claims and lineage: who may write, and which checkpoints count."""

from __future__ import annotations

import json
import threading
from itertools import islice
from typing import Any

import pytest

from spotguard.checkpoint.lineage import (
    CheckpointRef,
    check_not_fenced,
    claim_attempt,
    highest_claim,
    latest_valid,
    read_claim,
    restorable,
)
from spotguard.checkpoint.manifest import check_shards_intact
from spotguard.errors import (
    DamagedCheckpoint,
    Fenced,
    StateMismatch,
    StoreUnavailable,
    UsageError,
)
from spotguard.events import keys
from spotguard.events.checksummed import with_checksum
from spotguard.testing.clock import FakeClock
from spotguard.testing.stores import FaultyStore, MemoryStore
from tests.checkpoint.crashes.savings import body_of, claim, flip, save, sealed


def history(store: Any) -> list[tuple[int, int]]:
    """Return (step, attempt) of what is restorable, newest first."""
    return [(ref.step, ref.attempt) for ref in restorable(store)]


def test_a_claim_comes_back_as_it_was() -> None:
    """Who, when, from where, and what the launcher knew: all of it is readable later."""
    store = MemoryStore()
    made = claim_attempt(store, 1, None, {"price": None, "nodes": 2}, clock=FakeClock(1e9))

    assert read_claim(store, 1) == highest_claim(store) == made
    assert (made.claimed_at, made.resumed_from, made.resumed_step) == (1e9, None, 0)
    assert made.extra == {"price": None, "nodes": 2}
    assert read_claim(store, 2) is None


def test_a_number_is_claimed_once() -> None:
    """The second process with the same number is fenced, and told who holds it."""
    store = MemoryStore()
    made = claim_attempt(store, 1, None)
    with pytest.raises(Fenced, match="attempt 1 is already claimed by " + made.writer):
        claim_attempt(store, 1, None)


def test_of_racing_claimants_one_wins() -> None:
    """Any number of processes that claim one number at once leave one writer."""
    store = MemoryStore()
    outcomes: list[str] = []
    start = threading.Barrier(8)

    def race() -> None:
        start.wait()
        try:
            outcomes.append(claim_attempt(store, 1, None).writer)
        except Fenced:
            outcomes.append("fenced")

    threads = [threading.Thread(target=race) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    holder = highest_claim(store)
    assert holder is not None
    assert sorted(outcomes) == sorted([holder.writer, *["fenced"] * 7])


def test_a_later_claim_fences_all_earlier_attempts() -> None:
    """An earlier attempt learns it when it claims late, and at its next check."""
    store = MemoryStore()
    claim(store, 1)
    check_not_fenced(store, 1)
    claim(store, 3)

    for attempt in (1, 2):
        with pytest.raises(Fenced, match=f"attempt {attempt} is fenced: attempt 3 has claimed"):
            check_not_fenced(store, attempt)
    with pytest.raises(Fenced):
        claim(store, 2)
    assert read_claim(store, 2) is None
    check_not_fenced(store, 3)


def test_a_claim_that_is_overtaken_while_it_is_made_is_fenced() -> None:
    """A higher claim between the look and the write: the lower one does not get to train."""
    store = FaultyStore(MemoryStore())
    store.before("put", lambda _key: claim(store.inner, 2), key_contains="000001")
    with pytest.raises(Fenced, match="attempt 2"):
        claim(store, 1)


def test_a_claim_whose_answer_was_lost_is_still_ours() -> None:
    """A store client that repeats its request meets its own claim, and that is a success."""
    inner = MemoryStore()

    class Repeating(FaultyStore):
        def put(self, key: str, data: Any, **how: Any) -> str:
            inner.put(key, data, **how)
            return inner.put(key, data, **how)

    assert claim_attempt(Repeating(inner), 1, None) == highest_claim(inner)


def test_stops_and_heartbeats_are_not_claims() -> None:
    """An attempt that died before it claimed, or was told to stop before, fences nobody."""
    store = MemoryStore()
    claim(store, 1)
    save(store, 10)
    store.put(keys.stop(2), b"{}")
    store.put(keys.heartbeat(2, 0), b"{}")

    check_not_fenced(store, 1)
    assert history(store) == [(10, 1)]


def test_an_unclaimed_run_restores_nothing() -> None:
    """Without a claim nobody knows whose checkpoints these are."""
    store = MemoryStore()
    save(store, 10)
    assert history(store) == []
    assert latest_valid(store) == (None, [])
    assert highest_claim(store) is None


def test_history_runs_through_the_claims() -> None:
    """Newest first: the attempt's own, then what it went on from and before, and so on."""
    store = MemoryStore()
    claim(store, 1)
    for step in (10, 20, 30):
        save(store, step)
    claim(store, 2, keys.checkpoint(30, 1))
    assert history(store) == [(30, 1), (20, 1), (10, 1)]

    for step in (40, 50, 60):
        save(store, step, attempt=2)
    claim(store, 3, keys.checkpoint(50, 2))
    save(store, 60, attempt=3)
    assert history(store) == [(60, 3), (50, 2), (40, 2), (30, 1), (20, 1), (10, 1)]


@pytest.mark.parametrize("zombie_step", [35, 40, 45, 50, 10**9])
def test_a_zombies_late_commits_never_count(zombie_step: int) -> None:
    """Whatever step attempt 1 commits after attempt 2's claim, it is never restored."""
    store = MemoryStore()
    claim(store, 1)
    save(store, 30)
    claim(store, 2, keys.checkpoint(30, 1))
    save(store, zombie_step, attempt=1)
    assert history(store) == [(30, 1)]

    save(store, 40, attempt=2)
    claim(store, 3, keys.checkpoint(40, 2))
    assert history(store) == [(40, 2), (30, 1)]


def test_a_commit_between_look_and_claim_is_lost_not_mixed() -> None:
    """Attempt 2 looked, attempt 1 committed once more, attempt 2 claimed: history is clean."""
    store = FaultyStore(MemoryStore())
    claim(store, 1)
    save(store, 30)
    found, _ = latest_valid(store)
    assert found is not None

    def commit_once_more(_key: str) -> None:
        save(store.inner, 40)

    store.before("put", commit_once_more, key_contains="claim")
    claim(store, 2, found.prefix)

    assert history(store) == [(30, 1)]


def test_a_start_from_nothing_ends_the_history() -> None:
    """What a fresh start left behind it stays behind."""
    store = MemoryStore()
    claim(store, 1)
    save(store, 30)
    claim(store, 2, None)
    assert history(store) == []
    save(store, 5, attempt=2)
    assert history(store) == [(5, 2)]


def test_an_attempt_has_nothing_before_what_it_went_on_from() -> None:
    """A checkpoint that its own attempt's claim contradicts is not part of the history."""
    store = MemoryStore()
    claim(store, 1)
    save(store, 30)
    claim(store, 2, keys.checkpoint(30, 1))
    save(store, 20, attempt=2)
    assert history(store) == [(30, 1)]


def test_shards_without_a_manifest_are_no_checkpoint() -> None:
    """A save that died before its commit does not exist."""
    store = MemoryStore()
    claim(store, 1)
    save(store, 10)
    store.delete(keys.manifest(save(store, 20)))
    assert history(store) == [(10, 1)]


def test_a_lost_claim_in_the_middle_does_not_hide_what_it_was_named_for() -> None:
    """The named checkpoint and its attempt's earlier ones count even if its claim is gone."""
    store = MemoryStore()
    claim(store, 1)
    save(store, 10)
    save(store, 20)
    claim(store, 2, keys.checkpoint(10, 1))
    store.delete(keys.claim(1))
    assert history(store) == [(10, 1)]


def test_the_newest_is_found_without_asking_for_all() -> None:
    """The first restorable checkpoint costs one look, however many there are."""
    store = FaultyStore(MemoryStore())
    claim(store, 1)
    for step in range(100):
        store.put(keys.manifest(keys.checkpoint(step, 1)), b"")
    store.calls.clear()
    assert [ref.step for ref in islice(restorable(store), 1)] == [99]
    assert store.calls["head"] <= 2
    assert store.calls["list_folders"] == 2


def test_a_damaged_checkpoint_is_skipped_and_reported() -> None:
    """Restore falls back to the one before, and says which was skipped and why."""
    store = MemoryStore()
    claim(store, 1)
    prefixes = [save(store, step) for step in (10, 20, 30, 40)]
    flip(store, keys.manifest(prefixes[3]), 1000)
    flip(store, prefixes[2] + "rank-00001-of-00002.safetensors", -1)
    store.delete(prefixes[1] + "rank-00000-of-00002.safetensors")

    quick, skipped = latest_valid(store)
    assert quick is not None
    assert quick.step == 30
    assert [prefix for prefix, _ in skipped] == [prefixes[3]]

    thorough, skipped = latest_valid(store, verify=check_shards_intact)
    assert thorough is not None
    assert thorough.step == 10
    assert [prefix for prefix, _ in skipped] == prefixes[:0:-1]
    assert [word in problem for (_, problem), word in zip(skipped, WORDS, strict=True)] == [
        True
    ] * 3


WORDS = ("damaged", "hash", "missing")


def test_a_resume_from_an_older_checkpoint_leaves_the_damaged_ones_out() -> None:
    """After a fallback the skipped checkpoints are out of the history for good."""
    store = MemoryStore()
    claim(store, 1)
    save(store, 10)
    flip(store, keys.manifest(save(store, 20)), 1000)
    found, _ = latest_valid(store)
    assert found is not None
    claim(store, 2, found.prefix)
    save(store, 15, attempt=2)
    assert history(store) == [(15, 2), (10, 1)]


def test_all_damaged_is_not_the_same_as_none() -> None:
    """The caller can tell a fresh start from a total loss."""
    store = MemoryStore()
    claim(store, 1)
    flip(store, keys.manifest(save(store, 10)), 500)
    found, skipped = latest_valid(store)
    assert found is None
    assert len(skipped) == 1


def test_trouble_with_the_store_is_not_damage() -> None:
    """A store that fails for a moment must not cost a checkpoint."""
    store = FaultyStore(MemoryStore())
    claim(store, 1)
    save(store, 10)
    save(store, 20)
    store.fail("get", key_contains="manifest")
    with pytest.raises(StoreUnavailable):
        latest_valid(store)


def test_a_newer_schema_stops_the_search() -> None:
    """Falling back behind a checkpoint of a newer spotguard would lose its work in silence."""
    store = MemoryStore()
    claim(store, 1)
    save(store, 10)
    prefix = save(store, 20)
    manifest, _ = latest_valid(store)
    assert manifest is not None
    store.put(keys.manifest(prefix), sealed(body_of(manifest) | {"schema": 99}))
    with pytest.raises(StateMismatch):
        latest_valid(store)


def test_a_checkpoint_pruned_during_the_search_is_passed_over() -> None:
    """What vanishes between listing and reading is reported, not a crash."""
    store = FaultyStore(MemoryStore())
    claim(store, 1)
    save(store, 10)
    save(store, 20)
    store.before("get", store.inner.delete, key_contains="000000000020-000001/manifest")
    found, skipped = latest_valid(store)
    assert found is not None
    assert found.step == 10
    assert len(skipped) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"resumed_from": keys.checkpoint(10, 2)},
        {"resumed_from": keys.checkpoint(10, 7)},
        {"resumed_from": keys.checkpoint(10, 0)},
        {"resumed_from": "elsewhere/"},
        {"resumed_from": 5},
        {"attempt": 3},
        {"attempt": "2"},
        {"claimed_at": "never"},
        {"extra": None},
        {"writer": 5},
    ],
)
def test_a_forged_claim_is_named_and_never_loops(change: dict[str, Any]) -> None:
    """A claim that cannot be true stops the restore with its key and the way out."""
    store = MemoryStore()
    claim(store, 1)
    save(store, 10)
    claim(store, 2, keys.checkpoint(10, 1))
    body = json.loads(store.get(keys.claim(2)))
    del body["checksum"]
    store.put(keys.claim(2), with_checksum(json.dumps(body | change).encode()))
    with pytest.raises(DamagedCheckpoint, match=r"attempts/000002/claim\.json") as caught:
        latest_valid(store)
    assert "gives up what attempt 2 did" in caught.value.hint


def test_every_flipped_bit_of_a_claim_is_found() -> None:
    """A digit of what it went on from would otherwise be another history, silently."""
    store = MemoryStore()
    claim(store, 1)
    save(store, 10)
    claim(store, 2, keys.checkpoint(10, 1))
    for bit in range(8 * len(store.get(keys.claim(2)))):
        flip(store, keys.claim(2), bit)
        with pytest.raises(DamagedCheckpoint, match=r"attempts/000002/claim\.json"):
            read_claim(store, 2)
        flip(store, keys.claim(2), bit)


def test_a_claim_of_an_older_version_is_read() -> None:
    """It has no checksum, and counts all the same."""
    store = MemoryStore()
    claim(store, 1)
    made = read_claim(store, 1)
    body = json.loads(store.get(keys.claim(1)))
    del body["checksum"]
    store.put(keys.claim(1), json.dumps(body).encode())
    assert read_claim(store, 1) == made


@pytest.mark.parametrize(
    ("attempt", "resumed_from"),
    [(0, None), (10**6, None), (2, keys.checkpoint(10, 2)), (2, "checkpoints/10-1/"), (2, "x")],
)
def test_a_claim_that_makes_no_sense_is_not_written(attempt: int, resumed_from: str | None) -> None:
    """A wrong number or source is refused before the store is touched."""
    store = FaultyStore(MemoryStore())
    with pytest.raises(UsageError):
        claim_attempt(store, attempt, resumed_from)
    assert store.mutations == 0


def test_foreign_folders_are_not_checkpoints() -> None:
    """Whatever else lies below checkpoints/ and attempts/ is ignored."""
    store = MemoryStore()
    claim(store, 1)
    save(store, 10)
    for key in ("checkpoints/10-1/manifest.json", "checkpoints/x/y", "attempts/old/claim.json"):
        store.put(key, b"")
    assert history(store) == [(10, 1)]
    assert CheckpointRef.of("checkpoints/x/") is None
