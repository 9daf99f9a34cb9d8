from __future__ import annotations

import re
import shutil
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.runtime.harness.processes import Jobs

pytestmark = pytest.mark.e2e

START = """
import torch
import spotguard.runtime as spotguard
from spotguard.testing import MemoryStore

run = spotguard.init()
data = torch.utils.data.TensorDataset(torch.randn(12, 3), torch.randn(12, 1))
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = run.loader(data, global_batch_size=4, micro_batch_size=2)
"""
TRACK = "run.track(model=model, optimizer=optimizer)\n"


def loop(body: str, total: str = "total=4") -> str:
    """Return a loop with some body."""
    return START + TRACK + f"for step in run.steps(loader, {total}):\n    {body}\n"


CASES = {
    "loss.backward instead of step.backward": (
        loop("for x, y in step: model(x).sum().backward()\n    optimizer.step()"),
        "a micro-batch went by without step.backward(loss)",
    ),
    "an optimizer within the loop": (
        loop("for x, y in step: step.backward(model(x).sum()); optimizer.step()"),
        "optimizer.step() came before the last micro-batch of the step (gradients are the global",
    ),
    "no batch was asked for": (
        loop("optimizer.step()"),
        "a step ended before all its micro-batches were trained on",
    ),
    "the loop over the batches was left": (
        loop("for x, y in step:\n        step.backward(model(x).sum()); break"),
        "a step ended before all its micro-batches were trained on",
    ),
    "backward twice": (
        loop("for x, y in step: step.backward(model(x).sum()); step.backward(model(x).sum())"),
        "step.backward() needs a micro-batch: call it once per batch",
    ),
    "backward outside": (
        loop("step.backward(model(torch.ones(1, 3)).sum())"),
        "step.backward() needs a micro-batch",
    ),
    "a wrong reduction": (
        loop("for x, y in step: step.backward(model(x).sum(), reduction='max')"),
        "step.backward: reduction is 'max'; allowed: mean, sum",
    ),
    "evaluation in the middle of a step": (
        loop("for x, y in step: step.backward(model(x).sum())\n    list(run.evaluate([1]))"),
        "run.evaluate() comes after the step's first micro-batch",
    ),
    "track after the loop began": (
        loop("run.track(late={})"),
        "run.track() must come before run.steps()",
    ),
    "init twice": (
        START + TRACK + "spotguard.init()",
        "spotguard.init() was called twice in one process (call spotguard.reset() before it",
    ),
    "another init": (
        START + "spotguard.init(seed=1)",
        "spotguard.init() was called twice in one process (call spotguard.reset() before it",
    ),
    "a reset within the loop": (
        loop("spotguard.reset()"),
        "spotguard.reset() was called inside the loop over run.steps() (leave the loop first",
    ),
    "another loader": (
        START + TRACK + "next(run.steps(torch.utils.data.DataLoader(data), total=3))",
        "run.steps needs a loader from run.loader(...), not a DataLoader",
    ),
    "nothing tracked": (
        START + "next(run.steps(loader, total=3))",
        "nothing is tracked, so nothing could be resumed",
    ),
    "neither total nor epochs": (
        START + TRACK + "next(run.steps(loader))",
        "run.steps: give either total= (steps) or epochs=",
    ),
    "total and epochs": (
        START + TRACK + "next(run.steps(loader, total=3, epochs=2))",
        "run.steps: give either total= (steps) or epochs=",
    ),
    "no steps": (
        START + TRACK + "next(run.steps(loader, total=0))",
        "0 steps in all, but must be 1 or more",
    ),
    "a batch of streams that follows the ranks": (
        START + "run.loader(iter([]), global_batch_size=4, lr_scaling='linear', "
        "reference_world_size=1)",
        "run.loader: lr_scaling needs samples with indices: a stream cannot be cut anew",
    ),
    "a batch that follows the ranks, bitwise": (
        START.replace("init()", "init(exact='bitwise')")
        + "run.loader(data, global_batch_size=4, lr_scaling='sqrt', reference_world_size=1)",
        'run.loader: lr_scaling and exact="bitwise" exclude each other',
    ),
    "no epochs": (
        START + TRACK + "next(run.steps(loader, epochs=0))",
        "0 epochs in all, but must be 1 or more",
    ),
    "half a step": (START + TRACK + "next(run.steps(loader, total=2.5))", "2.5 steps in all"),
    "the loop twice": (
        START + TRACK + "for step in run.steps(loader, total=1):\n"
        "    for x, y in step: step.backward(model(x).sum())\nnext(run.steps(loader, total=2))",
        "run.steps() can be used once per process",
    ),
    "a name twice": (
        START + TRACK + "run.track(model=model)",
        "run.track: model is tracked already",
    ),
    "an object without state": (
        START + "run.track(tokenizer=object())",
        "run.track: tokenizer is a object, which has no state_dict()",
    ),
    "a state that cannot be stored": (
        START + "run.track(callbacks={'fn': print})",
        "cannot store callbacks.fn (builtins.builtin_function_or_method)",
    ),
    "a bad size": (
        START + "run.loader(data, global_batch_size=-1)",
        "run.loader: global_batch_size is -1, but must be a whole number above 0",
    ),
    "no dataset": (START + "run.loader(None, global_batch_size=2)", "NoneType has no length"),
    "a wrong run id": (
        "import spotguard.runtime as s\ns.init(run_id='My Run')",
        "run_id: given 'My Run'; allowed are lower-case letters, digits and dashes",
    ),
    "too few checkpoints": (
        "import spotguard.runtime as s\ns.init(keep_last=1)",
        "keep_last: given 1, but at least 2 checkpoints must be kept",
    ),
    "a store that is a file": (
        loop("pass").replace("init()", "init(store='script.py')"),
        "spotguard: cannot write /",
    ),
}  # fmt: skip

