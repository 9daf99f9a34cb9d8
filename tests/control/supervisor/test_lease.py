"""Two machines never control one run at the same time, and the second says who holds it."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest

from spotguard.control import api
from spotguard.control.controller import one_run
from spotguard.control.controller.rest import Bell, Rest
from spotguard.control.handover import adopt
from spotguard.control.run_folder import folder_of
from spotguard.control.supervisor import lease as lease_module
from spotguard.control.supervisor.lease import (
    RENEW_S,
    VALID_S,
    Lease,
    check_ours,
    read_holder,
)
from spotguard.errors import StoreUnavailable, UsageError
from spotguard.events import keys
from spotguard.shared.units import SystemClock, to_iso
from spotguard.spec.model import JobSpec
from spotguard.storage import FileStore, PrefixedStore, open_store
from spotguard.storage.deadline import remaining_s
from spotguard.testing import FakeClock, FaultyStore, MemoryStore
from spotguard.testing.job import FakeJob
from spotguard.testing.launcher import FakeLauncher
from tests.checkpoint.crashes.savings import flip

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from typing import NoReturn

    from spotguard.launch.base import ClusterView, Offer
    from spotguard.storage.base import ObjectStore


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that renews looks often."""
    monkeypatch.setattr(lease_module, "_LOOK_S", 0.001)


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


def test_a_lease_is_renewed_beside_what_its_owner_does() -> None:
    """A call of SkyPilot's may take minutes, in which the controller asks nothing else."""
    store, clock = MemoryStore(), FakeClock()
    lease = Lease(store, clock, "one")
    lease.take()
    with lease.kept():
        for _ in range(30):
            clock.advance(RENEW_S)
            wait_until(lambda: renewed_at(store) == clock.now(), "it is renewed")
    clock.advance(RENEW_S)
    assert renewed_at(store) < clock.now(), "it goes on after the end"


def test_a_renewal_that_hangs_keeps_nobody_waiting() -> None:
    """The controller asks whether it may act ten times a second; a slow store takes longer."""
    store, clock = FaultyStore(MemoryStore()), FakeClock()
    lease = Lease(store, clock, "one")
    lease.take()
    begun, answered = threading.Event(), threading.Event()

    def hang(_key: str) -> None:
        begun.set()
        assert answered.wait(60.0)

    store.before("put", hang)
    clock.advance(RENEW_S)
    with lease.kept():
        assert begun.wait(60.0)
        assert lease.keep()
        clock.advance(VALID_S - 2 * RENEW_S)
        assert not lease.keep(), "another machine may soon have it"
        answered.set()
    assert lease.keep()


@pytest.mark.parametrize("fails", [False, True])
def test_a_renewal_is_as_old_as_its_stamp_says(fails: bool) -> None:
    """Who waited for a slow store acts no longer than others take it for alive; and waits less
    than a lease is valid."""
    store, clock = FaultyStore(MemoryStore()), FakeClock()
    lease = Lease(store, clock, "one")
    lease.take()
    allowed: list[float | None] = []

    def slow(_key: str) -> None:
        allowed.append(remaining_s())
        clock.advance(VALID_S - RENEW_S)
        if fails:
            raise StoreUnavailable("it answered to nothing")

    store.before("put", slow)
    clock.advance(RENEW_S)
    assert not lease.keep(), "another machine may soon have it"
    assert allowed[0] is not None
    assert allowed[0] < VALID_S - 2 * RENEW_S
    assert lease.keep()


def test_a_lease_is_never_fresher_to_its_owner_than_to_others() -> None:
    """Also the first one, which has all the time that the store needs."""
    store, clock = FaultyStore(MemoryStore()), FakeClock()
    first = Lease(store, clock, "one")
    store.before("put", lambda _: clock.advance(VALID_S + 1))
    first.take()
    store.fail("put")
    acts = first.keep()
    Lease(store, clock, "two").adopt()
    assert not acts


def test_a_store_that_fails_while_it_says_who_won_is_asked_again() -> None:
    """Neither the controller nor the thread that renews dies of it."""
    store, clock = FaultyStore(MemoryStore()), FakeClock()
    first = Lease(store, clock, "one")
    first.take()
    clock.advance(VALID_S + 1)
    Lease(store, clock, "two").adopt()
    store.fail("head")
    assert not first.keep()
    assert first.lost_to == ""
    assert not first.keep()
    assert "process" in first.lost_to


