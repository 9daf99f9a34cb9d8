"""The folder store: atomic, durable, and clear about what went wrong."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from spotguard.errors import StoreError, StoreFull, StoreUnavailable, UsageError
from spotguard.storage import FileStore, PrefixedStore, open_store
from spotguard.storage.filesystem.direct_io import is_cached

if TYPE_CHECKING:
    from spotguard.storage.base import Buffer


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    """An empty folder store."""
    return FileStore(tmp_path / "store")


def leftovers(store_root: Path) -> list[Path]:
    """Return the temporary files below a store."""
    return list((store_root / ".spotguard" / "tmp").iterdir())


def test_bytes_and_names_are_synced_in_the_right_order(
    store: FileStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An object is on the disk before it has its name, and its name before `put` returns."""
    story: list[str] = []
    fsync, link, rename = os.fsync, os.link, os.replace

    def spy_fsync(descriptor: int) -> None:
        story.append(f"sync {Path(f'/proc/self/fd/{descriptor}').readlink().name}")
        fsync(descriptor)

    def spy_link(source: str, target: str, **folders: Any) -> None:
        story.append("link")
        link(source, target, **folders)

    def spy_rename(source: str, target: str, **folders: Any) -> None:
        story.append("rename")
        rename(source, target, **folders)

    store.check_conditions()
    monkeypatch.setattr(os, "fsync", spy_fsync)
    monkeypatch.setattr(os, "link", spy_link)
    monkeypatch.setattr(os, "replace", spy_rename)

    FileStore(tmp_path / "new" / "store").put("x", b"0")
    assert story[:2] == [f"sync {tmp_path.name}", "sync new"]  # the store's own way down

    story.clear()
    store.put("a/b/x", b"1", if_absent=True)
    temp, *folders = story
    assert temp.startswith(f"sync {os.getpid()}-")
    # The new folders' own entries, from the top down, then the object's.
    assert folders == [f"sync {tmp_path.name}", "sync store", "sync a", "link", "sync b"]

    story.clear()
    store.put("a/b/x", b"2")
    assert story[1:] == ["rename", "sync b"]

    story.clear()
    store.put("a/c/x", b"1")  # where it lies is known to be there
    assert story[1:] == ["sync a", "rename", "sync c"]

    shutil.rmtree(tmp_path / "store" / "a")  # by somebody else
    story.clear()
    store.put("a/d/x", b"1")
    assert story[1:] == [f"sync {tmp_path.name}", "sync store", "sync a", "rename", "sync d"]
    shutil.rmtree(tmp_path / "store" / "a")
    story.clear()
    store.put("a/d/x", b"1")
    assert story[1:] == [f"sync {tmp_path.name}", "sync store", "sync a", "rename", "sync d"]
    store.put("a/b/x", b"2")

    story.clear()
    store.delete("a/b/x")
    assert story == ["sync b"]


def test_a_writer_killed_half_way_leaves_the_old_object(tmp_path: Path) -> None:
    """SIGKILL in the middle of a put: the old bytes stay, nothing half-written is ever listed."""
    store = FileStore(tmp_path)
    store.put("x", b"old")
    code = """
import sys, os, signal
from spotguard.storage import FileStore
import spotguard.storage.filesystem.fsync as durable
os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)
FileStore(sys.argv[1]).put("x", b"new" * 1000)
"""
    died = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)

    assert died.returncode == -signal.SIGKILL
    assert store.get("x") == b"old"
    assert [info.key for info in store.list()] == ["x"]
    assert len(leftovers(tmp_path)) == 1


def test_leftovers_of_dead_writers_are_swept(tmp_path: Path) -> None:
    """A day later the first put removes them; a living writer's are left alone."""
    FileStore(tmp_path).put("x", b"")
    old, young = (tmp_path / ".spotguard" / "tmp" / name for name in ("old", "young"))
    for path in (old, young):
        path.write_bytes(b"half")
    two_days_ago = time.time() - 2 * 86_400
    os.utime(old, (two_days_ago, two_days_ago))

    FileStore(tmp_path).put("y", b"")
    assert leftovers(tmp_path) == [young]


