"""The copy of the job's folder: whole or not there, bounded, and told of."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from spotguard.errors import EnvironmentFailure, SpecError
from spotguard.launch.workdir import snapshot as module
from spotguard.launch.workdir.left_behind import missed_by_git, told
from spotguard.launch.workdir.snapshot import (
    ALL,
    CODE,
    Snapshot,
    Wanted,
    changed,
    copy_for_trial,
    keep_for,
    load,
    take,
)

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a project with code, data, results and a repository."""
    top = tmp_path / "project"
    for path, text in {
        "train.py": "import pkg\n",
        "pkg/__init__.py": "",
        "configs/base.yaml": "lr: 1",
        "out/log.txt": "x",
        ".gitignore": "out/\n",
        ".git/HEAD": "ref: refs/heads/main",
    }.items():
        (top / path).parent.mkdir(parents=True, exist_ok=True)
        (top / path).write_text(text)
    (top / "empty").mkdir()
    return top


def _taken(folder: Path, home: Path, **more: object) -> Snapshot:
    said: list[str] = []
    return take(Wanted(workdir=folder, kind=ALL, **more), home, said.append)  # type: ignore[arg-type]


def test_the_copy_is_what_nodes_get_and_is_named_by_it(folder: Path, tmp_path: Path) -> None:
    """The same content is one copy; another content is another; git's own files change no name."""
    first = _taken(folder, tmp_path / "home")
    got = sorted(
        p.relative_to(first.files).as_posix() for p in first.files.rglob("*") if p.is_file()
    )
    assert got == [".git/HEAD", ".gitignore", "configs/base.yaml", "pkg/__init__.py", "train.py"]
    assert (first.files / "empty").is_dir()
    assert _taken(folder, tmp_path / "home").digest == first.digest
    assert load(tmp_path / "home", first.digest) == first
    (folder / "out/log.txt").write_text("y")
    (folder / "train.py").write_text("import pkg, os\n")
    (folder / "configs/base.yaml").unlink()
    (folder / ".git/HEAD").write_text("ref: refs/heads/other")
    second = _taken(folder, tmp_path / "home")
    assert changed(first.marks, second.marks) == ["configs/base.yaml", "train.py"]
    assert (first.files / "train.py").read_text() == "import pkg\n"


def test_modes_links_and_empty_folders_are_copied_as_they_are(folder: Path, tmp_path: Path) -> None:
    """A node finds programs that run and links as they were; those that lead out are told of."""
    (folder / "run.sh").write_text("#!/bin/sh\n")
    (folder / "run.sh").chmod(0o755)
    (folder / "inside").symlink_to("configs")
    (folder / "data").symlink_to(tmp_path)
    (folder / "up").symlink_to("../elsewhere")
    (folder / "mounted").symlink_to("/data/tokens")
    taken = _taken(folder, tmp_path / "home", mounted=("/data",))
    assert os.access(taken.files / "run.sh", os.X_OK)
    assert (taken.files / "inside").readlink().name == "configs"
    assert set(taken.leads_out) >= {"data", "up"}
    assert "inside" not in taken.leads_out
    assert any("data" in words and "lead out" in words for words in told(taken, []))
    copy_for_trial(taken, tmp_path / "trial")
    assert not (tmp_path / "trial/data").exists()
    (tmp_path / "trial/train.py").write_text("changed")
    assert (taken.files / "train.py").read_text() == "import pkg\n"


def test_what_git_keeps_and_is_not_copied_is_named(folder: Path, tmp_path: Path) -> None:
    """A tracked file and one that a `!` line brings back for git are told with their line."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    shutil.rmtree(folder / ".git")
    (folder / ".gitignore").write_text("*.yaml\n!configs/base.yaml\npkg/\n")
    git = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "-f", "pkg"], check=True)
    taken = _taken(folder, tmp_path / "home")
    (words,) = told(taken, missed_by_git(taken, folder))
    assert "configs/base.yaml, by line 1 of .gitignore" in words
    assert "pkg/__init__.py, by line 3 of .gitignore" in words
    assert ".skyignore" in words
    (folder / ".skyignore").touch()
    taken = _taken(folder, tmp_path / "home")
    assert told(taken, missed_by_git(taken, folder)) == []


@pytest.mark.parametrize(
    ("rules", "path", "words"),
    [
        ("dataset/*\n", "verl/utils/dataset/__init__.py", "by line 1 of .gitignore"),
        ("# no data\ndata/*\n", "src/project/data/__init__.py", "by line 2 of .gitignore"),
        ("log*\n!logging.py\n", "pkg/utils/logging.py", "by line 1 of .gitignore"),
        ("", "pkg/.skyignore", "pkg/.skyignore is not read"),
    ],
)
def test_lines_that_others_stumbled_over_are_told(
    folder: Path, tmp_path: Path, rules: str, path: str, words: str
) -> None:
    """A pattern meant for the top, or a file in a place where it is not read, is no silent loss."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    shutil.rmtree(folder / ".git")
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    (folder / path).touch()
    (folder / ".gitignore").write_text(rules)
    subprocess.run(["git", "-C", str(folder), "init", "-q"], check=True)
    subprocess.run(["git", "-C", str(folder), "add", "-f", path], check=True)
    taken = _taken(folder, tmp_path / "home")
    (said,) = told(taken, missed_by_git(taken, folder))
    assert words in said
    assert path in said


