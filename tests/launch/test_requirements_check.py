"""Whether pip has anything to do, told from what is installed in a folder."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from typing import TYPE_CHECKING

import pytest
from packaging.requirements import Requirement

from spotguard.launch.requirements_check import are_met, main

if TYPE_CHECKING:
    from pathlib import Path

INSTALLED = {
    "app": ("1.2", ["lib>=2", "extra-lib; extra == 'more'", "gone; python_version < '3'"]),
    "lib": ("2.1rc1", ["app"]),  # a circle
    "extra-lib": ("1.0", ["missing; extra == 'deep'"]),
    "broken": ("1.0", ["missing"]),
    "old": ("1.0", ["lib>=3"]),
    "odd": ("1.0-of-ours!", []),
    "linked": ("1.0", ["lib @ https://example.org/lib.whl"]),
}


def install(folder: Path) -> None:
    """Put the records of some packages into a folder."""
    for name, (version, needs) in INSTALLED.items():
        info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        lines = [f"Name: {name}", f"Version: {version}"]
        lines += [f"Requires-Dist: {need}" for need in needs]
        (info / "METADATA").write_text("\n".join(lines) + "\n")


def met(folder: Path, *asked: str) -> bool:
    """Tell whether what is in `folder` is enough."""

    def find(name: str) -> metadata.Distribution:
        found = metadata.Distribution.discover(name=name, path=[str(folder)])
        for distribution in found:
            return distribution
        raise metadata.PackageNotFoundError(name)

    return are_met([Requirement(line) for line in asked], find)


@pytest.mark.parametrize(
    ("asked", "enough"),
    [
        ("app", True),
        ("App>=1,<2", True),
        ("app==1.3", False),
        ("lib>=1", True),  # 2.1rc1 is there, so pip keeps it
        ("extra_lib", True),
        ("missing", False),
        ("missing; python_version < '3'", True),
        ("broken", False),
        ("old", False),
        ("app[more]", True),
        ("app[unheard-of]", True),  # pip warns only
        ("extra-lib[deep]", False),
        ("app @ https://example.org/app.whl", False),
        ("linked", False),
    ],
)
def test_what_is_there_is_enough_or_not(tmp_path: Path, asked: str, enough: bool) -> None:
    """Versions, markers, extras, and what packages need in turn are all looked at."""
    install(tmp_path)
    assert met(tmp_path, asked) == enough
    assert met(tmp_path, "app", asked) == met(tmp_path, asked, "app") == enough


def test_an_extra_counts_although_the_package_was_seen_without(tmp_path: Path) -> None:
    """The order in which a package and its extra are met changes nothing."""
    install(tmp_path)
    assert not met(tmp_path, "extra-lib", "extra-lib[deep]")
    assert not met(tmp_path, "extra-lib[deep]", "extra-lib")


@pytest.mark.parametrize(
    "line",
    [
        "--index-url https://example.org",
        "-e .",
        "./lib",
        "torch==1 --hash=sha256:0",
        "numpy \\",
        "?",
    ],
)
def test_what_only_pip_understands_is_left_to_it(tmp_path: Path, line: str) -> None:
    """Nothing is guessed from a line that is more than a requirement."""
    file = tmp_path / "r.txt"
    file.write_text(f"numpy\n{line}\n")
    assert main(["-r", str(file)]) == 1


def test_an_installation_that_makes_no_sense_is_left_to_pip(tmp_path: Path) -> None:
    """Without a word: what pip says of it is the better one."""
    install(tmp_path)
    command = [sys.executable, "-m", "spotguard.launch.requirements_check"]
    for name, code in (("app", 0), ("odd>=0.5", 1)):
        done = subprocess.run(
            [*command, name],
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            check=False,
            capture_output=True,
        )
        assert (done.returncode, done.stdout, done.stderr) == (code, b"", b"")


def test_a_file_that_is_not_there_is_left_to_pip(tmp_path: Path) -> None:
    """Pip says so in its own words."""
    assert main(["-r", str(tmp_path / "none.txt")]) == 1


def test_it_speaks_for_the_environment_that_runs_it(tmp_path: Path) -> None:
    """Silently, from any folder: what lies in the job's is no part of the environment."""
    file = tmp_path / "r.txt"
    file.write_text("# what the job needs\nnumpy>=1  # always\n\ntorch>=2 ; python_version > '3'\n")
    (tmp_path / "packaging.py").write_text("raise SystemExit(7)")

    def code(*words: str) -> int:
        command = [sys.executable, "-I", "-m", "spotguard.launch.requirements_check", *words]
        done = subprocess.run(command, cwd=tmp_path, check=False, capture_output=True)
        assert not done.stdout
        assert not done.stderr
        return done.returncode

    assert code("-r", str(file), "spotguard") == 0
    assert code("-r", str(file), "spotguard==0.0.1") == 1
    assert code("-r", str(file), "no-such-package") == 1
