from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.programs.pythons import interpreters

ROOT = Path(__file__).parents[2]
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in (ROOT / "spotguard").rglob("*.py")
    if path.name not in ("__init__.py", "__main__.py")
)

NEEDS_ITS_PACKAGES = {"spotguard.cli.main"}
"""Looks at typer's own classes while it is imported; `make test-pythons` imports it for real."""


def test_every_module_runs_on_the_oldest_python() -> None:
    """No module of ours uses what Python 3.10 lacks: a type checker does not see all of it."""
    oldest = interpreters.SUPPORTED[0]
    python = interpreters.find(oldest)
    if python is None:
        pytest.skip(f"no Python {oldest} on this machine")
    modules = [module for module in MODULES if module not in NEEDS_ITS_PACKAGES]
    done = subprocess.run(
        [python, "-B", ROOT / "tests" / "guards" / "bare_import.py", *modules],
        env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False, timeout=50,
    )  # fmt: skip

    assert done.returncode == 0, done.stdout + done.stderr
