from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from spotguard.events import env
from spotguard.events.event import Event, JobEvent
from spotguard.launch.agent import command_line, environment
from spotguard.launch.membership import Part

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

pytestmark = pytest.mark.slow

FIRST = Part(attempt=3, node=2, nodes=(0, 1, 2), host="10.0.0.1", port=4000)
OTHERS = ("SPOTGUARD_", "SKYPILOT_")
NEXT = Part(attempt=4, node=2, nodes=(1, 2), host="10.0.0.2", port=5000)


def test_torchrun_is_told_the_place_among_those_that_stay() -> None:
    """The node rank is counted among the members, not in the cluster."""
    command = command_line(NEXT, 8, ["job.py", "--lr", "1"])
    assert command[1:] == [
        *("-m", "spotguard.launch.ranks", "--nnodes=2", "--node-rank=1", "--nproc-per-node=8"),
        *("--master-addr=10.0.0.2", "--master-port=5000", "--max-restarts=0"),
        *("job.py", "--lr", "1"),
    ]


def test_the_job_is_told_what_is_new() -> None:
    """Its number fences the attempt before; money lasts longer on fewer nodes; the rest stays."""
    claim = json.dumps({"nodes": 3, "zone": "here-a", "intended_at": 1.0})
    given = {env.ATTEMPT: "3", env.CLAIM: claim, env.BUDGET_STOP_AT: "1600", "HOME": "/home"}
    told = environment(given, FIRST, NEXT, 1000.0)

    assert told[env.ATTEMPT] == "4"
    assert json.loads(told[env.CLAIM]) == {"nodes": 2, "zone": "here-a", "intended_at": 1000.0}
    assert float(told[env.BUDGET_STOP_AT]) == pytest.approx(1000 + 600 * 3 / 2)
    assert told["HOME"] == "/home"
    assert env.BUDGET_STOP_AT not in environment({}, FIRST, NEXT, 1000.0)


