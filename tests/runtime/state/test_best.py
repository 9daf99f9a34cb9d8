from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest

from spotguard.checkpoint.lineage import restorable
from spotguard.checkpoint.manifest import load_manifest
from spotguard.runtime.state.best import Best, BestState
from spotguard.storage import open_store

if TYPE_CHECKING:
    from pathlib import Path

    from tests.runtime.harness.processes import Jobs

SCRIPT = """
import os, torch
import spotguard.runtime as spotguard

run = spotguard.init(save_every="2 steps", keep_last=2)
data = torch.utils.data.TensorDataset(torch.randn(12, 3), torch.randn(12, 1))
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.track(model=model, optimizer=optimizer)
values = [9, 5, 7, float("nan"), 3, 6, 8, 4, 9, 9, 2, 9]
stop = int(os.environ.get("STOP", "99"))
for step in run.steps(run.loader(data, global_batch_size=4), total=len(values)):
    for x, y in step:
        step.backward(model(x).sum())
    optimizer.step()
    optimizer.zero_grad()
    if run.best(values[step.number]):
        print("best", step.number, flush=True)
    if step.number == stop:
        raise ValueError("enough")
"""


def test_only_a_better_value_counts() -> None:
    """NaN never does, an equal value does not, and more is better where it was said so."""
    least, most = Best(), Best(BestState(3.0))
    assert [least.offer(v, "min") for v in (math.nan, 5, 5, 6, math.inf, 4)] == [
        False,
        True,
        False,
        False,
        False,
        True,
    ]
    assert [most.offer(v, "max") for v in (2, 3, math.nan, 4)] == [False, False, False, True]
    assert (least.value, most.value) == (4, 4)


@pytest.mark.e2e
def test_the_best_state_is_kept_beyond_retention_and_remembered(jobs: Jobs, tmp_path: Path) -> None:
    """Old saves go, the best one stays; after a resume only a still better value counts."""
    script = tmp_path / "job.py"
    script.write_text(SCRIPT)
    said = jobs.run(script, code=1, STOP=9)
    assert [line for line in said.splitlines() if line.startswith("best")] == [
        "best 0",
        "best 1",
        "best 4",
    ]
    assert kinds(jobs)[5] == "best"
    assert 2 not in kinds(jobs), "an older best one is like any other"

    said = jobs.run(script, SPOTGUARD_ATTEMPT=2)
    assert [line for line in said.splitlines() if line.startswith("best")] == ["best 10"]
    assert [step for step, kind in kinds(jobs).items() if kind == "best"][-1] == 11


def kinds(jobs: Jobs) -> dict[int, str]:
    """Return {steps: kind} of the run's checkpoints."""
    store = open_store(str(jobs.folder / "spotguard-runs" / "a-run"))
    return {
        ref.step: str(load_manifest(store, ref.prefix).kind)
        for ref in reversed([*restorable(store)])
    }
