from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from spotguard.checkpoint.lineage import CheckpointRef, list_all
from spotguard.checkpoint.retention import Retention
from spotguard.checkpoint.shard import shard_file, write_shard
from spotguard.control.checkpoints import commands as checkpoints
from spotguard.control.checkpoints.commands import Validity
from spotguard.control.checkpoints.detail import describe
from spotguard.control.checkpoints.find import OpenedRun, committed, find_checkpoint, open_run
from spotguard.control.run_folder import folder_of
from spotguard.errors import DamagedCheckpoint, StoreUnavailable, UsageError
from spotguard.events import keys
from spotguard.events.event import Event, JobEvent
from spotguard.events.states import CheckpointKind
from spotguard.shared.json_documents import document
from spotguard.testing import FaultyStore, MemoryStore
from tests.checkpoint.crashes.savings import blocks, claim, flip, make_manifest, save, sealed
from tests.control.run_folders import make_run

if TYPE_CHECKING:
    from pathlib import Path

    from spotguard.checkpoint.manifest import Manifest
    from spotguard.storage.base import ObjectStore


def a_history() -> MemoryStore:
    """Return a store with two attempts, a zombie's save, and the remains of a dead one.

    In the history: 10-1, 20-1, 30-2, 40-2. Outside: 30-1.
    """
    store = MemoryStore()
    claim(store, 1)
    save(store, 10)
    save(store, 20, parent=keys.checkpoint(10, 1))
    claim(store, 2, keys.checkpoint(20, 1))
    save(store, 30, 1)  # the zombie
    save(store, 30, 2, parent=keys.checkpoint(20, 1))
    save(store, 40, 2, parent=keys.checkpoint(30, 2), kind=CheckpointKind.EMERGENCY)
    write_shard(store, keys.checkpoint(50, 2), shard_file(0, 2), blocks(50))
    return store


def opened(store: ObjectStore, *, at_rest: bool | None = True) -> OpenedRun:
    """Return the run of a store."""
    return OpenedRun(run_id="a-run", store=store, at_rest=at_rest)


def ref(step: int, attempt: int = 1) -> CheckpointRef:
    """Return a checkpoint by its numbers."""
    found = CheckpointRef.of(keys.checkpoint(step, attempt))
    assert found
    return found


def names(store: ObjectStore) -> list[str]:
    """Return what the list shows, as `step-attempt`."""
    return [f"{row.step}-{row.attempt}" for row in checkpoints.list_checkpoints(opened(store))]


# ---------------------------------------------------------------- listing


def test_the_list_tells_what_counts_and_what_does_not() -> None:
    """The history, the next one to go on from, a zombie's save and a dead one's remains."""
    rows = checkpoints.list_checkpoints(opened(a_history()))
    assert [(f"{row.step}-{row.attempt}", row.in_history, row.is_next) for row in rows] == [
        ("50-2", False, False),
        ("40-2", True, True),
        ("30-2", True, False),
        ("30-1", False, False),
        ("20-1", True, False),
        ("10-1", True, False),
    ]
    dead, newest = rows[:2]
    assert (dead.condition, dead.kind, dead.created_at) == (
        Validity.UNCOMMITTED,
        None,
        None,
    )
    assert dead.size_bytes
    assert dead.size_bytes > 4096
    assert (newest.condition, newest.kind) == (Validity.WHOLE, CheckpointKind.EMERGENCY)
    assert (newest.world_size, newest.problem) == (2, "")
    assert newest.created_at == 1_700_000_000.125
    assert document(newest)["created_at"] == "2023-11-14T22:13:20.125Z"


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_next() -> None:
    """What the list promises is what a restore does: it falls back."""
    store = a_history()
    store.delete(keys.checkpoint(40, 2) + shard_file(1, 2))
    flip(store, keys.manifest(keys.checkpoint(30, 2)), 900)
    rows = {f"{row.step}-{row.attempt}": row for row in checkpoints.list_checkpoints(opened(store))}
    assert rows["40-2"].condition is Validity.DAMAGED
    assert "rank-00001-of-00002.safetensors is missing" in rows["40-2"].problem
    assert rows["30-2"].condition is Validity.DAMAGED
    assert rows["30-2"].kind is None
    assert rows["20-1"].is_next


