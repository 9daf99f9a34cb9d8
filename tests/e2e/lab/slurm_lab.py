"""The Slurm lab as tests use it: its nodes and verbs, and a user's machine beside it."""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tests.e2e.lab import lab_jobs
from tests.e2e.lab.far_machine import FarMachine
from tests.e2e.lab.lab_jobs import NO_SMOKE
from tests.e2e.lab.scripted_lab import environ_of, output
from tests.e2e.lab.sky_api import start_api

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SCRIPT = Path(__file__).parents[3] / "infra" / "lab" / "slurm_lab.sh"
_MORTAL = Path(__file__).with_name("mortal")
_HASTENED = Path(__file__).with_name("hastened")
NODES = 3
_BOOKS_EVERY_S = 3.0
_NO_CLUSTERS = ("spotlab-hold", "bash")
"""What preempts in the lab, and SkyPilot's look at what Slurm is like."""
_SKY_CONFIG = """\
slurm:
  provision_timeout: 25
  cluster_configs:
    spotlab:
      partition_configs:
        spot: {pricing: {cpu: 1.0, memory: 0.0}}
        ondemand: {pricing: {cpu: 3.0, memory: 0.0}}
        spot1: {pricing: {cpu: 1.8567, memory: 0.0}}
        spot2: {pricing: {cpu: 2.407, memory: 0.0}}
        spot3: {pricing: {cpu: 10.3157, memory: 0.0}}
"""
"""As the lab's own, but a launch that finds too few nodes gives up sooner. Partitions of one node
cost what an H100 did in us-east4-b and in asia-southeast1-b on spot, and on demand."""


wait_until = partial(lab_jobs.wait_until, every_s=1.0)
"""Each look is a command: more of them would take the cores from what they wait for."""


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """What Slurm's own books say of one cluster."""

    name: str
    nodes: int
    begin_at: float
    end_at: float | None

    @property
    def cluster(self) -> str:
        """SkyPilot's name of it; on Slurm a mark of the user's follows."""
        return self.name.rpartition("-")[0]

    @property
    def node_s(self) -> float:
        """Seconds times nodes; up to now if it is not over."""
        return self.nodes * ((self.end_at or time.time()) - self.begin_at)


class SlurmLab:
    """A running lab."""

    def __init__(self, folder: Path, *, ours: bool) -> None:
        """`ours`: it is brought up here, and taken away again."""
        self.folder = folder
        self.ours = ours
        self.environ: dict[str, str] = {}

    def up(self) -> None:
        """Start what does not run yet, SkyPilot's API server included."""
        if self.ours:
            config = self.folder / "home" / ".sky" / "config.yaml"
            config.parent.mkdir(parents=True, exist_ok=True)
            config.write_text(_SKY_CONFIG)
            self.verb("up", str(NODES), timeout_s=500.0)
        self.environ = environ_of(SCRIPT, self._knobs())
        start_api(self)  # else it would be a child of the first controller

    def down(self) -> None:
        """Take away what `up` brought."""
        if self.ours:
            self.verb("down", "purge", timeout_s=600.0)  # many small files

    def calm(self) -> None:
        """Heal what is broken, let nodes be free, take announcements back."""
        self.reach(True)
        self.verb("release")
        for index in range(1, NODES + 1):
            self.verb("heal", f"spot{index}")
        self.verb("imds", "all", "aws")
        left = self.sky_names()
        if left:
            self.sky("down", "-y", *left)
        wait_until(lambda: not self.clusters(), "no cluster is left", timeout_s=60.0)

    def reach(self, possible: bool) -> None:
        """Let this machine reach the lab, or not; what is in the lab reaches each other always."""
        network = os.environ.get("SPOTLAB_NET", "10.77.0")
        verb = "replace" if possible else "del"
        output(["ip", "addr", verb, f"{network}.1/24", "dev", "spotlab0"], self._knobs(), 10.0)

    def verb(self, *words: str, grace_s: float = 30.0, timeout_s: float = 120.0) -> str:
        """Run one of the lab's verbs."""
        knobs = {**self._knobs(), "SPOTLAB_GRACE_S": f"{grace_s:.0f}"}
        return output([SCRIPT, *words], knobs, timeout_s)

    def sky(self, *words: str) -> str:
        """Run SkyPilot's command line."""
        return output([Path(sys.executable).with_name("sky"), *words], self.environ, 180.0)

    def sky_names(self) -> list[str]:
        """Return the names of the clusters that SkyPilot has in its books."""
        code = "import sky; print(*(c['name'] for c in sky.get(sky.status())))"
        return output([sys.executable, "-c", code], self.environ, 120.0).split()

    def sky_node_s(self, names: Sequence[str]) -> dict[str, float]:
        """Return how many node-seconds SkyPilot says that each cluster was billed for."""
        code = (
            "import sky\n"
            "for c in sky.get(sky.cost_report(days=1)):\n"
            "    print(c['name'], c['num_nodes'] * c['duration'])"
        )
        lines = output([sys.executable, "-c", code], self.environ, 120.0).splitlines()
        known = {name: float(node_s) for name, node_s in map(str.split, lines)}
        return {name: known[name] for name in names if name in known}

    def clusters(self) -> list[str]:
        """Return the names of the clusters that Slurm has not ended."""
        lines = self.slurm("squeue", "-h", "-o", "%j").splitlines()  # of those that live
        return [line.strip() for line in lines if line.strip() not in _NO_CLUSTERS]

    def slurm(self, *words: str) -> str:
        """Run one of Slurm's commands in the lab, which can also be done when it is cut off."""
        return self.verb("exec", "login", *words)

    def _knobs(self) -> dict[str, str]:
        return {
            **os.environ,
            "SPOTLAB_DIR": str(self.folder),
            "SPOTLAB_PYTHON": sys.executable,
        }


