"""What ranks printed is told when their nodes are gone, attempt by attempt, on any machine."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from tests.e2e.lab.lab_jobs import OFTEN, Lab

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]

STEPS = 220
KILLED = (1, 1)
A_NOTICE_OF_12_S = ("--speed-up", "10")
"""As real ones it leaves time for the save and for the last lines, on a busy machine, too."""
TRUTH_LATE_S = 8.0
"""A killed node loses five seconds of its log, and more while the machine is late with all."""
JOB = """
import os, sys, time
import torch
import spotguard.runtime as spotguard

truth = open(os.path.join(sys.argv[1], f"{os.environ['SPOTGUARD_ATTEMPT']}-{os.environ['RANK']}"), "a")

def say(words):
    print(words)
    print(words, time.time(), file=truth, flush=True)

run = spotguard.init()
data = torch.utils.data.TensorDataset(torch.arange(4_000.0).reshape(-1, 1))
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-12)
loader = run.loader(data, global_batch_size=6, micro_batch_size=1)
run.track(model=model, optimizer=optimizer)
for step in run.steps(loader, total=int(sys.argv[2])):
    for (x,) in step:
        step.backward(model(x).mean())
    optimizer.step()
    optimizer.zero_grad()
    say(f"attempt {os.environ['SPOTGUARD_ATTEMPT']} of rank {os.environ['RANK']}: step {step.number}")
    time.sleep(0.1)
"""  # noqa: E501 - a script's own lines


def test_logs_outlive_their_nodes_and_their_machine(lab: Lab) -> None:
    """Of three attempts: what a rank printed last, from the home that ran them and from another."""
    script, truth, store = lab.work / "talks.py", lab.work / "truth", lab.work / "store"
    script.write_text(JOB)
    truth.mkdir()
    status = lab.up(
        script,
        *("--nodes", "2", "--store", str(store), *OFTEN, *A_NOTICE_OF_12_S),
        *("--interrupt", "node=1@step=80:kill", "--interrupt", "node=0@step=100:notice"),
        args=(str(truth), str(STEPS)),
        timeout_s=1000.0,
    )
    run = status["run_id"]
    assert len(status["attempts"]) == 3
    shutil.rmtree(lab.home / "runs" / run / "local")  # whatever a node has left

    told = _told(lab, run)
    for attempt, rank in told:
        printed, at = _printed(truth, attempt, rank), _at(truth, attempt, rank)
        last = printed.index(told[attempt, rank][-1])
        assert told[attempt, rank] == printed[max(0, last - 19) : last + 1]
        if (attempt, rank) == KILLED:
            assert at[-1] - at[last] <= TRUTH_LATE_S
        else:
            assert last == len(printed) - 1

    shutil.rmtree(lab.home)
    lab.home = lab.home.with_name("another")
    place = f"{store}/{run}"
    assert _told(lab, place) == told, "looked at in its store alone"
    adopted = lab.spotguard("adopt", place, "--yes")
    assert adopted.code == 0, adopted.err
    assert _told(lab, run) == told, "adopted"


def _told(lab: Lab, run: str) -> dict[tuple[int, int], list[str]]:
    """Return the last twenty lines of each rank in each attempt that the script itself printed."""
    told = {}
    for attempt in (1, 2, 3):
        for rank in (0, 1):
            chosen = ("--attempt", str(attempt), "--rank", str(rank), "--tail", "20")
            said = lab.spotguard("logs", run, *chosen)
            assert said.code == 0, said.err
            assert 0 < len(said.out.splitlines()) <= 20
            own = lab.spotguard("logs", run, *chosen, "--grep", "attempt . of rank")
            assert own.code == 0, own.err
            told[attempt, rank] = [line.partition(" | ")[2] for line in own.out.splitlines()]
    return told


def _printed(truth: Path, attempt: int, rank: int) -> list[str]:
    lines = (truth / f"{attempt}-{rank}").read_text().splitlines()
    return [line.rpartition(" ")[0] for line in lines]


def _at(truth: Path, attempt: int, rank: int) -> list[float]:
    lines = (truth / f"{attempt}-{rank}").read_text().splitlines()
    return [float(line.rpartition(" ")[2]) for line in lines]
