from __future__ import annotations

import fcntl
import os
import pty
import subprocess
import termios
import time
from typing import TYPE_CHECKING

import pytest

from tests.e2e.lab.lab_jobs import (
    OFTEN,
    SPOTGUARD,
    STEADY,
    Lab,
    final_weights,
    reasons,
    wait_until,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.e2e.conftest import Calm

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def test_stop_resume_down_resume(lab: Lab, calm: Callable[[int], Calm]) -> None:
    """`stop` keeps every step, `down` goes back to the last save, `resume` goes on from either."""
    run = lab.start(STEADY, "--nodes", "1", *OFTEN, args=("--pause", "0.4"))
    lab.wait_for_step(run, 8)

    stopped = lab.spotguard("stop", run)
    assert stopped.code == 0, stopped.err
    status = lab.status(run)
    assert status["state"] == "stopped"
    assert reasons(status) == ["stopped"]
    assert status["saved_step"] == status["step"] >= 8
    assert f"saved at step {status['step']}" in stopped.out
    again = lab.spotguard("stop", run)
    assert again.code == 0
    assert "nothing to do" in again.out

    resumed = lab.spotguard("resume", run, "--detach")
    assert resumed.code == 0, resumed.err
    twice = lab.spotguard("resume", run)
    assert twice.code == 2, "a run that goes on is not resumed"
    lab.wait_for_step(run, status["step"] + 8, attempt=2)
    down = lab.spotguard("down", run, "--yes")
    assert down.code == 0, down.err
    wait_until(lambda: not lab.on_nodes(), "what was killed is gone", timeout_s=5.0)
    status = lab.status(run)
    assert status["state"] == "stopped"
    assert status["attempts"][1]["steps_lost"] <= 6

    finished = lab.spotguard("resume", run, "--json")
    assert finished.code == 0, finished.err
    assert final_weights(finished.json) == calm(1).weights
    assert lab.spotguard("resume", run).code == 2, "what is finished is not resumed"


def test_ctrl_c_detaches(lab: Lab) -> None:
    """Ctrl-C leaves the live view, exit 75, and tells how to look and to stop; the run goes on."""
    master, slave = pty.openpty()
    command = [*SPOTGUARD, "up", str(STEADY), "--nodes", "1", "--yes", "--", "--pause", "0.5"]
    process = subprocess.Popen(
        command,
        cwd=lab.work,
        env=lab.environ({"TERM": "xterm"}),
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(slave)
    screen = b""
    give_up_at = time.monotonic() + 60
    while b"training starts" not in screen and time.monotonic() < give_up_at:
        screen += os.read(master, 65536)
    os.write(master, b"\x03")
    try:
        while True:
            screen += os.read(master, 65536)
    except OSError:  # the terminal's other end is closed
        os.close(master)

    assert process.wait(10) == 75
    said = screen.decode(errors="replace").rsplit("\x1b", 1)[-1]
    run = lab.status()["run_id"]
    assert f"spotguard status {run} --watch" in said
    assert f"spotguard stop {run}" in said
    assert lab.status(run)["state"] == "running"
    assert lab.spotguard("down", run, "--yes").code == 0
