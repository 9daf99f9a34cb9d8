from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from spotguard.errors import StoreUnavailable
from spotguard.events import keys
from spotguard.launch.cache import listing as listings
from spotguard.launch.cache.keeping import Interrupted
from spotguard.storage import FileStore
from spotguard.testing import FaultyStore, MemoryStore
from spotguard.testing.stores import SimulatedCrash
from tests.launch.cache.nodes import CACHE, PIECE_BYTES, TOKENS, Node

if TYPE_CHECKING:
    from pathlib import Path


def pieces_in(store: MemoryStore | FileStore) -> list[str]:
    """Return the keys of all stored pieces."""
    return [info.key for info in store.list(keys.CACHE_PIECES)]


def test_all_is_back_on_the_next_node(tmp_path: Path) -> None:
    """Contents, links, modes and times; empty and huge files, odd names."""
    store = MemoryStore()
    first = Node(tmp_path / "a", store)
    blob = first.write("hub/blobs/3f", os.urandom(2 * PIECE_BYTES + 5))
    first.write("hub/empty", b"")
    first.write("hub/odd näme 'x' $HOME;rm", b"odd")
    tool = first.write("tool", b"#!/bin/sh\n")
    tool.chmod(0o750)
    os.utime(blob, ns=(1, 1_600_000_000_123_456_789))
    first.write("train.bin", b"\0" * 70_000, folder=1)
    link = first.folders[0][1] / "hub/snapshots/main/weights"
    link.parent.mkdir(parents=True)
    link.symlink_to("../../blobs/3f")
    assert first.keep()

    second = Node(tmp_path / "b", store, attempt=2)
    restored = second.restore()

    assert second.has() == first.has()
    assert (restored.files, restored.problems) == (5, [])
    assert (second.folders[0][1] / "hub/snapshots/main/weights").read_bytes() == blob.read_bytes()
    assert (second.folders[0][1] / "tool").stat().st_mode & 0o777 == 0o750
    back = second.folders[0][1] / "hub/blobs/3f"
    assert back.stat().st_mtime_ns == 1_600_000_000_123_456_789


def test_only_what_has_changed_is_stored(tmp_path: Path) -> None:
    """A second round stores nothing; of a long file that grew only the last piece."""
    store = FaultyStore(MemoryStore())
    node = Node(tmp_path, store)
    node.write("a", os.urandom(PIECE_BYTES + 10))
    node.keep()
    before = node.keeping.stored_bytes
    puts = store.calls["put"]
    node.keep()
    assert (node.keeping.stored_bytes, store.calls["put"]) == (before, puts)

    with (node.folders[0][1] / "a").open("ab") as file:
        file.write(b"more")
    node.keep()
    assert node.keeping.stored_bytes == before + 14


def test_what_was_restored_is_neither_read_nor_stored_again(tmp_path: Path) -> None:
    """A node that got fifty gigabytes back need not read them all to know them."""
    memory = MemoryStore()
    first = Node(tmp_path / "a", memory)
    first.write("a", b"a" * 1000)
    first.keep()
    second = Node(tmp_path / "b", memory, attempt=2)
    second.restore()
    (second.folders[0][1] / "a").chmod(0)  # root reads it all the same: see the bytes, too
    second.keep()
    assert second.keeping.stored_bytes == 0
    third = Node(tmp_path / "c", memory, attempt=3)
    assert third.restore().attempt == 2
    assert third.restore().listing.files == second.had.files


def test_equal_files_are_stored_once(tmp_path: Path) -> None:
    """By their content, whatever they are called."""
    store = MemoryStore()
    node = Node(tmp_path, store)
    for name in ("a", "b", "c/d"):
        node.write(name, b"same")
    node.keep()
    assert len(pieces_in(store)) == 1


def test_deleted_files_stay_deleted(tmp_path: Path) -> None:
    """The newest attempt's listing counts, not all that was ever there."""
    store = MemoryStore()
    first = Node(tmp_path / "a", store)
    first.write("old", b"old")
    first.write("kept", b"kept")
    first.keep()
    (first.folders[0][1] / "old").unlink()
    first.keep()
    second = Node(tmp_path / "b", store, attempt=2)
    second.restore()
    assert second.has() == {f"{CACHE}/kept": b"kept"}


def test_what_is_there_stays_as_it_is(tmp_path: Path) -> None:
    """The workdir's files are the user's, as of now."""
    store = MemoryStore()
    first = Node(tmp_path / "a", store)
    first.write("words", b"of attempt 1", folder=1)
    first.keep()
    second = Node(tmp_path / "b", store, attempt=2)
    second.write("words", b"of the user", folder=1)
    assert second.restore().there == 1
    assert second.has() == {f"{TOKENS}/words": b"of the user"}


