"""Whole runs through the real SkyPilot on a real Slurm, on the virtual nodes of `infra/lab`.

`SPOTLAB_DIR` names a lab that is up already; without it one is brought up, which needs root and
Debian, and taken away again. What happens in a run is real, and takes the time that it takes: two
runs share the lab where they do not disturb each other.
"""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from tests.e2e.lab.lab_jobs import (
    EXAMPLES,
    JOBS,
    final_weights,
    reasons,
    store_of,
)
from tests.e2e.lab.slurm_lab import Books, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.e2e.lab.lab_jobs import Status, Weights
    from tests.e2e.lab.slurm_lab import Beside, SlurmLab

pytestmark = [pytest.mark.e2e, pytest.mark.lab, pytest.mark.timeout(3000)]

GPT = EXAMPLES / "train_gpt.py"
EXACT = JOBS / "exact.py"
WITNESSED = JOBS / "witnessed_gpt.py"
_LATE_S = 30.0
_REFUSED_S = 10.0
"""How much longer than Slurm SkyPilot bills a cluster, on a machine that has much else to do."""
_STOPS_BEFORE_S = 240.0
"""With so much money left a run may be stopped already; it is to train a little before."""
_TRAINS_S = 60.0
"""For less than that no nodes are asked for, however fast they come up."""
_LOST_S = 8.0
"""Of the log of a node that is killed: five seconds, and more while the machine is late."""

_TAIL = 100
"""Lines of a rank: where a peer is gone, the last may be the error that ended the script."""


def test_preempted_twice_shrunk_killed_and_grown_again(
    beside: Beside, slurm: SlurmLab, undisturbed: Callable[..., Weights]
) -> None:
    """Whatever Slurm takes, the run goes on where it was, on what there is, at the right price.

    And when no node is left, what each rank printed is told: here, and where it is adopted.
    """
    steps = 180  # those of the first three attempts are 110 at most
    args = ("--bitwise", "--steps", str(steps))
    beside.copy(GPT)
    printed = beside.shared("printed")
    with Books(slurm) as books:
        flags = ("--nodes", "1:3", "--budget", "5")
        run = beside.begin(WITNESSED, *flags, args=(str(printed), *args, "--pause", "0.25"))
        beside.trains(run, attempt=1)
        announce_and_preempt(beside, slurm, run)

        beside.trains(run, attempt=2)
        slurm.verb("release")
        slurm.verb("preempt", "spot2", grace_s=15.0)
        beside.ended(run, attempt=2)
        slurm.verb("release")

        beside.trains(run, attempt=3)
        found_out_s = kill_and_heal(beside, slurm, run, attempt=3)
        status = beside.settled(run)

    nodes = [attempt["nodes"] for attempt in status["attempts"]]
    assert nodes[:3] == [3, 2, 3]
    assert nodes[3:] in ([3], [2]), "2 if the dead node takes long to start again"
    ends = reasons(status)
    assert (ends[0], ends[3]) == ("preempted", "finished")
    assert ends[1] in ("terminated", "node_lost"), "a rank may be too busy to answer in time"
    assert ends[2] in ("vanished", "node_lost")
    assert found_out_s < 60.0
    assert [recovery["detect_s"] < 3.0 for recovery in status["recoveries"]] == [True] * 3
    assert final_weights(status) == undisturbed(GPT, *args)
    assert status["step"] == status["total_steps"] == steps
    assert {"notice", "no_capacity"} <= set(kinds(beside, run))
    assert slurm.sky_names() == []
    check_money(status, books, slurm)
    check_logs(beside, status, printed)


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_the_example_is_preempted_shrinks_and_grows_by_its_own_rule(
    beside: Beside, slurm: SlurmLab, undisturbed: Callable[..., Weights]
) -> None:
    """With less than it may have, a run trains on, and lets go when more may be had and it pays.

    How long it waits follows from how long a start takes, so this needs a quiet machine.
    """
    steps = 1000
    args = ("--bitwise", "--steps", str(steps))
    with Books(slurm) as books, ThreadPoolExecutor() as meanwhile:
        expected = meanwhile.submit(undisturbed, GPT, *args)
        flags = ("--nodes", "1:3", "--budget", "5")
        run = beside.begin(GPT, *flags, args=(*args, "--pause", "0.2"))
        beside.trains(run, attempt=1)
        announce_and_preempt(beside, slurm, run)

        beside.trains(run, attempt=2)
        slurm.verb("release")
        beside.ended(run, attempt=2, within_s=420.0)

        beside.trains(run, attempt=3)
        slurm.verb("preempt", "spot2", grace_s=15.0)
        beside.ended(run, attempt=3)
        slurm.verb("release")

        beside.trains(run, attempt=4)
        found_out_s = kill_and_heal(beside, slurm, run, attempt=4)
        status = beside.settled(run, within_s=900.0)

    assert [attempt["nodes"] for attempt in status["attempts"]] == [3, 2, 3, 3, 3]
    ends = reasons(status)
    assert (ends[:2], ends[4]) == (["preempted", "resized"], "finished")
    assert ends[2] in ("terminated", "node_lost"), "a rank may be too busy to answer in time"
    assert ends[3] in ("vanished", "node_lost")
    assert found_out_s < 60.0
    assert [recovery["detect_s"] < 3.0 for recovery in status["recoveries"]] == [True] * 4
    assert final_weights(status) == expected.result()
    assert status["step"] == status["total_steps"] == steps
    lost = [attempt["steps_lost"] for attempt in status["attempts"]]
    assert (lost[:3], lost[4]) == ([0, 0, 0], 0)
    assert lost[3] <= 10, "two intervals between saves"
    assert {"notice", "no_capacity"} <= set(kinds(beside, run))
    assert slurm.sky_names() == []
    check_money(status, books, slurm)