def test_a_newer_format_is_not_called_damaged_and_nothing_older_is_next() -> None:
    """Restoring would stop there and ask for an upgrade, so the list does not promise more."""
    store = a_history()
    key = keys.manifest(keys.checkpoint(40, 2))
    store.put(key, sealed({"schema": 9}))
    rows = checkpoints.list_checkpoints(opened(store))
    assert rows[1].condition is Validity.NEWER
    assert "schema 9" in rows[1].problem
    assert not any(row.is_next for row in rows)
    (result,) = checkpoints.verify(opened(store), [ref(40, 2)])
    assert (result.condition, result.size_bytes) == (Validity.NEWER, None)


def test_a_damaged_claim_makes_the_history_unknown_not_empty() -> None:
    """Without the claim nobody can tell which saves count."""
    store = a_history()
    flip(store, keys.claim(2), 8)
    rows = checkpoints.list_checkpoints(opened(store))
    assert [row.in_history for row in rows] == [None] * 6
    assert not any(row.is_next for row in rows)
    assert rows[1].condition is Validity.WHOLE


def test_what_retention_deletes_during_the_listing_is_left_out_not_called_damaged() -> None:
    """A look at a living run raises no false alarm."""
    inner = a_history()
    prefix = keys.checkpoint(10, 1)

    def pruned(_: str) -> None:
        for info in list(inner.list(prefix)):
            inner.delete(info.key)

    store = FaultyStore(inner).before("get", pruned, key_contains=f"{prefix}manifest")
    assert "10-1" not in names(store)


def test_a_store_without_checkpoints_has_an_empty_list() -> None:
    """Also one whose folder does not exist yet."""
    assert checkpoints.list_checkpoints(opened(MemoryStore())) == []


# ---------------------------------------------------------------- finding


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (None, "40-2"),
        ("latest", "40-2"),
        ("20", "20-1"),
        ("30", "30-2"),
        ("30-1", "30-1"),
        ("checkpoints/000000000030-000001/", "30-1"),
    ],
)
def test_a_checkpoint_is_found_by_what_users_type(text: str | None, found: str) -> None:
    """The history is preferred; a zombie's is there for whoever asks for it."""
    meant = find_checkpoint(a_history(), text)
    assert f"{meant.step}-{meant.attempt}" == found
    assert find_checkpoint(a_history(), text, list_all(a_history())) == meant


def test_what_cannot_be_found_is_refused_with_the_nearest() -> None:
    """Nobody has to list before the second try."""
    store = a_history()
    with pytest.raises(UsageError, match="no committed checkpoint 33") as caught:
        find_checkpoint(store, "33")
    assert "30-" in caught.value.hint
    with pytest.raises(UsageError, match="no committed checkpoint 50"):
        find_checkpoint(store, "50")  # there are only remains
    with pytest.raises(UsageError, match="'newest'; allowed: a step"):
        find_checkpoint(store, "newest")
    with pytest.raises(UsageError, match="no checkpoint to go on from"):
        find_checkpoint(MemoryStore())
    save(store, 30, 3)
    assert find_checkpoint(store, "30").attempt == 2
    save(store, 70, 1)
    save(store, 70, 3)
    with pytest.raises(UsageError, match=r"2 checkpoints outside .* 70-3, 70-1") as caught:
        find_checkpoint(store, "70")
    assert "70-3" in caught.value.hint


