"""Finds the Pythons of this machine."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

SUPPORTED = ("3.10", "3.11", "3.12", "3.13")


def find(version: str) -> Path | None:
    """Return an interpreter of `3.10` or the like that starts, on PATH or of pyenv; None if none.

    pyenv puts a `python3.10` on PATH that starts only where it was chosen, so each is tried.
    """
    name = f"python{version}"
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    on_path = (Path(folder) / name for folder in os.get_exec_path())
    for candidate in (*on_path, *sorted(pyenv.glob(f"{version}.*/bin/{name}"))):
        if candidate.is_file() and _is(candidate, version):
            return candidate
    return None


def _is(candidate: Path, version: str) -> bool:
    say = "import sys, venv; print('%d.%d' % sys.version_info[:2])"
    try:
        done = subprocess.run(
            [candidate, "-c", say], capture_output=True, text=True, check=False, timeout=30
        )
    except OSError:
        return False
    return done.stdout.strip() == version
