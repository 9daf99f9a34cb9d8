"""Worker processes of a script's own loaders, when SIGTERM comes to the whole process tree."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from tests.runtime.harness.processes import Jobs

pytestmark = pytest.mark.e2e

SCRIPT = """
import os, time, torch
import spotguard.runtime as spotguard

torch.set_num_threads(2)  # from here on torch makes a thread in each forked worker
run = spotguard.init(save_every="100 steps")
data = torch.utils.data.TensorDataset(torch.randn(64, 3), torch.randn(64, 1))
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
run.track(model=model, optimizer=optimizer)
loader = run.loader(data, global_batch_size=4, micro_batch_size=2, num_workers=1)
held_out = torch.utils.data.DataLoader(data, num_workers=2, persistent_workers=True)


def evaluate():
    for count, batch in enumerate(run.evaluate(held_out), 1):
        time.sleep(float(os.environ.get("EVALUATION_PACE_S", "0")))
        print("evaluated", count, flush=True)
    print("evaluation ends", flush=True)


for step in run.steps(loader, total=int(os.environ.get("STEPS", "9"))):
    if step.number == 0:
        evaluate()
    for x, y in step:
        step.backward(torch.nn.functional.mse_loss(model(x), y))
    optimizer.step()
    optimizer.zero_grad()
    print("step", step.number, flush=True)
    time.sleep(float(os.environ.get("PACE_S", "0")))
evaluate()
print("over", flush=True)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A job whose loader of held-out data keeps its workers from one evaluation to the next."""
    path = tmp_path / "job.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.parametrize(
    ("moment", "slow"),
    [("step 3", {"PACE_S": 0.1, "STEPS": 500}), ("evaluated 3", {"EVALUATION_PACE_S": 0.1})],
)
def test_sigterm_to_the_whole_tree_leaves_them_to_their_work(
    jobs: Jobs, script: Path, moment: str, slow: dict[str, float]
) -> None:
    """The job leaves as ever, saved; one worker's death would have ended it with an error."""
    job = jobs.start(script, **slow)
    job.wait_for(moment)
    for _ in range(2):
        job.kill_tree(signal.SIGTERM)
    assert job.wait() == 75, job.said
    [end] = jobs.ends()
    assert (end["reason"], end["step"]) == ("terminated", end["saved_step"])

    assert "over" in jobs.run(script, SPOTGUARD_ATTEMPT=2, STEPS=9)
