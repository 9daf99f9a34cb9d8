"""What a pod does before it goes: the template's hook, run by a real shell on real processes."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from typing import TYPE_CHECKING

import pytest

from spotguard.spec.templates import load_template

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

AGENT = "/tmp/spotguard-1000/run-1/venv/bin/python -m spotguard.launch.agent --nodes 2 --node 0"
RANKS = "/tmp/spotguard-1000/run-1/venv/bin/python -m spotguard.launch.ranks --nnodes=2"
OTHERS = (
    "bash -c /venv/bin/python -m spotguard.launch.agent --nodes 2",
    "/venv/bin/python -m spotguard.launch.ranks.store 7 29500",
    "/venv/bin/python -u train.py -m spotguard.launch.agent",
)
SAVES = "trap 'sleep 0.3; touch saved; exit 75' TERM; touch ready; while :; do sleep 0.05; done"

pytestmark = pytest.mark.skipif(not shutil.which("pkill"), reason="pkill is missing (procps)")


def hook() -> list[str]:
    """Return the command that Kubernetes runs in the pod."""
    task = load_template("kubernetes")
    (container,) = task["config"]["kubernetes"]["pod_config"]["spec"]["containers"]
    command: list[str] = container["lifecycle"]["preStop"]["exec"]["command"]
    return command


@pytest.fixture
def pod(tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[bytes]]]:
    """Return a function: a process of that command line, in a session that stands for a pod."""
    begun: list[subprocess.Popen[bytes]] = []
    folder = tmp_path / "bin"
    folder.mkdir()

    def begin(named: str) -> subprocess.Popen[bytes]:
        place = tmp_path / str(len(begun))
        place.mkdir()
        process = subprocess.Popen(
            [named, "-c", SAVES],
            executable="/bin/sh",
            cwd=place,
            start_new_session=True,
        )
        begun.append(process)
        give_up_at = time.monotonic() + 30.0
        while not (place / "ready").exists():
            assert time.monotonic() < give_up_at
            time.sleep(0.01)
        return process

    yield begin
    for process in begun:
        process.kill()
        process.wait()


def test_a_pod_that_is_deleted_tells_its_job_and_goes_when_it_has_saved(
    pod: Callable[[str], subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    """The agent and its launcher are told; ranks hear it from the launcher, and others never."""
    agent, launcher, *others = [pod(each) for each in (AGENT, RANKS, *OTHERS)]
    sessions = ",".join(str(process.pid) for process in (agent, launcher, *others))
    for name in ("pkill", "pgrep"):  # a pod sees no processes but its own
        program = tmp_path / "bin" / name
        program.write_text(f'#!/bin/sh\nexec {shutil.which(name)} -s {sessions} "$@"\n')
        program.chmod(0o755)
    environ = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    before = subprocess.Popen(hook(), env=environ)
    assert before.wait(30.0) == 0
    for place, told in (("0", agent), ("1", launcher)):
        assert (tmp_path / place / "saved").exists()
        assert told.wait(30.0) == 75
    assert all(each.poll() is None for each in others)