def test_what_a_living_writer_has_is_not_swept_by_a_machine_with_a_wrong_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that is two days ahead makes no file old: its age is told by the folder's own."""
    FileStore(tmp_path).put("x", b"1")
    begun = tmp_path / ".spotguard" / "tmp" / "a-writer"
    begun.write_bytes(b"half")
    two_days_on = time.time() + 2 * 86_400
    monkeypatch.setattr(time, "time", lambda: two_days_on)

    FileStore(tmp_path).put("x", b"2")
    assert begun.exists()


def test_who_lost_what_was_to_be_stored_hears_just_that(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody deleted the temporary file: no folder vanishes, and another try is of no use."""
    replace, tries = os.replace, count()

    def swept(temp: str, target: str, **folders: Any) -> None:
        next(tries)
        os.unlink(temp, dir_fd=folders["src_dir_fd"])
        replace(temp, target, **folders)

    monkeypatch.setattr(os, "replace", swept)
    with pytest.raises(StoreUnavailable, match="what was to be stored was deleted"):
        store.put("a/x", b"2")
    assert next(tries) == 1


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES])
def test_a_hiccup_at_a_deletion_is_an_error_of_the_store(
    store: FileStore, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """A network's folder may fail at any look: no other error ends the thread that deletes."""
    store.put("a/x", b"1")

    def fails(path: object, **_: object) -> os.stat_result:
        raise OSError(number, os.strerror(number), str(path))

    with monkeypatch.context() as broken:
        broken.setattr(os, "stat", fails)
        with pytest.raises(StoreUnavailable):
            store.delete("a/x")
    assert store.get("a/x") == b"1"
    store.delete("a/x")
    store.delete("a/x")
    assert store.head("a/x") is None


@pytest.mark.parametrize("size_bytes", [3_000_000, 9_000_000], ids=["small", "large"])
def test_a_full_disk_is_said_so_and_changes_nothing(tmp_path: Path, size_bytes: int) -> None:
    """When the bytes do not fit, `StoreFull` names the path; the old object and no litter stay."""
    store = FileStore(tmp_path)
    store.put("x", b"old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(
            StoreFull, match=r"no room left to write .*/x: file too large"
        ) as caught:
            store.put("x", [bytes(size_bytes)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

    assert "free space" in caught.value.hint
    assert store.get("x") == b"old"
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("tail", [0, 1, 4095, 4096, 4097])
def test_large_objects_arrive_whole_whatever_their_pieces(store: FileStore, tail: int) -> None:
    """Past the page cache too: odd sizes and many small pieces come back byte for byte."""
    pieces: list[Buffer] = [
        b"head",
        *(bytes([n]) * 1_000_003 for n in range(9)),
        bytes(3) * 20_001,
        b"x" * tail,
    ]
    store.put("x", pieces)
    assert store.get("x") == b"".join(pieces)


def _forget(path: Path) -> None:
    """Put a file out of the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


@pytest.mark.parametrize("cached", [True, False], ids=["cached", "on disk"])
@pytest.mark.parametrize("refused", [False, True], ids=["direct", "refused"])
def test_ranges_arrive_whole_wherever_they_lie(
    store: FileStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cached: bool, refused: bool
) -> None:
    """Any offset, length and memory: from the page cache, past it, or as the disk allows."""
    content = random.Random(3).randbytes((3 << 20) + 1234)
    store.put("x", content)
    if refused:
        set_flags = fcntl.fcntl

        def refuse(descriptor: int, what: int, flags: int = 0) -> int:
            if what == fcntl.F_SETFL and flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, "no direct I/O here")
            return set_flags(descriptor, what, flags)

        monkeypatch.setattr(fcntl, "fcntl", refuse)
    spans = [(0, len(content)), (4096, 8192), (5, 1), (4095, 2), (len(content) - 3, 3)]
    spans += [(1 << 20, 1 << 20), ((1 << 20) - 7, (2 << 20) + 9)]
    for offset, size in spans:
        if not cached:
            _forget(tmp_path / "store" / "x")
        memory = mmap.mmap(-1, size)
        store.get_into("x", offset, memoryview(memory))
        assert memory[:] == content[offset : offset + size]

        views = [memoryview(bytearray(n)) for n in (1, 0, size // 3, 4096)]
        views.append(memoryview(bytearray(max(size - sum(map(len, views)), 0))))
        if sum(map(len, views)) == size:
            store.get_into("x", offset, views)
            assert b"".join(views) == content[offset : offset + size]


def test_what_is_in_memory_is_read_in_fewer_and_larger_parts(
    store: FileStore, tmp_path: Path
) -> None:
    """From the disk many small reads at once; from the page cache as few as there are cores."""
    store.put("x", bytes(3 << 20))
    _forget(tmp_path / "store" / "x")
    with (tmp_path / "store" / "x").open("rb", buffering=0) as file:
        if is_cached(file.fileno(), 0):
            pytest.skip("this filesystem is memory")
    on_disk = store.best_reads("x")
    for _ in range(500):  # for milliseconds: what a question had fetched would be there by then
        assert store.best_reads("x") == on_disk, "asking changed the answer"
    assert store.get("x")
    cached = store.best_reads("x")

    assert on_disk == store.best_reads("nowhere/at all")
    assert on_disk.threads >= cached.threads
    assert on_disk.size_bytes < cached.size_bytes


def test_more_views_than_one_call_takes(store: FileStore) -> None:
    """The kernel takes 1024 at once."""
    content = random.Random(4).randbytes(5000)
    store.put("x", content)
    views = [memoryview(bytearray(2)) for _ in range(2500)]
    store.get_into("x", 0, views)
    assert b"".join(views) == content


@pytest.mark.parametrize("offset", [0, 4096, 5000, 9000])
def test_a_range_beyond_the_end_is_an_error(store: FileStore, tmp_path: Path, offset: int) -> None:
    """Cached or not, a truncated object is never half read in silence."""
    store.put("x", bytes(8192))
    for forget in (False, True):
        if forget:
            _forget(tmp_path / "store" / "x")
        with pytest.raises(StoreError, match="ends before byte"):
            store.get_into("x", offset, memoryview(bytearray(8193)))


@pytest.mark.parametrize("refusal", ["flag", "first write", "short write", "no reserve"])
def test_large_objects_need_no_direct_writes(
    store: FileStore, monkeypatch: pytest.MonkeyPatch, refusal: str
) -> None:
    """A filesystem that refuses direct writes, at once or later, gets buffered ones."""
    set_flags, write = fcntl.fcntl, os.pwrite

    def is_direct(descriptor: int) -> bool:
        return bool(set_flags(descriptor, fcntl.F_GETFL) & os.O_DIRECT)

    def refuse_flag(descriptor: int, what: int, flags: int = 0) -> int:
        if what == fcntl.F_SETFL and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct I/O here")
        return set_flags(descriptor, what, flags)

    def refuse_write(descriptor: int, data: memoryview, offset: int) -> int:
        if is_direct(descriptor):
            raise OSError(errno.EINVAL, "another alignment, please")
        return write(descriptor, data, offset)

    def short_write(descriptor: int, data: memoryview, offset: int) -> int:
        if is_direct(descriptor) and offset % 512:
            raise OSError(errno.EINVAL, "not aligned")
        return write(descriptor, data[:1_000_000], offset)

    def refuse_reserve(_descriptor: int, _offset: int, _size: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "cannot reserve")

    if refusal == "flag":
        monkeypatch.setattr(fcntl, "fcntl", refuse_flag)
    elif refusal == "no reserve":
        monkeypatch.setattr(os, "posix_fallocate", refuse_reserve)
    else:
        monkeypatch.setattr(os, "pwrite", refuse_write if refusal[0] == "f" else short_write)
    content = bytes(range(256)) * 40_000 + b"tail"
    store.put("x", content)
    assert store.get("x") == content


def test_a_failing_disk_is_not_taken_for_a_missing_feature(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of the disk itself ends the put; nothing is stored."""

    def fail(_descriptor: int, _data: memoryview, _offset: int) -> int:
        raise OSError(errno.EIO, "I/O error")

    monkeypatch.setattr(os, "pwrite", fail)
    with pytest.raises(StoreUnavailable, match="i/o error"):
        store.put("x", bytes(9_000_000))
    assert store.head("x") is None


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_no_space_and_no_quota_are_a_full_store(
    store: FileStore, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """The kernel's words for 'no room' become `StoreFull`, also when only fsync finds out."""

    def full(_descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreFull):
        store.put("x", b"1", if_absent=True)
    assert store.head("x") is None


def test_an_unwritable_store_is_one_clear_sentence(tmp_path: Path) -> None:
    """A file where the folder should be: the sentence names the path and the reason."""
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreUnavailable, match=r"cannot write .*file/run/x: not a directory"):
        PrefixedStore(open_store(tmp_path / "file"), "run").put("x", b"")


def test_a_read_only_store_is_one_clear_sentence(tmp_path: Path) -> None:
    """Where even root may not write, reading still works and nothing is created by it."""
    if os.geteuid() == 0:
        store = FileStore("/proc/self")
        assert store.get("comm")
    else:
        tmp_path.chmod(0o500)
        store = FileStore(tmp_path)
    assert store.head("nothing") is None
    with pytest.raises(StoreUnavailable, match="cannot write"):
        store.put("x", b"")


def test_reading_creates_nothing(tmp_path: Path) -> None:
    """Looking at a store that does not exist does not make it."""
    store = open_store(tmp_path / "later")
    assert list(store.list()) == []
    assert store.list_folders("") == []
    store.delete("x")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_in_the_way_is_not_taken_for_an_object(store: FileStore) -> None:
    """A key whose place is a folder cannot be written, and says so, whatever the condition."""
    store.put("a/b", b"")
    with pytest.raises(StoreUnavailable, match="folder"):
        store.put("a", b"", if_absent=True)
    with pytest.raises(StoreUnavailable, match="directory"):
        store.put("a", b"")
    with pytest.raises(StoreUnavailable, match="directory"):
        store.put("a/b/c", b"")


def test_two_conditions_at_once_are_refused(store: FileStore) -> None:
    """`if_absent` and `if_match` exclude each other."""
    with pytest.raises(UsageError):
        store.put("x", b"", if_absent=True, if_match="1")


def test_a_repeated_link_request_is_not_a_lost_race(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS may answer 'exists' for a link that it made itself: that is our success."""
    link = os.link

    def linked_but_answer_lost(source: str, target: str, **folders: Any) -> None:
        link(source, target, **folders)
        link(source, target, **folders)

    store.check_conditions()
    monkeypatch.setattr(os, "link", linked_but_answer_lost)
    store.put("x", b"mine", if_absent=True)
    assert store.get("x") == b"mine"


def test_etags_do_not_depend_on_the_kernels_coarse_clock(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Versions that are a nanosecond apart, even if they reuse an inode, have different etags."""
    monkeypatch.setattr(time, "time_ns", count(1_700_000_000_000_000_000).__next__)
    etags = [store.put("x", b"same") for _ in range(20)]
    assert len({etag.split("-")[0] for etag in etags}) == 20


@pytest.mark.parametrize("ahead_s", [3600, -3600])
def test_stamps_are_those_of_the_file_system(
    store: FileStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead_s: int
) -> None:
    """A folder that several machines share has one clock, however wrong that of a writer is."""
    true_ns = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: true_ns() + ahead_s * 10**9)
    store.put("x", b"1")
    (tmp_path / "plain").touch()

    info = store.head("x")
    assert info is not None
    assert info.modified_at is not None
    assert abs(info.modified_at - (tmp_path / "plain").stat().st_mtime) < 60


def test_foreign_things_in_the_folder_are_not_objects(store: FileStore, tmp_path: Path) -> None:
    """Links that loop, pipes and unspeakable names are neither listed nor followed."""
    store.put("a/x", b"")
    (tmp_path / "store" / "a" / "loop").symlink_to(tmp_path / "store")
    os.mkfifo(tmp_path / "store" / "pipe")
    (tmp_path / "store" / "bad\nname").write_bytes(b"")
    Path(os.fsdecode(os.fsencode(tmp_path / "store") + b"/\xff")).write_bytes(b"")

    assert [info.key for info in store.list()] == ["a/x"]
    assert store.list_folders("") == ["a/"]
    assert store.head("pipe") is None


def test_an_empty_folder_is_not_a_folder(store: FileStore, tmp_path: Path) -> None:
    """What a crash between mkdir and link leaves does not show."""
    (tmp_path / "store" / "checkpoints" / "000000000010-000001").mkdir(parents=True)
    assert store.list_folders("checkpoints/") == []
    assert store.list_folders("") == []


def test_a_listing_reads_only_the_folders_it_needs(store: FileStore, tmp_path: Path) -> None:
    """Taking the first object opens its folder, not those of all the others."""
    for folder in range(50):
        (tmp_path / "store" / f"{folder:02d}").mkdir(parents=True)
        (tmp_path / "store" / f"{folder:02d}" / "x").write_bytes(b"")
    opened: list[object] = []
    scandir = os.scandir

    def spy(path: Path) -> object:
        opened.append(path)
        return scandir(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "scandir", spy)
        first = [info.key for info in islice(store.list(), 2)]
        later = [info.key for info in store.list(start_after="48/x")]

    assert first == ["00/x", "01/x"]
    assert later == ["49/x"]
    assert len(opened) == 3 + 3  # the root and 2 folders each: 48's may still hold a later key


def test_a_folder_that_keeps_vanishing_ends_in_an_error(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A put does not retry for ever against a deleter gone mad."""

    def vanish(_source: str, _target: str, **_: object) -> None:
        raise FileNotFoundError(errno.ENOENT, "gone again")

    store.check_conditions()
    monkeypatch.setattr(os, "link", vanish)
    with pytest.raises(StoreUnavailable, match="keeps vanishing"):
        store.put("a/x", b"", if_absent=True)


def test_a_store_moved_away_under_a_living_writer_is_made_anew(tmp_path: Path) -> None:
    """Deleting the whole folder between two puts costs its content, not the second put."""
    store = FileStore(tmp_path / "store")
    store.put("a/x", b"1")
    (tmp_path / "store").rename(tmp_path / "moved")

    store.put("a/x", b"2", if_absent=True)
    assert store.get("a/x") == b"2"


@pytest.mark.parametrize("locks", ["none", "some"])
def test_plain_writes_need_no_locks(
    store: FileStore, monkeypatch: pytest.MonkeyPatch, locks: str
) -> None:
    """Where flock is not to be had, only `if_match` is refused."""

    def refuse(_file: object, _how: int) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    if locks == "none":
        monkeypatch.setattr(fcntl, "flock", refuse)
    etag = store.put("x", b"1")
    store.delete("x")
    etag = store.put("x", b"2")
    if locks == "none":
        with pytest.raises(StoreUnavailable, match="no locks"):
            store.put("x", b"3", if_match=etag)
    else:
        store.put("x", b"3", if_match=etag)


def test_processes_race_for_one_name(tmp_path: Path) -> None:
    """Of several processes that create one key at once exactly one succeeds."""
    code = """
import sys
from spotguard.errors import AlreadyExists
from spotguard.storage import FileStore
sys.stdin.readline()
try:
    FileStore(sys.argv[1]).put("claim", sys.argv[2].encode(), if_absent=True)
    print("won")
except AlreadyExists:
    print("lost")
"""
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path), str(index)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for index in range(3)
    ]
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    said = [racer.communicate(timeout=30)[0].strip() for racer in racers]

    assert sorted(said) == ["lost", "lost", "won"]
    assert FileStore(tmp_path).get("claim") == str(said.index("won")).encode()