@pytest.mark.parametrize("act", ["control", "adopt"])
def test_no_launcher_keeps_a_lease_waiting(
    home: Path, monkeypatch: pytest.MonkeyPatch, act: str
) -> None:
    """A controller, or an `adopt`, that hangs at SkyPilot holds the run all the same. A controller
    that fails leaves no thread behind that looks for its run: the process has other runs."""
    (home / "code").mkdir(parents=True)
    script = home / "code" / "job.py"
    script.write_text("")
    spec = JobSpec(
        script=str(script), workdir=str(script.parent), name="job", store=str(home / "store")
    )
    folder = folder_of(api.create_run(spec))
    store = PrefixedStore(open_store(home / "store"), folder.run_id)
    store.put(keys.launch(1), json.dumps({"cluster": f"{folder.run_id}-1", "nodes": 1}).encode())

    closed = threading.Event()

    class Hangs(FakeLauncher):
        def close(self) -> None:
            closed.set()

        def offers(self) -> list[Offer]:
            return self.hang()

        def observe(self, cluster: str, *, heard: bool = False) -> ClusterView:
            return self.hang()

        def hang(self) -> NoReturn:
            before = renewed_at(store)
            wait_until(lambda: renewed_at(store) > before, "it is renewed", timeout_s=30.0)
            raise Answered

    monkeypatch.setattr(lease_module, "RENEW_S", 0.01)
    launcher = Hangs(SystemClock(), FakeJob(store=store))
    module = one_run if act == "control" else adopt
    monkeypatch.setattr(module, "launcher_for", lambda *_, **__: launcher)
    if act == "adopt":
        shutil.rmtree(folder.path)
    acts: dict[str, Callable[[], object]] = {
        "control": lambda: one_run.control(folder, Rest(folder, Bell())),
        "adopt": lambda: api.adopt(f"{home}/store/{folder.run_id}", ask=lambda job: True),
    }
    with pytest.raises(Answered):
        acts[act]()
    assert closed.is_set() == (act == "control")


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