@pytest.mark.long
def test_killed_at_each_outside_act_nothing_is_done_twice(
    beside: Beside, slurm: SlurmLab, tmp_path: Path, undisturbed: Callable[..., Weights]
) -> None:
    """A controller dies before and after each request and each write; `status` starts the next."""
    epochs = 100
    slow = beside.mark("slow")  # or it might be done before a dying controller hands a stop on
    deaths = tmp_path / "deaths"
    deaths.mkdir()
    beside.mortal = deaths
    with Books(slurm) as books:
        args = ("--epochs", str(epochs), "--pause", "0.1", "--while", str(slow))
        run = beside.begin(EXACT, "--nodes", "1", args=args)
        beside.trains(run, attempt=1, more_steps=5)
        assert beside.spotguard("stop", run, timeout_s=300.0).code == 0
        beside.ended(run, attempt=1)
        wait_until(lambda: beside.status(run)["state"] == "stopped", "it rests", timeout_s=120.0)
        assert beside.spotguard("resume", run, "--detach").code == 0
        beside.trains(run, attempt=2)
        slow.unlink()
        status = beside.settled(run)

    died = {path.name for path in deaths.iterdir()}
    acts = ("submit", "down", "put launch", "put stop", "put end", "put controller")
    assert died >= {f"{act}.{side}" for act in acts for side in ("before", "after")}
    assert reasons(status) == ["stopped", "finished"]
    assert final_weights(status) == undisturbed(EXACT, "--epochs", str(epochs))
    assert len(books.entries) == 2, books.entries
    check_money(status, books, slurm)


def test_out_of_reach_a_run_goes_on_and_a_budget_is_kept(
    beside: Beside, slurm: SlurmLab, undisturbed: Callable[..., Weights]
) -> None:
    """SkyPilot is silent for five minutes: nothing is killed or started anew, and it goes on.

    Its job is heard all the time, so no contact is lost.

    Another run, whose controller is dead, uses its money up meanwhile: its job saves and stops by
    itself, and its cluster goes away.
    """
    epochs = 200
    slow = beside.mark("slow")
    with Books(slurm) as books:
        begun_at = time.monotonic()
        args = ("--epochs", str(epochs), "--pause", "0.25", "--while", str(slow))
        run = beside.begin(EXACT, "--nodes", "1", args=args)
        beside.trains(run, attempt=1)
        start_s = time.monotonic() - begun_at
        budget_usd = _worth_usd(_STOPS_BEFORE_S + _TRAINS_S + 1.5 * start_s)
        alone = beside.begin(
            EXACT,
            *("--nodes", "1", "--budget", str(budget_usd)),
            args=("--epochs", "999", "--pause", "0.1"),
        )
        poor = beside.trains(alone, attempt=1)
        beside.kill_controller(alone)
        slurm.reach(False)
        try:
            cut_at = time.monotonic()
            wait_until(
                lambda: beside.status(run)["state"] == "cloud_silent",
                "the cloud is silent",
                timeout_s=300.0,
            )
            wait_until(
                lambda: time.monotonic() - cut_at > 300.0 and len(slurm.clusters()) == 1,
                "five minutes are over, and the budget's cluster is gone",
                timeout_s=800.0,
            )
        finally:
            slurm.reach(True)
        wait_until(
            lambda: beside.status(run)["state"] in ("running", "draining", "finished"),
            "the cloud is back",
            timeout_s=120.0,
        )
        slow.unlink()
        status = beside.settled(run)

    assert reasons(status) == ["finished"]
    assert final_weights(status) == undisturbed(EXACT, "--epochs", str(epochs))
    assert {"cloud_silent", "cloud_back"} <= set(kinds(beside, run))
    assert "contact_lost" not in kinds(beside, run)
    assert len(books.entries) == 2, books.entries

    assert beside.controller_pid(alone) is None, "somebody else took it down"
    saved = sorted((store_of(poor)).glob("checkpoints/*/manifest.json"))
    poor = beside.settled(alone)
    assert (poor["state"], reasons(poor)) == ("paused", ["budget"])
    assert poor["saved_step"] == int(saved[-1].parent.name.split("-")[0])
    assert poor["attempts"][0]["steps_lost"] == 0
    assert poor["spent_usd"] <= budget_usd


