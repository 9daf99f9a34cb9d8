"""Two machines never control one run at the same time, and the second says who holds it."""

from __future__ import annotations

import pytest

from spotguard.control.lease import RENEW_S, VALID_S, Lease, check_ours, machine_id
from spotguard.errors import StoreUnavailable, UsageError
from spotguard.events import keys
from spotguard.testing import FakeClock, FaultyStore, MemoryStore


def test_the_second_machine_is_told_who_holds_the_run() -> None:
    """Its sentence names the host, the process, and how fresh the word is."""
    store, clock = MemoryStore(), FakeClock()
    Lease(store, clock, "one").take()
    clock.advance(12)
    with pytest.raises(UsageError, match=r"on .+ \(process \d+\), which showed itself 12 s ago"):
        Lease(store, clock, "two").adopt()


def test_a_lease_that_is_old_is_adopted_and_its_owner_stops() -> None:
    """The first machine, frozen for a while, finds at its next renewal that it has lost."""
    store, clock = MemoryStore(), FakeClock()
    first, second = Lease(store, clock, "one"), Lease(store, clock, "two")
    first.take()
    clock.advance(VALID_S + 1)
    second.adopt()
    assert not first.keep()
    assert "process" in first.lost_to
    assert second.keep()
    first.release()
    second.release()
    assert not first.keep()


@pytest.mark.parametrize("released", [False, True])
def test_a_run_that_was_elsewhere_is_not_simply_taken_again(released: bool) -> None:
    """However long ago: what happened there is not known here, until it is adopted."""
    store, clock = MemoryStore(), FakeClock()
    Lease(store, clock, "one").take()
    clock.advance(VALID_S + 1)
    other = Lease(store, clock, "two")
    other.adopt()
    if released:
        other.release()
    clock.advance(86_400)
    again = Lease(store, clock, "one")
    again.take()
    assert "process" in again.lost_to
    assert not again.keep()
    with pytest.raises(UsageError, match="Another machine had the run since"):
        check_ours(store, "one", clock.now())

    back = Lease(store, clock, "one")
    back.adopt()
    assert back.keep()
    check_ours(store, "one", clock.now())


def test_a_machine_that_slept_asks_before_it_acts() -> None:
    """The monotonic clock stands still while a laptop is closed."""
    store, clock = MemoryStore(), FakeClock()
    mine, other = Lease(store, clock, "one"), Lease(store, clock, "two")
    mine.take()
    clock.jump_wall(3 * 3600)
    other.adopt()
    assert not mine.keep()


def test_the_same_machine_goes_on_at_once() -> None:
    """Its own lock has decided already: a killed controller's successor does not wait."""
    store, clock = MemoryStore(), FakeClock()
    Lease(store, clock, "one").take()
    again = Lease(store, clock, "one")
    again.take()
    clock.advance(RENEW_S)
    assert again.keep()


def test_a_living_controller_keeps_its_lease_fresh() -> None:
    """However long it runs, nobody else may adopt it; after its release anybody may at once."""
    store, clock = MemoryStore(), FakeClock()
    first = Lease(store, clock, "one")
    first.take()
    for _ in range(100):
        clock.advance(5)
        assert first.keep()
        with pytest.raises(UsageError):
            Lease(store, clock, "two").adopt()
    first.release()
    Lease(store, clock, "two").adopt()


def test_without_the_store_acts_end_before_another_machine_may_take_over() -> None:
    """A controller that cannot renew does nothing more by the time its lease is old."""
    store, clock = FaultyStore(MemoryStore()), FakeClock()
    lease = Lease(store, clock, "one")
    lease.take()
    store.fail("put", times=None)
    safe_until = 0.0
    for second in range(200):
        if lease.keep():
            safe_until = second
        clock.advance(1)
    assert RENEW_S < safe_until < VALID_S
    store.heal()
    assert lease.keep()


def test_an_answer_that_was_lost_is_not_a_lost_lease() -> None:
    """The renewal took effect, its answer did not come: the next one goes on."""
    store, clock = FaultyStore(MemoryStore()), FakeClock()
    lease = Lease(store, clock, "one")
    lease.take()
    store.after("put", _lost)
    clock.advance(RENEW_S)
    lease.keep()
    clock.advance(1)
    lease.keep()
    assert lease.lost_to == ""
    assert lease.keep()


@pytest.mark.parametrize("body", [b"", b"{}", b"[1]", b'{"machine": 1}', b"\xff"])
def test_a_lease_that_makes_no_sense_holds_nothing(body: bytes) -> None:
    """Damage in it does not lock a run for ever."""
    store, clock = MemoryStore(), FakeClock()
    store.put(keys.LEASE, body)
    Lease(store, clock, "one").take()


def test_two_takers_at_the_same_moment_have_one_winner() -> None:
    """Both saw an old lease; the store decides."""
    store, clock = FaultyStore(MemoryStore()), FakeClock()
    Lease(store, clock, "dead").take()
    clock.advance(VALID_S + 1)
    store.before("put", lambda _: Lease(store.inner, clock, "rival").adopt())
    with pytest.raises(UsageError, match="same moment"):
        Lease(store, clock, "one").adopt()


def test_a_home_has_one_name(tmp_path_factory: pytest.TempPathFactory) -> None:
    """It is made once, and another home has another."""
    here, there = tmp_path_factory.mktemp("a"), tmp_path_factory.mktemp("b")
    assert machine_id(here / "home") == machine_id(here / "home")
    assert machine_id(here / "home") != machine_id(there)


def _lost(_key: str) -> None:
    raise StoreUnavailable("the answer was lost")
