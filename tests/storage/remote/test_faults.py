"""Stores on real servers behind a network that does its worst: whole, or not there, or an error.

Each promise is checked with a fault at every request in turn, on S3 by moto, Azure by azurite
and Google's by a fake that keeps the service's rules, each by the vendor's own client.
"""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import TYPE_CHECKING, Any

import pytest

from spotguard.errors import AlreadyExists, StoreError, StoreUnavailable
from spotguard.storage.deadline import give_up_after
from spotguard.storage.remote.bucket import ALWAYS
from spotguard.testing import FakeClock
from tests.storage.harness import fault_proxy as faults
from tests.storage.harness.lanes import be_impatient, silence_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from spotguard.storage.base import ObjectStore
    from tests.storage.harness.fault_proxy import Exchange, Fault
    from tests.storage.harness.lanes import Lane

pytestmark = pytest.mark.e2e

KEY = "folder/victim"
SMALL = b"some small content"
LARGE = b"".join(bytes([number]) * (175_000 + number) for number in range(4))
SIZES = {"small": SMALL, "large": LARGE}
"""One request, and three parts."""
IN_TIME_S = 2.0
"""How much longer than allowed a call may take on a machine with other work."""


ON_THE_WAY_UP: dict[str, Fault] = {
    "500": faults.refuse(500),
    "503": faults.refuse(503, b"<Error><Code>SlowDown</Code></Error>"),
    "429": faults.refuse(429, Retry_After="1"),
    "reset in the request": faults.reset_in_request(),
    "reset in the answer": faults.reset_in_answer(),
    "lost answer": faults.lose_answer(),
    "truncated answer": faults.truncate(),
    "truncated answer of wrong length": faults.truncate(lying=True),
    "stall": faults.stall(),
    "stall after it was done": faults.stall(after=True),
    "twice": faults.twice(),
    "slow": faults.slow(2_000),
    "damaged request": faults.damage_request(),
}
ON_THE_WAY_DOWN = {
    name: fault
    for name, fault in ON_THE_WAY_UP.items()
    if name not in ("damaged request", "reset in the request", "stall after it was done")
}


