"""Logs are read from the run store: filtered, in order, each line once, whoever is gone."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from spotguard.control import api
from spotguard.control.journal.stored import logs as stored_logs
from spotguard.control.journal.stored.logs import LogQuery, StoredLog, stored_tail
from spotguard.control.supervisor.logs import RunLog, log_tail
from spotguard.errors import StoreUnavailable, UsageError
from spotguard.events import keys
from spotguard.events.log_line import StoredLine
from spotguard.launch.base import LogChunk
from spotguard.storage.patterns import growing_lines
from spotguard.storage.patterns.growing_lines import GrowingObjects
from spotguard.testing import FaultyStore, MemoryStore
from tests.control.made import ended, made
from tests.control.run_folders import make_run
from tests.control.supervisor.test_logs import DONE, FIRST, SECOND, TAKEN, Cloud

if TYPE_CHECKING:
    from pathlib import Path

    from spotguard.storage.base import ObjectStore

FAILED = (*FIRST, ended(9.0, "failed"))


def ship(
    store: ObjectStore, attempt: int, node: int, *lines: StoredLine, began_at: float = 1e9
) -> GrowingObjects:
    """Store lines of a node, one upload for each."""
    objects = GrowingObjects(store, keys.logs(attempt), owner=node, at=began_at)
    for line in lines:
        objects.add([line.to_json()])
        objects.store()
    return objects


def printed(at: float, text: str, rank: int | None = 0, stream: str = "stdout") -> StoredLine:
    """Return a line."""
    return StoredLine(at, rank, stream, text)


def read(store: ObjectStore, query: LogQuery | None = None, attempt: int = 1) -> list[str]:
    """Return the texts of an attempt that are wanted."""
    log = StoredLog(store, attempt, query or LogQuery())
    return [line.text for line in log.lines(failed=False, final=True)]


def three_nodes() -> MemoryStore:
    """Return a store with the steps of six ranks on three nodes, at uneven times."""
    store = MemoryStore()
    for node in range(3):
        lines = [
            printed(100.0 + 10 * step + node + 0.1 * rank, f"step {step} rank {rank}", rank)
            for step in range(5)
            for rank in (2 * node, 2 * node + 1)
        ]
        ship(store, 1, node, *lines)
    return store


def test_lines_of_all_ranks_are_in_the_order_of_time() -> None:
    """Each node writes for itself; who reads sees one story."""
    assert read(three_nodes()) == [
        f"step {step} rank {rank}" for step in range(5) for rank in range(6)
    ]


@pytest.mark.parametrize(
    ("query", "wanted"),
    [
        (LogQuery(rank=3, tail=2), ["step 3 rank 3", "step 4 rank 3"]),
        (LogQuery(node=2, tail=1), ["step 4 rank 5"]),
        (LogQuery(pattern=re.compile("step [12] rank 0")), ["step 1 rank 0", "step 2 rank 0"]),
        (LogQuery(since=140.0, rank=1), ["step 4 rank 1"]),
        (LogQuery(tail=3), ["step 4 rank 3", "step 4 rank 4", "step 4 rank 5"]),
        (
            LogQuery(tail=2, pattern=re.compile("rank 4"), since=115.0),
            ["step 3 rank 4", "step 4 rank 4"],
        ),
        (LogQuery(rank=9), []),
    ],
)
def test_only_what_is_asked_for_is_told(query: LogQuery, wanted: list[str]) -> None:
    """By node, rank, time and words; the last lines are the last of these."""
    assert read(three_nodes(), query) == wanted


def test_the_last_lines_of_a_long_log_cost_a_few_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A month of output is not fetched for its last twenty lines, nor for its last minutes."""
    monkeypatch.setattr(growing_lines, "_FULL_LINES", 10)
    inner = MemoryStore()
    ship(inner, 1, 0, *(printed(1000.0 + number, str(number)) for number in range(1000)))
    for query in (LogQuery(tail=20), LogQuery(since=1980.0)):
        store = FaultyStore(inner)
        assert read(store, query) == [str(number) for number in range(980, 1000)]
        assert store.calls["get"] <= 4


def test_who_follows_reads_each_line_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """While pieces grow, are full, and are replaced; also a line that comes in parts."""
    monkeypatch.setattr(growing_lines, "_FULL_LINES", 3)
    store = MemoryStore()
    objects = GrowingObjects(store, keys.logs(1), owner=0, at=1e9)
    log = StoredLog(store, 1, LogQuery(tail=2))
    told: list[str] = []
    for number in range(20):
        line = StoredLine(float(number), 0, "stdout", f"{number} ", more=number % 2 == 0)
        objects.add([line.to_json()])
        objects.store()
        told += [line.text for line in log.lines(failed=False, final=False)]
    assert told == [f"{number} {number + 1} " for number in range(0, 20, 2)]


