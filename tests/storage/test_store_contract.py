"""What every store promises, whichever it is."""

from __future__ import annotations

import contextlib
import secrets
import threading
from typing import TYPE_CHECKING

import pytest

from spotguard.errors import AlreadyExists, NotFound, StoreError, TooLarge, UsageError
from spotguard.storage import FileStore, PrefixedStore
from spotguard.storage.remote.store import RemoteStore
from spotguard.testing.bucket import MemoryBucket
from spotguard.testing.stores import FaultyStore, MemoryStore
from tests.storage.harness.fake_gcs import FakeGcs
from tests.storage.harness.lanes import close, forget_accounts, make_container, open_bucket

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from spotguard.storage.base import ObjectStore
    from tests.storage.harness.servers import Server


UNCONDITIONAL = ("rclone", "gcs")
"""Servers that ignore conditions, so that writes with one are refused; `fake-gcs` heeds them."""
TRIPS = "rclone takes an empty folder away while another object is put into it"
KINDS = [
    *("file", "memory", "prefixed", "faulty", "remote", "fake-gcs"),
    *(pytest.param(kind, marks=pytest.mark.e2e) for kind in ("moto", "rclone", "azurite", "gcs")),
]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Every kind of store; those on emulators are `e2e`."""
    return str(request.param)


@pytest.fixture
def store(
    kind: str,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[ObjectStore]:
    """A store of this kind, empty."""
    local: dict[str, Callable[[], ObjectStore]] = {
        "file": lambda: FileStore(tmp_path / "store"),
        "memory": MemoryStore,
        "prefixed": lambda: PrefixedStore(FileStore(tmp_path / "store"), "some/run"),
        "faulty": lambda: FaultyStore(MemoryStore()),
        "remote": lambda: RemoteStore(MemoryBucket(page_size=3)),
    }
    if kind in local:
        yield local[kind]()
    else:
        with place_on(kind, request, monkeypatch) as url:
            bucket = open_bucket(url)
            yield RemoteStore(bucket, threads=4)
            close(bucket)


@contextlib.contextmanager
def place_on(
    kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """Give the URL of an empty place on a server."""
    forget_accounts(monkeypatch)
    folder = f"some/runs/{secrets.token_hex(8)}"
    if kind == "fake-gcs":
        with FakeGcs(page_size=3) as fake:
            monkeypatch.setenv("STORAGE_EMULATOR_HOST", fake.endpoint)
            yield f"gs://{fake.bucket}/{folder}"
        return
    server: Server = request.getfixturevalue(kind)
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    container = "bucket" if kind == "rclone" else f"box-{secrets.token_hex(8)}"
    if kind != "rclone":
        make_container(kind, container)
    scheme = {"azurite": "az", "gcs": "gs"}.get(kind, "s3")
    yield f"{scheme}://{container}/{folder}"


def need_conditions(kind: str) -> None:
    """Skip the test where writes with a condition are refused."""
    if kind in UNCONDITIONAL:
        pytest.skip(f"{kind} ignores conditions, so such writes are refused")


def keys_of(store: ObjectStore, prefix: str = "", start_after: str = "") -> list[str]:
    """Return the keys of a listing."""
    return [info.key for info in store.list(prefix, start_after=start_after)]


def test_what_was_put_is_what_is_got(store: ObjectStore) -> None:
    """An object comes back byte for byte, also an empty one, and also after being replaced."""
    store.put("a/b", b"one")
    store.put("a/empty", b"")
    store.put("a/b", b"two")

    assert store.get("a/b") == b"two"
    assert store.get("a/empty") == b""


def test_several_buffers_become_one_object(store: ObjectStore) -> None:
    """Buffers of any kind and shape are joined in order."""
    wide = memoryview(bytearray(range(16))).cast("B", (4, 4))
    store.put("x", [b"head", bytearray(b""), wide, memoryview(b"tail")])

    assert store.get("x") == b"head" + bytes(range(16)) + b"tail"


def test_create_if_absent_never_overwrites(store: ObjectStore, kind: str) -> None:
    """The second creator loses, and the first one's bytes stay."""
    need_conditions(kind)
    store.put("x", b"first", if_absent=True)
    with pytest.raises(AlreadyExists):
        store.put("x", b"second", if_absent=True)

    assert store.get("x") == b"first"