@contextlib.contextmanager
def agent(
    tmp_path: Path, script: str, *flags: str, **told: str
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a node's agent with one rank of a script; `told` are variables of its job."""
    with _started(["-m", "spotguard.launch.agent"], tmp_path, script, *flags, **told) as process:
        yield process


@contextlib.contextmanager
def impatient_agent(tmp_path: Path, script: str, **told: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start an agent that does not wait for a job that is told that its time is over."""
    code = "from spotguard.launch import agent; agent._STUBBORN_S = 0.2; agent.main()"
    with _started(["-c", code], tmp_path, script, **told) as process:
        yield process


@contextlib.contextmanager
def _started(
    program: Sequence[str], tmp_path: Path, script: str, *flags: str, **told: str
) -> Iterator[subprocess.Popen[bytes]]:
    (tmp_path / "job.py").write_text(script)
    command = [sys.executable, *program, "--nodes=1", "--node=0"]
    process = subprocess.Popen(
        [*command, "--nproc=1", "--master=127.0.0.1:1", *flags, "--", "job.py"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        env={**{k: v for k, v in os.environ.items() if not k.startswith(OTHERS)}, **told},
    )
    with process:
        yield process


CODES = [(0, 0), (1, 1), (7, 7), (75, 1)]
"""Of the script, and of the node: one that saved and left has no code of its own."""


@pytest.mark.parametrize(("code", "told"), CODES)
def test_it_ends_as_its_ranks_do(tmp_path: Path, code: int, told: int) -> None:
    """Without a run store there is nothing to go on from: the exit code is passed on."""
    with agent(tmp_path, f"raise SystemExit({code})") as process:
        assert process.wait(30) == told


def test_it_dies_as_what_started_the_ranks_does(tmp_path: Path) -> None:
    """Who looks at the node must see that it was killed, and by what."""
    script = "import os, signal; os.kill(os.getppid(), signal.SIGKILL)"
    with agent(tmp_path, script) as process:
        assert process.wait(30) == -signal.SIGKILL


def test_sigterm_does_not_end_it_before_the_job(tmp_path: Path) -> None:
    """The job saves and says how it ended; the agent waits for that."""
    script = "import time\nprint('up', flush=True)\ntime.sleep(0.3)\nraise SystemExit(7)"
    with agent(tmp_path, script) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        process.terminate()
        assert process.wait(30) == 7


@pytest.mark.parametrize("ahead_s", [0.0, 3600.0])
def test_a_frozen_job_ends_when_its_nodes_are_to_go(tmp_path: Path, ahead_s: float) -> None:
    """By the controller's clock, and though nodes and set-up took their time."""
    store = tmp_path / "store"
    launch = store / "job-1" / "attempts" / "000004" / "launch.json"
    launch.parent.mkdir(parents=True)
    now = time.time() - ahead_s  # by a controller that is behind this node
    launch.write_text(json.dumps({"written_at": now}))
    script = "import time\nprint('up', flush=True)\ntime.sleep(300)"
    told = {env.DOWN_AT: str(now + 2.5), env.CLOCK: "attempts/000004/launch.json"}
    with agent(tmp_path, script, **run_variables(store), **told) as process:
        assert process.wait(60) == 1
    assert time.time() - ahead_s >= now + 2.5, "not before"


@pytest.mark.parametrize(("told", "known"), [({}, False), ({env.NODE_UP_AT: "12.5"}, True)])
def test_the_job_knows_since_when_its_node_is_up(
    tmp_path: Path, told: dict[str, str], *, known: bool
) -> None:
    """From whoever set the node up; else since the agent runs. In place, it was up before."""
    began_at = time.time()
    script = f"import os\nprint(os.environ[{env.NODE_UP_AT!r}], flush=True)"
    with agent(tmp_path, script, **told) as process:
        assert process.stdout is not None
        up_at = float(process.stdout.readline())
    assert up_at == 12.5 if known else began_at <= up_at <= time.time()
    assert env.NODE_UP_AT not in environment({env.NODE_UP_AT: "12.5"}, FIRST, NEXT, 20.0)


def run_variables(store: Path) -> dict[str, str]:
    """Return what the agent of a SkyPilot cluster is told of its run."""
    return {
        env.RUN_ID: "job-1",
        env.STORE: str(store),
        env.ATTEMPT: "4",
        "SKYPILOT_TASK_ID": "sky-2026_job",
    }


def events_of(store: Path, kind: JobEvent) -> list[Event]:
    """Return what nodes wrote down of one kind."""
    files = sorted((store / "job-1" / "attempts" / "000004" / "events").glob("*"))
    events = [Event.from_json(file.read_bytes()) for file in files]
    return [event for event in events if event.kind == kind.value]


@pytest.mark.parametrize(("code", "told"), CODES)
def test_its_end_is_written_down(tmp_path: Path, code: int, told: int) -> None:
    """SkyPilot says `failed` of a job and of a lost node: the node itself says which it was."""
    store = tmp_path / "store"
    with agent(tmp_path, f"raise SystemExit({code})", **run_variables(store)) as process:
        assert process.wait(30) == told
    (event,) = events_of(store, JobEvent.NODE_EXITED)
    assert (event.attempt, event.node) == (4, 0)
    assert event.data == {"exit_code": told, "told": False}


def test_that_it_was_told_to_leave_is_written_down_with_it(tmp_path: Path) -> None:
    """A job that ends badly after a SIGTERM was taken: that is not the script's fault."""
    script = "import time\nprint('up', flush=True)\ntime.sleep(1.5)\nraise SystemExit(1)"
    store = tmp_path / "store"
    with agent(tmp_path, script, **run_variables(store)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        process.terminate()
        assert process.wait(30) == 1
    (event,) = events_of(store, JobEvent.NODE_EXITED)
    assert event.data == {"exit_code": 1, "told": True}


@pytest.mark.parametrize("left_out", ["SKYPILOT_TASK_ID", env.STORE, env.RUN_ID])
def test_only_ends_in_skypilots_tasks_are_written_down(tmp_path: Path, left_out: str) -> None:
    """Local nodes are seen by their launcher."""
    store = tmp_path / "store"
    told = {name: value for name, value in run_variables(store).items() if name != left_out}
    with agent(tmp_path, "raise SystemExit(1)", **told) as process:
        assert process.wait(30) == 1
    assert events_of(store, JobEvent.NODE_EXITED) == []


def test_a_store_that_fails_changes_nothing(tmp_path: Path) -> None:
    """The exit code is passed on, and the reason why nothing was written is said."""
    store = tmp_path / "store"
    store.write_text("not a folder")
    with agent(tmp_path, "raise SystemExit(7)", **run_variables(store)) as process:
        assert process.stderr is not None
        assert b"could not be written down" in process.stderr.read()
        assert process.wait(30) == 7