def test_what_is_not_kept_is_told_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many lines of which node, in their place."""
    monkeypatch.setattr(growing_lines, "_FULL_LINES", 10)
    store = MemoryStore()
    ship(store, 1, 7, *(printed(float(number), str(number)) for number in range(40)))
    for pieces in growing_lines.stored_pieces(store, keys.logs(1)).values():
        store.delete(pieces[1].keys[0])
        store.delete(pieces[2].keys[0])
    lines = read(store)
    assert lines[:10] == [str(number) for number in range(10)]
    assert lines[10].startswith("20 lines of node 7 (")
    assert lines[11:] == [str(number) for number in range(30, 40)]


NOISE = printed(3.0, "E1124 torch/distributed/ FAILED", None, "launcher")
OURS = printed(4.0, "spotguard: goes on in place", None, "launcher")


def told(store: ObjectStore, *lines: object, query: LogQuery | None = None) -> list[str]:
    """Return what the command prints of a run whose clusters are gone."""
    log = RunLog(Cloud(), store, query)
    return [line.text for line in log.lines(made(*lines), last=True)]  # type: ignore[arg-type]


def test_a_launchers_noise_is_left_out_unless_it_explains() -> None:
    """After a clean leave it says FAILED; after a failure it may be all that there is."""
    store = MemoryStore()
    ship(store, 1, 0, printed(1.0, "step 1"), NOISE, OURS)
    assert told(store, *TAKEN) == ["step 1", OURS.text]
    assert told(store, *TAKEN, query=LogQuery(everything=True)) == ["step 1", NOISE.text, OURS.text]
    assert told(store, *FAILED) == ["step 1", NOISE.text, OURS.text]


def test_a_gone_cluster_has_its_log_in_the_store() -> None:
    """Of any attempt; what an earlier version did not store is told as gone."""
    store = MemoryStore()
    ship(store, 1, 0, printed(1.0, "step 1"))
    assert told(store, *DONE) == ["step 1", "its cluster is gone, and what it printed with it"]
    ship(store, 2, 0, printed(2.0, "step 2"), printed(3.0, "step 3"))
    assert told(store, *DONE) == ["step 1", "step 2", "step 3"]
    assert told(store, *DONE, query=LogQuery(attempt=1)) == ["step 1"]
    assert told(store, *DONE, query=LogQuery(tail=1)) == ["step 3"]
    assert told(store, *DONE, query=LogQuery(tail=3)) == ["step 1", "step 2", "step 3"]


def test_the_launcher_is_asked_until_the_store_has_the_log() -> None:
    """Set-up is seen at once, and no line twice when the store takes over."""
    store = MemoryStore()
    cloud = Cloud(job_1_1=b"setting up\nstep 1\nstep 2\n")
    log = RunLog(cloud, store)

    def follow() -> list[str]:
        return [line.text for line in log.lines(made(*FIRST), last=False)]

    assert follow() == ["setting up", "step 1", "step 2"]
    objects = ship(store, 1, 0, printed(1.0, "step 1"), printed(2.0, "step 2"))
    assert follow() == []
    objects.add([printed(3.0, "step 2").to_json(), printed(4.0, "step 3").to_json()])
    objects.store()
    assert follow() == ["step 2", "step 3"]


def test_who_follows_with_a_tail_is_told_all_that_is_new() -> None:
    """Only the beginning is cut."""
    store = MemoryStore()
    first = ship(store, 1, 0, *(printed(float(n), f"step {n}") for n in range(9)))
    log = RunLog(Cloud(), store, LogQuery(tail=2))

    def follow() -> list[str]:
        return [line.text for line in log.lines(made(*SECOND[: len(FIRST)]), last=False)]

    assert follow() == ["step 7", "step 8"]
    first.add([printed(10.0 + n, f"new {n}").to_json() for n in range(5)])
    first.store()
    assert follow() == [f"new {n}" for n in range(5)]


def test_who_follows_with_a_tail_is_told_all_of_the_next_attempt() -> None:
    """It is new from its first line on, whoever tells of it at first."""
    store = MemoryStore()
    ship(store, 1, 0, *(printed(float(n), f"step {n}") for n in range(9)))
    log = RunLog(Cloud(job_1_2=b"setting up\n"), store, LogQuery(tail=2))

    def follow(*lines: object) -> list[str]:
        return [line.text for line in log.lines(made(*lines), last=False)]  # type: ignore[arg-type]

    assert follow(*FIRST) == ["step 7", "step 8"]
    assert follow(*SECOND) == ["setting up"]
    ship(store, 2, 0, *(printed(20.0 + n, f"more {n}") for n in range(5)))
    assert follow(*SECOND) == [f"more {n}" for n in range(5)]


def test_ranks_that_print_the_same_are_told_apart() -> None:
    """What one node's launcher has shown hides no line of another; a rank's wait for the store."""

    class TwoNodes(Cloud):
        def read_log(self, cluster: str, node: int, offset: int) -> LogChunk:
            text = (b"step 1\n", b"step 1\nstep 2\n")[node]
            return LogChunk(node=node, offset=offset, data=text[offset:])

    cloud, store = TwoNodes(), MemoryStore()
    every, one = RunLog(cloud, store), RunLog(cloud, store, LogQuery(rank=0))

    def follow(log: RunLog) -> list[tuple[int | None, str]]:
        return [(line.node, line.text) for line in log.lines(made(*FIRST), last=False)]

    assert follow(every) == [(0, "step 1"), (1, "step 1"), (1, "step 2")]
    assert follow(one) == []
    for node in (0, 1):
        ship(store, 1, node, *(printed(float(n), f"step {n}", node) for n in (1, 2, 3)))
    assert sorted(follow(every)) == [(0, "step 2"), (0, "step 3"), (1, "step 3")]
    assert follow(one) == [(0, "step 1"), (0, "step 2"), (0, "step 3")]


def test_a_failure_shows_what_was_held_back() -> None:
    """Who follows learns only at the end that the launcher's words explain something."""
    store = MemoryStore()
    ship(store, 1, 0, printed(1.0, "step 1"), NOISE)
    log = RunLog(Cloud(), store)
    assert [line.text for line in log.lines(made(*FIRST), last=False)] == ["step 1"]
    assert [line.text for line in log.lines(made(*FAILED), last=True)] == [NOISE.text]


