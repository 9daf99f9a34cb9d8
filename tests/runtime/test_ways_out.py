"""However the script ends itself, the job says truly how it ended, and keeps what it can."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from tests.runtime.processes import Jobs

pytestmark = pytest.mark.e2e

SCRIPT = """
import os, signal, sys, threading, time, traceback, torch
import spotguard.runtime as spotguard
from spotguard.errors import StoreError
from spotguard.storage.file import FileStore

{first}

def main():
    run = spotguard.init(save_every="5 steps")
    {after_init}
    data = torch.utils.data.TensorDataset(torch.randn(24, 3), torch.randn(24, 1))
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(run.loader(data, global_batch_size=4), total=20):
        if step.number == 12:
            {at_12}
        for x, y in step:
            step.backward(torch.nn.functional.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        if step.number == 12:
            {after_12}
    {after_loop}

{call}
"""


def script(jobs: Jobs, **places: str) -> Path:
    """Return a small training script with statements at some of its places."""
    usual = {
        "first": "", "after_init": "pass", "at_12": "pass", "after_12": "pass",
        "after_loop": "pass", "call": "main()",
    }  # fmt: skip
    path = jobs.folder / "job.py"
    path.write_text(SCRIPT.format(**{**usual, **places}))
    return path


NO_ROOM = """
from spotguard.runtime import job
job._EXIT_PATIENCE_S = 0.3
inner = FileStore.put
def put(self, key, *args, **kwargs):
    if {where!r} in key:
        raise StoreError("the bucket is gone")
    return inner(self, key, *args, **kwargs)
FileStore.put = put
"""


def test_a_failed_job_that_hangs_keeps_its_exit_code(jobs: Jobs) -> None:
    """A thread of the script outlives the failure: ended in its place, with 3 and not with 75."""
    hangs = "threading.Thread(target=time.sleep, args=(30,)).start()"
    job = jobs.start(script(jobs, first=NO_ROOM.format(where="manifest"), after_init=hangs))

    assert job.wait() == 3, job.said
    assert [end["reason"] for end in jobs.ends()] == ["store_failed"]
