"""The opt-in suite itself: it is found, skips without an account, and what it can play works."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.cloud.account import CLOUD, HOW_TO, STORE, why_not

ROOT = Path(__file__).parents[3]


def suite(*flags: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run the opt-in tests in a process of their own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SPOTGUARD_")}
    command = [sys.executable, "-m", "pytest", "-m", "cloud", "-p", "no:cacheprovider", *flags]
    return subprocess.run(
        [*command, "tests/e2e/cloud"],
        cwd=ROOT,
        env={**kept, **environ},
        capture_output=True,
        text=True,
        timeout=840.0,
        check=False,
    )


def test_without_an_account_everything_skips_with_one_sentence() -> None:
    """And nothing is started: the sentence says what to set and where to read on."""
    done = suite("-q", "-rs")
    assert done.returncode == 0, done.stdout
    assert "6 skipped" in done.stdout
    assert "passed" not in done.stdout.splitlines()[-1]
    reasons = [line for line in done.stdout.splitlines() if line.startswith("SKIPPED")]
    assert reasons
    assert all(HOW_TO in line for line in reasons)
    assert (ROOT / "docs" / "reference" / "cloud-tests.md").exists()


def test_each_thing_that_is_missing_is_named() -> None:
    """A typo, or no store; nobody is asked for that."""
    assert why_not("local", {}) is None
    assert why_not("amazon", {}) == f"{CLOUD} names 'amazon', which is no place; {HOW_TO}"
    assert str(why_not("aws", {})).startswith(f"{STORE} names no store for the runs on aws")


@pytest.mark.e2e
@pytest.mark.timeout(900)
def test_what_needs_no_account_works_on_this_machine() -> None:
    """The same tests with processes of this machine in the place of nodes."""
    done = suite("-q", "-rs", "-p", "no:randomly", **{CLOUD: "local"})
    assert done.returncode == 0, done.stdout
    assert "5 passed, 1 skipped" in done.stdout
    assert "together: $" in done.stdout
