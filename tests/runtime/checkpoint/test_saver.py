from __future__ import annotations

import itertools
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch

from spotguard.checkpoint.lineage import claim_attempt
from spotguard.checkpoint.manifest import commit, load_manifest, shard_readers
from spotguard.errors import CheckpointError, Fenced, StoreFull, StoreUnavailable
from spotguard.events import keys
from spotguard.events.states import CheckpointKind
from spotguard.runtime.checkpoint import restore as restoring
from spotguard.runtime.checkpoint.captured import OutOfContact, WithoutOthers
from spotguard.runtime.checkpoint.staging import StagingBuffer
from spotguard.runtime.state.tree import Leaf, Packed
from spotguard.storage.buffers import views_of
from spotguard.testing import FakeRendezvous, FaultyStore, MemoryStore
from spotguard.testing.stores import SimulatedCrash
from tests.checkpoint.crashes.savings import make_manifest
from tests.runtime.harness.lab import Rank, adapters, next_attempt, together

if TYPE_CHECKING:
    from collections.abc import Callable

    from spotguard.runtime.state.tracked import Finish
    from spotguard.storage.base import Content, ObjectStore


def state(value: float, size: int = 8) -> dict[str, Any]:
    """Return a state whose every value is `value`."""
    return {"weight": torch.full((size,), value), "count": int(value)}


def restored(store: ObjectStore) -> dict[str, Any]:
    """Return what the next attempt finds, and check that it is of one piece."""
    found: dict[str, Any] = {}
    manifest = next_attempt(store, s=found).manifest
    if manifest is None:
        return {}
    assert found["weight"].eq(found["count"]).all(), "a mixture of two states"
    assert manifest.step == found["count"]
    return found


def started(store: ObjectStore, **over: Any) -> Rank:
    """Return the first attempt's rank, claimed."""
    rank = Rank(store, **over)
    rank.start()
    return rank


class Gate:
    """Holds the store's background writer until it is opened."""

    def __init__(self, store: FaultyStore, key_contains: str = "safetensors") -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()
        store.before("put", self._hold, key_contains=key_contains)

    def _hold(self, _key: str) -> None:
        self.reached.set()
        assert self.opened.wait(10)


def test_a_periodic_save_holds_what_was_when_it_began() -> None:
    """Training goes on at once: what it overwrites before a byte is written is not in the save."""
    store = FaultyStore(MemoryStore())
    gate = Gate(store)
    rank = started(store)
    live = state(10)
    rank.later(10, s=live)
    assert gate.reached.wait(10)
    live["weight"].fill_(-1)
    live["count"] = -1
    gate.opened.set()
    rank.saver.wait()

    assert restored(store.inner)["count"] == 10
    assert [saved.step for saved in rank.saved] == [10]
    assert rank.failed == []


def test_one_save_at_a_time() -> None:
    """The next one waits for the one in flight, whose buffer it reuses; both are whole."""
    store = FaultyStore(MemoryStore())
    gate = Gate(store)
    rank = started(store)
    rank.later(10, s=state(10))
    assert gate.reached.wait(10)
    second = threading.Thread(target=rank.later, args=(20,), kwargs={"s": state(20)})
    second.start()
    second.join(0.05)
    assert second.is_alive(), "the buffer was overwritten while it was read"
    gate.opened.set()
    second.join(10)
    rank.saver.wait()

    assert [saved.step for saved in rank.saved] == [10, 20]
    assert restored(store.inner)["count"] == 20


def test_a_save_in_flight_is_waited_for_though_the_buffer_is_made_ready_meanwhile() -> None:
    """A resumed attempt may save before its first step, after which the buffer is made ready.

    The final save must not overtake the one in flight: retention would take its shards for those
    of a dead save, and what was saved last would be the older state.
    """
    store = FaultyStore(MemoryStore())
    gate = Gate(store)
    rank = started(store)
    rank.later(10, s=state(10))
    assert gate.reached.wait(10)
    rank.saver.warm(adapters({"s": state(10)}))
    waits = threading.Thread(target=rank.saver.wait)
    waits.start()
    waits.join(0.05)
    assert waits.is_alive(), "the save in flight was forgotten"
    gate.opened.set()
    waits.join(10)

    assert [saved.step for saved in rank.saved] == [10]
    assert restored(store.inner)["count"] == 10


