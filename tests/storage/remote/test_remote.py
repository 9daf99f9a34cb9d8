"""What a bucket's store promises whatever its network does."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

from spotguard.errors import AlreadyExists, StoreError, StoreUnavailable
from spotguard.storage.deadline import give_up_after, remaining_s, timeout_s
from spotguard.storage.remote.bucket import ALWAYS, PartRules, Precondition
from spotguard.storage.remote.store import PATIENCE_S, RemoteStore
from spotguard.testing import FakeClock
from spotguard.testing.bucket import MemoryBucket

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from spotguard.storage.base import Buffer

MB = 1 << 20
SMALL_PARTS = PartRules(min_bytes=1, max_bytes=MB, max_parts=10_000)


def made(bucket: MemoryBucket, clock: FakeClock | None = None) -> RemoteStore:
    """Return a store that cuts everything larger than 1000 bytes into parts."""
    return RemoteStore(bucket, clock=clock or FakeClock(), threads=4, single_bytes=1000)


def large(parts: int = 5) -> bytes:
    """Return bytes that make so many parts of at most 1 MB; no two of them are the same."""
    return b"".join(bytes([number + 1]) * (MB - number) for number in range(parts))


@pytest.mark.parametrize("op", ["put", "begin", "put_part", "finish", "get", "get_range", "page"])
def test_what_fails_for_a_passing_reason_is_tried_again(op: str) -> None:
    """Three failures in a row of any request are not seen by the caller."""
    bucket = MemoryBucket(part_rules=SMALL_PARTS).fail(op, times=3)
    store = made(bucket)
    store.put("small", b"s" * 10)
    store.put("large", large())
    into = bytearray(len(large()))

    store.get_into("large", 0, memoryview(into))
    assert (bytes(into), store.get("small")) == (large(), b"s" * 10)
    assert [info.key for info in store.list()] == ["large", "small"]
    assert bucket.calls[op] >= 4


def test_only_the_part_that_failed_is_sent_again() -> None:
    """Five parts of which one fails twice are seven requests."""
    bucket = MemoryBucket(part_rules=SMALL_PARTS).fail("put_part", nth=2, times=2)
    made(bucket).put("x", large(5))

    assert bucket.calls["put_part"] == 7
    assert bucket.objects["x"].content == large(5)


def test_what_another_try_does_not_mend_is_not_tried() -> None:
    """A missing right is told at once."""
    bucket = MemoryBucket().fail("get", error=StoreError("no right"), times=None)
    with pytest.raises(StoreError, match="no right"):
        made(bucket).get("x")
    assert bucket.calls["get"] == 1


def test_patience_has_an_end(caplog: pytest.LogCaptureFixture) -> None:
    """A server that stays away is given up after the patience, with its own sentence.

    What is waited for, and for how long, is said meanwhile: not at once, and not at each try.
    """
    clock = FakeClock()
    bucket = MemoryBucket().fail("get", times=None)
    with pytest.raises(StoreUnavailable, match="scripted"):
        made(bucket, clock).get("x")
    assert 0.8 * PATIENCE_S < sum(clock.slept) <= PATIENCE_S
    said = [record.getMessage() for record in caplog.records]
    assert 1 <= len(said) <= 2
    assert all(each.startswith("waiting for ") and "scripted" in each for each in said)


def test_name_service_away_for_twenty_seconds_is_waited_out() -> None:
    """Requests that all fail for 20 s, then work, are a pause and nothing more."""
    clock = FakeClock()
    began = clock.monotonic()
    bucket = MemoryBucket()

    class Away(MemoryBucket):
        def get(self, key: str, max_bytes: int | None = None) -> bytes:
            if clock.monotonic() < began + 20:
                raise StoreUnavailable("the name cannot be looked up")
            return bucket.get(key)

    made(bucket).put("x", b"1")
    assert made(Away(), clock).get("x") == b"1"


def test_no_try_outlives_the_deadline() -> None:
    """Inside `give_up_after` retries end before it, also those of parts in other threads."""
    clock = FakeClock()
    began = clock.monotonic()
    bucket = MemoryBucket(part_rules=SMALL_PARTS).fail("put_part", times=None)
    with give_up_after(5.0, clock), pytest.raises(StoreUnavailable):
        made(bucket, clock).put("x", large())
    # Four threads move the one clock on, so their pauses add up.
    assert clock.monotonic() < began + 4 * 5.0
    assert max(clock.slept) < 5.0


def test_deadlines_nest_and_cap_requests() -> None:
    """The nearest deadline counts; a request may take as long as usual, or what is left."""
    clock = FakeClock()
    assert remaining_s() is None
    assert timeout_s(30.0) == 30.0
    with give_up_after(10.0, clock):
        with give_up_after(60.0, clock):
            assert remaining_s() == 10.0
            assert timeout_s(30.0) == 10.0
        clock.advance(11.0)
        assert remaining_s() == -1.0
        assert timeout_s(30.0) > 0
    assert remaining_s() is None


@pytest.mark.parametrize("size", [10, len(large())])
def test_a_creator_whose_answer_was_lost_has_won_all_the_same(size: int) -> None:
    """The repeated create finds its own object and is content; the bytes are there once."""
    bucket = MemoryBucket(part_rules=SMALL_PARTS).lose_answer("put").lose_answer("finish")
    etag = made(bucket).put("x", large()[:size], if_absent=True)

    assert bucket.objects["x"].etag == etag
    assert bucket.objects["x"].content == large()[:size]
    assert not bucket.parts


def test_a_creator_whose_answer_was_lost_may_have_lost() -> None:
    """The request never arrived, and another writer came in between: that one's object stays."""
    bucket = MemoryBucket()
    rival = made(bucket)

    class Slow(MemoryBucket):
        def put(self, *args: object, **options: object) -> str:
            if "x" not in bucket.objects:
                rival.put("x", b"theirs")
                raise StoreUnavailable("connection reset")
            return bucket.put(*args, **options)  # type: ignore[arg-type]

        def writer_of(self, key: str) -> str | None:
            return bucket.writer_of(key)

    with pytest.raises(AlreadyExists):
        made(Slow()).put("x", b"ours", if_absent=True)
    assert bucket.objects["x"].content == b"theirs"


