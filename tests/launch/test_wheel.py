from __future__ import annotations

import subprocess
import sys
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
    written_at = first.stat().st_mtime_ns
    assert build_wheel(tmp_path / "a") == first
    assert first.stat().st_mtime_ns == written_at
    second = build_wheel(tmp_path / "b")
    assert second.relative_to(tmp_path / "b") == first.relative_to(tmp_path / "a")
    assert second.read_bytes() == first.read_bytes()
    assert [path.suffix for path in tmp_path.rglob("*") if path.is_file()] == [".whl", ".whl"]


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