class SlowWire(MemoryStore):
    """Goes through a shard at once, as a bucket's store does, and reads its bytes much later."""

    def __init__(self) -> None:
        super().__init__()
        self.gone_through, self.opened = threading.Event(), threading.Event()

    def put(self, key: str, data: Content, **options: Any) -> str:
        """Store it, but for the shards of step 20."""
        if "000000000020" in key:
            raise StoreUnavailable("the wire is busy")
        views = list(views_of(data))
        if key.endswith("safetensors"):
            self.gone_through.set()
            assert self.opened.wait(10)
        return super().put(key, b"".join(views), **options)


def test_a_buffer_is_not_written_to_while_a_save_that_was_given_up_reads_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two more saves fail meanwhile, as where another rank is lost: the older one is whole.

    What lies on a GPU is gathered by way of the buffer from which the older save is sent.
    """
    monkeypatch.setattr(
        StagingBuffer,
        "gather",
        lambda buffer, leaves, plan: [buffer.stage(leaves, plan, overlap=False).data],
    )
    store = SlowWire()
    rank = started(store)
    live = state(10)
    rank.later(10, s=live)
    assert store.gone_through.wait(10)
    [older] = [each for each in threading.enumerate() if each.name == "spotguard-save"]
    live["weight"].fill_(20)
    live["count"] = 20
    for _ in range(2):
        capture = rank.saver.capture(20, CheckpointKind.EMERGENCY, adapters({"s": live}), {})
        with pytest.raises(StoreUnavailable):
            rank.saver.save_now(capture, timeout_s=0.02)
    store.opened.set()
    older.join(10)

    assert restored(store)["count"] == 10


def test_states_that_grow_and_shrink() -> None:
    """The buffer serves any size, and what is left of a larger state is in no later one."""
    rank = started(MemoryStore())
    for step, size in enumerate((8, 10_000, 3, 0, 70_000, 8), start=1):
        live = state(step, size)
        rank.later(step, s=live)
        live["weight"].fill_(-1)
        rank.saver.wait()
        found: dict[str, Any] = {}
        rank.restore({"s": adapter(found)})
        assert found["weight"].shape == (size,)
        assert found["weight"].eq(step).all()
    assert rank.failed == []


def adapter(value: dict[str, Any]) -> Any:
    """Return a dict as `run.track` holds it."""
    from spotguard.runtime.state.tracked import tracked

    return tracked("s", value)


def test_the_buffer_is_reused() -> None:
    """Saves of one size take memory once: fresh pages would cost three times the copy."""
    rank = started(MemoryStore())
    addresses = set()
    for step in range(1, 6):
        rank.later(step, s=state(step, 100_000))
        rank.saver.wait()
        addresses.add(rank.saver._buffer._flat.data_ptr())

    assert len(addresses) == 1


FAILURES = {
    "shard": {"key_contains": "safetensors"},
    "manifest": {"key_contains": "manifest"},
    "full": {"key_contains": "safetensors", "error": StoreFull("no room left")},
}


@pytest.mark.parametrize("what", FAILURES)
def test_a_failed_save_is_reported_and_the_next_one_works(what: str) -> None:
    """In the background nobody sees an exception: it is told, and the last save still counts."""
    store = FaultyStore(MemoryStore())
    rank = started(store)
    rank.later(10, s=state(10))
    rank.saver.wait()
    store.fail("put", **FAILURES[what])  # type: ignore[arg-type]
    rank.later(20, s=state(20))
    rank.saver.wait()

    [(step, problem)] = rank.failed
    assert step == 20
    assert isinstance(problem, StoreFull if what == "full" else StoreUnavailable)
    assert rank.saver.last is not None
    assert rank.saver.last.step == 10
    assert load_manifest(store.inner, keys.checkpoint(10, 1)).step == 10
    rank.later(30, s=state(30))
    rank.saver.wait()
    assert restored(store.inner)["count"] == 30
    assert load_manifest(store.inner, keys.checkpoint(30, 1)).parent == keys.checkpoint(10, 1)


@pytest.mark.parametrize(
    "error", [RuntimeError("CUDA error"), MemoryError(), OSError(5, "I/O"), KeyError("a library's")]
)
def test_no_failure_is_silent(error: Exception) -> None:
    """An error that no store should raise is told too; a dead thread would tell nobody."""
    store = FaultyStore(MemoryStore()).fail("put", error=error, key_contains="safetensors")
    rank = started(store)
    rank.later(10, s=state(10))
    rank.saver.wait()

    [(step, problem)] = rank.failed
    assert step == 10
    assert isinstance(problem, CheckpointError)
    rank.later(20, s=state(20))
    rank.saver.wait()
    assert restored(store.inner)["count"] == 20


def test_pruning_reads_no_manifest_of_our_own_and_remembers_only_what_is_kept() -> None:
    """Many tensors make long manifests: neither time nor memory may grow with the saves."""
    store = FaultyStore(MemoryStore())
    rank = Rank(store, keep_last=2)
    rank.start()
    read: list[str] = []
    store.before("get", read.append, key_contains="manifest", times=None)
    for step in range(1, 11):
        rank.now(step, state={"w": torch.ones(3)})

    assert read == []
    assert sorted(rank.saver._seen) == [keys.checkpoint(step, 1) for step in (9, 10)]


def test_a_checkpoint_of_another_run_is_not_one_of_those_that_are_kept() -> None:
    """A restore passes over what was copied here: the run's own ones before it are still needed."""
    store = FaultyStore(MemoryStore())
    rank = started(store, keep_last=2)
    rank.now(10, s=state(10))
    commit(store, make_manifest(20, 1, run_id="another", world_size=1))
    rank.now(30, s=state(30))

    kept = [keys.checkpoint(step, 1) for step in (10, 20, 30)]
    assert list(store.inner.list_folders("checkpoints/")) == kept


