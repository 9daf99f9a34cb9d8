"""What ranks print reaches the run store: masked, with rank and time, each line once."""

from __future__ import annotations

import json
import random
import threading
from typing import TYPE_CHECKING

import pytest

from spotguard.control.journal.stored.logs import LogQuery, StoredLog
from spotguard.errors import SpotguardError
from spotguard.events import keys
from spotguard.events.masking import Masker
from spotguard.launch.logs import printed_files, shipping
from spotguard.launch.logs.printed_files import LAUNCHER_FILES, PrintedFiles
from spotguard.launch.logs.shipping import Shipping
from spotguard.shared.units import SystemClock
from spotguard.storage.patterns.growing_lines import read_piece, stored_pieces
from spotguard.testing import FaultyStore, MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from spotguard.control.journal.stored.logs import LogLine
    from spotguard.storage.base import ObjectStore


class Node:
    """A node whose ranks print what the test says."""

    def __init__(self, store: ObjectStore, *, node: int = 0, nproc: int = 2, attempt: int = 1):
        """Ship to the store; two ranks a node."""
        self.shipping = Shipping(
            lambda: store,
            url="/a/folder",
            attempt=attempt,
            node=node,
            first_rank=node * nproc,
            nproc=nproc,
            secrets={"hunter2hunter2"},
            clock=SystemClock(),
        )
        for name in LAUNCHER_FILES:
            (self.shipping.folder / name).touch()

    def prints(self, data: bytes, *, rank: int = 0, stream: str = "stdout") -> None:
        """Let a rank of this node, counted from 0 on it, print something."""
        folder = self.shipping.folder / "none_x" / "attempt_0" / str(rank)
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"{stream}.log").open("ab") as file:
            file.write(data)

    def end(self, give_up_after_s: float = 60.0) -> bool:
        """Return whether all is stored."""
        self.shipping.finish(give_up_after_s)
        return self.shipping.join()


def read(store: ObjectStore, *, attempt: int = 1, query: LogQuery | None = None) -> list[LogLine]:
    """Return all lines that are stored of an attempt."""
    return list(StoredLog(store, attempt, query or LogQuery()).lines(failed=True, final=True))


def texts(lines: list[LogLine], rank: int | None) -> list[str]:
    """Return what one rank printed, in order."""
    return [line.text for line in lines if line.rank == rank]


def test_each_line_has_its_rank_stream_and_text() -> None:
    """Of three nodes with two ranks each, torchrun's own beside; secrets are none any more."""
    store = MemoryStore()
    for number in range(3):
        node = Node(store, node=number)
        node.prints(b"to be or\nnot hunter2hunter2\n", rank=0)
        node.prints(b"an error\r\n", rank=1, stream="stderr")
        (node.shipping.folder / "launcher.err").write_bytes(b"W1124 torchrun\n")
        node.shipping.start()
        assert node.end()
    lines = read(store)
    assert {line.node for line in lines} == {0, 1, 2}
    for number in range(3):
        assert texts(lines, 2 * number) == ["to be or", "not ***"]
        assert texts(lines, 2 * number + 1) == ["an error"]
    assert [(line.stream, line.text) for line in lines if line.rank is None] == (
        [("launcher", "W1124 torchrun")] * 3
    )
    assert all(line.at is not None for line in lines)
    assert [line.at for line in lines] == sorted(line.at or 0.0 for line in lines)


def test_binary_and_endless_output_is_kept() -> None:
    """Bytes that are no text, a line without an end, one of a megabyte, a progress bar."""
    store = MemoryStore()
    node = Node(store)
    node.prints(b"\xff\xfe\x00binary\n")
    node.prints(b"x" * 1_000_000 + b"\n")
    node.prints(b"no end")
    node.prints(b"\r 1 %\r 50 %\r100 %\nthen\r", rank=1)
    node.shipping.start()
    assert node.end()
    lines = read(store)
    binary, long, end = texts(lines, 0)
    assert binary == "\ufffd\ufffd\0binary"
    assert long == "x" * 1_000_000
    assert end == "no end"
    assert texts(lines, 1) == ["100 %", "then"]