def test_a_swap_whose_answer_was_lost_counts_once() -> None:
    """A repeated if-match that finds its own new etag is content."""
    bucket = MemoryBucket()
    store = made(bucket)
    first = store.put("x", b"1")
    bucket.lose_answer("put", nth=2 - 1)
    second = store.put("x", b"2", if_match=first)

    assert second != first
    assert bucket.objects["x"].content == b"2"


def test_a_broken_write_in_parts_leaves_nothing() -> None:
    """Its parts are freed, the key is as before, and nobody reads the caller's memory any more."""
    bucket = MemoryBucket(part_rules=SMALL_PARTS)
    store = made(bucket)
    store.put("x", b"before")
    bucket.fail("put_part", nth=3, times=None, error=StoreError("no right"))
    with pytest.raises(StoreError, match="no right"):
        store.put("x", large())
    sent = bucket.calls["put_part"]

    assert not bucket.parts
    assert bucket.objects["x"].content == b"before"
    assert bucket.calls["put_part"] == sent


def test_a_stream_that_fails_gives_the_write_up() -> None:
    """What a stream raises while it is gone through reaches the caller; no part stays."""

    class Broken:
        size_bytes = len(large())

        def __iter__(self) -> Iterator[Buffer]:
            yield large()[: 2 * MB]
            raise ArithmeticError("the copy failed")

    bucket = MemoryBucket(part_rules=SMALL_PARTS)
    with pytest.raises(ArithmeticError):
        made(bucket).put("x", Broken())
    assert not bucket.parts
    assert "x" not in bucket.objects


def test_a_write_that_nobody_wants_any_more_ends_with_the_parts_under_way() -> None:
    """Of forty parts no more are sent than the threads had: another save's may be next in line."""
    wanted, slow = threading.Event(), threading.Event()
    wanted.set()

    class Slow(MemoryBucket):
        def put_part(self, *args: Any, **options: Any) -> str:
            slow.wait(0.05)
            part = super().put_part(*args, **options)
            wanted.clear()
            return part

    class Stream:
        size_bytes = len(large(40))

        def __iter__(self) -> Iterator[Buffer]:
            for part in range(40):
                if not wanted.is_set():
                    raise StoreError("another one is waiting")
                yield bytes([part + 1]) * (MB - part)

    bucket = Slow(part_rules=SMALL_PARTS)
    with pytest.raises(StoreError, match="another one is waiting"):
        made(bucket).put("x", Stream())
    assert bucket.calls["put_part"] <= 2 * 4
    assert not bucket.parts


def test_parts_lie_where_the_caller_has_them() -> None:
    """Not a byte is copied on the way to the bucket: parts are views of the caller's memory."""
    seen: list[object] = []

    class Watching(MemoryBucket):
        def put_part(
            self, key: str, upload_id: str, number: int, body: Sequence[memoryview]
        ) -> str:
            seen.extend(view.obj for view in body)
            return super().put_part(key, upload_id, number, body)

    data = bytearray(large())
    made(Watching(part_rules=SMALL_PARTS)).put("x", data)
    assert seen
    assert all(owner is data for owner in seen)


def test_clean_up_frees_what_was_broken_off_long_ago_and_nothing_else() -> None:
    """A write in parts that is under way, and those below other prefixes, go on."""
    clock = FakeClock()
    bucket = MemoryBucket(clock=clock)
    bucket.begin("run/old", writer="w")
    bucket.begin("other/old", writer="w")
    clock.advance(7200)
    bucket.begin("run/new", writer="w")

    assert made(bucket, clock).clean_up("run/", older_than_s=3600) == 1
    assert sorted(each.key for each in bucket.parts.values()) == ["other/old", "run/new"]