def test_a_failed_pruning_is_no_failed_save() -> None:
    """What is committed is saved: old checkpoints that could not be deleted go next time."""
    store = FaultyStore(MemoryStore())
    rank = started(store)
    for step in (10, 20):
        rank.now(step, s=state(step))
    store.fail("delete", times=None)
    for step in (30, 40):
        saved = rank.now(step, s=state(step))
        assert saved is not None
        assert saved.step == step
    rank.later(50, s=state(50))
    rank.saver.wait()
    assert rank.failed == []
    store.heal()
    rank.now(60, s=state(60))

    assert len(store.inner.list_folders("checkpoints/")) == 2


def test_a_damaged_claim_of_old_is_no_failed_save() -> None:
    """A restore never looks so far back; what is committed is saved, also at the end."""
    store = MemoryStore()
    started(store).now(10, s=state(10))
    for attempt in (2, 3):
        rank = Rank(store, attempt=attempt)
        rank.start(s=state(0))
        rank.now(10 * attempt, s=state(10 * attempt))
    store.put(keys.claim(2), b"{")
    rank.later(40, s=state(40))
    rank.saver.wait()
    last = rank.now(50, CheckpointKind.FINAL, s=state(50))

    assert last is not None
    assert (last.step, rank.failed) == (50, [])
    assert [saved.step for saved in rank.saved] == [30, 40, 50]


