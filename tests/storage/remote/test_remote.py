"""What a bucket's store promises whatever its network does."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from spotguard.errors import AlreadyExists, StoreError, StoreUnavailable
from spotguard.storage.deadline import give_up_after, remaining_s, timeout_s
from spotguard.storage.remote.bucket import ALWAYS, PartRules, Precondition
from spotguard.storage.remote.store import PATIENCE_S, RemoteStore
from spotguard.testing import FakeClock
from spotguard.testing.bucket import MemoryBucket

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from spotguard.storage.base import Buffer
    from spotguard.storage.remote.bucket import Page

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


def test_patience_has_an_end() -> None:
    """A server that stays away is given up after the patience, with its own sentence."""
    clock = FakeClock()
    bucket = MemoryBucket().fail("get", times=None)
    with pytest.raises(StoreUnavailable, match="scripted"):
        made(bucket, clock).get("x")
    assert 0.8 * PATIENCE_S < sum(clock.slept) <= PATIENCE_S


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
            assert go_on.wait(10)
            return super().put(key, body, condition=condition, writer=writer)

    ill, well = made(Hanging(heeds_conditions=None)), made(MemoryBucket(heeds_conditions=None))
    writers = [
        threading.Thread(target=store.put, args=("x", b"1"), kwargs={"if_absent": True})
        for store in (ill, well)
    ]
    writers[0].start()
    assert tried.wait(10)
    writers[1].start()
    writers[1].join(2.0)
    waits = writers[1].is_alive()
    go_on.set()
    for writer in writers:
        writer.join()

    assert not waits


def test_a_server_without_conditions_is_found_out_once() -> None:
    """It is tried before the first conditional write, and what was written for that is gone."""
    bucket = MemoryBucket(heeds_conditions=None)
    store = made(bucket)
    store.put("x", b"1", if_absent=True)
    calls = bucket.calls["put"]
    store.put("y", b"1", if_absent=True)

    assert bucket.calls["put"] == calls + 1
    assert sorted(bucket.objects) == ["x", "y"]


def test_without_the_servers_help_creators_still_agree() -> None:
    """On a server that overwrites, a second creator loses, as does one at the same time."""
    clock = FakeClock()
    bucket = MemoryBucket(clock=clock, heeds_conditions=None, ignores_conditions=True)
    store = made(bucket, clock)
    etag = store.put("x", b"first", if_absent=True)
    with pytest.raises(AlreadyExists):
        store.put("x", b"second", if_absent=True)
    assert bucket.objects["x"].content == b"first"
    store.put("x", b"third", if_match=etag)
    with pytest.raises(AlreadyExists):
        store.put("x", b"fourth", if_match=etag)
    assert bucket.objects["x"].content == b"third"
    store.delete("x")
    store.put("x", b"fifth", if_absent=True)
    assert bucket.objects["x"].content == b"fifth"


def test_no_bid_is_placed_that_there_is_no_time_to_wait_for() -> None:
    """It could win after its writer has told that the write failed; and the deadline is kept."""
    clock = FakeClock()
    began = clock.monotonic()
    bucket = MemoryBucket(clock=clock, heeds_conditions=False, ignores_conditions=True)
    with (
        give_up_after(2.5, clock),
        pytest.raises(StoreUnavailable, match="too little time is left"),
    ):
        made(bucket, clock).put("x", b"1", if_absent=True)

    assert clock.monotonic() - began <= 2.5
    assert not bucket.objects


def test_the_same_content_twice_is_not_the_same_race() -> None:
    """Where an etag is the hash of the content, who replaces what came back is not late."""

    class Hashing(MemoryBucket):
        def _store(self, key: str, content: bytes, condition: Precondition, writer: str) -> str:
            super()._store(key, content, condition, writer)
            etag = content.hex()
            self.objects[key] = replace(self.objects[key], etag=etag)
            return etag

    clock = FakeClock()
    bucket = Hashing(clock=clock, heeds_conditions=False, ignores_conditions=True)
    store = made(bucket, clock)
    first = store.put("x", b"A")
    second = store.put("x", b"B", if_match=first)
    again = store.put("x", b"A", if_match=second)
    assert again == first
    store.put("x", b"C", if_match=again)

    assert store.get("x") == b"C"


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("replaces", [False, True])
def test_who_bids_for_a_key_that_is_deleted_meanwhile_begins_again(
    replaces: bool, late: bool
) -> None:
    """With the key go the bids: what was to be replaced is no more, what is new is created."""

    class Deleting(MemoryBucket):
        deletes = True

        def page(self, prefix: str, **options: Any) -> Page:
            found = super().page(prefix, **options)
            if self.deletes and found.objects:
                self.deletes = False
                made(self).delete("x")
            return found if late else super().page(prefix, **options)

    clock = FakeClock()
    bucket = Deleting(clock=clock, ignores_conditions=True)
    bucket.heeds_conditions = None
    store = made(bucket, clock)
    etag = store.put("x", b"1") if replaces else None
    if replaces:
        with pytest.raises(AlreadyExists):
            store.put("x", b"2", if_match=etag)
    else:
        store.put("x", b"2", if_absent=True)

    assert not bucket.deletes
    assert ("x" in bucket.objects) is not replaces


@pytest.mark.parametrize("seed", range(20))
def test_racing_bidders_have_one_winner(seed: int) -> None:
    """Bids that lie side by side are judged alike by all, also for one that died after it."""
    clock = RacingClock()
    bucket = MemoryBucket(clock=clock, heeds_conditions=False, ignores_conditions=True)
    if seed % 2:
        bucket.fail("copy", error=StoreError("died"))
    won: list[bytes] = []
    start = threading.Barrier(4)

    def create(writer: int) -> None:
        store = RemoteStore(bucket, clock=clock)
        start.wait()
        try:
            store.put("x", b"%d" % writer, if_absent=True)
            won.append(b"%d" % writer)
        except AlreadyExists:
            pass
        except StoreError as problem:
            assert problem.message == "died"  # noqa: PT017  only one of them is to die

    threads = [threading.Thread(target=create, args=(writer,)) for writer in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == (1 if not seed % 2 else len(won)) <= 1
    if won:
        assert bucket.objects["x"].content == won[0]


class RacingClock(FakeClock):
    """Sleeping waits for the other bidders, as real time would."""

    def __init__(self) -> None:
        super().__init__()
        self._met = threading.Barrier(4)

    def sleep(self, seconds: float) -> None:
        """Let all four bids be placed before anyone looks."""
        self._met.wait()
