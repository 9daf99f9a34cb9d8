"""Averaged weights, in the model's place to be evaluated, are not taken for the training's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.runtime.harness.processes import digest

if TYPE_CHECKING:
    from tests.runtime.harness.processes import Jobs

pytestmark = pytest.mark.e2e

SCRIPT = Path(__file__).parents[1] / "jobs" / "averaged.py"


def ranks(jobs: Jobs, world: int, *, code: int = 0, **env: Any) -> list[str]:
    """Run the ranks of one attempt to their end; return what each said."""
    started = jobs.start_ranks(world, script=SCRIPT, **env)
    assert [rank.wait() for rank in started] == [code] * world, [rank.said for rank in started]
    return [rank.said for rank in started]


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize(("by", "reason"), [("cloud", "terminated"), ("budget", "budget")])
def test_weights_that_were_exchanged_are_not_saved(
    jobs: Jobs, world: int, by: str, reason: str
) -> None:
    """The last save counts, and the run ends with the weights that it had undisturbed.

    Whoever told it to stop, nobody is told that the store had failed.
    """
    calm = ranks(jobs, world, SPOTGUARD_RUN_ID="calm")
    left = ranks(jobs, world, code=75, HURT="9", BY=by)
    assert "evaluated 6" in left[0]
    assert "evaluated 9" not in left[0]
    [end] = jobs.ends()
    assert (end["reason"], end["step"], end["saved_step"]) == (reason, 9, 8)
    again = ranks(jobs, world, SPOTGUARD_ATTEMPT=2)
    assert "done 8" in again[0].splitlines()
    assert [digest(each) for each in again] == [digest(each) for each in calm]


AT_EPOCH_ENDS = """
import hashlib, os, signal
import torch
import spotguard.runtime as spotguard

run = spotguard.init(save_every="2 steps")
data = torch.utils.data.TensorDataset(torch.randn(18, 3), torch.randn(18, 1))
model = torch.nn.Linear(3, 1)
average = torch.optim.swa_utils.AveragedModel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
run.track(model=model, optimizer=optimizer, average=average)
loader = run.loader(data, global_batch_size=6, micro_batch_size=6)
for epoch in run.epochs(loader, total=3):
    for step in epoch:
        for x, y in step:
            step.backward(torch.nn.functional.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    average.update_parameters(model)
    for batch in run.evaluate(range(4)) if epoch.number else ():
        if batch == 1 and os.environ.get("HURT") == str(epoch.number):
            os.kill(os.getpid(), signal.SIGTERM)
            while run._job.watch.agreed is None:
                signal.sigtimedwait([], 0.01)
    print("averaged", int(average.n_averaged))
state = b"".join(p.detach().numpy().tobytes() for p in average.parameters())
print("digest", hashlib.sha256(state).hexdigest())
"""


def test_an_average_of_an_epoch_that_is_cut_is_taken_once(jobs: Jobs) -> None:
    """It goes on before the evaluation, which is left, the very first and a later one, too."""
    script = jobs.folder / "at_epoch_ends.py"
    script.write_text(AT_EPOCH_ENDS)
    calm = jobs.start(script, SPOTGUARD_RUN_ID="calm")
    assert calm.wait() == 0, calm.said
    for attempt, (code, env) in enumerate(((75, {"HURT": 1}), (75, {"HURT": 2}), (0, {})), 1):
        job = jobs.start(script, SPOTGUARD_ATTEMPT=attempt, **env)
        assert job.wait() == code, job.said
    assert "averaged 3" in job.said.splitlines()
    assert digest(job.said) == digest(calm.said)


OF_DDP = """
import os, signal, time
import torch
import spotguard.runtime as spotguard

class Task(torch.nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return self.net(x)

run = spotguard.init(seed=3, save_every="100 steps")
data = torch.utils.data.TensorDataset(torch.randn(28, 3), torch.randn(28, 1))
model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
if run.world_size > 1:
    model = torch.nn.parallel.DistributedDataParallel(model)
average = torch.optim.swa_utils.AveragedModel(model)  # which copies the DDP
task = Task(model)
optimizer = torch.optim.SGD(task.parameters(), lr=0.1, momentum=0.9)
run.track(task=task, average=average, optimizer=optimizer)
for step in run.steps(run.loader(data, global_batch_size=14, micro_batch_size=2), total=9):
    for x, y in step:
        step.backward((task(x) - y).pow(2).mean())
    optimizer.step()
    optimizer.zero_grad()
    average.update_parameters(model)
    if step.number == int(os.environ.get("TOLD_AT", -1)) and run.rank == run.world_size - 1:
        os.kill(os.getpid(), signal.SIGTERM)
        while run._job.watch.agreed is None:
            signal.sigtimedwait([], 0.01)
whole = torch.cat([p.detach().flatten() for p in (*task.parameters(), *average.parameters())])
print("averaged", int(average.n_averaged))
print("weights", whole.tolist())
"""


def test_an_average_of_a_model_in_ddp_goes_on_on_any_number_of_ranks(jobs: Jobs) -> None:
    """3 ranks, 1 without a DDP, 2, then 3: whatever is wrapped within what is tracked."""
    script = jobs.folder / "of_ddp.py"
    script.write_text(OF_DDP)

    def attempt(number: int, world: int, code: int = 0, **env: Any) -> list[str]:
        started = jobs.start_ranks(world, script=script, SPOTGUARD_ATTEMPT=number, **env)
        said = [rank.said for rank in started if rank.wait() == code]
        assert len(said) == world, "\n".join(rank.said for rank in started)
        return said

    calm = attempt(1, 3, SPOTGUARD_RUN_ID="calm")
    for number, (world, told_at) in enumerate(((3, 1), (1, 3), (2, 5)), 1):
        attempt(number, world, 75, TOLD_AT=told_at)
    for said in attempt(4, 3):
        assert "averaged 9" in said.splitlines()
        assert weights(said) == pytest.approx(weights(calm[0]), rel=1e-5)


def weights(said: str) -> list[float]:
    """Return the weights that a job has ended with."""
    found: list[float] = json.loads(digest(said, "weights").removeprefix("weights "))
    return found