def test_a_full_disk_keeps_what_is_there() -> None:
    """No room for a byte: one clear error, the last save stays, and with room again it goes on."""
    store = FaultyStore(MemoryStore())
    rank = started(store)
    rank.now(10, s=state(10))
    store.full()
    for _ in range(3):
        with pytest.raises(StoreFull, match="no room left"):
            rank.now(20, s=state(20))
    store.heal()
    rank.now(20, s=state(20))

    assert restored(store.inner)["count"] == 20


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_death_at_any_write_leaves_the_last_commit(after: bool) -> None:
    """At each change of the store in turn: the next attempt finds the last one, or the new one."""
    for n in itertools.count(1):
        inner = MemoryStore()
        first = started(inner)
        for step in (10, 20, 30):
            first.now(step, s=state(step))
        dying = Rank(FaultyStore(inner).crash_at(n, after=after), attempt=2)
        try:
            assert dying.start(s={}).prefix == keys.checkpoint(30, 1)
            for step in (40, 50):
                dying.now(step, s=state(step))
        except SimulatedCrash:
            committed = [saved.step for saved in dying.saved]
            assert restored(inner)["count"] in {max([30, *committed]), max([30, *committed]) + 10}
            continue
        break

    assert n > 6, "the crashes hit nothing"
    assert restored(inner)["count"] == 50


def test_a_fenced_writer_changes_nothing() -> None:
    """An old incarnation that still runs learns it at its next save; what it wrote never counts."""
    store = MemoryStore()
    old = started(store)
    old.now(10, s=state(10))
    old.later(20, s=state(20))
    old.saver.wait()
    new = Rank(store, attempt=2)
    assert new.start(s={}).prefix == keys.checkpoint(20, 1)
    with pytest.raises(Fenced):
        old.now(30, s=state(30))
    old.later(40, s=state(40))
    old.saver.wait()

    assert isinstance(old.failed[0][1], Fenced)
    for step in (30, 40):
        assert store.head(keys.manifest(keys.checkpoint(step, 1))) is None, "it was committed"
    assert restored(store)["count"] == 20


def test_a_fenced_commit_in_the_last_moment_is_outside_the_history() -> None:
    """The claim comes between the check and the commit: the commit is there, and never restored."""
    inner = MemoryStore()
    store = FaultyStore(inner)
    old = started(store)
    old.now(10, s=state(10))

    def claim(_key: str) -> None:
        claim_attempt(inner, 2, keys.checkpoint(10, 1))

    store.before("put", claim, key_contains="20-000001/manifest")
    with pytest.raises(Fenced):
        old.now(20, s=state(20))

    assert inner.head(keys.manifest(keys.checkpoint(20, 1))) is not None
    assert restored(inner)["count"] == 10


def test_the_same_step_is_saved_once() -> None:
    """A final or emergency save right after a periodic one has nothing to add."""
    store = FaultyStore(MemoryStore())
    rank = started(store)
    rank.later(10, s=state(10))
    rank.saver.wait()
    puts = store.calls["put"]
    saved = rank.now(10, CheckpointKind.FINAL, s=state(10))

    assert saved == rank.saved[0]
    assert store.calls["put"] == puts


def test_a_save_says_what_it_cost() -> None:
    """Size, stall and duration feed the schedule and the status; the parent makes the history."""
    rank = started(MemoryStore())
    rank.later(10, s=state(10, 1000))
    rank.saver.wait()
    [saved] = rank.saved

    assert saved.size_bytes >= 4000
    assert 0 <= saved.stall_s <= saved.duration_s
    assert rank.saver.rate_bytes_per_s is not None
    assert rank.saver.parent == saved.checkpoint == keys.checkpoint(10, 1)


# ---------------------------------------------------------------------- several ranks


class Part:
    """A row-wise part of a sharded matrix, as a DTensor is: the rest is on other ranks."""

    def __init__(self, whole: torch.Tensor, rank: int, world: int) -> None:
        self.value: Any = None
        self.whole = whole
        rows = torch.arange(len(whole)).tensor_split(world)[rank]
        self.start = int(rows[0]) if len(rows) else len(whole)
        self.mine = whole[self.start : self.start + len(rows)]

    def pack(self, name: str, into: Packed) -> Any:
        """Add the part under its place in the whole."""
        into.leaves[name] = Leaf(name, self.mine, tuple(self.whole.shape), (self.start, 0))
        return {"$": "tensor", "name": name, "sharded": True}

    def restore(self, name: str, tree: Any, reading: Any) -> Finish:
        """Put the whole together."""
        self.value = reading.new(tree["name"])
        return lambda: None


