"""Jobs of three ranks whose saves fail: now and then, in a row, or while their store is away."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from spotguard.checkpoint.lineage import restorable

if TYPE_CHECKING:
    from pathlib import Path

    from tests.runtime.harness.processes import Jobs

pytestmark = pytest.mark.e2e

SCRIPT = """
import os, time, torch
import spotguard.runtime as spotguard
from spotguard import errors
from spotguard.storage.filesystem.store import FileStore

failing = {f"{int(step):012d}" for step in os.environ["FAILING"].split(",")}
put = FileStore.put

def refuses(self, key, *args, **options):
    if key.endswith("manifest.json") and any(step in key for step in failing):
        raise getattr(errors, os.environ["HOW"])("the store has a hiccup (scripted)")
    return put(self, key, *args, **options)

FileStore.put = refuses
run = spotguard.init(save_every="1 steps")
data = torch.utils.data.TensorDataset(torch.randn(30, 3), torch.randn(30, 1))
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.track(model=model, optimizer=optimizer)
for step in run.steps(run.loader(data, global_batch_size=6), total=9):
    for x, y in step:
        step.backward(model(x).sum())
    optimizer.step()
    optimizer.zero_grad()
    run._job.keeper.saver.wait()  # each step's save has its turn
"""


@pytest.mark.parametrize(
    ("failing", "code", "steps", "how"),
    [
        ("2,4,6,8", 0, 9, "StoreError"),
        ("3,4,5", 3, 2, "StoreError"),
        ("3,4,5,6", 0, 9, "StoreUnavailable"),
    ],
    ids=["some", "in a row", "away"],
)
def test_only_refusals_in_a_row_stop_a_job(
    jobs: Jobs, tmp_path: Path, failing: str, code: int, steps: int, how: str
) -> None:
    """Of a success the first rank hears alone: the others count no failure of long ago.

    A store that is away refuses nothing: the job goes on, on all ranks, and saves once it is back.
    """
    script = tmp_path / "job.py"
    script.write_text(SCRIPT)
    ranks = jobs.start_ranks(3, script=script, FAILING=failing, HOW=how)
    ends = [job.wait() for job in ranks]

    assert ends == [code] * 3, "\n".join(job.said for job in ranks)
    assert next(restorable(jobs.store())).step == steps
    told = [str(end.get("message")) for end in jobs.ends()]
    assert ["3 saves in a row failed" in each for each in told] == [code != 0] * len(told)
