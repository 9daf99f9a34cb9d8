"""The contestants of `benchmarks.recovery`: a run of ours, and SkyPilot's own managed job."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import yaml

from tests.e2e.lab.lab_jobs import wait_until
from tests.e2e.lab.slurm_lab import Beside

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.e2e.lab.slurm_lab import SlurmLab

SAVE_EVERY = 5
CPUS = "2"
"""All that a node of the lab has, so that each contestant has one of its own."""
_JOB = Path(__file__).with_name("job.py")
Parts = dict[str, float | None]


class Failed(Exception):
    """The contestant gave the job up."""


class Contestant(Protocol):
    """Something that trains on the lab and goes on after a node was taken."""

    name: str
    trace: Path
    """Where the job leaves a line for each step."""

    def start(self) -> None:
        """Launch the job; return at once."""
        ...

    def check(self) -> None:
        """Raise `Failed` if it gave the job up."""
        ...

    def parts(self, ended_at: float, begun_at: float) -> Parts:
        """Return what is known of where the time from the last step to the next one went."""
        ...

    def end(self) -> None:
        """Release its nodes."""
        ...


class Ours:
    """`spotguard up`."""

    name = "spotguard"

    def __init__(self, slurm: SlurmLab, folder: Path) -> None:
        self.beside = Beside(folder / "ours", slurm)
        (self.beside.work / "spotguard.toml").write_text(f'[node]\ncpus = "{CPUS}"\n')
        self.trace = slurm.folder / "shared" / f"{folder.name}-ours.jsonl"
        self.run = ""

    def start(self) -> None:
        """Launch it in the background."""
        place = ("--infra", "slurm/spotlab/spot", "--nodes", "1")
        flags = (*place, "--save-every", f"{SAVE_EVERY} steps")
        self.run = self.beside.start(self.beside.copy(_JOB), *flags, args=(str(self.trace),))

    def check(self) -> None:
        """Raise `Failed` if the run came to rest."""
        status = self.beside.status(self.run)
        if status["finished_at"] is not None:
            raise Failed(f"{status['state']}: {status['state_detail']}")

    def parts(self, ended_at: float, begun_at: float) -> Parts:
        """Return them as `status` tells them; what comes before is the emergency save."""
        told: list[dict[str, Any]] = []

        def known() -> bool:
            told[:] = self.beside.status(self.run)["recoveries"][-1:]
            return bool(told) and told[0]["first_step_s"] is not None

        with contextlib.suppress(AssertionError):
            wait_until(known, "the first step is told", timeout_s=10.0)
        return {name: value for each in told for name, value in each.items() if name.endswith("_s")}

    def end(self) -> None:
        """Release its nodes, and wait until it has settled."""
        if not self.run:
            return
        self.beside.spotguard("down", self.run, "--yes")
        wait_until(lambda: self.beside.status(self.run)["finished_at"], "it is over", 60.0)


class Managed:
    """`sky jobs launch`, restarted on errors, with its controller in SkyPilot's own server."""

    name = "managed job"

    def __init__(self, slurm: SlurmLab, folder: Path) -> None:
        self.slurm = slurm
        self.job = f"{folder.name}-managed"
        self.shared = slurm.folder / "shared"
        self.trace = self.shared / f"{self.job}.jsonl"
        self.task = folder / "task.yaml"

    def start(self) -> None:
        """Launch it; returns when SkyPilot has taken it."""
        script = self.shared / f"{self.job}.py"
        shutil.copy(_JOB, script)
        checkpoint = self.shared / f"{self.job}.pt"
        command = f"{sys.executable} {script} {self.trace} --plain {checkpoint}"
        self.task.parent.mkdir(parents=True, exist_ok=True)
        task = {
            "resources": {
                "infra": "slurm/spotlab/spot",
                "cpus": CPUS,
                # Without this a job that Slurm ends by SIGTERM counts as the user's failure.
                "job_recovery": {"max_restarts_on_errors": 100},
            },
            "run": f"exec {command} --save-every {SAVE_EVERY}",
        }
        self.task.write_text(yaml.safe_dump(task))
        self.slurm.sky("jobs", "launch", "-y", "-d", "-n", self.job, str(self.task))

    def check(self) -> None:
        """Raise `Failed` if SkyPilot says that it is over."""
        for status, _, reason in self._events():
            if status.startswith("FAILED") or status in ("SUCCEEDED", "CANCELLED"):
                raise Failed(f"{status}: {reason}")

    def parts(self, ended_at: float, begun_at: float) -> Parts:
        """Return what its own events show, to the second: recovering, and running again."""
        found: dict[str, float] = {}
        for status, at, _ in self._events():
            if ended_at - 1 <= at <= begun_at + 1:
                found.setdefault(status, at)
        recovering_at, running_at = found.get("RECOVERING"), found.get("RUNNING")
        return {
            "detect_s": _between(ended_at, recovering_at),
            "provision_s": _between(recovering_at, running_at),
            "setup_s": _between(running_at, begun_at),
            "total_s": begun_at - ended_at,
        }

    def end(self) -> None:
        """Cancel it, and wait until its cluster is gone."""
        self.slurm.sky("jobs", "cancel", "-y", "-n", self.job)

        def gone() -> bool:
            return not any(name.startswith(self.job) for name in self.slurm.clusters())

        wait_until(gone, "its cluster is gone", timeout_s=90.0)

    def _events(self) -> list[tuple[str, float, str]]:
        """Return (status, when, why), oldest first."""
        code = (
            "import json\n"
            "from sky.jobs import state\n"
            f"ids = state.get_all_job_ids_by_name({self.job!r})\n"
            "found = [e for i in ids for e in state.get_job_events(i)]\n"
            "told = [(e['new_status'].value, e['timestamp'].timestamp(), e['reason'] or '')"
            " for e in found]\n"
            "print(json.dumps(sorted(told, key=lambda each: each[1])))"
        )
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=self.slurm.environ,
            capture_output=True,
            check=True,
            timeout=60.0,
        )
        return [(status, at, why) for status, at, why in json.loads(done.stdout)]


def _between(begin_at: float | None, end_at: float | None) -> float | None:
    return None if begin_at is None or end_at is None else max(0.0, end_at - begin_at)


@contextlib.contextmanager
def managed_jobs(slurm: SlurmLab) -> Iterator[None]:
    """Let SkyPilot's server control managed jobs itself, instead of on a machine of their own."""
    path = slurm.folder / "home" / ".sky" / "config.yaml"
    before = path.read_text()
    config = {**yaml.safe_load(before), "jobs": {"controller": {"consolidation_mode": True}}}
    path.write_text(yaml.safe_dump(config))
    try:
        _restart(slurm)
        yield
    finally:
        path.write_text(before)
        _restart(slurm)


def _restart(slurm: SlurmLab) -> None:
    slurm.sky("api", "stop")
    time.sleep(1.0)
    slurm.sky("api", "start")
