from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

import spotguard
from spotguard.errors import EnvironmentFailure
from spotguard.launch.wheel import build_wheel

PACKAGE = Path(spotguard.__file__).parent


def test_the_wheel_is_this_installation(tmp_path: Path) -> None:
    """It holds every module byte for byte, the templates and the metadata, and no caches."""
    with zipfile.ZipFile(build_wheel(tmp_path)) as wheel:
        names = set(wheel.namelist())
        for path in PACKAGE.rglob("*.py"):
            name = f"spotguard/{path.relative_to(PACKAGE).as_posix()}"
            assert wheel.read(name) == path.read_bytes()
        assert "spotguard/task_templates/base.yaml" in names
        assert not any("__pycache__" in name for name in names)
        metadata = next(name for name in names if name.endswith("/METADATA"))
        assert b"Requires-Dist: torch" in wheel.read(metadata)


def test_the_same_files_give_the_same_wheel(tmp_path: Path) -> None:
    """Built twice it is one file; elsewhere it has the same name and the same bytes."""
    first = build_wheel(tmp_path / "a")
    file = first.stat().st_ino
    assert build_wheel(tmp_path / "a") == first
    assert first.stat().st_ino == file
    second = build_wheel(tmp_path / "b")
    assert second.relative_to(tmp_path / "b") == first.relative_to(tmp_path / "a")
    assert second.read_bytes() == first.read_bytes()
    assert [path.suffix for path in tmp_path.rglob("*") if path.is_file()] == [".whl", ".whl"]


def test_wheels_that_no_launch_needs_are_deleted(tmp_path: Path) -> None:
    """The newest of each version stays, and what was taken within a day; so does what is used."""
    used = build_wheel(tmp_path)
    age(used, days=9)
    aged = {
        name: wheel(tmp_path, name, days)
        for name, days in {"a/spotguard-0": 5, "b/spotguard-0": 3, "c/spotguard-0": 7}.items()
    }
    of_this = wheel(tmp_path, f"d/{used.stem.removesuffix('-py3-none-any')}", 8)
    young = wheel(tmp_path, f"e/{used.stem.removesuffix('-py3-none-any')}", 0.9)
    draft, fresh_draft = tmp_path / "x.new", tmp_path / "y.new"
    for path in (draft, fresh_draft):
        path.touch()
    age(draft, days=2)

    assert build_wheel(tmp_path) == used
    left = {path for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {used, aged["b/spotguard-0"], young, fresh_draft}
    assert not of_this.parent.exists()


def test_a_wheel_is_young_again_each_time_it_is_taken(tmp_path: Path) -> None:
    """Another launch, at the same moment or a day before, leaves it to this one."""
    used = build_wheel(tmp_path)
    age(used, days=9)
    build_wheel(tmp_path)
    assert time.time() - used.stat().st_mtime < 60


def test_nobody_takes_a_wheel_while_another_deletes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was old a moment ago is not deleted under a launch that has just taken it."""
    waits: list[bool] = []

    def try_to_take(folder: Path) -> None:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waits.append(True)
        finally:
            os.close(descriptor)

    monkeypatch.setattr("spotguard.launch.wheel._tidy", try_to_take)
    build_wheel(tmp_path)
    assert waits == [True]
    try_to_take(tmp_path)
    assert waits == [True]


def wheel(folder: Path, name: str, days: float) -> Path:
    """Leave a wheel that was taken some days ago."""
    path = folder / f"{name}-py3-none-any.whl"
    path.parent.mkdir()
    path.touch()
    age(path, days=days)
    return path


def age(path: Path, *, days: float) -> None:
    """Let a file be of some days ago."""
    then = time.time() - days * 86_400
    os.utime(path, (then, then))


@pytest.mark.slow
def test_pip_installs_it(tmp_path: Path) -> None:
    """What a node does with it, and the node's side can be imported from there."""
    wheel = build_wheel(tmp_path / "wheels")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    target = tmp_path / "node"
    subprocess.run([*pip, "--no-deps", "--no-index", "--target", target, wheel], check=True)
    code = "import spotguard.launch.agent as a; print(a.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(target)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == str(target / "spotguard" / "launch" / "agent.py")


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    """One sentence instead of a traceback."""
    (tmp_path / "file").touch()
    with pytest.raises(EnvironmentFailure, match="cannot be packed for the nodes"):
        build_wheel(tmp_path / "file")
