from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.e2e.lab.lab_jobs import Lab, Weights, final_weights
from tests.e2e.lab.slurm_lab import Beside, SlurmLab

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_OWN_FOLDER = Path("/tmp/spotlab-tests")
_LOCK = _OWN_FOLDER.with_suffix(".lock")


@pytest.fixture(scope="session")
def slurm() -> Iterator[SlurmLab]:
    """A Slurm cluster of three spot nodes, and a SkyPilot that knows it."""
    lent = os.environ.get("SPOTLAB_DIR")
    why_not = _why_not(lent=bool(lent))
    if why_not:
        pytest.skip(why_not)
    lab = SlurmLab(Path(lent) if lent else _OWN_FOLDER, ours=not lent)
    with _LOCK.open("w") as lock:  # held for as long as this process lives
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pytest.skip("another run of these tests has the lab")
        try:
            if _OWN_FOLDER.exists():  # a run of these tests was killed
                lab.down()
            lab.up()
            lab.calm()
            yield lab
        finally:
            lab.down()


def _why_not(*, lent: bool) -> str | None:
    if find_spec("sky") is None:
        return "SkyPilot is not installed: pip install 'spotguard[sky]'"
    if lent:
        return None
    if os.getuid() != 0 or not shutil.which("apt-get"):
        return "the Slurm lab needs root and Debian"
    if subprocess.run(["unshare", "--net", "--mount", "true"], check=False).returncode:
        return "the Slurm lab needs a machine on which root may make namespaces"
    if Path("/run/netns/login").exists() and not _OWN_FOLDER.exists():
        return "a lab is up: use it with SPOTLAB_DIR, or take it down"
    return None


@pytest.fixture
def beside(tmp_path: Path, slurm: SlurmLab) -> Iterator[Beside]:
    """A user's machine; nothing may be left of what it started, here or in the lab."""
    machine = Beside(tmp_path, slurm)
    yield machine
    left = machine.clean_up()
    clusters = slurm.clusters()
    slurm.calm()
    assert not left, f"processes outlived their run: {left}"
    assert not clusters, f"clusters outlived their run: {clusters}"


@pytest.fixture
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Weights]:
    """Return a function: what a job's weights are in the end, on this machine alone."""

    def run(job: Path, *args: str) -> Weights:
        lab = Lab(tmp_path_factory.mktemp("undisturbed"))
        return final_weights(lab.up(job, args=args, timeout_s=900.0))

    return run