def ranks(world: int, store: ObjectStore, words: FakeRendezvous) -> list[Rank]:
    """Return the ranks of one attempt."""
    made = [Rank(store, rank, world, coordinator=words.rank(rank)) for rank in range(world)]
    claim_attempt(store, 1, None)
    return made


def save_part(
    rank: Rank, step: int, whole: torch.Tensor, *, solo: bool = False
) -> Callable[[], Any]:
    """Return a call that saves this rank's part of `whole` and a replica."""

    def save() -> Any:
        parts = {"part": Part(whole, rank.rank, rank.world_size), "s": adapter(state(step))}
        capture = rank.saver.capture(step, CheckpointKind.PERIODIC, parts, {}, solo=solo)
        return rank.saver.save_now(capture, solo=solo)

    return save


@pytest.mark.parametrize("world", [2, 3, 4])
def test_ranks_commit_together(world: int) -> None:
    """Each writes its parts, the first commits, all learn of it; replicas are stored once."""
    store, words = MemoryStore(), FakeRendezvous()
    team = ranks(world, store, words)
    whole = torch.arange(15.0).view(5, 3)
    results = together(*(save_part(rank, 10, whole) for rank in team))

    assert [saved.step for saved in results] == [10] * world
    manifest = load_manifest(store, keys.checkpoint(10, 1))
    assert manifest.world_size == world
    assert len(manifest.shards) == world
    held = ["s.weight" in reader.tensors for reader in shard_readers(store, manifest)]
    assert held == [True] + [False] * (world - 1)
    assert len(team[0].saved) == 1
    assert team[1].saved == [], "only the first rank reports"
    part, found = Part(whole, 0, 1), dict[str, Any]()
    Rank(store).restore({"part": part, "s": adapter(found)})
    assert torch.equal(part.value, whole)
    assert found["count"] == 10


def test_a_silent_rank_is_an_error_and_no_hang() -> None:
    """A peer that never answers: nothing is committed, the last save stands, all learn why."""
    store, words = MemoryStore(), FakeRendezvous(patience_s=0.0002)
    team = ranks(3, store, words)
    whole = torch.ones(6, 2)
    together(*(save_part(rank, 10, whole) for rank in team))
    words.mute(2)
    first, second, third = together(*(save_part(rank, 20, whole) for rank in team))

    assert isinstance(first, CheckpointError)
    assert "step 20 not saved: rank 2 is silent" in str(first)
    assert isinstance(second, CheckpointError)
    assert isinstance(third, CheckpointError)
    assert store.head(keys.manifest(keys.checkpoint(20, 1))) is None
    assert all(rank.saver.last is not None and rank.saver.last.step == 10 for rank in team)


def test_the_failure_of_one_rank_is_told_to_all() -> None:
    """One full disk: nobody waits for the timeout, and every rank knows whose it was."""
    inner, words = MemoryStore(), FakeRendezvous()
    team = ranks(2, inner, words)
    bad = FaultyStore(inner).full()
    for rank, others in ((1, 0), (0, 1)):
        step = 20 + rank
        broken = Rank(bad, rank, 2, coordinator=words.rank(rank))
        calls = sorted([broken, team[others]], key=lambda r: r.rank)
        results = together(*(save_part(r, step, torch.ones(4, 2)) for r in calls))

        assert isinstance(results[rank], StoreFull)
        assert isinstance(results[others], CheckpointError)
        assert "no room left" in str(results[others])


