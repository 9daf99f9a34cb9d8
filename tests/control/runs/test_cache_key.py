from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from spotguard.control.run_folder import RunFolder

if TYPE_CHECKING:
    from pathlib import Path


def test_a_run_has_one_key_that_only_its_user_reads(tmp_path: Path) -> None:
    """The next controller of the run finds the same."""
    key = RunFolder(tmp_path).cache_key()
    assert key is not None
    assert len(key) == 64
    assert RunFolder(tmp_path).cache_key() == key
    assert [path.name for path in tmp_path.iterdir()] == ["cache.key"]
    assert (tmp_path / "cache.key").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("left", [b"", b"\n", None])
def test_what_a_crash_left_of_it_is_made_anew(tmp_path: Path, left: bytes | None) -> None:
    """A file that is empty, or one that had no name yet: nobody takes that for a key."""
    (tmp_path / ".cache.key.new").write_bytes(b"half")
    if left is not None:
        (tmp_path / "cache.key").write_bytes(left)
    key = RunFolder(tmp_path).cache_key()
    assert key is not None
    assert len(key) == 64
    assert RunFolder(tmp_path).cache_key() == key


@pytest.mark.parametrize("broken", ["no folder", "no text", "no file"])
def test_without_a_key_the_run_goes_on(tmp_path: Path, broken: str) -> None:
    """Then nodes keep nothing: a cache is no reason for a controller to end."""
    folder = tmp_path / "run"
    if broken != "no folder":
        folder.mkdir()
    if broken == "no text":
        (folder / "cache.key").write_bytes(b"\xff\xfe")
    if broken == "no file":
        (folder / "cache.key").mkdir()
    assert RunFolder(folder).cache_key() is None
