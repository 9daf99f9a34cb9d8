"""A rank's events: stored alone, merged when old, and never lost or told twice."""

from __future__ import annotations

import itertools
import threading
from typing import TYPE_CHECKING

import pytest

from spotguard.control.journal.job_events import JobNews, newest_events, recall
from spotguard.errors import StoreUnavailable
from spotguard.events import keys
from spotguard.events.event import Event, Heartbeat, JobEvent
from spotguard.events.event_chunk import LARGEST_CHUNK, MERGED_AT_ONCE
from spotguard.runtime.reporting.event_log import EventLog
from spotguard.runtime.reporting.node_reports import Reporter
from spotguard.testing import FaultyStore, MemoryStore
from spotguard.testing.stores import SimulatedCrash

if TYPE_CHECKING:
    from collections.abc import Callable

    from spotguard.storage.base import ObjectStore


class Seen:
    """Remembers keys, and each event that was told."""

    def __init__(self) -> None:
        self.keys: set[str] = set()
        self.refused: list[str] = []

    def knows(self, key: str) -> bool:
        """Tell whether it was read."""
        return key in self.keys

    def set_aside(self, attempt: int, key: str, problem: str) -> None:
        """Remember what makes no sense."""
        self.refused.append(key)

    def note_chunk(self, attempt: int, key: str) -> None:
        """Remember a chunk."""
        self.keys.add(key)

    def read(self, store: MemoryStore, *, all_of_them: bool = True) -> list[int]:
        """Return the numbers of the events that are new."""
        return self.go_on(JobNews(store, self), all_of_them=all_of_them)

    def go_on(self, news: JobNews, *, all_of_them: bool) -> list[int]:
        """The same, by a reader that has read before."""
        numbers = []
        for key, event in news.events(1, all_of_them=all_of_them):
            assert key not in self.keys
            self.keys.add(key)
            numbers.append(event.data["number"])
        return numbers


def event(number: int, *, at: float | None = None) -> Event:
    """Return an event that knows its number."""
    at = 1e9 + number if at is None else at
    return Event(kind="saved", at=at, attempt=1, data={"number": number})


def written(store: MemoryStore | FaultyStore, count: int) -> list[int]:
    """Write so many events, tidied after each; return those that were stored."""
    log, done = EventLog(store, attempt=1, node=0, rank=0), []
    try:
        for number in range(count):
            log.write(event(number))
            done.append(number)
            log.tidy(lambda: True)
    except SimulatedCrash:
        pass
    return done


def objects(store: MemoryStore) -> list[str]:
    """Return the keys of everything that the attempt's events are in."""
    return [info.key for info in store.list(keys.events(1))]


def test_a_long_attempt_stays_short_to_list() -> None:
    """Thousands of events take a few dozen objects, and all of them are read, once."""
    store, seen = MemoryStore(), Seen()
    count = 20 * LARGEST_CHUNK
    written(store, count)

    assert len(objects(store)) <= count / LARGEST_CHUNK + 2 * MERGED_AT_ONCE + 2
    assert sorted(seen.read(store)) == list(range(count))
    assert seen.read(store) == []


def test_the_newest_events_always_stand_alone() -> None:
    """Who looks for how an attempt ended does not have to read chunks."""
    for count in (1, MERGED_AT_ONCE, 2 * MERGED_AT_ONCE, 5 * MERGED_AT_ONCE + 3):
        store = MemoryStore()
        written(store, count)
        newest = [each.data["number"] for each in newest_events(store, 1)]
        assert newest == list(range(count))[-len(newest) :]
        assert len(newest) >= min(count, MERGED_AT_ONCE)


def test_a_writer_that_dies_between_any_two_writes_loses_nothing_and_repeats_nothing() -> None:
    """Every put and delete of three merges is where it dies, before or after; all are read once."""
    count = 4 * MERGED_AT_ONCE
    whole = FaultyStore(MemoryStore())
    written(whole, count)
    assert whole.mutations > count + 2 * MERGED_AT_ONCE
    for nth in range(2 * MERGED_AT_ONCE - 1, whole.mutations + 1):
        for after in (False, True):
            store = MemoryStore()
            done = written(FaultyStore(store).crash_at(nth, after=after), count)
            numbers = sorted(Seen().read(store))
            assert numbers[: len(done)] == done, (nth, after)
            assert numbers in (done, [*done, len(done)]), (nth, after)  # its answer was lost


def test_a_reader_beside_the_writer_reads_each_event_once() -> None:
    """At every moment of a merge a look tells what is new, and the looks together tell all."""
    store, seen, numbers = MemoryStore(), Seen(), []
    news = JobNews(store, seen)
    watched = FaultyStore(store)

    def look(_key: str) -> None:
        numbers.extend(seen.go_on(news, all_of_them=False))

    for op in ("put", "delete"):
        watched.after(op, look, times=None)
    written(watched, 6 * MERGED_AT_ONCE)

    assert sorted(numbers) == list(range(6 * MERGED_AT_ONCE))


