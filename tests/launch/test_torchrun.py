"""What torchrun prints of ranks that saved and left: nothing; of others: all."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from typing import TYPE_CHECKING

import pytest

from spotguard.launch.agent import command_line
from spotguard.launch.membership import Part
from spotguard.shared.net import free_port

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def torchrun(tmp_path: Path, script: str) -> subprocess.Popen[str]:
    """Start two ranks of a script as a node's agent does."""
    path = tmp_path / "train.py"
    path.write_text(script)
    part = Part(attempt=1, node=0, nodes=(0,), host="127.0.0.1", port=free_port())
    return subprocess.Popen(
        command_line(part, 2, [str(path)]),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_ranks_that_saved_are_no_failure(tmp_path: Path) -> None:
    """They exit with 75 after a notice; torchrun still ends with 1, but says nothing of FAILED."""
    with torchrun(tmp_path, "import sys; sys.stdout.write('saved step 7\\n'); sys.exit(75)") as job:
        printed, _ = job.communicate()
    assert job.returncode == 1
    assert set(printed.split("\n")) <= {"saved step 7", ""}


def test_a_rank_that_failed_is_told(tmp_path: Path) -> None:
    """Also if another one saves and leaves on being told so by torchrun."""
    script = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n"
        "os.environ['RANK'] == '0' or sys.exit(3)\n"
        "while True: signal.pause()\n"
    )
    with torchrun(tmp_path, script) as job:
        printed, _ = job.communicate()
    assert job.returncode == 1
    assert "failed (exitcode: 3)" in printed
    assert "FAILED" in printed


def test_torchrun_that_is_told_to_leave_shows_no_traceback(tmp_path: Path) -> None:
    """It passes SIGTERM on, waits for the ranks' last save, and ends with 1."""
    script = (
        "import signal, sys, pathlib\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n"
        f"pathlib.Path({str(tmp_path)!r}, 'up').touch()\n"
        "while True: signal.pause()\n"
    )
    with torchrun(tmp_path, script) as job:
        while not (tmp_path / "up").exists():
            assert job.poll() is None
            time.sleep(0.05)
        job.send_signal(signal.SIGTERM)
        printed, _ = job.communicate()
    assert job.returncode == 1
    assert printed == ""
