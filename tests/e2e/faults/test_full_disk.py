from __future__ import annotations

import contextlib
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.e2e.lab.lab_jobs import (
    STEADY,
    Lab,
    Status,
    checkpoints,
    final_weights,
    reasons,
    store_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.e2e.conftest import Calm

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def test_files_that_may_not_grow(lab: Lab, calm: Callable[[int], Calm]) -> None:
    """A save for which there is no room: one sentence, exit 3, and the save before it is whole."""
    marker = lab.work / "full"
    marker.touch()
    status = lab.up(
        STEADY, "--nodes", "1", "--save-every", "8 steps", args=("--full-at", "20"), code=3
    )

    _check_full(status, last_good=16)
    marker.unlink()
    _check_resumes(lab, status, calm(1))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 1 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    try:
        mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("mounting a small disk needs root")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_disk_that_is_full_to_the_last_byte(
    lab: Lab, calm: Callable[[int], Calm], small_disk: Path
) -> None:
    """When not even an event can be written, the run still says so in one sentence, exit 3."""
    run = lab.start(
        STEADY,
        *("--nodes", "1", "--save-every", "8 steps", "--store", str(small_disk / "store")),
        args=("--pause", "0.2"),
    )
    lab.wait_for_step(run, 18, every_s=0.1)  # before the save of step 24
    _fill(small_disk / "filler")
    status = lab.follow(run)

    _check_full(status, last_good=16)
    (small_disk / "filler").unlink()
    _check_resumes(lab, status, calm(1))


def _fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


def _check_full(status: Status, *, last_good: int) -> None:
    assert status["state"] == "failed"
    assert reasons(status) == ["store_failed"]
    told = f"{status['state_detail']} {status['warnings']}"
    assert "room" in told, told
    assert status["traceback"] is None, "it is no error of the script"
    assert checkpoints(store_of(status))[-1] == (last_good, 1)


def _check_resumes(lab: Lab, status: Status, undisturbed: Calm) -> None:
    resumed = lab.spotguard("resume", status["run_id"], "--json")
    assert resumed.code == 0, resumed.err
    assert reasons(resumed.json) == ["store_failed", "finished"]
    assert final_weights(resumed.json) == undisturbed.weights