def _worth_usd(seconds: float) -> float:
    """Return what a node of the lab costs in that time."""
    return round(seconds / 3600.0, 2)


def kinds(beside: Beside, run: str) -> list[str]:
    """Return what kinds of things happened to a run."""
    return [entry["kind"] for entry in beside.history(run)]


def announce_and_preempt(beside: Beside, slurm: SlurmLab, run: str) -> None:
    """Take a node of the first attempt as a cloud does: 12 s after its metadata said so."""
    slurm.verb("notice", "spot1", "aws", "12")
    time.sleep(12.0)
    slurm.verb("preempt", "spot1", grace_s=5.0)
    beside.ended(run, attempt=1)
    slurm.verb("imds", "all", "aws")  # what comes in its place is another machine


def kill_and_heal(beside: Beside, slurm: SlurmLab, run: str, *, attempt: int) -> float:
    """Cut the power of a node; return after how many seconds the attempt was known to be over."""
    killed_at = time.time()
    slurm.verb("kill", "spot3")
    beside.ended(run, attempt=attempt)
    found_out_s = time.time() - killed_at
    slurm.verb("heal", "spot3")
    return found_out_s


def check_money(status: Status, books: Books, slurm: SlurmLab) -> None:
    """Compare what `status` says that a run cost with SkyPilot's books and with Slurm's.

    SkyPilot bills from its request to Slurm, which starts it some seconds later, to the end that
    it sees some seconds after Slurm.
    """
    held = [entry for entry in books.entries.values() if entry.node_s > 0]
    slurm_usd = sum(entry.node_s for entry in held) / 3600.0
    # Of a request that Slurm took and then refused, SkyPilot counts the wait, too.
    begun = [entry.cluster for entry in held if entry.node_s > entry.nodes * _REFUSED_S]
    sky_usd = sum(slurm.sky_node_s(begun).values()) / 3600.0
    told = f"ours {status['spent_usd']}, SkyPilot {sky_usd}, Slurm {slurm_usd}: {held}"
    assert status["spent_usd"] == pytest.approx(sky_usd, rel=0.02), told
    late_usd = sum(entry.nodes for entry in held) * _LATE_S / 3600.0
    assert 0.99 * slurm_usd <= status["spent_usd"] <= slurm_usd + late_usd, told
    print(told)  # noqa: T201


def check_logs(beside: Beside, status: Status, printed: Path) -> None:
    """Compare what `logs` tells of each rank of each attempt with what it printed.

    Of a node that was killed five seconds may be missing; another home that adopts the run tells
    the same.
    """
    run = status["run_id"]
    told = {}
    for each in status["attempts"]:
        for rank in range(each["nodes"]):
            attempt = each["attempt"]
            last = printed_last(beside, run, attempt, rank)
            told[attempt, rank] = last
            lines = (printed / f"{attempt}-{rank}").read_text().splitlines()
            until = lines.index(last[-1]) + 1
            assert last == lines[max(0, until - len(last)) : until]
            if each["end_reason"] in ("preempted", "finished"):
                assert until == len(lines)
            lost_s = _printed_at(lines[-1]) - _printed_at(last[-1])
            assert lost_s <= _LOST_S, f"rank {rank} of attempt {attempt} lost {lost_s:.1f} s"

    another = {"SPOTGUARD_HOME": str(beside.home.with_name("another"))}
    adopted = beside.spotguard("adopt", f"{beside.store}/{run}", "--yes", env=another)
    assert adopted.code == 0, adopted.err
    for each in status["attempts"]:
        last = printed_last(beside, run, each["attempt"], rank=0, env=another)
        assert last == told[each["attempt"], 0]


def printed_last(
    beside: Beside, run: str, attempt: int, rank: int, *, env: dict[str, str] | None = None
) -> list[str]:
    """Return what of the last lines of a rank its script printed."""
    chosen = ("--attempt", str(attempt), "--rank", str(rank), "--tail", str(_TAIL))
    said = beside.spotguard("logs", run, *chosen, "--json", env=env)
    assert said.code == 0, said.err
    lines = [json.loads(line) for line in said.out.splitlines()]
    assert 0 < len(lines) <= _TAIL, said.out
    assert {(line["attempt"], line["rank"]) for line in lines} == {(attempt, rank)}
    last = [line["text"] for line in lines if line["stream"] == "stdout"]
    assert last, f"rank {rank} of attempt {attempt}: {said.out}"
    return last


def _printed_at(line: str) -> float:
    return float(line.rpartition(" ")[2])
