"""What each rank draws from a generator of its own goes on over an interruption."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.runtime.harness.processes import Jobs

pytestmark = pytest.mark.e2e

SCRIPT = Path(__file__).parents[1] / "jobs" / "own_noise.py"


def drawn(jobs: Jobs, world: int, *, code: int = 0, **env: Any) -> list[list[str]]:
    """Run an attempt; return what each rank drew."""
    started = jobs.start_ranks(world, script=SCRIPT, **env)
    assert [rank.wait() for rank in started] == [code] * world, [rank.said for rank in started]
    lines = ([x for x in rank.said.splitlines() if x.startswith("noise")] for rank in started)
    return [list(each) for each in lines]


def test_each_rank_draws_on_from_its_own_generator(jobs: Jobs) -> None:
    """Three ranks draw what they would have drawn undisturbed; a fourth draws something else."""
    calm = drawn(jobs, 3, SPOTGUARD_RUN_ID="calm")
    assert len({each[0] for each in calm}) == 3
    before = drawn(jobs, 3, code=75, HURT="5")
    after = drawn(jobs, 3, SPOTGUARD_ATTEMPT=2)
    assert [[*a, *b] for a, b in zip(before, after, strict=True)] == calm
    drawn(jobs, 3, code=75, HURT="5", SPOTGUARD_RUN_ID="more")
    more = drawn(jobs, 4, SPOTGUARD_RUN_ID="more", SPOTGUARD_ATTEMPT=2)
    assert [each[0] for each in more[:3]] == [each[6] for each in calm]
    assert len({each[0] for each in more}) == 4


SPREAD = """
import torch
import spotguard.runtime as spotguard
from spotguard.runtime.loop import training

def said(modules):
    print("spread", [type(module).__name__ for module in modules])

training.spread_over = said
run = spotguard.init()
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.track(model=model, optimizer=optimizer)
for step in run.steps(run.loader([torch.ones(1)] * 4, global_batch_size=2), total=2):
    for x in step:
        step.backward(model(x).sum())
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_loop_looks_for_the_gpus_that_its_models_lie_on(jobs: Jobs) -> None:
    """Before it begins or resumes: from there on, the generators of all of them are seeded."""
    script = jobs.folder / "spread.py"
    script.write_text(SPREAD)
    assert jobs.run(script).splitlines().count("spread ['Linear']") == 1
