"""Saves of every kind, killed at every single step: the newest committed state comes back."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import count
from pathlib import Path

import pytest

from spotguard.storage import FileStore
from spotguard.testing import FaultyStore, MemoryStore
from spotguard.testing.stores import SimulatedCrash
from tests.runtime.harness.deaths import KINDS, begin, check, go_on, live


@pytest.mark.e2e
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("kind", ["memory", "file"])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_death_at_any_write_to_the_store_loses_nothing(
    kind: str, after: bool, tmp_path: Path
) -> None:
    """Periodic, emergency and final saves, claim and pruning: at each put and delete in turn."""
    ends = set()
    for n in count(1):
        inner = MemoryStore() if kind == "memory" else FileStore(tmp_path / str(n))
        begin(inner)
        told: list[int] = []
        try:
            live(FaultyStore(inner).crash_at(n, after=after), tell=told.append)
        except SimulatedCrash:
            ends.add(check(inner, told))
            go_on(inner)
            continue
        break

    assert ends == {30, *KINDS}
    assert n > 10, "the crashes hit nothing"


@pytest.mark.e2e
@pytest.mark.same_everywhere
@pytest.mark.parametrize(
    ("large_bytes", "stride"), [(8 << 20, 1), (1, 4)], ids=["cached", "direct"]
)
def test_death_at_any_step_of_the_folder_store_loses_nothing(
    large_bytes: int, stride: int, tmp_path: Path
) -> None:
    """Before and after each file opened, torn, synced, linked, renamed, removed; each folder too.

    By `os._exit` in a forked process: no handler runs, nothing is tidied up. Past the page cache
    only the way of the bytes differs, so every fourth step will do there.
    """
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tests.runtime.harness.deaths"),
            *(str(tmp_path), str(large_bytes), str(stride)),
        ],
        check=False,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[3],
        env={**os.environ, "PYTHONWARNINGS": ""},
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 100, "the crashes hit nothing"