@pytest.mark.parametrize("rank", [0, 1])
def test_whatever_a_rank_fails_with_is_told_to_all(rank: int) -> None:
    """Also an error that no store should raise: who waits for the others waits in vain."""
    inner, words = MemoryStore(), FakeRendezvous()
    team = ranks(2, inner, words)
    ill = FaultyStore(inner).fail("put", error=KeyError("a library's"))
    team[rank] = Rank(ill, rank, 2, coordinator=words.rank(rank))
    results = together(*(save_part(each, 20, torch.ones(4, 2)) for each in team))

    assert isinstance(results[rank], KeyError)
    assert isinstance(results[1 - rank], CheckpointError)
    assert "a library's" in str(results[1 - rank])


def test_lost_contact_is_an_error() -> None:
    """The rendezvous died with the first node: the save fails, in words."""
    store, words = MemoryStore(), FakeRendezvous()
    team = ranks(2, store, words)
    words.lose(0, 1)
    results = together(*(save_part(rank, 10, torch.ones(4, 2)) for rank in team))

    for problem in results:
        assert isinstance(problem, CheckpointError)
        assert "step 10 not saved" in str(problem)


def test_who_is_alone_waits_for_nobody() -> None:
    """A peer is known to be gone: a save that needs its word fails at once, not in two minutes."""
    store, words = MemoryStore(), FakeRendezvous()
    team = ranks(2, store, words)
    for rank in team:
        rank.saver.alone.set()
        with pytest.raises(CheckpointError, match=f"step {rank.rank} not saved"):
            save_part(rank, rank.rank, torch.ones(4, 2))()


def test_who_loses_contact_in_a_last_save_is_alone() -> None:
    """The first rank has died, and with it the rendezvous: a save beside training says nothing."""
    store, words = MemoryStore(), FakeRendezvous(patience_s=0.001)
    survivor = ranks(2, store, words)[1]
    survivor.later(5, x={})
    survivor.saver.wait()
    words.lose(1)
    survivor.later(6, x={})
    survivor.saver.wait()
    assert not survivor.saver.alone.is_set()
    with pytest.raises(OutOfContact, match="step 7 not saved"):
        survivor.now(7, x={})

    assert survivor.saver.alone.is_set()


def test_a_first_rank_that_left_after_its_commit_has_saved() -> None:
    """The rendezvous may end with it before the others heard the word: the commit says it."""
    store = MemoryStore()

    def ends_with_the_first_rank(rank: int, operation: str, key: str) -> None:
        if rank == 1 and operation == "get" and key.endswith("/done"):
            assert committed.wait(10)
            raise ConnectionError("the first rank hosted the rendezvous (scripted)")

    committed = threading.Event()
    words = FakeRendezvous(before=ends_with_the_first_rank)
    faulty = FaultyStore(store).after("put", lambda _: committed.set(), key_contains="manifest")
    results = together(*(save_part(rank, 10, torch.ones(4, 2)) for rank in ranks(2, faulty, words)))

    assert [saved.step for saved in results] == [10, 10]


def test_a_survivor_saves_alone() -> None:
    """A replica is whole: the second rank commits without the others and is restored from."""
    store, words = MemoryStore(), FakeRendezvous()
    survivor = ranks(3, store, words)[2]
    words.lose(2)
    capture = survivor.saver.capture(
        10, CheckpointKind.EMERGENCY, {"s": adapter(state(10))}, {}, solo=True
    )
    saved = survivor.saver.save_now(capture, solo=True)

    assert saved is not None
    assert survivor.saved == [saved], "it reports, for nobody else does"
    assert restored(store)["count"] == 10


def test_two_survivors_may_save_the_same_step() -> None:
    """Both hold the same replica: one commits, the other finds it done; neither fails."""
    store, words = MemoryStore(), FakeRendezvous()
    team = ranks(3, store, words)

    def alone(rank: Rank) -> Callable[[], Any]:
        objects = {"s": adapter(state(10))}
        return lambda: rank.saver.save_now(
            rank.saver.capture(10, CheckpointKind.EMERGENCY, objects, {}, solo=True), solo=True
        )

    results = together(*(alone(rank) for rank in team[1:]))

    assert [saved.step for saved in results] == [10, 10]
    assert restored(store)["count"] == 10