def test_a_run_is_opened_by_id_by_place_and_by_default(home: Path) -> None:
    """The id's beginning is enough; a place needs no journal on this machine."""
    run = make_run(home, "alpha-250101-000000-aaaa")
    claim(run, 1)
    assert open_run(None).run_id == "alpha-250101-000000-aaaa"
    assert open_run("alpha").store.url == run.url
    place = home / "store" / "alpha-250101-000000-aaaa"
    for text in (str(place), f"file://{place}", f"{place}/"):
        by_place = open_run(text)
        assert by_place.store.url == run.url
        assert by_place.at_rest is None
    assert open_run("alpha").at_rest is False
    with pytest.raises(UsageError, match="no run 'alhpa'"):
        open_run("alhpa")
    with pytest.raises(UsageError, match=r"no run at .*nobody"):
        open_run(str(home / "store" / "nobody"))
    with pytest.raises(UsageError, match="does not name a run"):
        open_run("file:///tmp/Not A Run")


# ---------------------------------------------------------------- describing


@pytest.mark.parametrize("harm", ["none", "newest", "two", "newer format", "claim", "gone"])
def test_one_row_is_as_in_the_list(harm: str) -> None:
    """Also whether the next start goes on from it; only as many are looked at as that takes."""
    store = a_history()
    match harm:
        case "newest" | "two":
            store.delete(keys.checkpoint(40, 2) + shard_file(1, 2))
            if harm == "two":
                store.delete(keys.checkpoint(30, 2) + shard_file(1, 2))
        case "newer format":
            store.put(keys.manifest(keys.checkpoint(40, 2)), sealed({"schema": 9}))
        case "claim":
            flip(store, keys.claim(2), 8)
        case "gone":
            store.delete(keys.checkpoint(50, 2) + shard_file(0, 2))
    rows = checkpoints.list_checkpoints(opened(store))
    refs = [ref(*at) for at in ((50, 2), (40, 2), (30, 2), (30, 1), (20, 1), (10, 1))]
    listing = list_all(store)
    one_by_one = [checkpoints.find_row(opened(store), each, listing) for each in refs]
    assert [row for row in one_by_one if row is not None] == rows


def test_describing_looks_at_few_others() -> None:
    """One checkpoint of ten thousand, each with the one before as its parent, costs no more."""
    store = MemoryStore()
    claim(store, 1)
    for step in range(1, 200):
        save(store, step, parent=keys.checkpoint(step - 1, 1) if step > 1 else None)
    counting = FaultyStore(store)
    detail = describe(opened(counting), ref(199))
    assert counting.calls["get"] < 20
    assert (len(detail.parents), detail.more_parents, detail.lost_parent) == (10, True, None)
    assert detail.row.is_next
    assert not describe(opened(store), ref(11)).more_parents


def test_the_description_has_tensors_parts_ancestors_and_counters() -> None:
    """Everything that the manifest says, each tensor once with all of its parts."""
    detail = describe(opened(a_history()), ref(40, 2))
    assert detail.row.is_next
    assert detail.parents == tuple(keys.checkpoint(*at) for at in ((30, 2), (20, 1), (10, 1)))
    assert detail.lost_parent is None
    assert detail.counters == {"train_s": 1.5}
    assert detail.versions == {"spotguard": "0"}
    assert [file for file, _ in detail.files] == [shard_file(0, 2), shard_file(1, 2)]
    tensors = {item.name: item for item in detail.tensors}
    assert tensors["weight"].shape == (8, 16)
    assert tensors["part"].shape == (4, 3)
    assert [part.offsets for part in tensors["part"].parts] == [(2, 0), (2, 0)]
    assert tensors["bias"].parts[0].end - tensors["bias"].parts[0].start == 12
    assert document(detail)["tensors"][0]["parts"][0]["file"] == shard_file(0, 2)


