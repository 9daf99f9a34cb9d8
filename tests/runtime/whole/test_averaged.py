"""Averaged weights, in the model's place to be evaluated, are not taken for the training's."""

from __future__ import annotations

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
