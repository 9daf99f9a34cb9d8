"""Completion by the shell: a real bash, told by the command line itself what may come next."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.cli.conftest import Cli

REPOSITORY = Path(__file__).parents[2]
TAB = """
complete_line() {
    COMP_WORDS=("$@"); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); COMPREPLY=()
    local how; how=$(complete -p spotguard); how=${how##*-F }; ${how%% *} spotguard
    echo "$* -> ${COMPREPLY[*]}"
}
"""
"""What bash does at the Tab key, by the function that is registered for the command."""


@pytest.fixture
def bash_with_spotguard(tmp_path: Path) -> list[str]:
    """Return the beginning of a command line that runs bash in an empty home."""
    found = shutil.which("bash")
    if found is None:
        pytest.skip("no bash on this machine")
    command = tmp_path / "bin" / "spotguard"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m spotguard.cli "$@"\n')
    command.chmod(0o755)
    path = f"{command.parent}:{os.environ['PATH']}"
    home = f"HOME={tmp_path}"
    return ["env", home, f"PATH={path}", f"PYTHONPATH={REPOSITORY}", found, "--norc", "-c"]


@pytest.mark.slow
def test_bash_completes_commands_and_options(bash_with_spotguard: list[str]) -> None:
    """After `--install-completion`, a new bash knows commands, options and the parts of a group."""
    lines = ("spotguard st", "spotguard checkpoints ver", "spotguard up --budg", "spotguard up tra")
    script = "spotguard --install-completion || exit\n. ~/.bashrc\n" + TAB
    script += "\n".join(f"complete_line {line}" for line in lines)
    done = subprocess.run(
        [*bash_with_spotguard, script], capture_output=True, text=True, check=False, timeout=150
    )

    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert "bash completion installed" in said[0]
    assert sorted(said[-4].split(" -> ")[1].split()) == ["status", "stop"]
    assert said[-3].endswith(" -> verify")
    assert said[-2].endswith(" -> --budget")
    assert said[-1].endswith(" -> "), "a script's name is left to bash, which knows the files"


def test_installing_it_twice_leaves_one_line(bash_with_spotguard: list[str]) -> None:
    """The user's own `.bashrc` keeps what was in it, and grows by one line only."""
    script = "echo 'alias mine=true' > ~/.bashrc; " + "spotguard --install-completion; " * 2
    done = subprocess.run(
        [*bash_with_spotguard, f"{script} cat ~/.bashrc"],
        capture_output=True,
        text=True,
        check=True,
    )

    kept = [line for line in done.stdout.splitlines() if line]
    assert kept.count("alias mine=true") == 1
    assert sum("spotguard.sh'" in line for line in kept) == 1


def test_the_entry_point_returns_after_completing(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who calls `main` gets an exit code, here too, instead of a `SystemExit`."""
    monkeypatch.setenv("_SPOTGUARD_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "spotguard hist")
    monkeypatch.setenv("COMP_CWORD", "1")
    said = cli()

    assert (said.code, said.out.split()) == (0, ["history"])