@pytest.mark.parametrize("crash_at", range(1, 6))
@pytest.mark.parametrize("after", [False, True])
def test_a_node_that_dies_half_way_leaves_whole_files_or_none(
    tmp_path: Path, crash_at: int, *, after: bool
) -> None:
    """Pieces first, the listing last: whatever is listed can be read."""
    memory = MemoryStore()
    store = FaultyStore(memory).crash_at(crash_at, after=after)
    first = Node(tmp_path / "a", store)
    first.write("one", os.urandom(PIECE_BYTES + 1))
    first.write("two", b"two")

    def three_rounds() -> None:
        for _ in range(3):
            first.keep()
            first.write(f"more-{len(pieces_in(memory))}", os.urandom(9))

    with pytest.raises(SimulatedCrash):
        three_rounds()
    second = Node(tmp_path / "b", memory, attempt=2)
    restored = second.restore()
    assert restored.problems == []
    assert second.has().items() <= first.has().items()
    assert len(second.has()) == restored.files


def test_a_file_that_changes_while_it_is_read_comes_later(tmp_path: Path) -> None:
    """What is kept of a file was the file at one moment."""
    store = MemoryStore()
    first = Node(tmp_path / "a", store)
    place = first.write("a", b"x" * (PIECE_BYTES + 1))
    writes = iter((b"y", b"z"))

    def write() -> None:
        if (data := next(writes, None)) is not None:
            with place.open("r+b") as file:
                file.write(data * (PIECE_BYTES + 1))

    first.wait = write
    assert not first.keep()
    second = Node(tmp_path / "b", store, attempt=2)
    second.restore()
    assert second.has() == {}

    first.wait = lambda: None
    assert first.keep()
    second.restore()
    assert second.has() == first.has()


def test_a_file_that_is_being_written_waits_for_a_later_round(tmp_path: Path) -> None:
    """Unless there is none."""
    store = MemoryStore()
    node = Node(tmp_path, store)
    place = node.write("a", b"a")
    node.keeping._wall = lambda: place.stat().st_mtime + 0.5
    assert not node.keep()
    assert pieces_in(store) == []
    assert node.keep(final=True)
    assert len(pieces_in(store)) == 1


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("token", "x"),
        ("hub/stored_tokens", "x"),
        ("sub/.netrc", "x"),
        ("server.pem", "x"),
        ("notes.txt", "login hf_" + "Ab1" * 12 + " of mine"),
        ("a.json", '{"id": "AKIA' + "ABCDEFGH12345678" + '"}'),
        ("deploy", "-----BEGIN OPENSSH PRIVATE KEY-----\nabc"),
        ("log.txt", "password is correct-horse"),
    ],
)
def test_secrets_stay_on_the_node(tmp_path: Path, name: str, data: str) -> None:
    """By their names, by their form, and the job's own by their values."""
    store = MemoryStore()
    node = Node(tmp_path, store, secrets=("correct-horse",))
    node.write(name, data)
    node.write("tokenizer.json", "{}")
    node.write("tokens/0001.bin", "abc")
    assert node.keep()
    second = Node(tmp_path / "b", store, attempt=2)
    second.restore()
    assert sorted(second.has()) == [f"{CACHE}/tokenizer.json", f"{CACHE}/tokens/0001.bin"]
    assert all(data.encode() not in store.get(key) for key in pieces_in(store))
    node.keep()
    assert len(pieces_in(store)) == 2


def test_unfinished_downloads_locks_and_what_is_no_file_stay(tmp_path: Path) -> None:
    """They are of no use elsewhere, or cannot be read."""
    store = MemoryStore()
    node = Node(tmp_path, store)
    root = node.write("a.incomplete", "x").parent
    node.write(".locks/a.lock", "")
    node.write(".spotguard-cache-abc", "x")
    os.mkfifo(root / "pipe")
    (root / "away").symlink_to("../../..")
    (root / "absolute").symlink_to("/etc/passwd")
    (root / "sly").symlink_to("x/../../../y")
    (root / os.fsdecode(b"\xff\xfe")).write_bytes(b"no text")
    assert node.keep()
    found = node.restore()
    assert found.listing.files == ()
    assert pieces_in(store) == []