@pytest.fixture(autouse=True)
def _short_silence(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Let who says nothing be given up soon."""
    be_impatient(monkeypatch, silence_for(request.node.name))


def impatient(lane: Lane) -> ObjectStore:
    """Return a store whose pauses between tries take no time."""
    return lane.store(clock=FakeClock())


def left_after_clean_up(lane: Lane) -> int:
    """Let the next start clean up; return how many writes in parts are still begun and not ended.

    There may be some before: when the answer to `begin` is lost, nobody knows the upload's id.
    """
    bucket = lane.bucket()
    lane.store(bucket).clean_up(older_than_s=-60.0)
    return len(bucket.uploads(""))


@pytest.mark.parametrize("if_absent", [False, True], ids=["over", "new"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("what", ON_THE_WAY_UP)
def test_a_fault_at_any_request_of_a_write_is_not_seen(
    lane: Lane, what: str, size: str, if_absent: bool
) -> None:
    """One fault, whichever request it befalls, is mended: the write succeeds, once, and is whole.

    A create-if-absent that nobody raced for is won, also when its first answer was lost or the
    network delivered it twice.
    """
    content = SIZES[size]
    for nth in count(1):
        key = f"{KEY}-{nth}"
        store = impatient(lane)
        store.head(key)  # what a client asks once is not of this write
        if not if_absent:
            store.put(key, b"before")
        struck = lane.proxy.struck
        lane.proxy.on(ON_THE_WAY_UP[what], path=f"victim-{nth}", nth=nth)
        etag = store.put(key, content, if_absent=if_absent)
        over = lane.proxy.struck == struck
        lane.proxy.heal()

        found = store.head(key)
        assert found is not None
        assert (found.etag, store.get(key)) == (etag, content), f"fault at request {nth}"
        if over:
            break
    assert [info.key for info in store.list()] == sorted(f"{KEY}-{n}" for n in range(1, nth + 1))
    assert nth > (1 if size == "small" else 4)
    assert left_after_clean_up(lane) == 0


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("what", ON_THE_WAY_UP)
def test_a_fault_that_stays_leaves_the_old_object_or_the_whole_new_one(
    lane: Lane, what: str, size: str
) -> None:
    """From any request on, every one fails: nothing half is ever listed or read."""
    content = SIZES[size]
    for nth in count(1):
        store = lane.store(clock=FakeClock(), patience_s=2.0)
        store.put(KEY, b"before")
        struck = lane.proxy.struck
        lane.proxy.on(ON_THE_WAY_UP[what], path="victim", nth=nth, times=None)
        with contextlib.suppress(StoreError):
            store.put(KEY, content)
        over = lane.proxy.struck == struck
        lane.proxy.heal()

        found = {info.key: info.size_bytes for info in store.list()}
        assert store.get(KEY) in (b"before", content)
        assert found == {KEY: len(store.get(KEY))}
        assert left_after_clean_up(lane) == 0
        if over or what in ("twice", "slow"):
            break


@pytest.mark.parametrize("what", ON_THE_WAY_DOWN)
def test_a_fault_at_any_request_of_a_read_is_not_seen(lane: Lane, what: str) -> None:
    """Content, ranges, sizes and listings are right although one request of each fails."""
    store = impatient(lane)
    for key, content in SIZES.items():
        store.put(f"x/{key}", content)
    into = memoryview(bytearray(len(LARGE)))

    def ranged() -> bytes:
        store.get_into("x/large", 0, into)
        return bytes(into)

    reads: list[tuple[Callable[[], Any], Any]] = [
        (lambda: store.get("x/small"), SMALL),
        (ranged, LARGE),
        (lambda: store.head("x/small").size_bytes, len(SMALL)),  # type: ignore[union-attr]
        (lambda: store.head("x/none"), None),
        (lambda: [info.key for info in store.list("x/")], ["x/large", "x/small"]),
        (lambda: store.list_folders(""), ["x/"]),
    ]
    for read, right in reads:
        into[:] = bytes(len(into))
        struck = lane.proxy.struck
        lane.proxy.on(ON_THE_WAY_DOWN[what])
        assert read() == right
        assert lane.proxy.struck == struck + 1
        lane.proxy.heal()


def test_bytes_damaged_on_their_way_down_are_noticed(lane: Lane) -> None:
    """An object whose checksum the server keeps is never returned with other bytes."""
    store = impatient(lane)
    store.put(KEY, SMALL)
    lane.proxy.on(faults.damage_answer(), method="GET", path="victim", times=2)

    assert store.get(KEY) == SMALL
    assert lane.proxy.struck == 2


def test_bytes_always_damaged_on_their_way_up_are_not_stored(lane: Lane) -> None:
    """A server that proves checksums refuses them each time, and the error says so."""
    store = lane.store(clock=FakeClock(), patience_s=1.0)
    lane.proxy.on(faults.damage_request(), path="victim", times=None)
    for content in SIZES.values():
        with pytest.raises(StoreUnavailable, match=r"damaged|Md5Mismatch"):
            store.put(KEY, content)
    lane.proxy.heal()

    assert list(store.list()) == []


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("size", SIZES)
def test_a_race_on_a_bad_line_has_one_winner(lane: Lane, size: str, seed: int) -> None:
    """Six create the same key while answers are lost, repeated and refused: one of them wins."""
    chance = random.Random(seed)
    kinds = [
        *(faults.lose_answer(), faults.twice(), faults.refuse(503)),
        *(faults.reset_in_request(), faults.truncate(), faults.reset_in_answer()),
    ]
    won: list[bytes] = []
    start = threading.Barrier(6)

    def create(writer: int) -> None:
        store = lane.store()
        content = bytes([writer]) * len(SIZES[size])
        store.head(KEY)
        start.wait()
        with contextlib.suppress(AlreadyExists):
            store.put(KEY, content, if_absent=True)
            won.append(content)

    for nth in range(1, 60):
        if chance.random() < 0.4:
            lane.proxy.on(chance.choice(kinds), path="victim", nth=nth)
    with ThreadPoolExecutor(6) as crew:
        list(crew.map(create, range(6)))
    lane.proxy.heal()

    assert won == [impatient(lane).get(KEY)]
    assert lane.proxy.struck > 3


def deaf(exchange: Exchange) -> None:
    """Do not even read what is sent."""
    exchange.wait()
    exchange.hang_up()


@pytest.mark.parametrize("op", ["put", "put large", "get", "get_into", "head", "list", "copy"])
@pytest.mark.parametrize("fault", ["stall", "deaf", "trickle", "503"])
def test_nothing_outlives_the_deadline(
    lane: Lane, op: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Silence, a line of a few bytes a second, refusals: all end with the time that was given."""
    be_impatient(monkeypatch, 60.0)
    store = lane.store()
    store.put(KEY, LARGE)
    calls: dict[str, Callable[[], object]] = {
        "put": lambda: store.put(KEY, SMALL),
        "put large": lambda: store.put(KEY, LARGE),
        "get": lambda: store.get(KEY),
        "get_into": lambda: store.get_into(KEY, 0, memoryview(bytearray(len(LARGE)))),
        "head": lambda: store.head(KEY),
        "list": lambda: list(store.list()),
        "copy": lambda: store.copy(KEY, "folder/other"),
    }
    act = {
        "stall": faults.stall(),
        "deaf": deaf,
        "trickle": faults.trickle(20),
        "503": faults.refuse(503),
    }[fault]
    lane.proxy.on(act, times=None)
    began = time.monotonic()
    with give_up_after(0.5), pytest.raises(StoreUnavailable):
        calls[op]()
    took_s = time.monotonic() - began
    lane.proxy.heal()

    assert took_s < 0.5 + IN_TIME_S
    assert store.get(KEY) in (SMALL, LARGE)


def test_a_name_service_away_for_twenty_seconds_is_waited_out(
    lane: Lane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No name can be looked up for 20 s in the middle of a save; it goes on, and is whole.

    One thread: on a fake clock the sleeps of several add up, and end everybody's patience early.
    """
    clock = FakeClock()
    lookup = socket.getaddrinfo
    gone_until = clock.monotonic() + 20.0

    def resolve(*args: Any, **options: Any) -> Any:
        if clock.monotonic() < gone_until:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return lookup(*args, **options)

    store = lane.store(clock=clock, threads=1)
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    store.put(KEY, LARGE)

    assert clock.monotonic() >= gone_until
    assert store.get(KEY) == LARGE


def test_a_name_service_that_stays_away_is_told(
    lane: Lane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the patience the error names the host, and that the name is what is not known."""

    def resolve(*args: Any, **options: Any) -> Any:
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    store = impatient(lane)
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with pytest.raises(StoreUnavailable, match=r"the name .* is not known"):
        store.put(KEY, SMALL)


def test_what_was_broken_off_is_freed_by_the_next_start(lane: Lane) -> None:
    """Parts whose writer died are nowhere listed, and gone after `clean_up`."""
    bucket = lane.bucket()
    upload = bucket.begin(KEY, writer="dead")
    bucket.put_part(KEY, upload, 1, [memoryview(LARGE)[:200_000]])
    store = impatient(lane)

    assert list(store.list()) == []
    assert store.head(KEY) is None
    assert left_after_clean_up(lane) == 0
    with pytest.raises(StoreError):
        bucket.finish(KEY, upload, ["x x"], condition=ALWAYS, writer="dead")
    assert list(store.list()) == []


@pytest.mark.parametrize("lane", ["s3", "gcs"], indirect=True)
def test_a_write_that_is_refused_frees_its_parts_at_once(lane: Lane) -> None:
    """What went up before the refusal is not left for the next start, which may never come."""
    store = impatient(lane)
    bucket = lane.bucket()
    begun = [len(bucket.uploads(""))]

    def refuse(exchange: Exchange) -> None:
        begun.append(len(bucket.uploads("")))
        faults.refuse(403)(exchange)

    lane.proxy.on(refuse, method="POST", path="/compose" if lane.kind == "gcs" else "uploadId=")
    with pytest.raises(StoreError):
        store.put(KEY, LARGE)

    assert [*begun, len(bucket.uploads(""))] == [0, 1, 0]


@pytest.mark.parametrize("lane", ["s3"], indirect=True)
def test_cleaning_up_goes_on_after_a_fault(lane: Lane) -> None:
    """A request of it that fails is tried again, and what comes after it is done."""
    for writer in ("one", "two"):
        lane.bucket().begin(KEY, writer=writer)
    lane.proxy.on(faults.refuse(503), method="DELETE", path="victim", times=2)

    assert left_after_clean_up(lane) == 0
    assert lane.proxy.struck == 2
