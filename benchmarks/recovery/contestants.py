"""The contestants of `benchmarks.recovery`: a run of ours, and SkyPilot's own managed job."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import yaml

from benchmarks.recovery.places import SAVE_EVERY
from tests.e2e.lab.lab_jobs import wait_until

if TYPE_CHECKING:
    from benchmarks.recovery.places import Place

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

    def __init__(self, place: Place, folder: Path) -> None:
        self._place = place
        self._user = place.user(folder / "ours")
        self.trace, self._traced = place.trace(f"{folder.name}-ours")
        self._run = ""

    def start(self) -> None:
        """Launch it in the background."""
        copy = self._user.work / _JOB.name
        copy.write_text(_JOB.read_text())
        flags = (*self._place.flags(), "--nodes", "1", "--save-every", f"{SAVE_EVERY} steps")
        self._run = self._user.start(copy, *flags, args=(self._traced,))

    def check(self) -> None:
        """Raise `Failed` if the run came to rest."""
        status = self._user.status(self._run)
        if status["finished_at"] is not None:
            raise Failed(f"{status['state']}: {status['state_detail']}")

    def parts(self, ended_at: float, begun_at: float) -> Parts:
        """Return them as `status` tells them; what comes before is the emergency save."""
        told: list[dict[str, Any]] = []

        def known() -> bool:
            told[:] = self._user.status(self._run)["recoveries"][-1:]
            return bool(told) and told[0]["first_step_s"] is not None

        with contextlib.suppress(AssertionError):
            wait_until(known, "the first step is told", timeout_s=10.0)
        return {name: value for each in told for name, value in each.items() if name.endswith("_s")}

    def end(self) -> None:
        """Release its nodes, and wait until it has settled."""
        if not self._run:
            return
        self._user.spotguard("down", self._run, "--yes")
        wait_until(lambda: self._user.status(self._run)["finished_at"], "it is over", 200.0)


class Managed:
    """`sky jobs launch`, restarted on errors, with its controller in SkyPilot's own server."""

    name = "managed job"

    def __init__(self, place: Place, folder: Path) -> None:
        self._place = place
        self._job = f"{folder.name}-managed"
        self.trace, self._traced = place.trace(self._job)
        self._task = folder / "task.yaml"

    def start(self) -> None:
        """Launch it; returns when SkyPilot has taken it."""
        task = self._place.task(_JOB, self._job, self._traced)
        # Without this a job that Slurm ends by SIGTERM counts as the user's failure.
        task["resources"]["job_recovery"] = {"max_restarts_on_errors": 100}
        self._task.parent.mkdir(parents=True, exist_ok=True)
        self._task.write_text(yaml.safe_dump(task))
        self._place.sky("jobs", "launch", "-y", "-d", "-n", self._job, str(self._task))

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
        self._place.sky("jobs", "cancel", "-y", "-n", self._job)

        def gone() -> bool:
            return not any(self._job in name for name in self._place.clusters())

        wait_until(gone, "its cluster is gone", timeout_s=200.0)

    def _events(self) -> list[tuple[str, float, str]]:
        """Return (status, when, why), oldest first."""
        code = (
            "import json\n"
            "from sky.jobs import state\n"
            f"ids = state.get_all_job_ids_by_name({self._job!r})\n"
            "found = [e for i in ids for e in state.get_job_events(i)]\n"
            "told = [(e['new_status'].value, e['timestamp'].timestamp(), e['reason'] or '')"
            " for e in found]\n"
            "print(json.dumps(sorted(told, key=lambda each: each[1])))"
        )
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=dict(self._place.environ),
            capture_output=True,
            check=True,
            timeout=60.0,
        )
        return [(status, at, why) for status, at, why in json.loads(done.stdout)]


def _between(begin_at: float | None, end_at: float | None) -> float | None:
    return None if begin_at is None or end_at is None else max(0.0, end_at - begin_at)