@pytest.mark.parametrize("body", [b"", b"{}", b"[1]", b'{"machine": 1}', b"\xff", "flip", "cut"])
def test_a_damaged_lease_is_somebodys_until_it_is_old(body: bytes | str, tmp_path: Path) -> None:
    """Who holds the run cannot be read: nobody takes it, and adopting waits until it is old.

    Damage does not lock a run for ever: the store's own stamp says how old the word is.
    """
    store, clock = FileStore(tmp_path), FakeClock(time.time())
    Lease(store, clock, "one").take()
    raw = store.get(keys.LEASE)
    spoilt = {"flip": raw.replace(b"one", b"onf"), "cut": raw[: len(raw) // 2]}
    store.put(keys.LEASE, spoilt[body] if isinstance(body, str) else body)

    again = Lease(store, clock, "one")
    again.take()
    assert "whose lease is damaged" in again.lost_to
    with pytest.raises(UsageError, match="in the hands of a controller whose lease is damaged"):
        again.adopt()
    clock.advance(VALID_S + 60)
    _age(tmp_path, VALID_S + 60)
    with pytest.raises(UsageError, match="Another machine had the run since"):
        check_ours(store, "one", clock.now())
    back = Lease(store, clock, "one")
    back.adopt()
    assert back.keep()
    check_ours(store, "one", clock.now())


def test_every_flipped_bit_of_a_lease_is_found() -> None:
    """None makes it another machine's, an older one, or a released one."""
    store, clock = MemoryStore(), FakeClock(time.time())
    Lease(store, clock, "one").take()
    raw = store.get(keys.LEASE)
    for bit in range(8 * len(raw)):
        flip(store, keys.LEASE, bit)
        found = read_holder(store)
        assert found is not None
        assert found[0].damaged, raw
        assert found[0].is_foreign("one")
        store.put(keys.LEASE, raw)


def test_a_controller_whose_lease_somebody_spoilt_stops_acting(tmp_path: Path) -> None:
    """What stands there now was written by another: it may be another controller."""
    store, clock = FileStore(tmp_path), FakeClock(time.time())
    lease = Lease(store, clock, "one")
    lease.take()
    store.put(keys.LEASE, b"{}")
    clock.advance(RENEW_S)
    assert not lease.keep()
    assert "whose lease is damaged" in lease.lost_to


def test_a_lease_of_an_older_version_is_read() -> None:
    """It has no checksum, and counts all the same."""
    store, clock = MemoryStore(), FakeClock()
    Lease(store, clock, "one").take()
    body = json.loads(store.get(keys.LEASE))
    del body["checksum"]
    store.put(keys.LEASE, json.dumps(body).encode())
    with pytest.raises(UsageError, match="in the hands of"):
        Lease(store, clock, "two").adopt()
    Lease(store, clock, "one").take()


def test_two_takers_at_the_same_moment_have_one_winner() -> None:
    """Both saw an old lease; the store decides."""
    store, clock = FaultyStore(MemoryStore()), FakeClock()
    Lease(store, clock, "dead").take()
    clock.advance(VALID_S + 1)
    store.before("put", lambda _: Lease(store.inner, clock, "rival").adopt())
    with pytest.raises(UsageError, match="same moment"):
        Lease(store, clock, "one").adopt()


@pytest.fixture
def elsewhere() -> Iterator[int]:
    """Another controller that lives on this machine; its process id."""
    words = ("-c", "import time; time.sleep(600)", "-m", "spotguard.control", "job-1")
    process = subprocess.Popen([sys.executable, *words])
    yield process.pid
    process.kill()
    process.wait()


def held_by(clock: FakeClock, *, pid: int, host: str | None = None) -> MemoryStore:
    """Return a store in which a process has just taken a lease for the home `one`."""
    store = MemoryStore()
    body = {
        "machine": "one",
        "host": host or socket.gethostname(),
        "pid": pid,
        "renewed_at": to_iso(clock.now()),
        "released": False,
    }
    store.put(keys.LEASE, json.dumps(body).encode())
    return store


def test_a_controller_in_a_copy_of_the_home_is_not_joined(elsewhere: int) -> None:
    """Both have the same name and a lock of their own; the one that lives has the run."""
    clock = FakeClock()
    store = held_by(clock, pid=elsewhere)
    for act in (Lease.take, Lease.adopt):
        with pytest.raises(UsageError, match=rf"process {elsewhere}\).* another copy"):
            act(Lease(store, clock, "one"))
    clock.advance(VALID_S)
    Lease(store, clock, "one").take()


def test_a_dead_controller_of_the_home_is_followed_at_once() -> None:
    """Whoever has its process id now is no controller; the clock has not moved."""
    clock = FakeClock()
    began_at = clock.now()
    Lease(held_by(clock, pid=os.getppid()), clock, "one").take()
    assert clock.now() == began_at


def test_a_home_on_another_host_waits_until_the_lease_is_old() -> None:
    """Nobody here can tell whether that controller lives."""
    clock = FakeClock()
    store = held_by(clock, pid=1, host="another-host")
    with pytest.raises(UsageError, match="another-host"):
        Lease(store, clock, "one").take()
    clock.advance(VALID_S)
    Lease(store, clock, "one").take()


class Answered(Exception):
    """SkyPilot said something at last."""


def renewed_at(store: ObjectStore) -> float:
    """Return when the lease was last renewed, by its owner's clock."""
    found = read_holder(store)
    assert found is not None
    return found[0].renewed_at


def wait_until(holds: Callable[[], bool], what: str, *, timeout_s: float = 60.0) -> None:
    """Wait for another thread."""
    give_up_at = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < give_up_at, f"not in time: {what}"
        time.sleep(0.001)


def _lost(_key: str) -> None:
    raise StoreUnavailable("the answer was lost")


def test_a_lease_from_the_future_is_as_old_as_the_store_says(tmp_path: Path) -> None:
    """A controller whose machine's clock is hours ahead dies: nobody waits until that hour."""
    store = FileStore(tmp_path)
    ahead, now = FakeClock(time.time() + 5 * 3600.0), FakeClock(time.time())
    Lease(store, ahead, "one").take()
    with pytest.raises(UsageError, match="showed itself"):
        Lease(store, now, "two").adopt()
    now.advance(VALID_S + 1)
    _age(tmp_path, VALID_S + 1)
    Lease(store, now, "two").adopt()


@pytest.mark.parametrize("name", ["one", "two"])
@pytest.mark.parametrize("damaged", [False, True])
def test_a_machine_whose_clock_is_ahead_takes_no_living_run_for_dead(
    tmp_path: Path, name: str, damaged: bool
) -> None:
    """Before it takes over, it asks the store how old the lease is: also a home's copy on another
    host. Nothing is left behind, and while the lease is young nothing is asked."""
    store = FaultyStore(FileStore(tmp_path))
    body = json.loads(held_by(FakeClock(time.time()), pid=1, host="another-host").get(keys.LEASE))
    store.put(keys.LEASE, b"{}" if damaged else json.dumps(body).encode())
    asked: list[str] = []
    store.before("put", asked.append)
    with pytest.raises(UsageError, match="in the hands of"):
        Lease(store, FakeClock(time.time()), name).adopt()
    assert asked == []

    ahead = FakeClock(time.time() + 3600.0)
    with pytest.raises(UsageError, match="in the hands of"):
        Lease(store, ahead, name).adopt()
    assert [info.key for info in store.list()] == [keys.LEASE]

    _age(tmp_path, VALID_S + 1)
    Lease(store, ahead, name).adopt()


def test_in_doubt_how_old_a_lease_is_its_holder_lives(tmp_path: Path) -> None:
    """Two processes of a home ask the store at once, and one removes what the other asked by."""
    store = FaultyStore(FileStore(tmp_path))
    Lease(store, FakeClock(time.time()), "one").take()
    mine = keys.lease_clock("two")
    store.before("head", store.inner.delete, key_contains=mine)
    with pytest.raises(UsageError, match="in the hands of"):
        Lease(store, FakeClock(time.time() + 3600.0), "two").adopt()


def _age(root: Path, by_s: float) -> None:
    """Let the store have written the lease so much earlier."""
    path = root / keys.LEASE
    os.utime(path, (path.stat().st_atime, path.stat().st_mtime - by_s))