def test_if_match_compares_and_swaps(store: ObjectStore, kind: str) -> None:
    """A writer that looked at an older version loses, also when there is no object any more."""
    need_conditions(kind)
    first = store.put("x", b"1")
    second = store.put("x", b"2", if_match=first)
    with pytest.raises(AlreadyExists):
        store.put("x", b"3", if_match=first)
    assert store.get("x") == b"2"

    store.delete("x")
    with pytest.raises(AlreadyExists):
        store.put("x", b"4", if_match=second)
    assert store.head("x") is None


def test_etag_changes_with_every_version(store: ObjectStore) -> None:
    """Versions of the same size in quick succession are told apart; head agrees with put."""
    etags = [store.put("x", b"%03d" % version) for version in range(50)]
    found = store.head("x")

    assert len(set(etags)) == 50
    assert found is not None
    assert (found.key, found.size_bytes, found.etag) == ("x", 3, etags[-1])


def test_one_of_many_racing_creators_wins(store: ObjectStore, kind: str) -> None:
    """Whatever the timing, one create-if-absent succeeds and its bytes are the object's."""
    need_conditions(kind)
    for race in range(10):
        won: list[bytes] = []
        start = threading.Barrier(8)

        def create(writer: int, key: str = f"race/{race}") -> None:
            start.wait()  # noqa: B023  the threads end before the next round
            body = b"%d" % writer * 1000
            try:
                store.put(key, body, if_absent=True)
            except AlreadyExists:
                return
            won.append(body)  # noqa: B023

        run_threads(create, 8)
        assert won == [store.get(f"race/{race}")]


@pytest.mark.e2e
@pytest.mark.parametrize("kind", UNCONDITIONAL)
def test_a_server_that_ignores_conditions_is_refused(store: ObjectStore) -> None:
    """No write with a condition is taken, and what is there stays as it was, to be read."""
    etag = store.put("x", b"first")
    writes: list[Callable[[], str]] = [
        lambda: store.put("x", b"second", if_absent=True),
        lambda: store.put("new", b"second", if_absent=True),
        lambda: store.put("x", b"second", if_match=etag),
        lambda: store.copy("x", "new", if_absent=True),
    ]
    for write in writes:
        with pytest.raises(StoreError, match="two nodes could both believe") as refused:
            write()
        assert store.url in refused.value.message

    assert store.get("x") == b"first"
    assert keys_of(store) == ["x"]


def test_racing_swaps_lose_no_update(store: ObjectStore, kind: str) -> None:
    """A counter raised by compare-and-swap from several threads counts every raise."""
    need_conditions(kind)
    store.put("n", b"0")

    def add(_writer: int) -> None:
        for _ in range(10):
            while True:
                seen = store.head("n")
                assert seen is not None
                value = int(store.get("n"))
                try:
                    store.put("n", b"%d" % (value + 1), if_match=seen.etag)
                    break
                except AlreadyExists:
                    continue

    run_threads(add, 4)
    assert store.get("n") == b"40"


def test_writers_and_deleters_of_one_folder_do_not_trip_each_other(
    store: ObjectStore, kind: str
) -> None:
    """Deleting the last object of a folder while another is put there loses no put."""
    if kind == "rclone":
        pytest.skip(TRIPS)

    def work(writer: int) -> None:
        for _ in range(40):
            store.put(f"deep/er/{writer}", b"x")
            assert store.get(f"deep/er/{writer}") == b"x"
            store.delete(f"deep/er/{writer}")

    run_threads(work, 4)
    assert keys_of(store) == []


def test_ranges_are_read_in_place(store: ObjectStore) -> None:
    """`get_into` fills exactly the view; a range past the end is an error, not zeros."""
    store.put("x", bytes(range(100)))
    buffer = bytearray(10)

    store.get_into("x", 90, memoryview(buffer))
    assert buffer == bytes(range(90, 100))
    store.get_into("x", 3, memoryview(buffer)[:0])
    with pytest.raises(StoreError):
        store.get_into("x", 91, memoryview(buffer))


def test_listing_is_sorted_by_key_across_folders(store: ObjectStore) -> None:
    """Order is that of whole keys (`a.x` < `a/x` < `a0`), not of folder names."""
    keys = ["a/x", "a0", "a.x", "b/c/d", "b/c.d", "b/c0", "ä", "z"]
    for key in keys:
        store.put(key, b"")

    assert keys_of(store) == sorted(keys)