def test_a_store_that_cannot_be_read_costs_a_line() -> None:
    """Then the launcher is asked, as ever."""
    store = FaultyStore(MemoryStore()).fail("list", times=None, error=StoreUnavailable("away"))
    log = RunLog(Cloud(job_1_1=b"step 1\n"), store)
    assert [line.text for line in log.lines(made(*FIRST), last=True)] == [
        "the run store cannot be read now: away",
        "step 1",
    ]


def test_a_launchers_log_knows_neither_ranks_nor_times() -> None:
    """Who asks for a rank is told that its lines cannot be told apart."""
    log = RunLog(Cloud(job_1_1=b"step 1\n"), MemoryStore(), LogQuery(rank=1))
    first, second = log.lines(made(*FIRST), last=True)
    assert "nobody can tell its ranks and times apart" in first.text
    assert second.text == "step 1"


def test_the_reason_of_a_failure_is_read_from_the_store_when_the_cluster_is_gone() -> None:
    """The last lines of the node that failed, without what torchrun adds."""
    store = MemoryStore()
    ship(store, 1, 1, *(printed(float(n), f"line {n}") for n in range(50)), NOISE)
    (attempt,) = made(*FIRST).attempts
    tail = log_tail(Cloud(), store, attempt, 1)  # type: ignore[arg-type]
    assert tail == "\n".join(f"line {n}" for n in range(10, 50))
    assert log_tail(Cloud(), store, attempt, 0) is None  # type: ignore[arg-type]
    assert stored_tail(store, 1, 1, 1) == "line 49"


def test_lines_that_make_no_sense_cost_only_themselves() -> None:
    """Whoever can write into the store may write anything."""
    store = MemoryStore()
    objects = GrowingObjects(store, keys.logs(1), owner=0, at=1e9)
    objects.add([b"no JSON", printed(1.0, "step 1").to_json(), b'{"at":1,"from":"x","text":""}'])
    objects.store()
    store.put(keys.piece(keys.logs(1), owner=3, at=1e9, number=0, count=1), b"no gzip")
    assert read(store) == ["step 1"]


def test_an_attempt_that_there_is_not_is_refused(home: Path) -> None:
    """With those that there are."""
    make_run(home, "job-1", settled=True)
    with pytest.raises(UsageError, match="no such attempt"):
        list(api.logs("job-1", query=LogQuery(attempt=9)))


def test_a_line_in_parts_without_end_is_told_in_the_end() -> None:
    """A prompt, or what was printed last before a kill."""
    store = MemoryStore()
    ship(store, 1, 0, StoredLine(1.0, 0, "stdout", "50 %", more=True))
    assert read(store) == ["50 %"]
    assert stored_logs.LogLine(attempt=1, node=0, text="x").rank is None
