"""What starts a node's ranks: they are told and ended as torchrun does it, and meet in a store that
no rank keeps."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from spotguard.launch.agent import command_line
from spotguard.launch.membership import Part
from spotguard.shared.net import free_port
from spotguard.shared.node_locks import LEFT

if TYPE_CHECKING:
    from collections.abc import Callable

    Popen = subprocess.Popen[str]

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

TORCHRUN = "torch.distributed.run"


@pytest.fixture(params=[2, 1], ids=["two ranks", "the only rank"])
def started(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], Popen]:
    """Return a function that starts ranks of a script as a node's agent does."""
    return lambda script: start(tmp_path, script, ranks=request.param)


def start(
    tmp_path: Path,
    script: str,
    *,
    ranks: int,
    node: int = 0,
    nodes: int = 1,
    port: int | None = None,
    by: str = "spotguard.launch.ranks",
    log_dir: Path | None = None,
) -> Popen:
    """Start so many ranks of a script on a node."""
    path = tmp_path / "train.py"
    path.write_text(script)
    part = Part(
        attempt=1, node=node, nodes=tuple(range(nodes)), host="127.0.0.1", port=port or free_port()
    )
    command = command_line(part, ranks, [str(path)], log_dir=log_dir)
    return subprocess.Popen(
        [by if word == "spotguard.launch.ranks" else word for word in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_ranks_that_saved_are_no_failure(started: Callable[[str], Popen]) -> None:
    """They exit with 75 after a notice: the node ends with 1, as under torchrun, without a word."""
    with started("import sys; sys.stdout.write('saved step 7\\n'); sys.exit(75)") as job:
        printed, _ = job.communicate()
    assert job.returncode == 1
    assert set(printed.split("\n")) <= {"saved step 7", ""}


TELLS = (
    "import json, os, sys\n"
    "told = {n: v for n, v in os.environ.items()\n"
    "        if n.startswith(('TORCH', 'MASTER', 'ROLE')) or 'RANK' in n or 'WORLD' in n}\n"
    "last = int(os.environ['WORLD_SIZE']) - 1\n"
    "os.environ['RANK'] == str(last) and print(json.dumps([told, sys.argv[1:]]))\n"
)


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_are_told_what_torchrun_tells(tmp_path: Path, ranks: int) -> None:
    """The same names and values, but for where they meet and what is torchrun's own affair."""
    said = {}
    for by in (TORCHRUN, "spotguard.launch.ranks"):
        with start(tmp_path, TELLS, ranks=ranks, by=by) as job:
            printed, _ = job.communicate()
        assert job.returncode == 0, printed
        told, args = json.loads(printed)
        assert args == []
        assert told.pop("MASTER_PORT")
        assert told.pop("TORCHELASTIC_USE_AGENT_STORE") == str(ranks > 1 or by == TORCHRUN)
        said[by] = told
    for its_own in ("TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_SIGNALS_TO_HANDLE"):
        said[TORCHRUN].pop(its_own)
    assert said["spotguard.launch.ranks"] == said[TORCHRUN]


@pytest.mark.parametrize(
    ("script", "ranks", "code", "words"),
    [
        ("sys.exit(3)", 1, 3, "the script failed (exitcode: 3)"),
        ("os.kill(os.getpid(), 9)", 1, 137, "the script died of SIGKILL (exitcode: -9)"),
        ("rank or sys.exit(3); signal.pause()", 2, 3, "the script failed on rank 0 (exitcode: 3)"),
        (
            "rank and os.kill(os.getpid(), 9); signal.pause()",
            2,
            137,
            "the script died of SIGKILL on rank 1 (exitcode: -9)",
        ),
    ],
)
def test_a_script_that_failed_is_told(
    tmp_path: Path, script: str, ranks: int, code: int, words: str
) -> None:
    """In one line, with its code or its signal, and that is the node's exit code, too."""
    begins = "import os, signal, sys; rank = int(os.environ['RANK']); "
    with start(tmp_path, begins + script, ranks=ranks) as job:
        printed, _ = job.communicate()
    assert job.returncode == code
    assert printed == f"spotguard: {words}\n"


def test_what_a_rank_leaves_behind_is_told_to_end(tmp_path: Path) -> None:
    """A helper holds a port or a device's memory, which the next ranks in this place need.

    A rank that leaves at once runs no clean-up of its script.
    """
    script = (
        "import os, subprocess\n"
        "quiet = {'stdout': subprocess.DEVNULL, 'stderr': subprocess.DEVNULL}\n"
        "helper = subprocess.Popen(['sleep', '600'], **quiet)\n"
        "print(helper.pid, flush=True)\n"
        "os._exit(75)\n"
    )
    with start(tmp_path, script, ranks=1) as job:
        assert job.stdout is not None
        helper = int(job.stdout.readline())
        job.communicate()
    end = time.monotonic() + 20
    while psutil.pid_exists(helper) and time.monotonic() < end:
        time.sleep(0.01)
    assert not psutil.pid_exists(helper)


def test_a_rank_that_failed_is_told_though_the_other_one_saves(tmp_path: Path) -> None:
    """It is told to end, saves and leaves: that is not what happened to the job."""
    script = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n"
        "os.environ['RANK'] == '0' or sys.exit(3)\n"
        "while True: signal.pause()\n"
    )
    with start(tmp_path, script, ranks=2) as job:
        printed, _ = job.communicate()
    assert job.returncode == 3
    assert printed == "spotguard: the script failed on rank 1 (exitcode: 3)\n"


TRAINS = """
import os, pathlib, signal, sys, time
from spotguard.shared import node_locks
node_locks.live(os.environ["SPOTGUARD_RANK_FILE"])
here = pathlib.Path(sys.argv[1], os.environ["RANK"])
def save(*_):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(1)
    here.write_text("saved")
    node_locks.say_left()
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
here.touch()
while True:
    signal.pause()
"""


@pytest.mark.parametrize(
    "wraps",
    [
        "subprocess.call(command)",
        "os.system(f'{shlex.join(command)} | tee /dev/null')",
        "subprocess.Popen(command, start_new_session=True).wait()",
    ],
    ids=["subprocess", "tee", "session"],
)
def test_a_rank_lives_as_long_as_what_trains(tmp_path: Path, wraps: str) -> None:
    """A wrapper dies of SIGTERM at once: what it has started hears it, and saves.

    The node's ranks end when all of that has ended, as ranks that saved and left.
    """
    trains, said = tmp_path / "real.py", tmp_path / "said"
    trains.write_text(TRAINS)
    said.mkdir()
    command = [sys.executable, str(trains), str(said)]
    script = f"import os, shlex, subprocess\ncommand = {command!r}\n{wraps}\n"
    with start(tmp_path, script, ranks=3, log_dir=tmp_path / "logs") as job:
        end = time.monotonic() + 60
        while len(list(said.iterdir())) < 3 and time.monotonic() < end:
            time.sleep(0.02)
        job.send_signal(signal.SIGTERM)
        printed, _ = job.communicate(timeout=60)
    assert [path.read_text() for path in said.iterdir()] == ["saved"] * 3
    assert job.returncode == 1, printed
    assert printed == ""


MEETS = """
import os, sys, time
from datetime import timedelta
from torch._C._distributed_c10d import TCPStore
import torch.distributed as dist, torch
rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
total = torch.tensor([float(rank)])
dist.all_reduce(total)
store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
assert total.item() == 0 + 1 + 2, total
"""


def test_three_nodes_meet_though_one_comes_late(tmp_path: Path) -> None:
    """No rank starts before all nodes are there; all meet, and the first one ends last."""
    script = MEETS + "time.sleep(rank); store.set('done', 'yes'); store.get('done')\n"
    port = free_port()
    jobs = [start(tmp_path, script, ranks=1, node=n, nodes=3, port=port) for n in (0, 1)]
    time.sleep(1.0)
    jobs.append(start(tmp_path, script, ranks=1, node=2, nodes=3, port=port))
    assert [(job.communicate()[0], job.returncode) for job in jobs] == [("", 0)] * 3


def test_ranks_still_meet_when_the_first_one_was_killed(tmp_path: Path) -> None:
    """The store is no rank's: the others agree in it on what to save."""
    script = MEETS + (
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "if rank == 0: os.kill(os.getpid(), 9)\n"
        "time.sleep(1.0)\n"
        "store.set(f'said{rank}', 'yes')\n"
        "store.wait([f'said{3 - rank}'], timedelta(seconds=60))\n"
        "print('met'); sys.exit(75)\n"
    )
    with start(tmp_path, script, ranks=3) as job:
        printed, _ = job.communicate()
    assert printed.count("met") == 2
    assert "died of SIGKILL on rank 0" in printed
    assert job.returncode == 137


def test_who_is_told_to_leave_before_all_nodes_came_leaves(tmp_path: Path) -> None:
    """Nothing was started; it is no failure."""
    for node in (0, 1):
        with start(tmp_path, "", ranks=1, node=node, nodes=2) as job:
            time.sleep(1.0)
            job.send_signal(signal.SIGTERM)
            printed, _ = job.communicate(timeout=60)
        assert (job.returncode, printed) == (1, "")


def test_a_port_that_is_taken_is_told(tmp_path: Path) -> None:
    """In one sentence, and no rank is left."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with start(tmp_path, "", ranks=1, node=0, nodes=2, port=port) as job:
            printed, _ = job.communicate()
    assert job.returncode == 1
    assert printed.startswith("spotguard: the ranks could not be started: ")
    assert printed.count("\n") == 1


def test_a_node_that_is_told_to_leave_shows_no_traceback(
    tmp_path: Path, started: Callable[[str], Popen]
) -> None:
    """It passes SIGTERM on, waits for the ranks' last save, and ends with 1."""
    script = (
        "import signal, sys, pathlib\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n"
        f"pathlib.Path({str(tmp_path)!r}, 'up').touch()\n"
        "while True: signal.pause()\n"
    )
    with started(script) as job:
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
    saving = tmp_path / "saving"
    with start_impatient(tmp_path, script, SPOTGUARD_SAVING=str(saving)) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == "up\n"
        job.send_signal(signal.SIGTERM)
        printed, _ = job.communicate(timeout=60)
    assert job.returncode == 1
    assert printed == "heard\n"
    assert not Path(f"{saving}{LEFT}").exists(), "a rank was torn from its work"


def test_a_save_has_the_time_that_the_job_is_told(tmp_path: Path) -> None:
    """No rank is killed before `SPOTGUARD_GRACE_S` is over, though that is longer than usual."""
    script = (
        "import signal, sys, time\n"
        "def leave(*_):\n"
        "    time.sleep(6)\n"
        "    print('saved')\n"
        "    sys.exit(75)\n"
        "signal.signal(signal.SIGTERM, leave)\n"
        "print('up')\n"
        "while True: signal.pause()\n"
    )
    saving = tmp_path / "saving"
    told = {"SPOTGUARD_SAVING": str(saving), "SPOTGUARD_GRACE_S": "60"}
    with start_impatient(tmp_path, script, **told) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == "up\n"
        job.send_signal(signal.SIGTERM)
        printed, _ = job.communicate(timeout=60)
    assert job.returncode == 1
    assert printed == "saved\n"
    assert Path(f"{saving}{LEFT}").exists(), "it left in order"


def start_impatient(tmp_path: Path, script: str, **env: str) -> Popen:
    """Start a rank by what kills those who stay after 2 s."""
    path = tmp_path / "train.py"
    path.write_text(script)
    part = Part(attempt=1, node=0, nodes=(0,), host="127.0.0.1", port=free_port())
    flags = command_line(part, 1, [str(path)])[3:]
    code = (
        "from spotguard.launch.ranks import __main__, node_ranks; "
        "node_ranks._LAST_SAVE_S = 1.0; node_ranks._AFTER_SAVE_S = 1.0; __main__.main()"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code, *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **env},
    )