class Books(threading.Thread):
    """Copies Slurm's books while a test runs: Slurm forgets a job after five minutes."""

    def __init__(self, slurm: SlurmLab) -> None:
        super().__init__(daemon=True)
        self.entries: dict[str, Allocation] = {}
        self._slurm = slurm
        self._since = time.time()
        self._stopped = threading.Event()

    def __enter__(self) -> Books:
        """Begin to copy."""
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Copy a last time."""
        self._stopped.set()
        self.join()

    def run(self) -> None:
        """Copy until told to stop."""
        while not self._stopped.wait(_BOOKS_EVERY_S):
            self._copy()
        self._copy()

    def _copy(self) -> None:
        for line in self._slurm.slurm("scontrol", "show", "job", "-o").splitlines():
            job = dict(word.split("=", 1) for word in line.split() if "=" in word)
            begin_at = _instant(job.get("StartTime", ""))
            if begin_at is None or begin_at < self._since or job["JobState"] == "PENDING":
                continue
            if job["JobName"] in _NO_CLUSTERS:
                continue
            over = job["JobState"] not in ("RUNNING", "COMPLETING")
            self.entries[job["JobId"]] = Allocation(
                name=job["JobName"],
                nodes=int(job["NumNodes"].partition("-")[0]),
                begin_at=begin_at,
                end_at=_instant(job["EndTime"]) if over else None,
            )


class Beside(FarMachine):
    """A user's machine that can reach the lab; its runs keep their state on the lab's disk."""

    look_every_s = 1.0
    more_steps = 10

    def __init__(self, folder: Path, slurm: SlurmLab) -> None:
        super().__init__(folder)
        self.slurm = slurm
        self.mortal: Path | None = None
        """Where controllers that die at each of their outside acts leave their marks."""
        self.hastened: tuple[float, Path] | None = None
        """By how much the market of controllers is faster, and where they keep what was decided."""
        self.store = slurm.folder / "shared" / f"{folder.name}-{time.time():.0f}"

    def environ(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the environment of a shell that uses the lab."""
        given = {**self.slurm.environ, "SPOTGUARD_STORE": str(self.store), **NO_SMOKE}
        if self.mortal is not None:
            given["PYTHONPATH"] = f"{_MORTAL}{os.pathsep}{given['PYTHONPATH']}"
            given["CONTROLLERS_DEATHS"] = str(self.mortal)
        if self.hastened is not None:
            speed_up, decisions = self.hastened
            given["PYTHONPATH"] = f"{_HASTENED}{os.pathsep}{given['PYTHONPATH']}"
            given |= {"MARKET_SPEED_UP": f"{speed_up:g}", "MARKET_DECISIONS": str(decisions)}
        return {**given, "SPOTGUARD_HOME": str(self.home), **(more or {})}

    def mark(self, name: str) -> Path:
        """Return a new empty file that jobs on the nodes see."""
        path = self.store.with_name(f"{self.store.name}.{name}")
        path.touch()
        return path

    def shared(self, name: str) -> Path:
        """Return a new empty folder in which jobs on the nodes can write."""
        path = self.store.with_name(f"{self.store.name}.{name}")
        path.mkdir()
        return path

    def copy(self, job: Path) -> Path:
        """Return a copy of a script in the folder that goes to the nodes."""
        return Path(shutil.copy(job, self.work))

    def begin(self, job: Path, *flags: str, args: tuple[str, ...]) -> str:
        """Start a run on Slurm's spot nodes and return its id."""
        place = ("--infra", "slurm/spotlab/spot", "--save-every", "5 steps")
        return self.start(self.copy(job), *place, *flags, args=args)


def _instant(text: str) -> float | None:
    try:
        return datetime.fromisoformat(text).astimezone().timestamp()
    except ValueError:
        return None