def test_more_than_the_limit_is_left_out_and_told(tmp_path: Path) -> None:
    """The same files each time, so that nothing is stored in vain."""
    store = MemoryStore()
    node = Node(tmp_path, store, most_bytes=250)
    for name in "abcd":
        node.write(name, os.urandom(100))
    node.keep()
    node.keep()
    assert "2 files (200 B) are not kept" in node.keeping.left_out
    assert "cache_limit_gb" in node.keeping.left_out
    second = Node(tmp_path / "b", store, attempt=2)
    second.restore()
    assert sorted(second.has()) == [f"{CACHE}/a", f"{CACHE}/b"]


def test_each_piece_is_stored_by_one_of_several_nodes(tmp_path: Path) -> None:
    """All have downloaded the same: they share out what is uploaded, and restore all of it."""
    store = FaultyStore(FileStore(tmp_path / "store"))
    nodes = [Node(tmp_path / str(i), store, index=i, count=3) for i in range(3)]
    for node in nodes:
        for number in range(12):
            node.write(f"shared/{number}", f"piece {number}" * 10)
        node.write(f"own-{node.index}", f"of node {node.index} alone")
    for _ in range(2):
        for node in nodes:
            node.keep()
            node.clock.advance(61.0)
    for node in nodes:
        assert node.keep()
    assert len(pieces_in(store.inner)) == 15  # type: ignore[arg-type]
    shares = [node.keeping.stored_bytes for node in nodes]
    assert sum(shares) == sum(len(f"piece {n}" * 10) for n in range(12)) + 3 * 15
    assert min(shares) > 0

    for index in range(3):
        fresh = Node(tmp_path / f"new-{index}", store, attempt=2, index=index, count=3)
        assert fresh.restore().problems == []
        assert len(fresh.has()) == 15


def test_nothing_is_left_to_a_node_that_is_gone(tmp_path: Path) -> None:
    """What another one should have stored is stored after a minute, or in the last round."""
    for final, waits_s in ((False, 61.0), (True, 0.0)):
        store = FileStore(tmp_path / f"store-{final}")
        node = Node(tmp_path / f"n-{final}", store, index=1, count=2)
        for number in range(8):
            node.write(str(number), f"{number}" * 10)
        if not final:
            node.keep()
            assert len(pieces_in(store)) < 8
        node.clock.advance(waits_s)
        assert node.keep(final=final)
        assert len(pieces_in(store)) == 8


def test_a_node_has_its_own_version_of_a_file(tmp_path: Path) -> None:
    """And one that is new has the first one's."""
    store = FileStore(tmp_path / "store")
    for index in range(2):
        node = Node(tmp_path / str(index), store, index=index, count=2)
        node.write("rank.txt", f"{index}")
        node.keep(final=True)
    for index, expected in ((0, b"0"), (1, b"1"), (2, b"0")):
        fresh = Node(tmp_path / f"new-{index}", store, attempt=2, index=index)
        fresh.restore()
        assert fresh.has() == {f"{CACHE}/rank.txt": expected}


def test_a_save_goes_first(tmp_path: Path) -> None:
    """Before each piece it is looked whether one may be sent; what is interrupted goes on."""
    store = MemoryStore()
    node = Node(tmp_path, store)
    node.write("a", os.urandom(3 * PIECE_BYTES))
    asked = []

    def wait() -> None:
        asked.append(len(pieces_in(store)))
        if len(asked) == 3:
            raise Interrupted

    node.wait = wait
    with pytest.raises(Interrupted):
        node.keep()
    assert asked == [0, 1, 2]
    node.wait = lambda: None
    assert node.keep()
    assert len(pieces_in(store)) == 3


def test_a_store_that_fails_is_tried_again(tmp_path: Path) -> None:
    """What was stored by then is not stored again."""
    memory = MemoryStore()
    store = FaultyStore(memory).fail("put", nth=2)
    node = Node(tmp_path / "a", store)
    node.write("a", b"a")
    node.write("b", b"b")
    with pytest.raises(StoreUnavailable):
        node.keep()
    assert node.keep()
    second = Node(tmp_path / "b", memory, attempt=2)
    assert second.restore().files == 2


