"""A home that is moved or copied beneath a living controller starts no second cluster."""

from __future__ import annotations

import re
import shutil
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.e2e.lab.lab_jobs import OFTEN, STEADY, Lab, final_weights, reasons, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.e2e.conftest import Calm

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def begin(lab: Lab) -> str:
    """Start a run whose store is elsewhere; return its id once it trains."""
    store = ("--store", str(lab.work / "store"), "--nodes", "1")
    run = lab.start(STEADY, *store, *OFTEN, args=("--pause", "0.5"))
    lab.wait_for_step(run, 6)
    return run


def launches(*homes: Path) -> list[str]:
    """Return the clusters that were started below the homes, one line for each node."""
    logs = [log for home in homes for log in home.glob("runs/*/local/clusters/*/cloud.log")]
    return [line for log in logs for line in re.findall(r"node \d+ started", log.read_text())]


def test_a_home_moved_beneath_its_controller_goes_on(lab: Lab, calm: Callable[[int], Calm]) -> None:
    """The controller finds its journal gone and stops; the next command takes over the cluster."""
    run = begin(lab)
    first = lab.controller_pid(run)
    assert first is not None
    before, lab.home = lab.home, lab.home.with_name("moved")
    before.rename(lab.home)
    lab.status(run)
    wait_until(lambda: not psutil.pid_exists(first), "the controller has stopped")
    assert lab.status(run)["state"] == "running"

    status = lab.follow(run)
    assert reasons(status) == ["finished"]
    assert final_weights(status) == calm(1).weights
    assert launches(lab.home) == ["node 0 started"]
    assert not list(before.glob("runs/*/local/clusters/*"))
    kinds = [line["kind"] for line in lab.history(run)]
    assert kinds.count("launched") == 1


def test_a_copy_of_a_home_leaves_the_run_to_the_original(
    lab: Lab, calm: Callable[[int], Calm]
) -> None:
    """It may be looked at there; the original's controller goes on, alone."""
    run = begin(lab)
    first = lab.controller_pid(run)
    original = lab.home
    copy = original.with_name("copy")
    shutil.copytree(original, copy, symlinks=True, ignore=lambda *_: [])

    lab.home = copy
    looked = lab.spotguard("status", run, "--json")
    assert looked.code == 0, looked.err
    told = [line["kind"] for line in lab.history(run)]
    lab.home = original
    assert lab.controller_pid(run) == first
    assert told[-2:] == ["taken_over", "settled"]
    status = lab.follow(run)
    assert reasons(status) == ["finished"]
    assert final_weights(status) == calm(1).weights
    assert launches(original) == ["node 0 started"]
    assert looked.json["run_id"] == run
