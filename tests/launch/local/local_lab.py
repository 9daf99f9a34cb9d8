"""A job that tells what befalls it, and a laboratory to run it in."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spotguard.launch.base import ClusterState, ClusterView, LaunchRequest
from spotguard.launch.local import LocalLauncher, LocalOptions

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

JOB = '''
"""Steps along, writes its progress, and notes every signal and every child it has."""
import json, os, signal, struct, subprocess, sys, time

on_term, steps, step_s, exit_code, children = sys.argv[1:6]
node = os.environ["SPOTGUARD_NODE"]
cluster = os.environ["SPOTGUARD_CLUSTER"]

def note(kind, **more):
    line = json.dumps({"kind": kind, "node": int(node), "cluster": cluster,
                       "at": time.time(), "pid": os.getpid(), **more})
    with open("notes.jsonl", "a") as notes:
        notes.write(line + "\\n")

def handle(*_):
    note("term")
    if on_term == "leave":
        sys.exit(75)

if on_term != "die":
    signal.signal(signal.SIGTERM, handle)
sleeper = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
for _ in range(int(children)):
    child = subprocess.Popen([sys.executable, "-c", sleeper], start_new_session=True)
    bare = subprocess.Popen([sys.executable, "-c", sleeper], start_new_session=True, env={})
    note("child", child=child.pid)
    note("child", child=bare.pid)
note("start", env=dict(os.environ), cwd=os.getcwd())
print("hello from node", node)
for step in range(1, int(steps) + 1):
    time.sleep(float(step_s))
    with open(os.environ["SPOTGUARD_PROGRESS"], "r+b") as progress:
        progress.write(struct.pack("<qq", step, int(steps)))
note("end")
sys.exit(int(exit_code))
'''


@dataclass(frozen=True)
class Note:
    """One thing that a job told."""

    kind: str
    node: int
    cluster: str
    at: float
    body: dict[str, Any]


class Lab:
    """Runs the job on local clusters below one folder, and reads what it told."""

    def __init__(self, folder: Path) -> None:
        self.run_dir = folder / "run"
        self.workdir = folder / "work"
        self.workdir.mkdir()
        self.script = self.workdir / "job.py"
        self.script.write_text(JOB)

    def launcher(self, *interruptions: str, **options: Any) -> LocalLauncher:
        """Return a launcher of plain python jobs, 120 times as fast as reality."""
        settings: dict[str, Any] = {"runner": "python", "speed_up": 120.0, "seed": 0, **options}
        return LocalLauncher(self.run_dir, LocalOptions(interruptions=interruptions, **settings))

    def request(
        self,
        cluster: str = "c1",
        *,
        nodes: int = 1,
        on_term: str = "ignore",
        steps: int = 100_000,
        exit_code: int = 0,
        children: int = 0,
        **more: Any,
    ) -> LaunchRequest:
        """Return a request for a job that takes 10 ms a step."""
        fields: dict[str, Any] = {
            "cluster": cluster,
            "run_id": "r1",
            "attempt": 1,
            "nodes": nodes,
            "nproc_per_node": 1,
            "script": str(self.script),
            "args": (on_term, str(steps), "0.01", str(exit_code), str(children)),
            "workdir": str(self.workdir),
            "env": {"SPOTGUARD_RUN_ID": "r1"},
            "offer": self.launcher().offers()[0],
            "max_lifetime_s": 30.0,  # a failed test leaves nothing behind
        }
        return LaunchRequest(**{**fields, **more})

    def notes(self, kind: str, *, node: int | None = None) -> list[Note]:
        """Return what the jobs told so far."""
        path = self.workdir / "notes.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        bodies = [json.loads(line) for line in lines]
        return [
            Note(body["kind"], body["node"], body["cluster"], body["at"], body)
            for body in bodies
            if body["kind"] == kind and node in (None, body["node"])
        ]


def wait_for(condition: Callable[[], object], what: str, timeout_s: float = 15.0) -> None:
    """Return as soon as `condition` holds; fail if it does not in time."""
    give_up_at = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up_at, f"not in {timeout_s} s: {what}"
        time.sleep(0.01)


def wait_until_gone(
    launcher: LocalLauncher, cluster: str = "c1", timeout_s: float = 15.0
) -> ClusterView:
    """Return the last view of the cluster."""
    views: list[ClusterView] = []

    def is_gone() -> bool:
        views[:] = [launcher.observe(cluster)]
        return views[0].state is ClusterState.GONE

    wait_for(is_gone, f"{cluster} gone", timeout_s)
    return views[0]
