from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.e2e.ec2.ec2_lab import SCRIPT, Beside, Ec2Lab
from tests.e2e.lab.lab_jobs import Lab, Weights, final_weights

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_FOLDER = Path("/tmp/ec2-lab-tests")
_LOCK = _FOLDER.with_suffix(".lock")


@pytest.fixture(scope="session")
def ec2() -> Iterator[Ec2Lab]:
    """An AWS account with two regions of nodes, and a SkyPilot that knows it."""
    why_not = _why_not()
    if why_not:
        pytest.skip(why_not)
    # Of the workers of one run of pytest, the first brings the lab up and the last takes it down.
    is_worker = "PYTEST_XDIST_WORKER" in os.environ
    owner = os.getppid() if is_worker else os.getpid()
    if is_worker:
        threading.Thread(target=_end_with, args=(owner,), daemon=True).start()
    lab = Ec2Lab(_FOLDER, owner)
    with _only_one():
        users = _users()
        if users["owner"] not in (0, owner):
            pytest.skip("another run of these tests has the EC2 lab")
        if users["count"]:
            lab.join()
        else:
            lab.down()  # what a run of these tests that was killed may have left
            lab.up()
        _note(owner, users["count"] + 1)
    try:
        yield lab
    finally:
        with _only_one():
            users = _users()
            left = max(0, users["count"] - 1)
            if users["owner"] in (0, owner):  # else pytest was killed, and another run began since
                if not left:
                    lab.down()
                    shutil.rmtree(_FOLDER, ignore_errors=True)
                _note(owner if left else 0, left)


def _end_with(owner: int) -> None:
    """End at once when pytest was killed.

    A worker outlives it for a while, and each command that it still runs would start a controller
    anew, which launches nodes in the next run's lab.
    """
    while os.getppid() == owner:
        time.sleep(0.5)
    os._exit(1)


@contextmanager
def _only_one() -> Iterator[None]:
    with _LOCK.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _users() -> dict[str, int]:
    """Return which run of pytest has the lab, and in how many processes; none once it is gone."""
    try:
        told: dict[str, int] = json.loads(_LOCK.read_text())
    except ValueError:
        return {"owner": 0, "count": 0}
    return told if psutil.pid_exists(told["owner"]) else {"owner": 0, "count": 0}


def _note(owner: int, count: int) -> None:
    _LOCK.write_text(json.dumps({"owner": owner, "count": count}))


def _why_not() -> str | None:
    environ = {**os.environ, "EC2LAB_VENV": str(Path(sys.executable).parents[1])}
    done = subprocess.run(
        ["bash", SCRIPT, "why-not"], env=environ, capture_output=True, text=True, check=False
    )
    if done.stdout.strip():
        return done.stdout.strip()
    lent = Path("/sys/class/net/ec2lab0")
    if lent.exists() and not _FOLDER.exists():
        return "an EC2 lab is up, and there can be one: make ec2-lab-down"
    return None


@pytest.fixture
def _turn(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, ec2: Ec2Lab
) -> Iterator[None]:
    """Let other workers' tests go on meanwhile, but none beside one that is marked `alone`."""
    alone = request.node.get_closest_marker("alone") is not None
    with (tmp_path_factory.getbasetemp().parent / "turns.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield
        if alone:
            ec2.verb("calm")


@pytest.fixture
def machine(tmp_path: Path, ec2: Ec2Lab, _turn: None) -> Iterator[Callable[[str], Beside]]:
    """Return a function: a user's machine of that name. Nothing of theirs may be left, anywhere.

    Other tests may use the lab meanwhile: each has regions of its own.
    """
    made: list[Beside] = []

    def make(name: str) -> Beside:
        made.append(Beside(tmp_path / name, ec2))
        return made[-1]

    try:
        yield make
        living = [each for beside in made for run in beside.runs for each in ec2.living(run)]
        with ThreadPoolExecutor() as together:
            left = [each for beside in together.map(Lab.clean_up, made) for each in beside]
        assert not left, f"processes outlived their run: {left}"
        assert not living, f"instances outlived their run: {living}"
    finally:
        for beside in made:
            beside.clean_up()
        runs = [run for beside in made for run in beside.runs]
        ec2.calm(runs, {place.split("/")[1] for beside in made for place in beside.places})


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Weights]:
    """Return a function: what a job's weights are in the end, on this machine alone."""
    known: dict[tuple[str, ...], Weights] = {}

    def run(job: Path, *args: str) -> Weights:
        if args not in known:
            lab = Lab(tmp_path_factory.mktemp("undisturbed"))
            known[args] = final_weights(lab.up(job, args=args, timeout_s=900.0))
        return known[args]

    return run
