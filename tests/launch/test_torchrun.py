"""What torchrun prints of ranks that saved and left: nothing; of others: all."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from spotguard.launch.agent import command_line
from spotguard.launch.membership import Part
from spotguard.shared.net import free_port

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Popen = subprocess.Popen[str]

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


@pytest.fixture(params=[2, 1], ids=["two ranks", "the only rank"])
def torchrun(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], Popen]:
    """Return a function that starts ranks of a script as a node's agent does."""
    return lambda script: start(tmp_path, script, ranks=request.param)


def start(tmp_path: Path, script: str, *, ranks: int) -> Popen:
    """Start so many ranks of a script on one node."""
    path = tmp_path / "train.py"
    path.write_text(script)
    part = Part(attempt=1, node=0, nodes=(0,), host="127.0.0.1", port=free_port())
    return subprocess.Popen(
        command_line(part, ranks, [str(path)]),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_ranks_that_saved_are_no_failure(torchrun: Callable[[str], Popen]) -> None:
    """They exit with 75 after a notice; torchrun still ends with 1, but says nothing of FAILED."""
    with torchrun("import sys; sys.stdout.write('saved step 7\\n'); sys.exit(75)") as job:
        printed, _ = job.communicate()
    assert job.returncode == 1
    assert set(printed.split("\n")) <= {"saved step 7", ""}


def test_a_script_ends_well_and_sees_what_torchrun_tells(tmp_path: Path) -> None:
    """One rank is told the same names as one of two; only where they meet is told otherwise."""
    script = (
        "import json, os, sys\n"
        "told = {n: v for n, v in os.environ.items() if 'RANK' in n or 'WORLD' in n}\n"
        "more = sorted(n for n in os.environ if n.startswith(('TORCH', 'MASTER', 'ROLE')))\n"
        "os.environ['RANK'] == '0' and print(json.dumps([told, more, sys.argv[1:]]))\n"
    )
    said = {}
    for ranks in (1, 2):
        with start(tmp_path, script, ranks=ranks) as job:
            printed, _ = job.communicate()
        assert job.returncode == 0
        said[ranks] = json.loads(printed)
    (alone, more, args), (of_two, all_more, _) = said[1], said[2]
    assert args == []
    assert alone == {name: "1" if value == "2" else value for name, value in of_two.items()}
    torchruns_own = {"TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_SIGNALS_TO_HANDLE"}
    assert set(more) == set(all_more) - torchruns_own


def test_the_only_rank_that_failed_is_told(tmp_path: Path) -> None:
    """With its code or its signal, in one line; the node's exit code is torchrun's."""
    for script, words in (
        ("import sys; sys.exit(3)", "the script failed (exitcode: 3)"),
        ("import os; os.kill(os.getpid(), 9)", "the script died of SIGKILL (exitcode: -9)"),
    ):
        with start(tmp_path, script, ranks=1) as job:
            printed, _ = job.communicate()
        assert job.returncode == 1
        assert printed == f"spotguard: {words}\n"


def test_a_rank_that_failed_is_told(tmp_path: Path) -> None:
    """Also if another one saves and leaves on being told so by torchrun."""
    script = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n"
        "os.environ['RANK'] == '0' or sys.exit(3)\n"
        "while True: signal.pause()\n"
    )
    with start(tmp_path, script, ranks=2) as job:
        printed, _ = job.communicate()
    assert job.returncode == 1
    assert "failed (exitcode: 3)" in printed
    assert "FAILED" in printed


def test_torchrun_that_is_told_to_leave_shows_no_traceback(
    tmp_path: Path, torchrun: Callable[[str], Popen]
) -> None:
    """It passes SIGTERM on, waits for the ranks' last save, and ends with 1."""
    script = (
        "import signal, sys, pathlib\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n"
        f"pathlib.Path({str(tmp_path)!r}, 'up').touch()\n"
        "while True: signal.pause()\n"
    )
    with torchrun(script) as job:
        while not (tmp_path / "up").exists():
            assert job.poll() is None
            time.sleep(0.05)
        job.send_signal(signal.SIGTERM)
        printed, _ = job.communicate()
    assert job.returncode == 1
    assert printed == ""


def test_what_ignores_the_signal_is_killed_with_all_that_it_started(tmp_path: Path) -> None:
    """The script's own children hear SIGTERM, too, as torchrun has it; who stays is killed."""
    child = (
        "import signal, sys; signal.signal(15, lambda *_: sys.exit('heard'))\n"
        "print('up'); signal.pause()"
    )
    script = (
        "import signal, subprocess, sys\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"child = subprocess.Popen([sys.executable, '-u', '-c', {child!r}])\n"
        "while True: signal.pause()\n"
    )
    path = tmp_path / "train.py"
    path.write_text(script)
    part = Part(attempt=1, node=0, nodes=(0,), host="127.0.0.1", port=free_port())
    flags = command_line(part, 1, [str(path)])[3:]
    code = "from spotguard.launch import torchrun; torchrun._LAST_SAVE_S = 2.0; torchrun.main()"
    with subprocess.Popen(
        [sys.executable, "-c", code, *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == "up\n"
        job.send_signal(signal.SIGTERM)
        printed, _ = job.communicate(timeout=60)
    assert job.returncode == 1
    assert printed == "heard\n"
