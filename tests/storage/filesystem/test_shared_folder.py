"""A folder store that others may write to, or that is a mounted bucket: links, groups, FUSE."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from spotguard.control.doctor.store import try_store
from spotguard.errors import NoObject, StoreError
from spotguard.storage import FileStore, check_conditions
from tests.storage.filesystem.test_file_store import leftovers

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    """An empty folder store."""
    return FileStore(tmp_path / "store")


class MountedBucket:
    """A bucket mounted by FUSE, as one node sees it: no hard links, locks for this node alone.

    `number` is what a link ends with; None: a name is given to whoever asks last.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int | None) -> None:
        self._number = number
        self._link = os.link
        monkeypatch.setattr(os, "link", self._refuse)
        monkeypatch.setattr(fcntl, "flock", lambda _file, _how: None)  # the other node has its own
        monkeypatch.setattr(Path, "hardlink_to", lambda new, old: self._refuse(str(old), str(new)))

    def _refuse(self, source: str, target: str, **folders: Any) -> None:
        if self._number is not None:
            raise OSError(self._number, os.strerror(self._number))
        with contextlib.suppress(FileNotFoundError):
            os.unlink(target, dir_fd=folders.get("dst_dir_fd"))
        self._link(source, target, **folders)


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, None])
def test_a_mounted_bucket_is_refused_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int | None
) -> None:
    """Create-if-absent is never won twice: three nodes are refused, at the check and at a write.

    What needs no condition is written and read, so that what lies there can be looked at.
    """
    nodes = [FileStore(tmp_path) for _ in range(3)]
    MountedBucket(monkeypatch, number)
    for node in nodes:
        with pytest.raises(StoreError, match="both believe that they had won") as caught:
            node.put("claim", b"mine", if_absent=True)
        assert "s3://BUCKET" in caught.value.hint
        node.put("x", b"1")
    with pytest.raises(StoreError, match="as on a mounted bucket"):
        check_conditions(str(tmp_path))
    assert nodes[0].head("claim") is None
    assert nodes[0].get("x") == b"1"
    assert leftovers(tmp_path) == []

    found = try_store(str(tmp_path), speed_bytes=1)
    assert found.rights["conditional write"] is False
    assert ["s3://BUCKET" in each.hint for each in found.findings] == [True]


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A folder of somebody else's, with an old file; nothing in it may change."""
    folder = tmp_path / "elsewhere"
    (folder / "old").mkdir(parents=True)
    for path in (folder / "thesis", folder / "old" / "thesis"):
        path.write_bytes(b"years of work")
        os.utime(path, (1e9, 1e9))
    return folder


@pytest.mark.parametrize("link", [".spotguard", ".spotguard/tmp", "run", "run/attempts"])
def test_no_link_below_a_store_is_followed(
    store: FileStore, tmp_path: Path, elsewhere: Path, link: str
) -> None:
    """A link in a folder's place leads no write, deletion or sweep elsewhere; it is named."""
    (elsewhere / "attempts").mkdir()
    (elsewhere / "attempts" / "old").write_bytes(b"1")
    (elsewhere / "tmp").symlink_to("old")
    before = sorted(elsewhere.rglob("*"))
    place = tmp_path / "store" / link
    place.parent.mkdir(parents=True)
    place.symlink_to(elsewhere)
    acts: list[Callable[[], object]] = [
        lambda: store.put("run/attempts/x", b"1"),
        lambda: store.put("run/attempts/y", b"1", if_absent=True),
    ]
    if link.startswith("run"):
        acts.append(
            lambda: store.delete("run/attempts/old" if link == "run" else "run/attempts/thesis")
        )
    for act in acts:
        with pytest.raises(StoreError, match=f"{place} is a link") as caught:
            act()
        assert "--store" in caught.value.hint
    with contextlib.suppress(StoreError):
        store.clean_up(older_than_s=-1)
    assert sorted(elsewhere.rglob("*")) == before
    assert (elsewhere / "thesis").read_bytes() == b"years of work"


def test_a_link_in_an_objects_place_is_no_object(
    store: FileStore, tmp_path: Path, elsewhere: Path
) -> None:
    """It is not listed or read; a write takes its place and leaves alone what it led to."""
    store.put("a/x", b"1")
    (tmp_path / "store" / "a" / "y").symlink_to(elsewhere / "thesis")
    (tmp_path / "store" / ".spotguard" / "lock").unlink()
    (tmp_path / "store" / ".spotguard" / "lock").symlink_to(elsewhere / "new")
    assert [info.key for info in store.list()] == ["a/x"]
    assert store.head("a/y") is None
    with pytest.raises(NoObject):
        store.get("a/y")
    with pytest.raises(StoreError):
        store.put("a/y", b"2")
    (tmp_path / "store" / ".spotguard" / "lock").unlink()
    store.put("a/y", b"2")
    assert store.get("a/y") == b"2"
    assert (elsewhere / "thesis").read_bytes() == b"years of work"
    assert not (elsewhere / "new").exists()


def _as_user(user: int, group: int, folder: Path) -> int:
    """Write, overwrite and delete in a store as somebody else; return the exit code."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    try:
        os.setgroups([])
        os.setgid(group)
        os.setuid(user)
        store = FileStore(folder)
        store.put("run/a/x", b"2")
        store.put(f"run/a/{user}", b"2", if_absent=True)
        store.delete("run/a/x")
    except BaseException:  # noqa: BLE001 - it must not return into the parent's code
        os._exit(1)
    os._exit(0)


@pytest.mark.parametrize("umask", [0o002, 0o022, 0o077])
def test_a_group_shares_a_folder_whatever_the_first_ones_umask(umask: int) -> None:
    """Three users of one group write, overwrite and delete in each other's folders.

    Where the folder is the group's (set-group-id, group-writable), so is all that is made in it.
    In a folder that is not, the umask says who may what.
    """
    with tempfile.TemporaryDirectory() as base:
        Path(base).chmod(0o755)  # pytest's own folders let nobody else in
        shared, own = Path(base, "shared"), Path(base, "own")
        for folder, mode in ((shared, 0o2770), (own, 0o700)):
            folder.mkdir()
            folder.chmod(mode)
        before = os.umask(umask)
        try:
            for folder in (shared, own):
                FileStore(folder / "runs").put("run/a/x", b"1", if_absent=True)
        finally:
            os.umask(before)
        for path in shared.rglob("*"):
            wanted = 0o2070 if path.is_dir() else 0o060
            assert path.stat().st_mode & 0o2070 & wanted == wanted, path
        assert all(path.stat().st_mode & umask == 0 for path in own.rglob("*"))
        if os.geteuid() == 0:
            for user in (4242, 4243):
                assert _as_user(user, shared.stat().st_gid, shared / "runs") == 0
                FileStore(shared / "runs").put("run/a/x", b"1")
