"""Whole runs through the real SkyPilot on a real Slurm, on the virtual nodes of `infra/lab`.

`SPOTLAB_DIR` names a lab that is up already; without it one is brought up, which needs root and
Debian, and taken away again.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.e2e.lab import JOBS, Lab, Status, Weights, final_weights, reasons, store_of, wait_until
from tests.e2e.slurm_lab import Beside, Books, SlurmLab

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = [pytest.mark.e2e, pytest.mark.lab, pytest.mark.timeout(900)]

EXACT = JOBS / "exact.py"
STEPS_AN_EPOCH = 16
_OWN_FOLDER = Path("/tmp/spotlab-tests")


@pytest.fixture(scope="session")
def slurm() -> Iterator[SlurmLab]:
    """A Slurm cluster of three spot nodes, and a SkyPilot that knows it."""
    lent = os.environ.get("SPOTLAB_DIR")
    why_not = _why_not(lent=bool(lent))
    if why_not and not os.environ.get("CI"):
        pytest.skip(why_not)
    lab = SlurmLab(Path(lent) if lent else _OWN_FOLDER, ours=not lent)
    try:
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
    if Path(sys.prefix).resolve().is_relative_to("/tmp"):
        return "the virtual nodes have a /tmp of their own, and this Python is in the machine's"
    if os.getuid() != 0 or not shutil.which("apt-get"):
        return "the Slurm lab needs root and Debian"
    if Path("/run/netns/login").exists():
        return "a lab is up: use it with SPOTLAB_DIR, or take it down"
    return None


@pytest.fixture
def beside(tmp_path: Path, slurm: SlurmLab) -> Iterator[Beside]:
    """A user's machine; nothing may be left of what it started, here or in the lab."""
    machine = Beside(tmp_path, slurm, EXACT)
    yield machine
    left = machine.clean_up()
    clusters = slurm.clusters()
    slurm.calm()
    assert not left, f"processes outlived their run: {left}"
    assert not clusters, f"clusters outlived their run: {clusters}"


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Weights]:
    """Return a function: what the job's weights are after so many epochs, on this machine."""
    known: dict[int, Weights] = {}

    def run(epochs: int) -> Weights:
        if epochs not in known:
            lab = Lab(tmp_path_factory.mktemp(f"undisturbed-{epochs}-"))
            known[epochs] = final_weights(lab.up(EXACT, args=("--epochs", str(epochs))))
        return known[epochs]

    return run


def test_preempted_twice_shrunk_killed_and_grown_again(
    beside: Beside, slurm: SlurmLab, undisturbed: Callable[[int], Weights]
) -> None:
    """Whatever Slurm takes, the run goes on where it was, on what there is, at the right price."""
    epochs = 26
    with Books(slurm) as books:
        args = ("--epochs", str(epochs), "--pause", "0.1")
        run = beside.begin("--nodes", "1:3", "--budget", "5", args=args)
        beside.trains(run, attempt=1)
        slurm.verb("notice", "spot1", "aws", "12")
        time.sleep(12.0)
        slurm.verb("preempt", "spot1", grace_s=5.0)
        first = beside.ended(run, attempt=1)
        slurm.verb("imds", "all", "aws")  # what comes in its place is another machine

        shrunk = beside.trains(run, attempt=2)
        slurm.verb("release")
        slurm.verb("preempt", "spot2", grace_s=15.0)
        beside.ended(run, attempt=2)
        slurm.verb("release")

        grown = beside.trains(run, attempt=3)
        killed_at = time.time()
        slurm.verb("kill", "spot3")
        lost = beside.ended(run, attempt=3)
        found_out_s = time.time() - killed_at
        slurm.verb("heal", "spot3")
        status = beside.settled(run)

    assert first["attempts"][0]["end_reason"] == "preempted"
    assert [a["nodes"] for a in (*shrunk["attempts"], grown["attempts"][-1])] == [3, 2, 3]
    assert reasons(lost)[:2] == ["preempted", "terminated"]
    assert reasons(lost)[2] in ("vanished", "node_lost")
    assert found_out_s < 75.0
    assert reasons(status)[-1] == "finished"
    assert final_weights(status) == undisturbed(epochs)
    assert status["step"] == status["total_steps"] == epochs * STEPS_AN_EPOCH
    assert {"notice", "no_capacity"} <= set(kinds(beside, run))
    assert slurm.sky_names() == []
    check_money(status, books, slurm)