def test_the_ancestors_end_where_retention_cut_them_off() -> None:
    """A pruned parent is named as lost, and so is a damaged one; a circle ends too."""
    store = a_history()
    store.delete(keys.manifest(keys.checkpoint(20, 1)))
    detail = describe(opened(store), ref(40, 2))
    assert (len(detail.parents), detail.lost_parent) == (1, keys.checkpoint(20, 1))
    circle = MemoryStore()
    save(circle, 1, parent=keys.checkpoint(2, 1))
    save(circle, 2, parent=keys.checkpoint(1, 1))
    assert len(describe(opened(circle), ref(1)).parents) == 2


def test_a_damaged_manifest_cannot_be_described() -> None:
    """One sentence with the file, not a guess at what it might have held."""
    store = a_history()
    flip(store, keys.manifest(keys.checkpoint(40, 2)), 900)
    with pytest.raises(DamagedCheckpoint, match=r"manifest\.json is damaged"):
        describe(opened(store), ref(40, 2))


# ---------------------------------------------------------------- verifying


def test_verification_names_each_damaged_shard_and_reads_everything() -> None:
    """One flipped bit in a tensor, one in another shard: both are named, with the bytes."""
    store = a_history()
    flip(store, keys.checkpoint(40, 2) + shard_file(0, 2), -1)
    flip(store, keys.checkpoint(40, 2) + shard_file(1, 2), 4096 * 8 + 1)
    damaged, whole = checkpoints.verify(opened(store), [ref(40, 2), ref(30, 2)])
    assert damaged.condition is Validity.DAMAGED
    assert [file for file, _ in damaged.problems] == [shard_file(0, 2), shard_file(1, 2)]
    assert all("the hash of bytes 4096 to" in problem for _, problem in damaged.problems)
    assert (whole.condition, whole.problems) == (Validity.WHOLE, ())


@pytest.mark.parametrize("bit", [None, 4096 * 8 + 1], ids=["whole", "damaged"])
def test_the_progress_of_a_verification_is_complete(bit: int | None) -> None:
    """It grows, and ends at the total, also when a shard was given up half way."""
    store = a_history()
    if bit is not None:
        flip(store, keys.checkpoint(40, 2) + shard_file(0, 2), bit)
    told: list[tuple[int, int]] = []
    checkpoints.verify(
        opened(store), [ref(40, 2), ref(30, 2)], lambda *progress: told.append(progress)
    )
    assert told[-1][0] == told[-1][1]
    assert told == sorted(told)


def test_a_damaged_manifest_is_found_and_named() -> None:
    """Its own checksum covers every byte of it."""
    store = a_history()
    flip(store, keys.manifest(keys.checkpoint(40, 2)), 500)
    (result,) = checkpoints.verify(opened(store), [ref(40, 2)])
    assert [file for file, _ in result.problems] == ["manifest.json"]
    assert document(result)["condition"] == "damaged"


def test_a_store_that_fails_is_not_damage() -> None:
    """Nobody deletes a good checkpoint because the network was down."""
    with pytest.raises(StoreUnavailable):
        checkpoints.verify(opened(FaultyStore(a_history()).fail("get_into")), [ref(40, 2)])


def test_what_is_pruned_while_it_is_verified_is_left_out() -> None:
    """Retention at work in a living run is no damage."""
    inner = a_history()

    def pruned(_: str) -> None:
        for info in list(inner.list(keys.checkpoint(10, 1))):
            inner.delete(info.key)

    store = FaultyStore(inner).before("get_into", pruned, nth=2)
    assert checkpoints.verify(opened(store), [ref(10, 1)]) == []


def test_all_committed_checkpoints_can_be_verified() -> None:
    """Also those outside the history, but not the remains of a dead save."""
    assert len(list(committed(a_history()))) == 5


# ---------------------------------------------------------------- pruning and pinning


