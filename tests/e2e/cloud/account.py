"""A user with a cloud account: what the suite may use, what it spends, and how it tidies up."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spotguard.errors import SpecError
from spotguard.spec.infra import LOCAL, places
from tests.e2e.lab.lab_jobs import Lab, Status, wait_until

if TYPE_CHECKING:
    from collections.abc import Mapping

JOB = Path(__file__).parent / "jobs" / "tiny.py"
ASIDE = Path(__file__).parent / "aside.py"
CLOUD, STORE = "SPOTGUARD_CLOUD", "SPOTGUARD_CLOUD_STORE"
INTERRUPT = "SPOTGUARD_CLOUD_INTERRUPT"
"""A command that takes a node away; `{cluster}` stands for SkyPilot's name of the cluster."""
BUDGET_USD = 0.50
"""The most that one run may cost; it is a hard limit. They need about a tenth of it."""
STEPS_AN_EPOCH = 16
HOW_TO = f"set {CLOUD}=aws (gcp, azure, …) and {STORE}=s3://…; see docs/reference/cloud-tests.md"

_START_S = 1200.0
"""A spot machine, its set-up and torch may take so long."""
_SMALL = """\
[node]
cpus = "2+"
memory = "4+"
[env]
UV_TORCH_BACKEND = "cpu"
"""


@dataclass(frozen=True)
class Spent:
    """What one run cost."""

    run: str
    usd: float | None
    sky_usd: float | None

    def __str__(self) -> str:
        ours = "unknown" if self.usd is None else f"${self.usd:.4f}"
        theirs = "" if self.sky_usd is None else f", by SkyPilot's books ${self.sky_usd:.4f}"
        return f"{self.run}: {ours}{theirs}"


SPENT: list[Spent] = []
"""Of the whole session, told at its end."""


def chosen(environ: Mapping[str, str] = os.environ) -> list[str | None]:
    """Return the places that the user wants to be tested on; one None if nothing was said."""
    return [each.strip() for each in environ.get(CLOUD, "").split(",") if each.strip()] or [None]


def why_not(place: str | None, environ: Mapping[str, str] = os.environ) -> str | None:
    """Return in one sentence why nothing can be tested on a place; None if it can."""
    if place is None:
        return HOW_TO
    try:
        places(place)
    except (ValueError, SpecError):
        return f"{CLOUD} names {place!r}, which is no place; {HOW_TO}"
    if place == LOCAL:
        return None
    if not environ.get(STORE):
        return f"{STORE} names no store for the runs on {place}; {HOW_TO}"
    if find_spec("sky") is None:
        return "SkyPilot is not installed: pip install 'spotguard[sky]'"
    cloud = place.partition("/")[0]
    if cloud not in _aside("enabled", environ=environ):
        return f"SkyPilot has not enabled {cloud}: sky check {cloud}"
    return None