@pytest.mark.slow
def test_a_rank_that_prints_without_measure_is_kept_in_measure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first and the last lines are there, what is missing is told, the store stays small."""
    monkeypatch.setattr(shipping, "KEPT_BYTES", 1 << 20)
    store = MemoryStore()
    node = Node(store)
    chance = random.Random(1)
    count = 10_000
    block = [b"%d %s\n" % (number, chance.randbytes(300).hex().encode()) for number in range(count)]
    node.prints(b"".join(block))
    node.shipping.start()
    assert node.end()
    assert sum(info.size_bytes for info in store.list(keys.logs(1))) < 2 << 20
    lines = read(store)
    told = [line.text for line in lines if line.node is None]
    kept = [int(line.text.split()[0]) for line in lines if line.node is not None]
    assert kept[0] == 0
    assert kept[-1] == count - 1
    assert kept == sorted(set(kept)), "in order, none twice"
    assert len(told) == 1
    assert told[0].startswith(f"{count - len(kept)} lines of node 0 ")
    assert [line.text for line in read(store, query=LogQuery(tail=2))] == [
        block[number].decode().rstrip("\n") for number in (count - 2, count - 1)
    ]


def test_a_flood_neither_fills_the_disk_nor_hides_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its beginning and its end are read, and how much is not; the disk gets its room back.

    Also where one of the two readers hangs, as one that shows lines on a dead pipe does.
    """
    monkeypatch.setattr(printed_files, "MOST_BEHIND", 4 << 20)
    monkeypatch.setattr(printed_files, "KEPT_END", 1 << 20)
    path = tmp_path / "ranks" / "attempt_0" / "0" / "stdout.log"
    path.parent.mkdir(parents=True)
    masker = Masker({"hunter2hunter2"})
    read, hangs = (
        PrintedFiles(tmp_path, first_rank=0, nproc=1, masker=masker, patience_s=1.0)
        for _ in range(2)
    )
    line = b"x" * 1023 + b"\n"
    texts: list[bytes] = []
    path.touch()
    assert not list(hangs.read(0.0, most_bytes=1))
    with path.open("wb", buffering=0) as rank:  # at a place of its own, as a rank prints
        for part in range(3):
            rank.write(b"begin %d\n" % part + line * (32 << 10) + b"end %d\n" % part)
            for now in range(40):
                taken = list(read.read(float(now), most_bytes=1 << 20))
                texts += [each.raw for each in taken]
                read.give_back(hangs)
            assert path.stat().st_blocks * 512 < 6 << 20
        rank.write(b"hunter2hunter2 last\n")
    texts += [each.raw for each in read.read(99.0, most_bytes=8 << 20, final=True)]
    shown = [each.raw for each in hangs.read(99.0, most_bytes=8 << 20, final=True)]

    for kept in (texts, shown):
        assert kept[-2:] == [b"end 2", b"*** last"]
        assert any(b"MB that were printed here are left out" in text for text in kept)
        assert b"\0" not in b"".join(kept)
    assert [text for text in texts if text.startswith(b"end")] == [b"end 0", b"end 1", b"end 2"]
    for each in (read, hangs):
        each.close()


