"""What a script does after it has left its loop by `break` is no part of what is saved."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

from spotguard.shared.units import to_iso
from tests.runtime.harness.processes import digest

if TYPE_CHECKING:
    from pathlib import Path

    from tests.runtime.harness.processes import Job, Jobs

pytestmark = pytest.mark.e2e

SCRIPT = """
import hashlib, os, time, torch
import spotguard.runtime as spotguard
from spotguard.runtime.checkpoint.staging import StagingBuffer

run = spotguard.init(save_every="4 steps")
torch.manual_seed(1)
data = torch.utils.data.TensorDataset(torch.randn(24, 3), torch.randn(24, 1))
model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
run.track(model=model, optimizer=optimizer)
leaves, after = os.environ.get("LEAVES", ""), os.environ.get("AFTER", "")


def refuse(self, leaves, plan, *, overlap):
    raise RuntimeError("CUDA error")


def train():
    for step in run.steps(run.loader(data, global_batch_size=4), total=10):
        model(torch.randn(2, 3))  # moves BatchNorm's statistics
        if leaves == "body" and step.number == 5:
            StagingBuffer.stage = refuse if after == "not copied" else StagingBuffer.stage
            break
        for x, y in step:
            step.backward(torch.nn.functional.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        if leaves == "end" and step.number == 5:
            StagingBuffer.stage = refuse if after == "not copied" else StagingBuffer.stage
            break
        if leaves == "error" and step.number == 5:
            raise ValueError("a mistake")


try:
    train()
finally:
    if after:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        model(torch.randn(2, 3))
    if after == "cast":
        model.half()
    if after == "told":
        print("the loop is over", flush=True)
        time.sleep(600)
whole = b"".join(v.detach().numpy().tobytes() for v in model.state_dict().values())
print("digest", hashlib.sha256(whole).hexdigest())
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """Return a script that leaves its loop and goes on with its model."""
    path = tmp_path / "job.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture
def undisturbed(jobs: Jobs, script: Path) -> str:
    """Return what it ends with if nothing disturbs it."""
    return digest(jobs.run(script, SPOTGUARD_RUN_ID="calm"))


@pytest.mark.parametrize("after", ["exchanged", "cast"])
@pytest.mark.parametrize(("leaves", "step"), [("body", 5), ("end", 6)])
def test_weights_of_after_the_loop_are_not_saved(
    jobs: Jobs, script: Path, undisturbed: str, leaves: str, step: int, after: str
) -> None:
    """The best weights, an average, or a cast for the test come after what is taken up again."""
    said = jobs.run(script, LEAVES=leaves, AFTER=after)
    [end] = jobs.ends()
    assert (end["reason"], end["saved_step"], end["saved"]) == ("finished", step, True)
    assert "the weights are saved as they were where the loop was left" in said

    assert digest(jobs.run(script, SPOTGUARD_ATTEMPT=2)) == undisturbed


@pytest.mark.parametrize("leaves", ["body", "end"])
def test_weights_that_changed_and_were_not_copied_are_told(
    jobs: Jobs, script: Path, undisturbed: str, leaves: str
) -> None:
    """Nothing that may be wrong is saved: the last save counts, and the history says so."""
    said = jobs.run(script, LEAVES=leaves, AFTER="not copied")

    [end] = jobs.ends()
    assert (end["reason"], end["saved_step"], end["saved"]) == ("finished", 4, False)
    assert "after which they were not copied" in said
    assert [e.kind for e in jobs.events()].count("save_failed") == 1
    assert digest(jobs.run(script, SPOTGUARD_ATTEMPT=2)) == undisturbed


def told_after_loop(jobs: Jobs, script: Path, leaves: str) -> Job:
    """Return a job that was told to stop within seconds in what comes after its loop."""
    notice = jobs.folder / "notice"
    job = jobs.start(script, LEAVES=leaves, AFTER="told", SPOTGUARD_NOTICE_FILE=notice)
    job.wait_for("the loop is over")
    notice.write_text(f'{{"deadline_at": "{to_iso(time.time() + 6)}"}}')
    assert job.wait() == 75, job.said
    return job


@pytest.mark.parametrize(("leaves", "step"), [("body", 5), ("end", 6)])
def test_a_notice_after_the_loop_saves_where_it_was_left(
    jobs: Jobs, script: Path, undisturbed: str, leaves: str, step: int
) -> None:
    """All steps since the last periodic save are kept, whatever the script has loaded since."""
    job = told_after_loop(jobs, script, leaves)

    [end] = jobs.ends()
    assert (end["reason"], end["saved_step"], end["saved"]) == ("preempted", step, True), job.said
    assert digest(jobs.run(script, SPOTGUARD_ATTEMPT=2)) == undisturbed


def test_a_notice_while_an_error_is_handled_takes_it_for_no_break(
    jobs: Jobs, script: Path, undisturbed: str
) -> None:
    """The step in which the error came may be half done: the last save counts."""
    told_after_loop(jobs, script, "error")

    [end] = jobs.ends()
    assert (end["saved_step"], end["saved"]) == (4, False)
    assert digest(jobs.run(script, SPOTGUARD_ATTEMPT=2)) == undisturbed


def test_two_ranks_save_where_they_left_their_loops(jobs: Jobs, script: Path) -> None:
    """Each keeps a copy of what it stores; the first one's has the weights."""
    calm = jobs.start_ranks(2, script=script, SPOTGUARD_RUN_ID="calm")
    assert [job.wait() for job in calm] == [0, 0], calm[0].said

    left = jobs.start_ranks(2, script=script, LEAVES="end", AFTER="exchanged")
    assert [job.wait() for job in left] == [0, 0], left[0].said
    [end] = jobs.ends()
    assert (end["reason"], end["saved_step"], end["saved"]) == ("finished", 6, True)
    resumed = jobs.start_ranks(2, script=script, SPOTGUARD_ATTEMPT=2)

    assert [job.wait() for job in resumed] == [0, 0], resumed[0].said
    assert digest(resumed[0].said) == digest(calm[0].said)


def test_two_ranks_that_are_told_after_their_loops_save_where_they_left_them(
    jobs: Jobs, script: Path
) -> None:
    """Whichever is the first to save: the second one has no copy of the weights, and knows it."""
    calm = jobs.start_ranks(2, script=script, SPOTGUARD_RUN_ID="calm")
    assert [job.wait() for job in calm] == [0, 0], calm[0].said

    notice = jobs.folder / "notice"
    how: dict[str, Any] = {"LEAVES": "end", "AFTER": "told", "SPOTGUARD_NOTICE_FILE": notice}
    told = jobs.start_ranks(2, script=script, **how)
    for job in told:
        job.wait_for("the loop is over")
    notice.write_text(f'{{"deadline_at": "{to_iso(time.time() + 6)}"}}')
    assert [job.wait() for job in told] == [75, 75], told[0].said
    [end] = jobs.ends()
    assert (end["reason"], end["saved_step"], end["saved"]) == ("preempted", 6, True), told[0].said
    resumed = jobs.start_ranks(2, script=script, SPOTGUARD_ATTEMPT=2)

    assert [job.wait() for job in resumed] == [0, 0], resumed[0].said
    assert digest(resumed[0].said) == digest(calm[0].said)