def test_a_dead_controller_is_replaced_and_launches_nothing_twice(
    beside: Beside, slurm: SlurmLab, undisturbed: Callable[[int], Weights]
) -> None:
    """Killed while SkyPilot launches and while the job trains; `status` starts the next one."""
    epochs = 12
    with Books(slurm) as books:
        args = ("--epochs", str(epochs), "--pause", "0.1")
        run = beside.begin("--nodes", "1", args=args)
        kill_controller(beside, run)
        time.sleep(3.0)
        beside.trains(run, attempt=1)
        kill_controller(beside, run)
        time.sleep(3.0)
        status = beside.settled(run)

    assert reasons(status) == ["finished"]
    assert final_weights(status) == undisturbed(epochs)
    assert len(books.entries) == 1, books.entries
    check_money(status, books, slurm)


def test_without_a_controller_the_budget_is_kept_all_the_same(
    beside: Beside, slurm: SlurmLab
) -> None:
    """The job saves and stops when its money is used up, and its cluster goes away by itself."""
    budget_usd = 0.1
    run = beside.begin(
        *("--nodes", "1", "--budget", str(budget_usd)), args=("--epochs", "1000", "--pause", "0.1")
    )
    status = beside.trains(run, attempt=1)
    kill_controller(beside, run)
    wait_until(lambda: not slurm.clusters(), "the cluster is gone", timeout_s=480.0)
    assert beside.controller_pid(run) is None, "somebody else took it down"
    saved = sorted((store_of(status)).glob("checkpoints/*/manifest.json"))

    status = beside.settled(run)
    assert (status["state"], reasons(status)) == ("paused", ["budget"])
    assert status["saved_step"] == int(saved[-1].parent.name.split("-")[0])
    assert status["attempts"][0]["steps_lost"] == 0
    assert status["spent_usd"] <= budget_usd


def test_a_cluster_out_of_reach_is_left_alone(
    beside: Beside, slurm: SlurmLab, undisturbed: Callable[[int], Weights]
) -> None:
    """Contact lost is a state of its own: nothing is killed or started, and it goes on."""
    epochs = 60
    with Books(slurm) as books:
        args = ("--epochs", str(epochs), "--pause", "0.25")
        run = beside.begin("--nodes", "1", args=args)
        beside.trains(run, attempt=1)
        slurm.reach(False)
        try:
            wait_until(
                lambda: beside.status(run)["state"] == "contact_lost",
                "contact is lost",
                timeout_s=150.0,
            )
        finally:
            slurm.reach(True)
        wait_until(
            lambda: beside.status(run)["state"] in ("running", "draining", "finished"),
            "contact is back",
            timeout_s=60.0,
        )
        status = beside.settled(run)

    assert reasons(status) == ["finished"]
    assert final_weights(status) == undisturbed(epochs)
    assert {"contact_lost", "contact_back"} <= set(kinds(beside, run))
    assert len(books.entries) == 1, books.entries


def kinds(beside: Beside, run: str) -> list[str]:
    """Return what kinds of things happened to a run."""
    return [entry["kind"] for entry in beside.history(run)]


def kill_controller(beside: Beside, run: str) -> None:
    """Kill the run's controller as an out-of-memory killer would."""
    pid = beside.controller_pid(run)
    assert pid is not None
    os.kill(pid, 9)
    wait_until(lambda: beside.controller_pid(run) is None, "the controller is dead")


def check_money(status: Status, books: Books, slurm: SlurmLab) -> None:
    """Compare what `status` says that a run cost with SkyPilot's books and with Slurm's.

    SkyPilot bills from the request to Slurm, which holds it in its queue for some seconds.
    """
    held = [entry for entry in books.entries.values() if entry.node_s > 0]
    slurm_usd = sum(entry.node_s for entry in held) / 3600.0
    sky_usd = sum(slurm.sky_node_s([entry.cluster for entry in held]).values()) / 3600.0
    told = f"ours {status['spent_usd']}, SkyPilot {sky_usd}, Slurm {slurm_usd}: {held}"
    assert status["spent_usd"] == pytest.approx(sky_usd, rel=0.02), told
    assert 0.99 * slurm_usd <= status["spent_usd"] <= 1.2 * slurm_usd, told
    print(told)  # noqa: T201
