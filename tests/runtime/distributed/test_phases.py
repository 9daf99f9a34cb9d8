"""Steps of several backward passes: each phase is synchronised once; what is not is refused."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.runtime.harness.processes import Jobs

SCRIPT = Path(__file__).parents[1] / "jobs" / "phases.py"
ALGORITHMS = ["gan", "sam", "closure", "lbfgs", "actor-critic"]

pytestmark = pytest.mark.e2e


def said_by(said: str, word: str) -> dict[str, list[float]]:
    """Return the numbers of each line that begins with `word`."""
    lines = [line.split(" ", 2) for line in said.splitlines() if line.startswith(word)]
    return {name: json.loads(values) for _, name, values in lines}


@pytest.mark.parametrize(
    ("algorithm", "wrap"),
    [
        (algorithm, wrap)
        for algorithm in ALGORITHMS
        for wrap in ("none", "ddp", "fsdp")
        if (algorithm, wrap) != ("lbfgs", "fsdp")  # torch's L-BFGS cannot flatten uneven shards
    ],
)
def test_several_phases_are_those_of_one_process(jobs: Jobs, algorithm: str, wrap: str) -> None:
    """On 3 ranks with 3, 2 and 2 micro-batches: the losses and weights of plain torch.

    All ranks see the same losses, evaluate a closure as often, and end with the same weights.
    """
    alone = jobs.run(SCRIPT, ALGORITHM=algorithm)
    ranks = jobs.start_ranks(3, script=SCRIPT, ALGORITHM=algorithm, WRAP=wrap)
    assert [job.wait() for job in ranks] == [0] * 3, ranks[0].said

    for word in ("losses", "weights"):
        first, aim = said_by(ranks[0].said, word), said_by(alone, word)
        assert first.keys() == aim.keys()
        for name, values in first.items():
            assert values == pytest.approx(aim[name], rel=1e-3, abs=1e-5), (word, name)
            assert all(said_by(job.said, word)[name] == values for job in ranks)


LOOP = """
import torch
import spotguard.runtime as spotguard

run = spotguard.init()
data = torch.utils.data.TensorDataset(torch.randn(14, 3), torch.randn(14, 1))
one, other = torch.nn.Linear(3, 1), torch.nn.Linear(3, 1)
first, second = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (one, other))
loader = run.loader(data, global_batch_size=14, micro_batch_size=2)
run.track(one=one, other=other, first=first, second=second)
for step in run.steps(loader, total=2):
    {body}