@pytest.mark.parametrize("seed", range(6))
def test_a_store_with_faults_keeps_each_line_once(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """503s, torn uploads, lost answers at random, while ranks print: all is there in the end."""
    monkeypatch.setattr(shipping, "_FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(shipping, "_LONGEST_PAUSE_S", 0.01)
    monkeypatch.setattr(shipping, "_SHIP_EVERY_S_TO_A_FOLDER", 0.0)
    chance = random.Random(seed)
    inner = MemoryStore()
    store = FaultyStore(inner)
    for nth in chance.sample(range(1, 12), 4):
        store.fail("put", nth=nth) if chance.random() < 0.5 else store.tear(nth=nth)
        store.fail("delete", nth=nth)
    node = Node(store)
    node.shipping.start()
    for number in range(300):
        node.prints(b"%d\n" % number, rank=number % 2)
    assert node.end()
    lines = read(inner)
    assert texts(lines, 0) == [str(number) for number in range(0, 300, 2)]
    assert texts(lines, 1) == [str(number) for number in range(1, 300, 2)]


@pytest.mark.slow
def test_a_store_that_hangs_stops_nobody() -> None:
    """Ranks print into files; the end waits as long as it is told, and says that it is not all."""
    released = threading.Event()
    store = FaultyStore(MemoryStore()).before("put", _wait_for(released))
    node = Node(store)
    node.shipping.start()
    node.prints(b"a line\n" * 100_000)
    assert not node.end(give_up_after_s=0.5)
    released.set()


def _wait_for(event: threading.Event) -> Callable[[str], None]:
    def wait(_: str) -> None:
        event.wait(60)

    return wait


def test_a_store_that_cannot_be_opened_at_first_has_all_in_the_end() -> None:
    """What was printed meanwhile waits in the files."""
    store = MemoryStore()
    node = Node(store)
    tries = iter([False, False, True])

    def opened() -> ObjectStore:
        if not next(tries):
            raise SpotguardError("no credentials yet")
        return store

    node.shipping._open_store = opened
    node.prints(b"first\nsecond\n")
    node.shipping.start()
    assert node.end()
    assert texts(read(store), 0) == ["first", "second"]


def test_what_others_read_of_an_attempt_is_only_its_own() -> None:
    """A zombie of the attempt before prints on into its own log."""
    store = MemoryStore()
    zombie, living = Node(store, attempt=1), Node(store, attempt=2)
    zombie.shipping.start()
    living.shipping.start()
    living.prints(b"new\n")
    zombie.prints(b"old\n")
    assert living.end()
    assert zombie.end()
    assert texts(read(store, attempt=1), 0) == ["old"]
    assert texts(read(store, attempt=2), 0) == ["new"]


def test_two_agents_of_one_node_do_not_overwrite_each_other() -> None:
    """One that was started anew writes beside the one before."""
    store = MemoryStore()
    for words in (b"first\n", b"second\n"):
        node = Node(store)
        node.shipping.start()
        node.prints(words)
        assert node.end()
    assert len(stored_pieces(store, keys.logs(1))) == 2
    assert texts(read(store), 0) == ["first", "second"]


def test_what_is_shown_is_what_was_printed(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    """On the stream where it was printed, whole lines, without secrets."""
    node = Node(MemoryStore())
    node.prints(b"out hunter2hunter2\n")
    node.prints(b"err \xff\n", stream="stderr")
    node.shipping.start()
    assert node.end()
    out, err = capfdbinary.readouterr()
    assert (out, err) == (b"out ***\n", b"err \xff\n")


def test_a_line_is_whole_until_it_is_old(tmp_path: Path) -> None:
    """A line that comes in two writes is one; a prompt without an end is told after a second."""
    files = PrintedFiles(tmp_path, first_rank=4, nproc=1, masker=Masker(()), patience_s=1.0)
    out = tmp_path / "x" / "attempt_0" / "0" / "stdout.log"
    out.parent.mkdir(parents=True)

    def told(now: float, *, final: bool = False) -> list[tuple[int | None, bytes, bool]]:
        read = files.read(now, most_bytes=1 << 20, final=final)
        return [(line.rank, line.raw, line.more) for line in read]

    out.write_bytes(b"one li")
    assert told(0.0) == []
    with out.open("ab") as file:
        file.write(b"ne\nname? ")
    assert told(0.5) == [(4, b"one line", False)]
    assert told(1.6) == [(4, b"name? ", True)]
    with out.open("ab") as file:
        file.write(b"joe")
    assert told(1.7, final=True) == [(4, b"joe", True)]
    files.close()


def test_a_line_without_measure_is_cut(tmp_path: Path) -> None:
    """What reads it needs no more memory than a piece of it takes."""
    files = PrintedFiles(tmp_path, first_rank=0, nproc=1, masker=Masker(()), patience_s=9.0)
    (tmp_path / "launcher.out").write_bytes(b"x" * (3 * printed_files.LONGEST + 5) + b"\n")
    lines = list(files.read(0.0, most_bytes=1 << 20))
    assert [len(line.raw) for line in lines] == [*[printed_files.LONGEST] * 3, 5]
    assert [line.more for line in lines] == [True, True, True, False]
    files.close()


def test_stored_lines_are_json_lines_of_their_own() -> None:
    """Any program can read the store: gzip, then JSON, with rank and time in each line."""
    store = MemoryStore()
    node = Node(store)
    node.prints(b"hello\n", rank=1)
    node.shipping.start()
    assert node.end()
    ((piece,),) = stored_pieces(store, keys.logs(1)).values()
    found = read_piece(store, piece)
    assert found is not None
    (body,) = map(json.loads, found.lines)
    assert body.pop("at") > 1.7e9
    assert body == {"rank": 1, "from": "stdout", "text": "hello"}


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    """Each test ends what it began, but for a thread in a store that hangs."""
    yield
    left = [thread for thread in threading.enumerate() if thread.name == "spotguard-logs-read"]
    for thread in left:
        thread.join(30)
    assert not any(thread.is_alive() for thread in left)