def test_a_sharded_model_cannot_be_saved_alone() -> None:
    """A part is not a model: it is refused in a sentence, and the last save counts."""
    store, words = MemoryStore(), FakeRendezvous()
    team = ranks(2, store, words)
    with pytest.raises(CheckpointError, match="cannot be saved without the other ranks"):
        save_part(team[1], 10, torch.ones(4, 2), solo=True)()

    assert not list(store.list("checkpoints/"))


def test_each_rank_keeps_its_own_random_states() -> None:
    """With `reseed=False` the manifest holds every rank's generators, and gives them back."""
    store, words = MemoryStore(), FakeRendezvous()
    claim_attempt(store, 1, None)
    team = [
        Rank(store, rank, 2, coordinator=words.rank(rank), save_random=True) for rank in range(2)
    ]
    captures = []
    for rank in team:
        torch.manual_seed(rank.rank)
        objects = {"s": adapter(state(10))}
        captures.append(rank.saver.capture(10, CheckpointKind.FINAL, objects, {}))
    draws = [torch.Generator().manual_seed(rank) for rank in range(2)]
    expected = [torch.rand(3, generator=generator) for generator in draws]
    together(*(lambda r=r, c=c: r.saver.save_now(c) for r, c in zip(team, captures, strict=True)))
    manifest = load_manifest(store, keys.checkpoint(10, 1))
    for number in range(2):
        torch.manual_seed(99)
        assert restoring.restore_random(manifest, number, 2)
        assert torch.equal(torch.rand(3), expected[number])

    before = torch.get_rng_state()
    assert not restoring.restore_random(manifest, 0, 3), "of another number of ranks: not restored"
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("gone", [True, False])
def test_who_hears_of_a_lost_rank_knows_that_it_is_lost(gone: bool) -> None:
    """The first rank's word tells a rank that is gone from one that is only silent."""
    first, _, other = ranks(3, MemoryStore(), FakeRendezvous())
    if gone:
        first.saver.alone.set()  # by the ring, which may not have told the other rank yet
    raised: dict[int, BaseException] = {}

    def save(rank: Rank) -> None:
        part = {"part": Part(torch.ones(6, 2), rank.rank, 3)}
        capture = rank.saver.capture(10, CheckpointKind.FINAL, part, {})
        try:
            rank.saver.save_now(capture, timeout_s=0.5 if rank is first else 30.0)
        except CheckpointError as problem:
            raised[rank.rank] = problem

    together(partial(save, first), partial(save, other))
    assert isinstance(raised[0], WithoutOthers)
    assert isinstance(raised[2], WithoutOthers) is gone
    assert other.saver.alone.is_set() is gone


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize(
    ("error", "gone"), [(KeyboardInterrupt, True), (SystemExit, True), (ValueError, False)]
)
def test_a_rank_that_is_ended_within_a_save_is_a_lost_one(
    victim: int, error: type[BaseException], gone: bool
) -> None:
    """Ctrl-C reaches the ranks one after the other: the others' save did not fail by a mistake."""
    store, words = MemoryStore(), FakeRendezvous()
    team = ranks(3, store, words)
    struck = FaultyStore(store).before("put", partial(strike, error), key_contains="safetensors")
    team[victim] = Rank(struck, victim, 3, coordinator=words.rank(victim))
    raised: dict[int, BaseException] = {}

    def save(rank: Rank) -> None:
        part = {"part": Part(torch.ones(6, 2), rank.rank, 3)}
        capture = rank.saver.capture(10, CheckpointKind.FINAL, part, {})
        try:
            rank.saver.save_now(capture)
        except BaseException as problem:  # noqa: BLE001 - it is what is looked at
            raised[rank.rank] = problem

    together(*(partial(save, rank) for rank in team))
    assert type(raised.pop(victim)) is error
    assert [isinstance(problem, WithoutOthers) for problem in raised.values()] == [gone, gone]


def strike(error: type[BaseException], _: str) -> None:
    """Raise an exception, as a signal's handler does."""
    raise error
