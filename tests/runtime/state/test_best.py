from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

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
values = [9, 5, 7, float("nan"), 3, 6, 8, 4, 9, 9, float(os.environ.get("LATER", "2")), 9]
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


@pytest.mark.e2e
def test_a_best_state_that_was_never_saved_is_not_the_best(jobs: Jobs, tmp_path: Path) -> None:
    """An attempt's end came before its save was done: a resume goes by the best that is kept."""
    script = tmp_path / "job.py"
    script.write_text(f"{SCRIPT}\nprint('restored', run.restore_best(), flush=True)\n")
    jobs.run(script, code=1, STOP=9)
    (lost,) = [ref for ref in restorable(jobs.store()) if ref.step == 5]
    for info in list(jobs.store().list(lost.prefix)):
        jobs.store().delete(info.key)

    said = jobs.run(script, SPOTGUARD_ATTEMPT=2, LATER="4")
    assert "best 10" in said, "3 was better, and its state is gone"
    assert "restored 11" in said


def kinds(jobs: Jobs) -> dict[int, str]:
    """Return {steps: kind} of the run's checkpoints."""
    store = open_store(str(jobs.folder / "spotguard-runs" / "a-run"))
    return {
        ref.step: str(load_manifest(store, ref.prefix).kind)
        for ref in reversed([*restorable(store)])
    }


def test_values_that_are_no_progress_are_counted() -> None:
    """Better by `min_delta` or less is the best, but no progress; NaN is neither."""
    best = Best()
    counts = []
    for value in (5.0, 4.95, 4.9, math.nan, 4.7, 4.7, 5.0):
        best.offer(value, "min", min_delta=0.2)
        counts.append(best.now.since)
    assert counts == [0, 1, 2, 3, 0, 1, 2]
    assert best.value == 4.7
    again = Best(BestState.of({"best": 4.7, "best_mark": 4.7, "best_since": 2}))
    again.offer(4.6, "min", min_delta=0.2)
    assert again.now.since == 3, "the count goes on after a resume"
    assert BestState.of({"best": 4.7}) == BestState(4.7, False, 4.7, 0), "of earlier versions"


@pytest.mark.parametrize("mode", ["min", "max"])
def test_no_value_that_is_not_finite_is_the_best(mode: str) -> None:
    """Neither the first one nor a later one, in either direction; a finite one is."""
    best = Best()
    values = (math.inf, -math.inf, math.nan, 1.0, math.inf, -math.inf)
    assert [best.offer(v, mode) for v in values] == [v == 1.0 for v in values]
    assert best.value == 1.0
    earlier = Best(BestState.of({"best": math.inf if mode == "min" else -math.inf}))
    assert earlier.offer(3.0, mode), "a version before this may have stored such a one"


EARLY = """
import os, torch
import spotguard.runtime as spotguard

run = spotguard.init(save_every="100 steps", keep_last=2, backend="gloo")
data = torch.utils.data.TensorDataset(torch.randn(12, 3), torch.randn(12, 1))
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.track(model=model, optimizer=optimizer)
values = eval(os.environ["VALUES"])
for step in run.steps(run.loader(data, global_batch_size=6, micro_batch_size=2), total=12):
    for x, y in step:
        step.backward(model(x).sum())
    optimizer.step()
    optimizer.zero_grad()
    # Ranks that measure for themselves differ in the last bits, or in more.
    run.best(values[step.number] + run.rank, patience=3, min_delta=0.5)
    print("weights", step.number + 1, model.weight.tolist(), flush=True)
    if str(step.number) == os.environ.get("STOP"):
        os.kill(os.getpid(), 15)
last = model.weight.tolist()
print("best of", run.restore_best(), model.weight.tolist(), "after", last, flush=True)
"""


def early(jobs: Jobs, tmp_path: Path, world: int, values: str, **env: Any) -> list[str]:
    """Run it; return what each rank printed."""
    script = tmp_path / "job.py"
    script.write_text(EARLY)
    ranks = jobs.start_ranks(world, script=script, VALUES=values, **env)
    codes = {job.wait() for job in ranks}
    assert codes == {75 if "STOP" in env else 0}, ranks[0].said
    return [job.said for job in ranks]


@pytest.mark.e2e
@pytest.mark.parametrize("world", [1, 3])
def test_a_run_without_progress_is_finished_early(jobs: Jobs, tmp_path: Path, world: int) -> None:
    """All ranks stop in the same step, by the first one's value; the count survives a resume.

    The reason is in the history, and the best weights come back on request.
    """
    values = "[9, 5, 4.9, 6, 4.8, 1, 1, 1, 1, 1, 1, 1]"
    early(jobs, tmp_path, world, values, STOP=2)
    said = early(jobs, tmp_path, world, values, SPOTGUARD_ATTEMPT=2)
    end = jobs.ends()[-1]
    assert (end["reason"], end["step"]) == ("finished", 5)
    assert (
        end["message"] == "stopped early: 3 values in a row were no better than 5 by more than 0.5"
    )
    for each in said:
        [line] = [line for line in each.splitlines() if line.startswith("best of")]
        assert line.startswith("best of 5 "), "the last value was the best, if no progress"


@pytest.mark.e2e
@pytest.mark.parametrize(
    "values", ["[9, 5, 6, 7, 8, 0, 0, 0, 0]", "[9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 0, -1]"]
)
def test_the_best_weights_come_back(jobs: Jobs, tmp_path: Path, values: str) -> None:
    """Also where the best state is the final one, which is saved once."""
    for said in early(jobs, tmp_path, 3, values):
        lines = said.splitlines()
        [told] = [line for line in lines if line.startswith("best of")]
        step = int(told.split()[2])
        assert step == (2 if "8, 0" in values else 12)
        [then] = [line for line in lines if line.startswith(f"weights {step} ")]
        assert told.split("[")[1].split("]")[0] == then.split("[")[1].split("]")[0]


WRONG = {
    "patience=0": "0 values of patience in all, but must be 1 or more",
    "min_delta=-1": "min_delta is -1, but must be a number from 0",
    "mode='least'": "mode is 'least'; allowed: min, max",
}


@pytest.mark.e2e
@pytest.mark.parametrize("argument", WRONG)
def test_wrong_arguments_are_told(jobs: Jobs, tmp_path: Path, argument: str) -> None:
    """In one sentence that names the argument."""
    script = tmp_path / "job.py"
    script.write_text(EARLY.replace("patience=3, min_delta=0.5", argument))
    assert WRONG[argument] in jobs.run(script, code=2, VALUES="[1, 2]")


@pytest.mark.e2e
def test_without_a_best_there_is_nothing_to_restore(jobs: Jobs, tmp_path: Path) -> None:
    """That is said, and nothing is changed."""
    script = tmp_path / "job.py"
    script.write_text(EARLY.replace("run.best(", "str(").replace(", patience=3, min_delta=0.5", ""))
    assert "run.best() was never told a value" in jobs.run(script, code=2, VALUES="[1] * 12")