print("the end")
"""
BACKWARD = "step.backward(one(x).sum())"
REFUSED = {
    "a second backward that nobody synchronises": (
        f"for x, y in step: {BACKWARD}; other(x).sum().backward()\n    first.step(); second.step()",
        "other.weight got a gradient outside of step.backward(), which is not synchronised: the "
        'ranks would train apart (give each backward pass a phase: with step.phase("name")',
    ),
    "such a backward after the loop": (
        f"for x, y in step: {BACKWARD}\n    one(x).sum().backward(); first.step()",
        "one.weight got a gradient outside of step.backward(), which is not synchronised",
    ),
    "an optimizer within the loop": (
        f"for x, y in step: {BACKWARD}; first.step(); first.zero_grad()",
        "optimizer.step() came before the last micro-batch of the step",
    ),
    "gradients thrown away within the loop": (
        f"for x, y in step: first.zero_grad(); {BACKWARD}\n    first.step()",
        "zero_grad() came between the micro-batches of the step",
    ),
    "an optimizer that is not tracked": (
        "third = torch.optim.SGD(spare.parameters(), lr=0.1)\n    for x, y in step: "
        "step.backward(spare(x).sum())\n    third.step()",
        "spare.weight is trained by an optimizer that is not tracked, so nobody synchronises its",
    ),
    "a phase after a loop without one": (
        f"for x, y in step: {BACKWARD}\n    with step.phase('more'): pass",
        "step.phase('more') comes after micro-batches that had no phase",
    ),
    "a second loop without a phase": (
        f"for x, y in step: {BACKWARD}\n    for x, y in step: {BACKWARD}",
        "a step's micro-batches are looped over a second time",
    ),
    "a phase within a phase": (
        "with step.phase('a'), step.phase('b'): pass",
        "step.phase('b') begins within step.phase('a')",
    ),
    "a phase that is left too early": (
        f"with step.phase('a'):\n        for x, y in step: {BACKWARD}; break",
        "step.phase('a') ended before all its micro-batches were trained on",
    ),
    "a phase of an optimizer that is not tracked": (
        "with step.phase('a', torch.optim.SGD(one.parameters(), lr=0.1)): pass",
        "step.phase: one of its optimizers is not tracked",
    ),
    "a loss of half a step": (
        f"for x, y in step: {BACKWARD}; step.mean_loss()",
        "step.mean_loss() comes after the loop over the micro-batches",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_synchronised_is_refused_in_the_first_step(jobs: Jobs, name: str) -> None:
    """On 2 ranks with 4 and 3 micro-batches: one sentence, with the way out, on every rank."""
    body, message = REFUSED[name]
    script = jobs.folder / "script.py"
    source = LOOP.format(body=body)
    if "spare" in body:
        source = source.replace("loader = ", "spare = torch.nn.Linear(3, 1)\nloader = ")
        source = source.replace("run.track(", "run.track(spare=spare, ")
    script.write_text(source)
    ranks = jobs.start_ranks(2, script=script)

    assert [job.wait() for job in ranks] == [2, 2], ranks[0].said + ranks[1].said
    for job in ranks:
        [told] = [line for line in job.said.splitlines() if message in line]
        assert len(told) < 400
        assert "Traceback" not in job.said
    assert all(end["message"] in told for end in jobs.ends()), "history tells the way out, too"
    assert jobs.ends()


ALLOWED = {
    "gradients that are thrown away": (
        f"one(torch.ones(1, 3)).sum().backward(); first.zero_grad(set_to_none=False)\n"
        f"    for x, y in step: other(x).sum().backward(); second.zero_grad(); {BACKWARD}\n"
        f"    first.step(); second.step()"
    ),
    "a penalty": (
        "for x, y in step:\n        x.requires_grad_()\n"
        "        [g] = torch.autograd.grad((one(x) ** 2).sum(), x, create_graph=True)\n"
        "        step.backward(g.square().mean())\n"
        "    first.step(); first.zero_grad()"
    ),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_gradients_that_nobody_steps_on_are_nobodys_business(jobs: Jobs, name: str) -> None:
    """A backward pass for something else, and one that is not accumulated, is allowed."""
    script = jobs.folder / "script.py"
    script.write_text(LOOP.format(body=ALLOWED[name]))
    ranks = jobs.start_ranks(2, script=script)

    assert [job.wait() for job in ranks] == [0, 0], ranks[0].said
    assert "the end" in ranks[0].said


LATE = """
import torch
import spotguard.runtime as spotguard

run = spotguard.init()
torch.manual_seed(3)
data = torch.utils.data.TensorDataset(torch.randn(14, 3), torch.randn(14, 1))
model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
run.track(model=model, optimizer=optimizer)
for step in run.steps(run.loader(data, global_batch_size=14, micro_batch_size=2), total=3):
    for x, y in step:
        step.backward(torch.nn.functional.mse_loss(model(x), y))
    if step.number == 1:
        optimizer.add_param_group({"params": model[1].parameters()})
    optimizer.step()
    model.zero_grad()
print("weights all", torch.cat([p.flatten() for p in model.parameters()]).tolist())
"""


def test_parameters_added_after_the_backward_pass_are_synchronised(jobs: Jobs) -> None:
    """A group that an optimizer gets between backward and its step has the global gradient, too."""
    script = jobs.folder / "script.py"
    script.write_text(LATE)
    alone = said_by(jobs.run(script, SPOTGUARD_RUN_ID="alone"), "weights")["all"]
    ranks = jobs.start_ranks(3, script=script)
    assert [job.wait() for job in ranks] == [0] * 3, ranks[0].said

    for job in ranks:
        assert said_by(job.said, "weights")["all"] == pytest.approx(alone, abs=1e-6)


DIES = """
import os, signal, time, torch
import spotguard.runtime as spotguard