class Account(Lab):
    """A machine from which runs are started on one place, below a prefix of their own."""

    def __init__(self, folder: Path, place: str, environ: Mapping[str, str] = os.environ) -> None:
        super().__init__(folder)
        self.place = place
        self.cloud = place.partition("/")[0]
        self.is_local = place == LOCAL
        given = environ.get(STORE) if not self.is_local else None
        self.store = f"{(given or str(folder)).rstrip('/')}/spotguard-test-{secrets.token_hex(4)}"
        self.script = self.work / JOB.name
        self.runs: list[str] = []
        self._interrupt = environ.get(INTERRUPT, "sky down -y {cluster}")
        shutil.copy(JOB, self.script)
        if self.cloud not in (LOCAL, "slurm"):
            (self.work / "spotguard.toml").write_text(_SMALL)

    # ------------------------------------------------------------ runs

    def begin(self, *, epochs: int, interrupt_at: int | None = None) -> str:
        """Start a run with all guards on it and return its id."""
        flags = ["--nodes", "1", "--store", self.store, "--save-every", "2s"]
        flags += ["--budget", str(BUDGET_USD), "--deadline", "40m"]
        if self.is_local:
            flags += ["--price", "1", "--on-demand-price", "3"]
            flags += ["--interrupt", f"node=0@step={interrupt_at}:kill"] if interrupt_at else []
        else:
            flags += ["--infra", self.place]
        run = self.start(self.script, *flags, args=("--epochs", str(epochs)))
        self.runs.append(run)
        return run

    def trains(self, run: str, *, step: int) -> Status:
        """Return the status once so many steps are done."""
        status: Status = {}

        def reached() -> bool:
            nonlocal status
            status = self.status(run)
            assert status["state"] not in ("failed", "paused", "stopped"), status
            return (status["step"] or 0) >= step

        wait_until(reached, f"{run} reaches step {step}", timeout_s=_START_S)
        return status

    def settled(self, run: str) -> Status:
        """Wait until a run comes to rest, and return its status."""
        said = self.spotguard("status", run, "--watch", timeout_s=2400.0)
        assert said.code == 0, said.err
        status = self.status(run)
        SPENT.append(Spent(run, status["spent_usd"], self.sky_usd(run)))
        return status

    def interrupt(self, run: str) -> None:
        """Take the node away behind the controller's back; a local one is gone by itself."""
        if self.is_local:
            return
        (cluster,) = self.clusters(run)
        words = [w.replace("{cluster}", cluster) for w in shlex.split(self._interrupt)]
        if words[0] == "sky":
            words[0] = str(Path(sys.executable).with_name("sky"))
        said = self.run(*words, timeout_s=600.0)
        assert said.code == 0, said.err

    # ------------------------------------------------------------ looking

    def clusters(self, run: str) -> list[str]:
        """Return the clusters of a run that still cost money, by SkyPilot's word."""
        names: list[str] = [] if self.is_local else _aside("clusters", run, environ=self.environ())
        return names

    def sky_usd(self, run: str) -> float | None:
        """Return what SkyPilot says that a run has cost; None where it has no books."""
        if self.is_local:
            return None
        return float(sum(_aside("bills", run, environ=self.environ()).values()))

    def heard(self, run: str) -> dict[str, str]:
        """Return what the run's node heard of its cloud."""
        found: dict[str, str] = _aside(
            "read", f"{self.store}/{run}", "heard.json", environ=self.environ()
        )
        return found

    def doctor(self, *flags: str) -> dict[str, Any]:
        """Return what `doctor --json` says. It tries the local store: reading a bucket costs."""
        return self.spotguard("doctor", "--json", *flags, timeout_s=900.0).json

    # ------------------------------------------------------------ tidying up

    def left(self, run: str) -> list[str]:
        """Return what a run that came to rest has left behind; empty is right."""
        leftovers = self.doctor()["clusters"]["leftovers"]
        orphans = [each["cluster"] for each in leftovers if each["run_id"] == run]
        return [*self.clusters(run), *orphans]

    def tidy_up(self) -> list[str]:
        """End all that still runs, delete what was stored, and return what could not be ended."""
        for run in self.runs:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.spotguard("down", run, "--yes", timeout_s=900.0)
        for name in self._still_there():
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.run(Path(sys.executable).with_name("sky"), "down", "-y", name, timeout_s=900.0)
        left = self._still_there()
        if not left:
            _aside("empty", self.store, environ=self.environ())
        return [*left, *self.clean_up()]

    def _still_there(self) -> list[str]:
        return [name for run in self.runs for name in self.clusters(run)]


def wait_long_until(condition: Any, what: str, *, timeout_s: float, every_s: float) -> None:
    """Return as soon as `condition` holds, looking seldom; fail if it does not in time."""
    give_up_at = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up_at, f"not in {timeout_s} s: {what}"
        time.sleep(every_s)


def _aside(verb: str, *words: str, environ: Mapping[str, str]) -> Any:
    done = subprocess.run(
        [sys.executable, str(ASIDE), verb, *words],
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300.0,
        check=False,
    )
    assert done.returncode == 0, f"{verb}: {done.stdout}\n{done.stderr}"
    return json.loads(done.stdout.splitlines()[-1])
