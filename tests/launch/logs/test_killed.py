"""What is killed loses at most five seconds of its log, and never tells a line twice."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import psutil
import pytest

from spotguard.control.journal.stored_logs import LogQuery, StoredLog
from spotguard.events import env
from spotguard.storage import PrefixedStore, open_store

if TYPE_CHECKING:
    from pathlib import Path

    from spotguard.control.journal.stored_logs import LogLine

pytestmark = pytest.mark.e2e
LOST_S = 5.0
LATE_S = 3.0
"""A machine with more to do than it can is late with everything."""
SCRIPT = """
import os, time
number = 0
while True:
    print(number, time.time())
    number += 1
    time.sleep(0.01)
"""
TORCHRUN = """
import os, pathlib, subprocess, sys
given = dict(a.split("=", 1) for a in sys.argv[1:] if "=" in a)
ranks = []
for rank in range(int(given["--nproc-per-node"])):
    folder = pathlib.Path(given["--log-dir"], "none_x", "attempt_0", str(rank))
    folder.mkdir(parents=True)
    out, err = (folder / f"{name}.log" for name in ("stdout", "stderr"))
    ranks.append(subprocess.Popen(
        [sys.executable, "job.py"], stdout=out.open("wb"), stderr=err.open("wb")))
sys.exit(max(abs(rank.wait()) for rank in ranks))
"""


def start(tmp_path: Path) -> subprocess.Popen[bytes]:
    """Start an agent with a torchrun that is small, of two ranks that print for ever."""
    distributed = tmp_path / "torch" / "distributed"
    reports = distributed / "elastic" / "multiprocessing"
    reports.mkdir(parents=True)
    for folder in (reports, *reports.relative_to(tmp_path).parents[:-1]):
        (tmp_path / folder / "__init__.py").touch()
    (reports / "api.py").write_text("class SignalException(Exception): pass")
    (reports / "errors.py").write_text("class ChildFailedError(Exception): pass")
    (distributed / "run.py").write_text(TORCHRUN)
    (tmp_path / "job.py").write_text(SCRIPT)
    others = ("SPOTGUARD_", "SKYPILOT_")
    told = {env.RUN_ID: "job-1", env.STORE: str(tmp_path / "store"), env.ATTEMPT: "1"}
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "spotguard.launch.agent", "--nodes=1", "--node=0"),
            *("--nproc=2", "--master=127.0.0.1:1", "--", "job.py"),
        ],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env={
            **{k: v for k, v in os.environ.items() if not k.startswith(others)},
            **told,
            "TMPDIR": str(tmp_path),
        },
    )


def stored(tmp_path: Path) -> list[LogLine]:
    """Return what is stored of the attempt."""
    store = PrefixedStore(open_store(str(tmp_path / "store")), "job-1")
    return list(StoredLog(store, 1, LogQuery()).lines(failed=True, final=True))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("victim", ["node", "agent", "rank"])
def test_a_kill_loses_at_most_five_seconds(tmp_path: Path, victim: str, seed: int) -> None:
    """Of a node, of its agent alone, of a rank: whenever it comes."""
    chance = random.Random(seed)
    agent = start(tmp_path)
    ranks: list[psutil.Process] = []
    try:
        deadline = time.monotonic() + 60
        while not stored(tmp_path) and time.monotonic() < deadline:
            time.sleep(0.05)
        family = psutil.Process(agent.pid).children(recursive=True)
        ranks = [each for each in family if each.cmdline()[-1] == "job.py"]
        time.sleep(chance.uniform(0.0, 4.0))
        killed_at = time.time()
        if victim == "node":
            for each in (psutil.Process(agent.pid), *family):
                each.kill()
        elif victim == "agent":
            agent.kill()
        else:
            ranks[0].kill()
            ranks[1].send_signal(signal.SIGTERM)
        agent.wait(60)
        lines = stored(tmp_path)
    finally:
        for each in (*ranks, *([] if agent.poll() is not None else [psutil.Process(agent.pid)])):
            if each.is_running():
                each.kill()
    for rank in (0, 1):
        told = [line.text.split() for line in lines if line.rank == rank]
        assert [int(number) for number, _ in told] == list(range(len(told))), "each once, in order"
        lost_s = killed_at - float(told[-1][1])
        assert lost_s <= (LOST_S + LATE_S if victim != "rank" else 1.0 + LATE_S)