def test_what_is_merged_while_it_is_read_is_found_in_its_chunk() -> None:
    """An event that is gone between the listing and its reading is looked for again."""
    inner = MemoryStore()
    log = EventLog(inner, attempt=1, node=0, rank=0)
    for number in range(2 * MERGED_AT_ONCE):
        log.write(event(number))
    store = FaultyStore(inner).before("get", lambda _: log.tidy(lambda: True))

    seen = Seen()
    numbers = seen.go_on(JobNews(store, seen), all_of_them=True)

    assert sorted(numbers) == list(range(2 * MERGED_AT_ONCE))


def test_an_event_with_an_older_time_is_read_once_however_late() -> None:
    """A clock that was set back hides nothing for good."""
    store, seen = MemoryStore(), Seen()
    news = JobNews(store, seen)
    log = EventLog(store, attempt=1, node=0, rank=0)
    for number in range(3 * MERGED_AT_ONCE):
        at = 1e9 - 5000 + number if number % 7 == 3 else None
        log.write(event(number, at=at))
        log.tidy(lambda: True)
        if number == MERGED_AT_ONCE:
            seen.go_on(news, all_of_them=False)
    seen.go_on(news, all_of_them=True)
    assert len([key for key in seen.keys if not keys.is_chunk(key)]) == 3 * MERGED_AT_ONCE
    assert seen.read(store) == []


def test_a_store_that_fails_while_events_are_merged_costs_nothing() -> None:
    """What could not be merged or deleted now is so the next time."""
    inner = MemoryStore()
    store = FaultyStore(inner).fail("put", key_contains=".jsonl").fail("delete", nth=3)
    log = EventLog(store, attempt=1, node=0, rank=0)
    problems = 0
    for number in range(6 * MERGED_AT_ONCE):
        log.write(event(number))
        try:
            log.tidy(lambda: True)
        except StoreUnavailable:
            problems += 1
    assert problems == 2
    assert sorted(Seen().read(inner)) == list(range(6 * MERGED_AT_ONCE))
    assert len(objects(inner)) < 2 * MERGED_AT_ONCE + 3


def test_nothing_is_tidied_while_there_is_something_to_report() -> None:
    """A merge that was made deletes nothing as long as its writer is asked to hurry."""
    store = MemoryStore()
    log = EventLog(store, attempt=1, node=0, rank=0)
    for number in range(2 * MERGED_AT_ONCE):
        log.write(event(number))
    log.tidy(lambda: False)
    assert len(objects(store)) == 2 * MERGED_AT_ONCE + 1
    log.tidy(lambda: True)
    assert len(objects(store)) == MERGED_AT_ONCE + 1


def test_a_damaged_line_hides_no_other_event() -> None:
    """Chunks come from a job: what makes no sense in one is set aside by its line."""
    store = MemoryStore()
    written(store, 2 * MERGED_AT_ONCE)
    (key,) = [key for key in objects(store) if keys.is_chunk(key)]
    lines = store.get(key).splitlines(keepends=True)
    lines[1:4] = [b'{"key": 1}\n', b"\xff\n", b'["x"]\n']
    store.put(key, b"".join(lines))

    seen = Seen()
    numbers = sorted(seen.read(store))
    assert numbers == [n for n in range(2 * MERGED_AT_ONCE) if n not in (1, 2, 3)]
    assert seen.refused == [f"{key}, line {line}" for line in (2, 3, 4)]


def test_a_past_is_recalled_from_its_ends() -> None:
    """Whoever has read nothing reads few objects, with the first and the newest events."""
    store = MemoryStore()
    count = 10 * LARGEST_CHUNK
    written(store, count)
    counting = FaultyStore(store)
    past = recall(counting, 1)

    numbers = [told.data["number"] for _, told in past.events]
    newest = numbers[MERGED_AT_ONCE:]
    assert numbers[:MERGED_AT_ONCE] == list(range(MERGED_AT_ONCE))
    assert newest == list(range(count))[-len(newest) :]
    assert counting.calls["get"] <= 2 * MERGED_AT_ONCE + 2
    assert past.left == len(past.chunks) - 1 > 5


BEAT = Heartbeat(
    at=1.0, attempt=1, node=0, step=1, total_steps=2, epoch=0, train_s=1.0, step_s=None,
    loss=None, saved_step=None, saved_at=None,
)  # fmt: skip


def reporter_of(store: ObjectStore, heartbeat: Callable[[], Heartbeat] | None = None) -> Reporter:
    """Return a reporter that beats, if it can, a hundred times a second."""
    return Reporter(
        store,
        attempt=1,
        node=0,
        rank=0,
        heartbeat_s=0.01 if heartbeat else 60.0,
        heartbeat=heartbeat,
        on_stop=lambda _: None,
    )