EXIT_CODES = {
    "an object without state": 10,
    "a state that cannot be stored": 10,
    "a store that is a file": 3,
}


@pytest.mark.parametrize("name", CASES)
def test_misuse_gives_one_clear_sentence(jobs: Jobs, name: str) -> None:
    """What is wrong is said once, by name, last; the exit code is no success and no 75."""
    source, message = CASES[name]
    script = jobs.folder / "script.py"
    script.write_text(source)
    job = jobs.start(script, SPOTGUARD_RUN_ID="")
    code = job.wait()
    said = [
        line for line in job.said.splitlines() if re.search(r"(?i)\w+error: |spotguard: ", line)
    ]
    told = [line for line in said if message in line]

    assert len(told) == 1, job.said
    assert len(told[0]) < 400
    assert code == EXIT_CODES.get(name, 2), job.said
    assert "Traceback" not in job.said
    assert "During handling of the above exception" not in job.said


def test_a_refused_init_can_be_caught(jobs: Jobs) -> None:
    """It is an exception like any other; a later one that is not ours is Python's to show."""
    script = jobs.folder / "script.py"
    script.write_text(
        "import spotguard.runtime as s\nfrom spotguard import SpotguardError\n"
        "try:\n    s.init(keep_last=1)\n"
        "except SpotguardError as problem:\n    print('caught:', problem.message)\n"
        "if s.init(save_every='never'): pass\n"
    )
    said = jobs.run(script, code=2)
    assert "caught: keep_last: given 1" in said
    assert "script.py:7: save_every: given 'never'; allowed: auto, 30s, or 100 steps" in said
    assert said.count("keep_last") == 1
    script.write_text(script.read_text().replace("if s.init(save_every='never'): pass", "1 / 0"))
    said = jobs.run(script, code=1)
    assert "Traceback" in said
    assert "ZeroDivisionError" in said


def test_a_second_init_ends_the_run_that_the_first_began(jobs: Jobs) -> None:
    """The store is told that it failed, and why: an error of `init` is not always the first."""
    script = jobs.folder / "script.py"
    script.write_text(
        "import spotguard.runtime as s\n"
        "try:\n    s.init(keep_last=1)\nexcept Exception:\n    s.init()\ns.init(seed=1)\n"
    )
    said = jobs.run(script, code=2)
    assert "script.py:6: spotguard.init() was called twice" in said
    assert "ended at step 0: the job's own failure" in said