def test_only_who_has_the_key_is_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who can write into the store cannot put a file onto a node, nor a node of another run."""
    store = MemoryStore()
    first = Node(tmp_path / "a", store)
    first.write("code.py", b"good")
    first.keep()
    key = keys.cache_listing(1, 0)
    genuine = store.get(key)

    def restored(raw: bytes) -> tuple[int, str]:
        store.put(key, raw)
        found = Node(tmp_path / "b", store, attempt=2).restore()
        return found.files, " ".join(found.problems)

    for raw in (genuine.replace(b"code.py", b"evil.py"), genuine[:-1], b"", b"{}", b"\xff" * 99):
        files, problem = restored(raw)
        assert (files, "cannot" in problem or "proven" in problem) == (0, True)
    evil = Node(tmp_path / "c", store, key="00" * 32)
    evil.write("code.py", b"evil")
    evil.keep()
    assert restored(store.get(key))[0] == 0
    assert restored(genuine)[0] == 1


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"path": "a/b"', '"path": "../b"'),
        ('"path": "a/b"', '"path": "/etc/b"'),
        ('"path": "a/b"', '"path": "a//b"'),
        ('"path": "a/b"', '"path": "a/token"'),
        ('"mode": 420', '"mode": 2541'),
        ('"size_bytes": 3', '"size_bytes": 99999999'),
        ('"target": "a"', '"target": "../../x"'),
        ('"target": "a"', '"target": "a/../../x"'),
        ('"schema": 1', '"schema": 2'),
    ],
)
def test_a_listing_leads_nowhere_else(tmp_path: Path, old: str, new: str) -> None:
    """Not even one that a node of the run has sealed."""
    store = MemoryStore()
    node = Node(tmp_path / "a", store)
    node.write("a/b", b"abc").chmod(0o644)
    (node.folders[0][1] / "link").symlink_to("a")
    node.keep()
    raw = store.get(keys.cache_listing(1, 0)).partition(b"\n")[2].decode()
    assert old in raw
    body = raw.replace(old, new).encode()
    seal = listings._seal(node.key, "job-1", body)
    store.put(keys.cache_listing(1, 0), f"{seal}\n".encode() + body)
    second = Node(tmp_path / "b", store, attempt=2)
    found = second.restore()
    assert (found.files, len(found.problems)) == (0, 1)
    assert second.has() == {}


@pytest.mark.parametrize("what", ["damaged", "cut", "gone"])
def test_a_file_that_cannot_be_proven_is_left_out(tmp_path: Path, what: str) -> None:
    """The others are back; nothing half is left behind."""
    store = MemoryStore()
    first = Node(tmp_path / "a", store)
    first.write("bad", b"bad" * 100)
    first.write("good", b"good")
    first.keep()
    bad = next(key for key in pieces_in(store) if store.get(key).startswith(b"bad"))
    if what == "gone":
        store.delete(bad)
    else:
        store.put(bad, b"worse" * 60 if what == "damaged" else b"bad" * 99)
    second = Node(tmp_path / "b", store, attempt=2)
    found = second.restore()
    assert second.has() == {f"{CACHE}/good": b"good"}
    assert [problem.startswith(f"{CACHE}/bad") for problem in found.problems] == [True]


def test_a_link_of_the_node_leads_nothing_out_of_the_folder(tmp_path: Path) -> None:
    """A folder above the file may be a link on this node."""
    store = MemoryStore()
    first = Node(tmp_path / "a", store)
    first.write("sub/a", b"a")
    first.keep()
    second = Node(tmp_path / "b", store, attempt=2)
    outside = tmp_path / "outside"
    outside.mkdir()
    second.folders[0][1].mkdir(parents=True)
    (second.folders[0][1] / "sub").symlink_to(outside)
    found = second.restore()
    assert (found.files, len(found.problems)) == (0, 1)
    assert list(outside.iterdir()) == []


def test_a_node_that_is_taken_restores_no_further(tmp_path: Path) -> None:
    """It leaves at once, without a half file."""
    store = MemoryStore()
    first = Node(tmp_path / "a", store)
    first.write("a", b"a")
    first.keep()
    second = Node(tmp_path / "b", store, attempt=2)
    assert second.restore(stop=lambda: True).files == 0
    assert second.has() == {}


def test_a_newer_attempt_that_kept_nothing_yet_hides_nothing(tmp_path: Path) -> None:
    """The newest that has a listing counts; one's own and later ones do not."""
    store = MemoryStore()
    first = Node(tmp_path / "a", store)
    first.write("a", b"a")
    first.keep()
    assert Node(tmp_path / "b", store, attempt=5).restore().attempt == 1
    assert Node(tmp_path / "c", store, attempt=1).restore().attempt is None


def test_in_place_the_next_attempt_has_a_listing_of_its_own(tmp_path: Path) -> None:
    """Without storing a file again."""
    store = MemoryStore()
    node = Node(tmp_path / "a", store)
    node.write("a", b"a")
    node.keep()
    node.attempt = 2
    node.keeping.begin_attempt(node.owner)
    node.keep()
    assert node.keeping.stored_bytes == 1
    assert Node(tmp_path / "b", store, attempt=3).restore().attempt == 2


