from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.runtime.harness.processes import digest
from tests.runtime.state.test_best import kinds

if TYPE_CHECKING:
    from pathlib import Path

    from tests.runtime.harness.processes import Jobs

pytestmark = pytest.mark.e2e

SCRIPT = """
import hashlib, os, random, signal, time, torch
import spotguard.runtime as spotguard

run = spotguard.init(save_every="100 steps")
torch.manual_seed(1)
data = torch.utils.data.TensorDataset(torch.randn(24, 3), torch.randn(24, 1))
model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.9)
dice, seen, meter = random.Random(5), {"bodies": 0}, {"losses": torch.zeros(10)}
run.track(model=model, optimizer=optimizer, plateau=plateau, dice=dice, seen=seen, meter=meter)
place = os.environ.get("TOLD_IN", "nowhere")


def told_to_stop(where):
    if where != place or step.number != 5:
        return
    os.kill(os.getpid(), signal.SIGTERM)
    while run._job.watch.agreed is None:
        time.sleep(0.001)


for step in run.steps(run.loader(data, global_batch_size=4), total=10):
    noise = dice.gauss(0.0, 1.0)
    seen["bodies"] += 1
    meter["losses"][step.number] += 1
    model(torch.full((2, 3), noise))  # moves BatchNorm's statistics
    if run.best([9, 9, 9, 9, 9, 1, 4, 4, 4, 4][step.number]) and step.number == 5:
        print("the best so far", flush=True)
    plateau.step(1.0)  # which lowers the rate
    told_to_stop("body")
    for batch in run.evaluate(range(3)):
        dice.random()
        told_to_stop("evaluation")
    told_to_stop("step")
    for x, y in step:
        step.backward(torch.nn.functional.mse_loss(model(x + noise), y))
    optimizer.step()
    optimizer.zero_grad()
    told_to_stop("end")
if place != "nowhere":  # what comes after the loop is none of its boundaries
    dice.random()
    seen["bodies"] += 100
    model(torch.zeros(2, 3))
state = [*model.state_dict().values(), torch.tensor(seen["bodies"]), meter["losses"]]
whole = b"".join(v.detach().numpy().tobytes() for v in state) + repr(dice.getstate()).encode()
print("digest", hashlib.sha256(whole).hexdigest())
"""


@pytest.mark.parametrize("place", ["body", "evaluation", "step", "end"])
def test_a_stop_that_comes_in_the_body_leaves_no_trace(
    jobs: Jobs, tmp_path: Path, place: str
) -> None:
    """What the body drew and counted before its step is saved as it was at the boundary.

    The stop is agreed after the loop handed out the step and before its first micro-batch.
    """
    script = tmp_path / "job.py"
    script.write_text(SCRIPT)
    undisturbed = digest(jobs.run(script, SPOTGUARD_RUN_ID="calm"))

    stopped = jobs.run(script, code=75, TOLD_IN=place)
    resumed = jobs.run(script, SPOTGUARD_ATTEMPT=2)

    assert digest(resumed) == undisturbed
    assert jobs.ends()[0]["saved_step"] == (6 if place == "end" else 5)
    told = ["the best so far" in said for said in (stopped, resumed)]
    why = "a value of a step that was given up counts anew"
    assert told == [True, place != "end"], f"{why}:\n{stopped}\n{resumed}"
    assert kinds(jobs)[6] == "best"


@pytest.mark.parametrize("at", [0, 5])
@pytest.mark.parametrize("place", ["body", "end", "held"])
def test_a_loop_that_is_left_by_break_can_be_taken_up_again(
    jobs: Jobs, tmp_path: Path, place: str, at: int
) -> None:
    """The final save is of a boundary: of the one before, or of a step whose weights changed."""
    script = tmp_path / "job.py"
    script.write_text(SCRIPT)
    undisturbed = digest(jobs.run(script, SPOTGUARD_RUN_ID="calm"))
    where = "end" if place == "held" else place
    leaves = f'if place == "{place}" and step.number == {at}: break'
    broken = SCRIPT.replace(f'told_to_stop("{where}")', leaves)
    if place == "held":  # the iterator outlives the loop
        loop = "run.steps(run.loader(data, global_batch_size=4), total=10)"
        broken = broken.replace(f"for step in {loop}:", f"held = {loop}\nfor step in held:")
        broken = broken.replace('if place != "nowhere":', "if False:")
    script.write_text(broken)

    jobs.run(script, TOLD_IN=place)
    resumed = jobs.run(script, SPOTGUARD_ATTEMPT=2)

    assert jobs.ends()[0]["saved_step"] == (at if place == "body" else at + 1)
    assert digest(resumed) == undisturbed
