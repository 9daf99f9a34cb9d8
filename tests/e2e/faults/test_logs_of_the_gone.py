"""What ranks printed is told when their nodes are gone, attempt by attempt, on any machine."""

from __future__ import annotations

import shutil

import pytest

from tests.e2e.lab.lab_jobs import FAST_CLOUD, OFTEN, Lab
from tests.e2e.lab.told_logs import check_told, told, told_elsewhere

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]

STEPS = 120
KILLED = 1
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
        *("--nodes", "2", "--store", str(store), *OFTEN, *FAST_CLOUD),
        *("--interrupt", "node=1@step=80:kill", "--interrupt", "node=0@step=100:notice"),
        args=(str(truth), str(STEPS)),
        timeout_s=1000.0,
    )
    run = status["run_id"]
    assert len(status["attempts"]) == 3
    shutil.rmtree(lab.home / "runs" / run / "local")  # whatever a node has left

    ranks = [(attempt, rank) for attempt in (1, 2, 3) for rank in (0, 1)]
    here = told(lab, run, ranks)
    check_told(here, truth, killed=[KILLED])
    assert told_elsewhere(lab, f"{store}/{run}", ranks) == (here, here)