run = spotguard.init(save_every="100 steps", exact="bitwise")
torch.manual_seed(3)
data = torch.utils.data.TensorDataset(torch.randn(14, 3), torch.randn(14, 1))
wide = [torch.nn.Linear(3, {width}), torch.nn.Linear({width}, 1)]
model = torch.nn.Sequential(wide[0], torch.nn.Tanh(), wide[1])
optimizer = torch.optim.{optimizer}
run.track(model=model, optimizer=optimizer)
for step in run.steps(run.loader(data, global_batch_size=14, micro_batch_size=2), total=8):
    evaluations = 0

    def closure():
        global evaluations
        evaluations += 1
        optimizer.zero_grad()
        {within}
            for x, y in step:
                if (step.number, evaluations, run.rank) == (5, {evaluation}, 2):
                    os.kill(os.getpid(), signal.{signal})
                step.backward(torch.nn.functional.mse_loss(model(x), y))
        return step.loss

    optimizer.step(closure)
weights = torch.cat([p.flatten() for p in model.parameters()])
print("weights all", weights[:20].tolist(), flush=True)
"""
LBFGS = 'LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe")'
ADAM = "Adam(model.parameters(), lr=0.01)"


@pytest.mark.parametrize(
    ("optimizer", "width", "evaluation", "end", "saved"),
    [
        (ADAM, 8, 1, "SIGKILL", 5),
        (ADAM, 300_000, 1, "SIGKILL", 5),
        (LBFGS, 8, 1, "SIGKILL", 5),
        (LBFGS, 8, 3, "SIGKILL", 5),
        (LBFGS, 300_000, 3, "SIGKILL", None),
        (LBFGS, 8, 3, "SIGSTOP", 5),
        (LBFGS, 300_000, 3, "SIGSTOP", None),
    ],
)
def test_a_peer_is_lost_inside_a_closure(
    jobs: Jobs, optimizer: str, width: int, evaluation: int, end: str, saved: int | None
) -> None:
    """The survivors save the step before while its weights are there, or kept; and leave at once.

    Where weights have changed and are too large to be kept, the last save counts. Bitwise sums
    show that it is the very boundary: L-BFGS makes much of the last bits.
    """
    within = "if True:" if optimizer == ADAM else 'with step.phase("closure"):'
    places = {"optimizer": optimizer, "width": width, "evaluation": evaluation, "within": within}
    source = DIES.format(signal=end, **places)
    script = jobs.folder / "script.py"
    script.write_text(source)
    how: dict[str, Any] = {"SPOTGUARD_PEER_TIMEOUT": "4s"} if end == "SIGSTOP" else {}
    ranks = jobs.start_ranks(3, script=script, **how)

    assert [ranks[n].wait() for n in (0, 1)] == [75, 75], ranks[0].said
    assert {event["saved_step"] for event in jobs.ends()} == {saved}
    ranks[2].kill(signal.SIGKILL)
    script.write_text(source.replace(f"signal.{end}", "0"))
    if saved is not None:
        alone = said_by(jobs.run(script, SPOTGUARD_RUN_ID="alone"), "weights")["all"]
        last = jobs.run(script, SPOTGUARD_ATTEMPT=2)
        assert "at step 5" in last
        assert said_by(last, "weights")["all"] == alone


OWN_LOSS = """
import torch
import spotguard.runtime as spotguard

run = spotguard.init()
data = torch.utils.data.TensorDataset(torch.arange(5.0).unsqueeze(1))
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
run.track(model=model, optimizer=optimizer)
loader = run.loader(data, global_batch_size=5, micro_batch_size=3, shuffle=False)
for step in run.steps(loader, total=1):
    for (x,) in step:
        step.backward((model(x) * 0 + x).mean())
    seen = step.own_loss
    print("own", run.rank, [None if seen is None else seen.item()], flush=True)
    optimizer.step()
"""


def test_the_loss_that_is_shown_is_the_mean_of_what_a_rank_saw(jobs: Jobs) -> None:
    """On three ranks with 3, 2 and 0 samples: a rank without a share says nothing, not 0."""
    script = jobs.folder / "script.py"
    script.write_text(OWN_LOSS.replace("None if", "-1.0 if"))
    ranks = jobs.start_ranks(3, script=script)
    assert [job.wait() for job in ranks] == [0] * 3, ranks[0].said
    seen = [said_by(job.said, "own")[str(rank)][0] for rank, job in enumerate(ranks)]
    assert seen == [1.0, 3.5, -1.0]