def test_pruning_keeps_the_last_the_pinned_and_the_multiples() -> None:
    """The plan and the deed agree, and nothing else is touched."""
    store = a_history()
    checkpoints.pin(store, ref(10), why="the paper")
    policy = Retention(keep_last=2)
    planned = checkpoints.plan_prune(opened(store), policy)
    before = names(store)
    assert before == names(store)  # planning deletes nothing
    done = checkpoints.prune(opened(store), policy)
    assert done == planned
    assert done.checkpoints == (keys.checkpoint(20, 1), keys.checkpoint(30, 1))
    assert done.size_bytes > 4 * 4096
    assert names(store) == ["50-2", "40-2", "30-2", "10-1"]
    assert checkpoints.plan_prune(opened(store), policy).checkpoints == ()
    assert checkpoints.unpin(store, ref(10)) is True
    kept = Retention(keep_last=2, keep_every_steps=10)
    assert checkpoints.plan_prune(opened(store), kept).checkpoints == ()
    assert checkpoints.prune(opened(store), policy).checkpoints == (keys.checkpoint(10, 1),)


def test_pins_say_whether_they_changed_anything() -> None:
    """And only what is committed can be pinned."""
    store = a_history()
    assert checkpoints.pin(store, ref(20)) is True
    assert checkpoints.pin(store, ref(20)) is False
    assert [row.pinned for row in checkpoints.list_checkpoints(opened(store))].count(True) == 1
    assert checkpoints.unpin(store, ref(20)) is True
    assert checkpoints.unpin(store, ref(20)) is False


@pytest.mark.parametrize("at_rest", [False, None])
def test_a_run_that_may_be_saving_is_not_pruned(at_rest: bool | None) -> None:
    """Neither one with a living controller nor one of which nothing proves that it has ended."""
    store = a_history()
    run = opened(store, at_rest=at_rest)
    before = names(store)
    with pytest.raises(UsageError, match="not known to be at rest") as caught:
        checkpoints.prune(run, Retention(keep_last=2))
    assert "spotguard stop a-run" in caught.value.hint
    assert names(store) == before
    assert checkpoints.plan_prune(run, Retention(keep_last=2)).checkpoints  # looking is allowed


@pytest.mark.parametrize("who", ["job", "controller"])
def test_an_attempt_that_is_known_to_be_over_may_be_pruned(who: str) -> None:
    """The job's own word is enough, or the controller's; that of an older attempt is not."""
    store = a_history()

    def ended(attempt: int) -> None:
        if who == "controller":
            store.put(keys.end(attempt), b"{}")
            return
        event = Event(kind=JobEvent.ENDED, at=5.0, attempt=attempt)
        key = keys.event(attempt, at=5.0, node=0, rank=0, count=1)
        store.put(key, event.to_json())

    ended(1)
    with pytest.raises(UsageError):
        checkpoints.check_at_rest(opened(store, at_rest=None))
    ended(2)
    checkpoints.check_at_rest(opened(store, at_rest=None))
    store.put(keys.launch(3), b"{}")  # the next one is on its way
    with pytest.raises(UsageError):
        checkpoints.check_at_rest(opened(store, at_rest=False))


def test_a_settled_run_is_at_rest_unless_its_controller_still_lives(home: Path) -> None:
    """The journal's word counts, as long as nobody is in control any more."""
    run_id = "alpha-250101-000000-aaaa"
    make_run(home, run_id, settled=True)
    assert open_run(run_id).at_rest is True
    with folder_of(run_id).control(patience_s=0) as alone:
        assert alone
        assert open_run(run_id).at_rest is False


def test_a_run_that_never_claimed_anything_has_nothing_to_prune() -> None:
    """No history, no writer: nothing is deleted on a guess."""
    store = MemoryStore()
    save(store, 10)
    assert checkpoints.prune(opened(store), Retention()).checkpoints == ()
    assert names(store) == ["10-1"]


def test_a_manifest_of_another_place_is_damage() -> None:
    """A checkpoint copied under another name is not what its name says."""
    store = a_history()
    stray: Manifest = make_manifest(7)
    store.put(keys.manifest(keys.checkpoint(60, 2)), stray.to_json())
    assert checkpoints.list_checkpoints(opened(store))[0].condition is Validity.DAMAGED
