"""The scripted store does what the script says, and nothing else."""

from __future__ import annotations

import pytest

from spotguard.errors import NotFound, StoreFull, StoreUnavailable
from spotguard.testing.clock import FakeClock
from spotguard.testing.stores import FaultyStore, MemoryStore, SimulatedCrash


def test_the_nth_call_fails_and_only_that() -> None:
    """`fail` counts matching calls; the failed one has no effect."""
    store = FaultyStore(MemoryStore()).fail("put", nth=2, key_contains="shard")
    store.put("shard-1", b"")
    store.put("other", b"")
    with pytest.raises(StoreUnavailable):
        store.put("shard-2", b"")
    store.put("shard-3", b"")

    assert [info.key for info in store.inner.list()] == ["other", "shard-1", "shard-3"]
    assert store.calls["put"] == store.mutations == 4


def test_failures_can_repeat_and_be_of_any_kind() -> None:
    """`times` calls in a row fail with the given error, on any operation with `*`."""
    store = FaultyStore(MemoryStore()).fail("*", times=2, error=TimeoutError("slow"))
    for _ in range(2):
        with pytest.raises(TimeoutError):
            store.head("x")
    assert store.head("x") is None


def test_a_torn_put_leaves_half() -> None:
    """`tear` models a server that is not atomic."""
    store = FaultyStore(MemoryStore()).tear(nth=1)
    with pytest.raises(StoreUnavailable):
        store.put("x", [b"abc", b"def"])
    assert store.inner.get("x") == b"abc"


def test_a_full_store_refuses_until_healed() -> None:
    """`full` lets reads and deletes through; `heal` ends it."""
    store = FaultyStore(MemoryStore()).full(nth=2)
    store.put("x", b"1")
    for _ in range(3):
        with pytest.raises(StoreFull):
            store.put("y", b"")
    assert store.get("x") == b"1"
    store.heal().put("y", b"")


@pytest.mark.parametrize("after", [False, True])
def test_a_crash_strikes_before_or_after_and_the_dead_stay_dead(after: bool) -> None:
    """`crash_at` counts puts and deletes; nothing that runs later can change the store."""
    store = FaultyStore(MemoryStore()).crash_at(2, after=after)
    store.put("a", b"")
    with pytest.raises(SimulatedCrash):
        store.put("b", b"")
    with pytest.raises(SimulatedCrash):
        store.delete("a")

    assert [info.key for info in store.inner.list()] == (["a", "b"] if after else ["a"])


def test_delays_pass_on_the_fake_clock_only() -> None:
    """A slow store costs the test no time."""
    clock = FakeClock(0.0)
    store = FaultyStore(MemoryStore()).delay("get", 30.0, clock=clock, key_contains="big")
    store.put("big", b"1")
    store.put("small", b"1")
    store.get("small")
    assert clock.now() == 0.0
    store.get("big")
    assert clock.now() == 30.0


def test_hooks_let_another_writer_slip_in() -> None:
    """`before` and `after` run in the middle of things, with the key."""
    store = FaultyStore(MemoryStore())
    seen: list[str] = []
    store.before("put", lambda key: store.inner.delete("victim"), key_contains="x")
    store.after("get", seen.append)
    store.put("victim", b"")
    store.put("x", b"1")
    store.get("x")

    assert seen == ["x"]
    with pytest.raises(NotFound):
        store.get("victim")


def test_a_lost_answer_is_an_after_hook_that_raises() -> None:
    """The effect stays although the caller sees an error."""

    def lost(_key: str) -> None:
        raise StoreUnavailable("the answer was lost")

    store = FaultyStore(MemoryStore()).after("put", lost)
    with pytest.raises(StoreUnavailable):
        store.put("x", b"1", if_absent=True)
    assert store.get("x") == b"1"