def test_no_room_on_the_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is restored then, and the job begins all the same."""
    store = MemoryStore()
    first = Node(tmp_path / "a", store)
    first.write("a", b"a")
    first.keep()
    usage = __import__("shutil").disk_usage(tmp_path)._replace(free=0)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    second = Node(tmp_path / "b", store, attempt=2)
    found = second.restore()
    assert found.files == 0
    assert "no room" in found.problems[0]


def test_what_this_node_had_no_room_for_the_next_one_may_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not taken for deleted; what this node has made anew counts more."""
    store = MemoryStore()
    first = Node(tmp_path / "a", store)
    first.write("large", b"large")
    first.write("words", b"of attempt 1")
    (first.folders[0][1] / "link").symlink_to("large")
    first.keep()
    with monkeypatch.context() as small:
        usage = __import__("shutil").disk_usage(tmp_path)._replace(free=0)
        small.setattr("shutil.disk_usage", lambda path: usage)
        second = Node(tmp_path / "b", store, attempt=2)
        second.restore()
    second.write("words", b"of attempt 2")
    second.keep()
    third = Node(tmp_path / "c", store, attempt=3)
    assert third.restore().attempt == 2
    assert third.has() == {
        f"{CACHE}/large": b"large",
        f"{CACHE}/words": b"of attempt 2",
        f"{CACHE}/link": b"-> large",
    }


def test_a_node_that_is_taken_while_it_restores_loses_nothing(tmp_path: Path) -> None:
    """Nor does one whose store fails: what was not brought back goes on being listed."""
    memory = MemoryStore()
    first = Node(tmp_path / "a", memory)
    for name in ("one", "two", "three"):
        first.write(name, name * 9)
    first.keep()
    asked = iter((False, False, *[True] * 99))
    second = Node(tmp_path / "b", memory, attempt=2)
    assert second.restore(stop=lambda: next(asked)).files < 3
    second.keep(final=True)
    failing = FaultyStore(memory).fail("get", key_contains=keys.CACHE_PIECES, times=None)
    third = Node(tmp_path / "c", failing, attempt=3)
    assert third.restore().files == 0
    third.keep(final=True)
    fourth = Node(tmp_path / "d", memory, attempt=4)
    assert fourth.restore().attempt == 3
    assert fourth.has() == first.has()


def test_nobody_waits_for_a_store_that_fails_again_and_again(tmp_path: Path) -> None:
    """Each request may take a minute, and there may be fifty thousand."""
    memory = MemoryStore()
    first = Node(tmp_path / "a", memory)
    for number in range(100):
        first.write(str(number), f"{number}")
    first.keep()
    store = FaultyStore(memory).fail("get", key_contains=keys.CACHE_PIECES, times=None)
    found = Node(tmp_path / "b", store, attempt=2).restore()
    assert store.calls["get"] < 40
    assert "does not answer" in found.problems[-1]


def test_a_round_that_takes_long_lists_what_it_has_by_then(tmp_path: Path) -> None:
    """A node that is killed an hour into its first round has not stored for an hour in vain."""
    store = MemoryStore()
    node = Node(tmp_path / "a", store)
    for name in "abcdef":
        node.write(name, name)
    asked = []

    def wait() -> None:
        asked.append(name)
        node.clock.advance(20.0)
        if len(asked) == 7:  # five files, and the list of two
            raise Interrupted

    node.wait = wait
    with pytest.raises(Interrupted):
        node.keep()
    second = Node(tmp_path / "b", store, attempt=2)
    second.restore()
    assert sorted(second.has()) == [f"{CACHE}/{name}" for name in "abcd"]
    node.wait = lambda: None
    assert node.keep()
    assert node.keeping.stored_bytes == 6, "nothing was stored twice"


def test_a_link_within_the_folder_is_not_followed_either(tmp_path: Path) -> None:
    """A listed link lies as deep as its path says, or it would lead out."""
    store = MemoryStore()
    first = Node(tmp_path / "a", store)
    place = first.write("a/b/c/file", b"x").parent / "up"
    place.symlink_to("../../../file")
    first.keep()
    second = Node(tmp_path / "b", store, attempt=2)
    root = second.folders[0][1]
    (root / "a").mkdir(parents=True)
    (root / "z").mkdir()
    (root / "a/b").symlink_to("../z")
    found = second.restore()
    assert (found.files, len(found.problems)) == (0, 1)
    assert list((root / "z").iterdir()) == []
