"""Folders below the temporary one: nothing of ours stays there for longer than its process."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING

import pytest

from spotguard.shared.paths import scratch, scratch_folder

if TYPE_CHECKING:
    from pathlib import Path

LEAVES = """
import os, signal, sys
from spotguard.shared.paths import scratch_folder
for _ in range(3):
    scratch_folder("spotguard-looks-")
if sys.argv[1] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[1] == "fork":
    os.fork() or sys.exit()
    os.wait()
os._exit(0) if sys.argv[1] == "exit" else sys.exit()
"""


@pytest.fixture(autouse=True)
def _temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))


@pytest.mark.parametrize(("ends", "stay"), [("killed", 3), ("exit", 3), ("well", 0), ("fork", 0)])
def test_the_next_process_removes_what_a_dead_one_left(
    tmp_path: Path, ends: str, stay: int
) -> None:
    """However it ended; what a living process has, or somebody else's, stays."""
    with scratch("spotguard-looks-") as mine:
        other = tmp_path / "spotguard-looks-other"
        other.mkdir()  # one that is just being made
        link = tmp_path / "spotguard-looks-link"
        link.symlink_to(tmp_path)
        subprocess.run([sys.executable, "-c", LEAVES, ends], check=False)
        before = {mine, other, link}
        assert len(set(tmp_path.iterdir()) - before) == stay

        fresh = scratch_folder("spotguard-looks-")
        assert set(tmp_path.iterdir()) == {*before, fresh}
        os.utime(other, (0, 0))
        scratch_folder("spotguard-looks-")
        assert not other.exists(), "an earlier version left it behind"
    assert not mine.exists()