def test_what_is_too_large_is_refused_with_the_way_out(folder: Path, tmp_path: Path) -> None:
    """Nobody copies 30 GB to each node unasked: the largest is named, and nothing is half-made."""
    with (folder / "weights.bin").open("wb") as file:
        file.truncate(30 * 10**9)
    with pytest.raises(SpecError, match=r"weights\.bin 30(\.0)? GB") as refused:
        _taken(folder, tmp_path / "home")
    assert ".skyignore" in refused.value.hint
    assert list((tmp_path / "home/code").iterdir()) == []
    (folder / ".skyignore").write_text("*.bin\n")
    assert _taken(folder, tmp_path / "home").size_bytes < 1000


def test_environments_and_secrets_are_told_of_and_the_home_is_not_copied(
    folder: Path, tmp_path: Path
) -> None:
    """A `.venv` and a `.env` are no surprise on a node; journals and keys never get there."""
    (folder / ".venv").mkdir()
    (folder / ".venv/pyvenv.cfg").touch()
    (folder / ".env").write_text("TOKEN=1")
    (folder / "runs/a").mkdir(parents=True)
    (folder / "runs/a/shard").touch()
    taken = _taken(folder, folder / "home", skipped=(folder / "runs",))
    assert [words.split()[0] for words in told(taken, [])] == [".env", ".venv/"]
    assert not (taken.files / "home").exists()
    assert not (taken.files / "runs").exists()


def test_nodes_of_this_machine_have_the_code_alone(folder: Path, tmp_path: Path) -> None:
    """Of 30 GB of data beside the script nothing is copied for nodes that have it themselves."""
    with (folder / "weights.bin").open("wb") as file:
        file.truncate(30 * 10**9)
    (folder / ".venv/lib").mkdir(parents=True)
    (folder / ".venv/lib/x.py").touch()
    taken = _taken_code(folder, tmp_path / "home")
    assert sorted(taken.marks) == ["pkg/__init__.py", "train.py"]


def _taken_code(folder: Path, home: Path) -> Snapshot:
    wanted = Wanted(workdir=folder, kind=CODE, least=(folder / "train.py",))
    return take(wanted, home, lambda _: None)


def test_a_folder_with_too_much_code_is_said_to_be_kept_in_part(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In somebody's whole home what the script imports is kept, and that is told."""
    monkeypatch.setattr(module, "_MOST_CODE_LOOKS", 2)
    taken = _taken_code(folder, tmp_path / "home")
    assert sorted(taken.marks) == ["train.py"]
    assert "1 files that the script imports" in told(taken, [])[0]


def test_kill_9_leaves_nothing_half_made(folder: Path, tmp_path: Path) -> None:
    """A copy that was torn is never taken for one, and the next one clears it away."""
    home = tmp_path / "home"
    code = (
        "import os, sys, pathlib\n"
        "from spotguard.launch.workdir import snapshot as s\n"
        "real = s._Copy._copy_file\n"
        "def torn(self, source, target):\n"
        "    mark = real(self, source, target)\n"
        "    os.kill(os.getpid(), 9) if source.name == 'train.py' else None\n"
        "    return mark\n"
        "s._Copy._copy_file = torn\n"
        f"s.take(s.Wanted(workdir=pathlib.Path({str(folder)!r}), kind='all'),"
        f" pathlib.Path({str(home)!r}), print)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    (torn,) = (home / "code").iterdir()
    assert torn.name.startswith(".new-")
    taken = _taken(folder, home)
    assert [path.name for path in (home / "code").iterdir()] == [taken.digest]


def test_copies_that_no_run_has_go_after_a_day(folder: Path, tmp_path: Path) -> None:
    """The home does not grow for ever, and no run loses its code."""
    home = tmp_path / "home"
    kept, other = _taken(folder, home), None
    (home / "runs/a").mkdir(parents=True)
    keep_for(home / "runs/a", kept.digest)
    (folder / "train.py").write_text("1")
    other = _taken(folder, home)
    for taken in (kept, other):
        os.utime(taken.folder, (0, 0))
    (folder / "train.py").write_text("2")
    newest = _taken(folder, home)
    assert {p.name for p in (home / "code").iterdir()} == {kept.digest, newest.digest}


def test_a_copy_that_is_gone_or_changed_is_said_so(folder: Path, tmp_path: Path) -> None:
    """No launch goes on with what is not the run's code."""
    taken = _taken(folder, tmp_path / "home")
    manifest = taken.folder / "manifest.json"
    manifest.write_text(json.dumps({"schema": 1}))
    with pytest.raises(EnvironmentFailure, match="not in"):
        load(tmp_path / "home", taken.digest)
