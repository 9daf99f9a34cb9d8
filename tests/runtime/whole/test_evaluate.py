from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.runtime.harness.processes import digest

if TYPE_CHECKING:
    from pathlib import Path

    from tests.runtime.harness.processes import Jobs

pytestmark = pytest.mark.e2e

SCRIPT = """
import hashlib, os, signal, torch
import torch.distributed as dist
import spotguard.runtime as spotguard

run = spotguard.init(save_every="100 steps")
data = torch.utils.data.TensorDataset(torch.randn(24, 3), torch.randn(24, 1))
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
run.track(model=model, optimizer=optimizer)
loader = run.loader(data, global_batch_size=4, micro_batch_size=2)
hurt = os.environ.get("HURT_RANK") == str(run.rank)


def evaluate(when, batches):
    count = 20 - len(batches)
    for batch in batches:
        if hurt and batch == 2 and when == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        if run.world_size > 1:
            total = torch.ones(1)
            dist.all_reduce(total)
        signal.sigtimedwait([], 0.05)
        count += 1
    print("evaluated", when, count, flush=True)


for step in run.steps(loader, total=10):
    if step.number % 5 == 0:
        evaluate(step.number, run.evaluate(range(20)))
    for x, y in step:
        step.backward(torch.nn.functional.mse_loss(model(x), y))
    optimizer.step()
    optimizer.zero_grad()
evaluate("end", run.evaluate(range(20)))
weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
print("digest", hashlib.sha256(weights).hexdigest())
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """The job."""
    path = tmp_path / "job.py"
    path.write_text(SCRIPT)
    return path


def test_an_evaluation_is_left_at_once_and_begun_anew(jobs: Jobs, script: Path) -> None:
    """The boundary before it is saved; after the resume the whole evaluation comes again."""
    expected = digest(jobs.run(script, SPOTGUARD_RUN_ID="undisturbed"))
    said = jobs.run(script, code=75, HURT_RANK=0)
    assert "evaluated 0 20" in said
    assert "evaluated 5" not in said
    [end] = jobs.ends()
    assert (end["step"], end["saved_step"]) == (5, 5)

    said = jobs.run(script, SPOTGUARD_ATTEMPT=2)
    assert "evaluated 5 20" in said
    assert "evaluated 0" not in said
    assert "evaluated end 20" in said
    assert digest(said) == expected


def test_all_ranks_leave_an_evaluation_at_the_same_batch(jobs: Jobs, script: Path) -> None:
    """One rank is told in the middle of a loop of collectives: both leave, saved, none hangs."""
    ranks = jobs.start_ranks(2, script=script, HURT_RANK=1)
    assert [rank.wait() for rank in ranks] == [75, 75], [rank.said for rank in ranks]
    [end] = jobs.ends()
    assert (end["reason"], end["step"], end["saved_step"]) == ("terminated", 5, 5)