def test_a_listing_of_many_pages_is_whole_and_lazy() -> None:
    """Pages are asked for as they are needed; foreign and reserved keys are left out."""
    bucket = MemoryBucket(page_size=3)
    store = made(bucket)
    for number in range(10):
        store.put(f"a/{number}", b"")
        store.put(f"b{number}/x", b"")
    for foreign in ("a//x", ".spotguard/bids/y", "a/../z"):
        bucket.put(foreign, [], condition=ALWAYS, writer="")

    assert next(iter(store.list())).key == "a/0"
    assert bucket.calls["page"] <= 2
    assert [info.key for info in store.list("a/")] == [f"a/{n}" for n in range(10)]
    assert store.list_folders("") == ["a/", *(f"b{n}/" for n in range(10))]


def test_one_store_that_hangs_makes_no_other_wait() -> None:
    """While one server is tried and says nothing, another store's first write goes on."""
    tried, go_on = threading.Event(), threading.Event()

    class Hanging(MemoryBucket):
        def put(
            self, key: str, body: Sequence[memoryview], *, condition: Precondition, writer: str
        ) -> str:
            tried.set()
            go_on.wait()
            return super().put(key, body, condition=condition, writer=writer)

    ill, well = made(Hanging(heeds_conditions=None)), made(MemoryBucket(heeds_conditions=None))
    writers = [
        threading.Thread(target=store.put, args=("x", b"1"), kwargs={"if_absent": True})
        for store in (ill, well)
    ]
    writers[0].start()
    tried.wait()
    writers[1].start()
    writers[1].join()  # for ever, if it waits for the other one
    go_on.set()
    writers[0].join()

    assert well.get("x") == b"1"


def test_whether_a_server_keeps_conditions_is_found_out_once() -> None:
    """It is tried before the first conditional write, and what was written for that is gone."""
    bucket = MemoryBucket(heeds_conditions=None)
    store = made(bucket)
    store.put("x", b"1", if_absent=True)
    calls = bucket.calls["put"]
    store.put("y", b"1", if_absent=True)

    assert bucket.calls["put"] == calls + 1
    assert sorted(bucket.objects) == ["x", "y"]


@pytest.mark.parametrize("write", ["small", "parts", "swap", "copy"])
def test_a_server_that_ignores_conditions_is_refused_before_anything_is_written(write: str) -> None:
    """Two could believe that they had won; so nothing is sent but two trials, once."""
    bucket = MemoryBucket(part_rules=SMALL_PARTS, heeds_conditions=None, ignores_conditions=True)
    store = made(bucket)
    etag = store.put("old", b"as it was")
    acts: dict[str, Callable[[], str]] = {
        "small": lambda: store.put("x", b"1", if_absent=True),
        "parts": lambda: store.put("x", large(), if_absent=True),
        "swap": lambda: store.put("old", b"1", if_match=etag),
        "copy": lambda: store.copy("old", "x", if_absent=True),
    }
    for _ in range(2):
        with pytest.raises(StoreError, match="two nodes could both believe") as refused:
            acts[write]()
        assert type(refused.value) is StoreError, "another try or another key would not mend it"
        assert store.url in refused.value.message
        assert "MinIO" in refused.value.hint
        assert "--store /shared/runs" in refused.value.hint

    assert bucket.objects["old"].etag == etag
    assert (set(bucket.objects), bucket.parts) == ({"old"}, {})
    assert bucket.calls == {"put": 1 + 2 * 2, "delete": 2}, "the object, and two trials"


def test_a_copy_that_is_behind_refuses_no_server() -> None:
    """One trial in which a condition was not kept is no proof: the next one decides."""

    class Behind(MemoryBucket):
        def put(
            self, key: str, body: Sequence[memoryview], *, condition: Precondition, writer: str
        ) -> str:
            behind = self.calls["put"] == 1
            return super().put(key, body, condition=ALWAYS if behind else condition, writer=writer)

    store = made(Behind(heeds_conditions=None))
    store.put("x", b"1", if_absent=True)
    with pytest.raises(AlreadyExists):
        store.put("x", b"2", if_absent=True)


def test_who_may_not_delete_the_trial_may_write() -> None:
    """What the trial leaves behind is in a place of our own; its verdict stands."""
    bucket = MemoryBucket(heeds_conditions=None)
    bucket.fail("delete", error=StoreError("no right to delete"))
    store = made(bucket)
    store.put("x", b"1", if_absent=True)
    assert [info.key for info in store.list()] == ["x"]


def test_on_a_server_that_ignores_conditions_all_else_works() -> None:
    """What lies there, such as the checkpoints of an older version, can be seen and moved."""
    bucket = MemoryBucket(heeds_conditions=None, ignores_conditions=True)
    store = made(bucket)
    bucket.put(".spotguard/bids/run/x", [], condition=ALWAYS, writer="")
    store.put("run/x", b"1")
    store.put("run/large", large())
    store.copy("run/x", "run/y")
    into = bytearray(len(large()))
    store.get_into("run/large", 0, memoryview(into))

    assert (bytes(into), store.get("run/x")) == (large(), b"1")
    assert store.head("run/y") is not None
    assert [info.key for info in store.list()] == ["run/large", "run/x", "run/y"]
    assert store.list_folders("") == ["run/"]
    assert store.clean_up(older_than_s=0.0) == 0
    store.delete("run/x")
    assert store.head("run/x") is None