def test_a_changed_loader_is_refused_on_resume(jobs: Jobs) -> None:
    """Other batch sizes would read samples twice: the change is named, nothing is trained."""
    script = jobs.folder / "script.py"
    whole = loop("for x, y in step: step.backward(model(x).sum())")
    script.write_text(whole)
    jobs.run(script)
    script.write_text(whole.replace("global_batch_size=4", "global_batch_size=6"))
    said = jobs.run(script, code=2)

    assert "run.loader changed since the checkpoint: global_batch_size was 4 and is 6" in said
    assert "Traceback" not in said


def test_a_changed_model_is_refused_on_resume(jobs: Jobs) -> None:
    """The mismatch is one sentence with the names, exit code 10, and the store stays as it is."""
    script = jobs.folder / "script.py"
    whole = loop("for x, y in step: step.backward(model(x).sum())")
    script.write_text(whole)
    jobs.run(script)
    script.write_text(whole.replace("Linear(3, 1)", "Linear(3, 1, bias=False)"))
    said = jobs.run(script, code=10)
    script.write_text(whole)
    again = jobs.run(script)

    assert "not in the script: bias" in said
    assert "Traceback" not in said
    assert "resumed at step 4" in again


def test_a_checkpoint_of_another_run_is_refused(jobs: Jobs) -> None:
    """One that was copied into a run's folder is passed over by name; if all were, nothing trains.

    It fits by its key, its names and its shapes, and would be trained on from other weights.
    """
    script = jobs.folder / "script.py"
    script.write_text(loop("for x, y in step: step.backward(model(x).sum())"))
    jobs.run(script)
    runs = jobs.folder / "spotguard-runs"
    shutil.copytree(runs / "a-run", runs / "b-run")
    said = jobs.run(script, code=10, SPOTGUARD_RUN_ID="b-run")
    assert "belongs to run a-run" in said
    assert "Traceback" not in said
    assert "resumed at step" not in said

    assert "resumed at step 4" in jobs.run(script)


def test_a_taken_attempt_is_fenced(jobs: Jobs) -> None:
    """Two starts with one attempt number: the second one trains nothing and says why."""
    script = jobs.folder / "script.py"
    script.write_text(loop("for x, y in step: step.backward(model(x).sum())"))
    jobs.run(script, SPOTGUARD_ATTEMPT=1)
    said = jobs.run(script, code=10, SPOTGUARD_ATTEMPT=1)

    assert "attempt 1 is already claimed" in said
    assert jobs.ends()[-1]["reason"] == "fenced"


def test_early_ends_are_ends(jobs: Jobs) -> None:
    """`run.end()` and `break` finish the run: saved, no further attempt, and told so."""
    train = "for x, y in step: step.backward(model(x).sum())\n"
    for name, leave in (("ended", "run.end('good enough')"), ("broken", "break")):
        script = jobs.folder / "script.py"
        script.write_text(loop(f"{train}    if step.number == 1: {leave}", "total=9"))
        jobs.run(script, SPOTGUARD_RUN_ID=name)
        [end] = [event.data for event in jobs.events(name) if event.kind == "ended"]
        assert end["reason"] == "finished"
        assert end["saved_step"] == end["step"]
        assert end["step"] == (2 if name == "ended" else 1)


def test_a_dead_log_pipe_does_no_harm(jobs: Jobs) -> None:
    """At a preemption whatever read the output is often gone first: the save happens anyway."""
    script = jobs.folder / "script.py"
    body = (
        "if step.number == 1:\n"
        "        import os, signal\n"
        "        read, write = os.pipe(); os.close(read)\n"
        "        os.dup2(write, 1); os.dup2(write, 2)\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "    for x, y in step: step.backward(model(x).sum())"
    )
    script.write_text(loop(body, "total=10**6"))
    job = jobs.start(script)

    assert job.wait() == 75
    [end] = jobs.ends()
    assert end["reason"] == "terminated"
    assert end["saved_step"] == end["step"]
