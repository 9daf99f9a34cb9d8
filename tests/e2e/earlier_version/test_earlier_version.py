"""Runs that an earlier version began, and left in the middle, go on with this one.

Each folder below `runs` holds those of one version, by its commit: one that was told to stop, and
one whose machine lost its power.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

import pytest

from tests.e2e.earlier_version import fixture
from tests.e2e.lab.lab_jobs import reasons

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.lab.lab_jobs import Lab, Status

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

VERSIONS = sorted(fixture.FOLDER.iterdir())
STEPS = 40
LEASE_S = 120.0
"""After so long the lease of a controller that was killed is over."""


@pytest.fixture(params=VERSIONS, ids=lambda folder: str(folder.name))
def version(request: pytest.FixtureRequest) -> Path:
    """Return the folder with the runs of one version."""
    folder: Path = request.param
    if time.time() < fixture.kept_at(folder) + LEASE_S:
        pytest.skip("this machine's clock is before the time at which the run was kept")
    return folder


def check_it_went_on(lab: Lab, before: Status, after: Status, version: Path) -> None:
    """Fail unless it ended as if nothing had happened, and tells of both halves."""
    assert after["state"] == "finished"
    assert fixture.outcome(after) == json.loads((version / "undisturbed.json").read_text())
    first, second = after["attempts"]
    saved_step = before["saved_step"]
    assert 0 < saved_step < STEPS
    assert (first["first_step"], second["first_step"], second["last_step"]) == (
        *(0, saved_step),
        STEPS,
    )
    assert first == before["attempts"][0], "what had happened is told as before"
    told = lab.history(after["run_id"])
    for attempt, saved in ((1, saved_step), (2, STEPS)):
        kinds = {line["kind"] for line in told if line["attempt"] == attempt}
        assert kinds >= {"launch_intended", "launched", "started", "saved", "attempt_ended"}
        saves = [line["data"]["step"] for line in told if line["kind"] == "saved"]
        assert saved in saves
    assert [line["at"] for line in told] == sorted(line["at"] for line in told)


def test_a_stopped_run_goes_on_from_its_journal(lab: Lab, version: Path) -> None:
    """`resume` trains on from the last step that was done."""
    run = fixture.place(version / "stopped.tar.gz", lab)
    before = lab.status()
    assert (before["run_id"], before["state"]) == (run, "stopped")
    assert before["saved_step"] == before["step"]
    resumed = lab.spotguard("resume", run, "--json")
    assert resumed.code == 0, resumed.err
    check_it_went_on(lab, before, resumed.json, version)
    assert reasons(resumed.json) == ["stopped", "finished"]


def test_a_run_that_lost_its_machine_goes_on_from_its_journal(lab: Lab, version: Path) -> None:
    """Whoever looks at it repairs it: the cluster is found dead, and another one is launched."""
    run = fixture.place(version / "killed.tar.gz", lab)
    looked = lab.spotguard("status", "--json")
    assert looked.code == 0
    assert f"the controller of {run} was gone; it has been restarted" in looked.err
    after = lab.follow(run)
    check_it_went_on(lab, {**looked.json, "attempts": after["attempts"]}, after, version)
    assert reasons(after) == ["vanished", "finished"]


@pytest.mark.parametrize("end", ["stopped", "killed"])
def test_a_run_goes_on_from_its_store_alone(lab: Lab, version: Path, end: str) -> None:
    """`adopt` on a machine that never saw it tells its story, and `resume` trains on."""
    run = fixture.place(version / f"{end}.tar.gz", lab, only_store=True)
    assert not lab.home.exists()
    adopted = lab.spotguard("adopt", lab.home.parent / "store" / run, "--yes")
    assert adopted.code == 0, adopted.err
    before = lab.status()
    assert before["run_id"] == run
    resumed = lab.spotguard("resume", run, "--json")
    assert resumed.code == 0, resumed.err
    check_it_went_on(lab, before, resumed.json, version)