@pytest.mark.parametrize(
    ("prefix", "after"),
    [
        *[("", ""), ("b", ""), ("b/", ""), ("b/c", ""), ("b/c/", "b/c/d"), ("", "b/c/1")],
        *[("b/c/d", ""), ("", "b/"), ("", "b/c"), ("q", ""), ("b/c/d/", ""), ("", "zz")],
        *[("b", "b/c/d"), ("b/c/d", "b/c/d")],
    ],
)
def test_listing_honours_prefix_and_start(store: ObjectStore, prefix: str, after: str) -> None:
    """A listing is exactly the keys that start with the prefix and sort after the start."""
    keys = ["a", "b/a", "b/c/1", "b/c/d", "b/c/e/f", "b/cc", "bb/x", "c/d"]
    for key in keys:
        store.put(key, b"")

    expected = [key for key in sorted(keys) if key.startswith(prefix) and key > after]
    assert keys_of(store, prefix, after) == expected


def test_folders_are_those_that_hold_something(store: ObjectStore) -> None:
    """Folders are one level deep, sorted, and gone with their last object."""
    for key in ("x/b/1", "x/a/deep/2", "x/file", "y/1"):
        store.put(key, b"")
    assert store.list_folders("x/") == ["x/a/", "x/b/"]
    assert store.list_folders("") == ["x/", "y/"]

    store.delete("x/b/1")
    assert store.list_folders("x/") == ["x/a/"]
    assert store.list_folders("nothing/") == []


def test_what_is_missing_is_not_found(store: ObjectStore, kind: str) -> None:
    """Reading a missing object is `NotFound`, looking gives None, deleting does nothing."""
    store.put("folder/x", b"")
    for key in ("missing", "folder", "folder/x/below", "no/such/folder"):
        with pytest.raises(NotFound):
            store.get(key)
        with pytest.raises(NotFound):
            store.get_into(key, 0, memoryview(bytearray(1)))
        assert store.head(key) is None
        if kind != "rclone" or "folder" not in key:  # its objects are files: 500, for a folder
            store.delete(key)
    assert keys_of(store) == ["folder/x"]


@pytest.mark.parametrize(
    "key",
    [
        *["", "/", "a//b", "/a", "a/", "../a", "a/../b", "a/./b", "a\0b", "a\nb", chr(0xD800)],
        *["x" * 256, "/".join(["y" * 200] * 6), ".spotguard/lock", "a/.spotguard/x"],
    ],
)
def test_keys_that_could_escape_or_confuse_are_refused(store: ObjectStore, key: str) -> None:
    """Every operation refuses a malformed key, before it touches anything."""
    with pytest.raises(UsageError, match="key"):
        store.put(key, b"")
    with pytest.raises(UsageError):
        store.get(key)
    with pytest.raises(UsageError):
        store.head(key)
    with pytest.raises(UsageError):
        store.delete(key)


def test_prefixes_that_could_escape_are_refused(store: ObjectStore) -> None:
    """A listing cannot climb out of the store, and a folder must look like one."""
    with pytest.raises(UsageError):
        list(store.list("../"))
    with pytest.raises(UsageError):
        list(store.list("a/../../b"))
    with pytest.raises(UsageError):
        store.list_folders("no-slash")


def run_threads(work: object, count: int) -> None:
    """Run `work(0..count-1)` in threads; re-raise the first problem."""
    assert callable(work)
    problems: list[BaseException] = []

    def guarded(index: int) -> None:
        try:
            work(index)
        except BaseException as problem:  # noqa: BLE001  re-raised below
            problems.append(problem)

    threads = [threading.Thread(target=guarded, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        raise problems[0]


def test_what_is_larger_than_wanted_is_refused(store: ObjectStore) -> None:
    """A reader that says how much it takes is never given more; just as much is taken."""
    store.put("five", b"12345")
    store.put("empty", b"")
    assert store.get("five", max_bytes=5) == b"12345"
    assert store.get("five", max_bytes=1000) == b"12345"
    assert store.get("empty", max_bytes=0) == store.get("empty", max_bytes=9) == b""
    for most_bytes in (4, 0):
        with pytest.raises(TooLarge, match="five"):
            store.get("five", max_bytes=most_bytes)
    with pytest.raises(NotFound):
        store.get("missing", max_bytes=5)
    assert store.get("five") == b"12345"