@pytest.mark.parametrize("stored", [False, True], ids=["refused", "answer lost"])
def test_a_hiccup_of_the_store_swallows_no_event(stored: bool) -> None:
    """What it refused is tried again, in its place; what it did take is there once."""

    def lose_answers(key: str) -> None:
        raise StoreUnavailable(f"no answer to {key} (scripted)")

    inner = MemoryStore()
    store = FaultyStore(inner)
    if stored:
        store.after("put", lose_answers, times=2)
    else:
        store.fail("put", nth=1).fail("put", nth=2)
    reporter = reporter_of(store)
    for number in range(4):
        reporter.event(JobEvent.ENDED if number == 3 else JobEvent.SAVED, number=number)
    reporter.start()
    assert reporter.flush(30.0)
    reporter.close(30.0)

    assert sorted(Seen().read(inner)) == [0, 1, 2, 3]
    assert len(objects(inner)) == 4


def test_whatever_goes_wrong_in_a_report_the_next_one_is_made() -> None:
    """Also an error that no store should raise: a job that nobody hears of is given up."""

    def breaks(key: str) -> None:
        raise OSError(5, f"input/output error at {key} (scripted)")

    inner = MemoryStore()
    store = FaultyStore(inner)
    store.before("put", breaks, times=2, key_contains="/events/")
    there = threading.Event()
    store.after("put", lambda _: there.set(), times=None, key_contains="/events/")
    beats = itertools.count()

    def beat() -> Heartbeat:
        if next(beats) == 0:
            raise OSError(5, "input/output error (scripted)")
        return BEAT

    reporter = reporter_of(store, beat)
    reporter.start()
    reporter.event(JobEvent.SAVED, number=0)
    assert there.wait(30.0), "it is tried again by itself"
    reporter.event(JobEvent.ENDED, number=1)
    reporter.close(30.0)

    assert sorted(Seen().read(inner)) == [0, 1]
    assert next(beats) > 1


class Failing:
    """A machine of which nothing can be measured any more."""

    def measure(self) -> None:
        """Fail as CUDA does once a kernel has failed."""
        raise RuntimeError("CUDA error: an illegal memory access was encountered (scripted)")

    flush = measure


def test_a_machine_that_fails_swallows_no_event() -> None:
    """Neither a measurement nor a heartbeat that it breaks ends the thread that tells the end."""
    store, beaten = MemoryStore(), threading.Semaphore(0)

    def beat() -> Heartbeat:
        beaten.release()
        raise RuntimeError("CUDA error: an illegal memory access was encountered (scripted)")

    reporter = reporter_of(store, beat)
    reporter._metrics = Failing()  # type: ignore[assignment]
    reporter.start()
    assert all(beaten.acquire(timeout=30.0) for _ in range(2))
    reporter.event(JobEvent.ENDED, number=1)
    reporter.close(30.0)
    assert not reporter._thread.is_alive()
    assert sorted(Seen().read(store)) == [1]


def test_a_store_that_is_away_for_long_starves_nobody() -> None:
    """Meanwhile the heart beats, who waits is let go, and at the end it is tried once more."""
    inner, back = MemoryStore(), threading.Event()

    def refuse_events(key: str) -> None:
        if "/events/" in key and not back.is_set():
            raise StoreUnavailable("it is away (scripted)")

    store = FaultyStore(inner).before("put", refuse_events, times=None)
    beats: list[int] = []
    enough = threading.Event()

    def heartbeat() -> Heartbeat:
        beats.append(1)
        if len(beats) == 5:
            enough.set()
        return BEAT

    reporter = reporter_of(store, heartbeat)
    reporter.event(JobEvent.ENDED, number=0)
    reporter.start()
    assert not reporter.flush(0.05)
    assert enough.wait(30.0)
    assert objects(inner) == []
    back.set()
    reporter.close(30.0)
    assert Seen().read(inner) == [0]


@pytest.mark.parametrize("kind", [JobEvent.NOTICE, JobEvent.AGREED])
def test_nothing_is_merged_once_a_node_is_to_be_taken(kind: JobEvent) -> None:
    """The report of the end does not wait for upkeep; after a false alarm upkeep goes on."""
    store = MemoryStore()
    reporter = reporter_of(store)
    reporter.event(kind)
    for number in range(3 * MERGED_AT_ONCE):
        reporter.event(JobEvent.SAVED, number=number)
    reporter.start()
    assert reporter.flush(30.0)
    assert not any(map(keys.is_chunk, objects(store)))

    reporter.event(JobEvent.WITHDRAWN)
    assert reporter.flush(30.0)
    assert any(map(keys.is_chunk, objects(store)))
    reporter.close(30.0)
