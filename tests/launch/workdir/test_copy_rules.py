"""What is said to be copied to nodes is what SkyPilot's own rsync copies, line by line."""

from __future__ import annotations

import ast
import importlib.util
import random
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

from spotguard.launch.workdir.copy_rules import (
    GIT_EXCLUDE,
    GITIGNORE,
    SKYIGNORE,
    CopyRules,
    way_out,
)

_NEEDS_RSYNC = pytest.mark.skipif(shutil.which("rsync") is None, reason="rsync is not installed")
_NAMES = ("a", "b.py", "!b.py", "build", "data", "x.log", "sp ace", "c#d", "no-te", "B.py")
_PATTERNS = (
    *("*.py", "!b.py", "build/", "build", "/build", "/data/", "a/build", "/a/build", "**/x.log"),
    *(
        "a/**",
        "**/a/b.py",
        "data/***",
        "/data/**/b.py",
        "*",
        "!*",
        "[ab]*",
        "[!a]?py",
        "[[:upper:]]*",
    ),
    *("?.log", "# no", ";no", "  a", "x.log ", r"\[c\]", "[c]", "no-te", "b", "/a", "a/", "data/*"),
    *("/", "!", "- a", "+ a", "**", "a**b.py", "a/*/b.py", "[z-a]", "*.p[xy]"),
)


def _tree(top: Path, dice: random.Random, depth: int = 3) -> None:
    for name in dice.sample(_NAMES, 6):
        if depth and dice.random() < 0.5:
            (top / name).mkdir(exist_ok=True)
            _tree(top / name, dice, depth - 1)
        else:
            (top / name).write_text(name)
    if dice.random() < 0.3:
        (top / "link").symlink_to(dice.choice(["build", "/etc", "gone"]))


def _ours(top: Path) -> set[str]:
    rules, found = CopyRules(top), set[str]()

    def walk(folder: Path) -> None:
        for entry in folder.iterdir():
            path = entry.relative_to(top).as_posix()
            is_folder = entry.is_dir() and not entry.is_symlink()
            if rules.left_behind(path, is_folder=is_folder) is None:
                found.add(path)
                if is_folder:
                    walk(entry)

    walk(top)
    return found


@cache
def _constants(module: str) -> dict[str, str]:
    """Return the texts that a module of the installed SkyPilot assigns, without its import."""
    found = importlib.util.find_spec("sky")
    assert found is not None
    assert found.origin is not None
    tree = ast.parse((Path(found.origin).parent / module).read_text())
    names: dict[str, str] = {"constants.SKY_IGNORE_FILE": SKYIGNORE}
    names["constants.GIT_IGNORE_FILE"] = GITIGNORE
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            parts = node.value.values if isinstance(node.value, ast.JoinedStr) else [node.value]
            texts = [
                names.get(ast.unparse(part.value))
                if isinstance(part, ast.FormattedValue)
                else getattr(part, "value", None)
                for part in parts
            ]
            if all(isinstance(text, str) for text in texts):
                names[node.targets[0].id] = "".join(map(str, texts))
    return names


def _theirs(top: Path, to: Path) -> set[str]:
    """Copy the folder by the command that SkyPilot's `_rsync` puts together; return what came."""
    shutil.rmtree(to, ignore_errors=True)
    known = _constants("utils/command_runner.py")
    has_own = (top / SKYIGNORE).exists()
    rules = [known["RSYNC_FILTER_SKYIGNORE" if has_own else "RSYNC_FILTER_GITIGNORE"]]
    if not has_own and (top / GIT_EXCLUDE).exists():
        rules.append(known["RSYNC_EXCLUDE_OPTION"].format(top / GIT_EXCLUDE))
    options = [known["RSYNC_DISPLAY_OPTION"], known["RSYNC_NO_OWNER_NO_GROUP_OPTION"], *rules]
    command = " ".join(["rsync", *options, f"{top}/", f"{to}/"])
    subprocess.run(command, shell=True, check=True, capture_output=True)
    return {path.relative_to(to).as_posix() for path in to.rglob("*")}


@_NEEDS_RSYNC
def test_the_rules_are_those_of_skypilots_own_rsync(tmp_path: Path) -> None:
    """What is told of copies is what SkyPilot does, for patterns of all kinds in all places."""
    for seed in range(12):
        dice, top = random.Random(seed), tmp_path / f"top-{seed}"
        top.mkdir()
        _tree(top, dice)
        folders = sorted(p for p in top.rglob("*") if p.is_dir() and not p.is_symlink())
        ignore = SKYIGNORE if seed % 3 == 0 else GITIGNORE
        for folder in dict.fromkeys([top, *dice.sample(folders, min(3, len(folders)))]):
            lines = dice.sample(_PATTERNS, 4)
            end = "\r\n" if seed % 4 == 0 else "\n"
            (folder / ignore).write_bytes("".join(f"{line}{end}" for line in lines).encode())
        if seed % 2:
            (top / GIT_EXCLUDE).parent.mkdir(parents=True)
            (top / GIT_EXCLUDE).write_text("\n".join(dice.sample(_PATTERNS, 3)))
        assert _ours(top) == _theirs(top, tmp_path / "to"), (
            seed,
            {str(p): p.read_text() for p in top.rglob(ignore)},
        )


def test_skypilots_rules_are_the_ones_that_are_read_here() -> None:
    """A SkyPilot that copies by other rules is noticed before users are told wrong things."""
    known = _constants("utils/command_runner.py")
    assert known["RSYNC_FILTER_GITIGNORE"] == f"--filter='dir-merge,- {GITIGNORE}'"
    assert known["RSYNC_FILTER_SKYIGNORE"] == f"--filter='dir-merge,- {SKYIGNORE}'"
    assert known["GIT_EXCLUDE"] == GIT_EXCLUDE
    assert known["RSYNC_DISPLAY_OPTION"] == "-Pavz"
    names = _constants("skylet/constants.py")
    assert (names["SKY_IGNORE_FILE"], names["GIT_IGNORE_FILE"]) == (SKYIGNORE, GITIGNORE)


@pytest.mark.parametrize(
    ("rules", "path", "line"),
    [
        ("*\n!train.py\n", "train.py", 1),
        ("# code\n\nconfigs/\n", "pkg/configs/base.yaml", 3),
        ("*.bin\nlib*\n", "libs/b/__init__.py", 2),
    ],
)
def test_who_is_left_behind_hears_by_which_line(
    tmp_path: Path, rules: str, path: str, line: int
) -> None:
    """A file that git would keep and SkyPilot leaves is named with the line to change."""
    (tmp_path / GITIGNORE).write_text(rules)
    file = tmp_path / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
    copied = CopyRules(tmp_path)
    found = copied.why(path)
    assert found is not None
    assert (found.rules, found.line) == (GITIGNORE, line)
    assert SKYIGNORE in way_out([found])
    (tmp_path / SKYIGNORE).touch()
    assert CopyRules(tmp_path).why(path) is None
