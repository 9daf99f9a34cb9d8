from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.runtime.harness.processes import digest

if TYPE_CHECKING:
    from tests.runtime.harness.processes import Job, Jobs

pytestmark = pytest.mark.e2e

STREAM = Path(__file__).parents[1] / "jobs" / "stream.py"


def read(attempts: list[list[Job]]) -> list[set[int]]:
    """Return what all ranks trained on at each step; a step done again counts as the last time."""
    steps: dict[int, set[int]] = {}
    for ranks in attempts:
        now: dict[int, set[int]] = {}
        for job in ranks:
            for line in job.said.splitlines():
                if line.startswith("read "):
                    step, numbers = json.loads(line.removeprefix("read "))
                    samples = now.setdefault(step, set())
                    assert not samples & set(numbers), "two ranks trained on the same sample"
                    samples.update(numbers)
        steps.update(now)
    return [steps[step] for step in sorted(steps)]


def attempt(jobs: Jobs, world: int, *, codes: set[int], **env: Any) -> list[Job]:
    """Run one attempt to its end; check how its ranks ended."""
    ranks = jobs.start_ranks(world, script=STREAM, **env)
    ended = {job.wait() for job in ranks}
    assert ended <= codes, "\n".join(job.said for job in ranks)
    return ranks


@pytest.mark.parametrize(
    ("world", "hurt", "codes"),
    [
        (1, "13:0:SIGTERM", {75}),
        (1, "13:0:SIGINT", {75}),  # in the midst of a step: that of the boundary is saved
        (1, "13:0:SIGKILL", {-9}),
        (2, "13:1:SIGTERM", {75}),
        (2, "13:1:SIGKILL", {-9, 75}),  # the survivor cannot know the other's place
    ],
)
def test_streams_of_ranks_go_on_where_they_were(
    jobs: Jobs, world: int, hurt: str, codes: set[int]
) -> None:
    """Whatever ends an attempt, the next one of as many ranks reads on: the same final weights.

    And every step trains on what it would have without the interruption.
    """
    aim = attempt(jobs, world, codes={0}, SPOTGUARD_RUN_ID="undisturbed")
    ended = attempt(jobs, world, codes=codes, HURT=hurt)
    rest = attempt(jobs, world, codes={0})
    assert digest(rest[0].said, "weights") == digest(aim[0].said, "weights")
    assert read([ended, rest]) == read([aim])


def test_another_number_of_ranks_is_told_in_the_history(jobs: Jobs) -> None:
    """Their shards are others: another pass begins, and a warning says what that means."""
    attempt(jobs, 2, codes={75}, HURT="9:0:SIGTERM")
    attempt(jobs, 1, codes={0})
    warnings = [e.data.get("message", "") for e in jobs.events() if e.kind == "warning"]
    assert any("saved by 2 ranks, now there are 1" in message for message in warnings), warnings


def test_shards_by_function_are_exact_on_any_number_of_ranks(jobs: Jobs) -> None:
    """1, 3, 2 ranks, interrupted in between: every step trains on the same samples as on one."""
    aim = attempt(jobs, 1, codes={0}, OPEN="shard", SPOTGUARD_RUN_ID="undisturbed")
    lives = [
        attempt(jobs, 1, codes={75}, OPEN="shard", HURT="5:0:SIGTERM"),
        attempt(jobs, 3, codes={75}, OPEN="shard", HURT="12:2:SIGTERM"),
        attempt(jobs, 2, codes={0}, OPEN="shard"),
    ]
    assert read(lives) == read([aim])
    assert all(len(samples) == 12 for samples in read(lives))
    assert not [e for e in jobs.events() if "pass" in e.data.get("message", "")]


BY_RANK = """
import os, torch
import spotguard.runtime as spotguard
run = spotguard.init()
model = torch.nn.Linear(1, 1)
run.track(model=model)
loader = run.loader(torch.ones(4, 1), global_batch_size=4, sampler={sampler})
for step in run.steps(loader, total=2):
    for x in step:
        step.backward(model(x).sum())
"""


@pytest.mark.parametrize(
    ("sampler", "agree"),
    [
        ("range(4)", True),
        ("torch.utils.data.RandomSampler(range(4))", True),
        ("[[0, 1, 2, 3], [3, 2, 1, 0]][run.rank]", False),
    ],
)
def test_ranks_with_different_samplers_are_found_out(jobs: Jobs, sampler: str, agree: bool) -> None:
    """Else some samples would be trained on twice and others never, and nobody would know."""
    script = jobs.folder / "script.py"
    script.write_text(BY_RANK.format(sampler=sampler))
    ranks = jobs.start_ranks(2, script=script)
    ended = {job.wait() for job in ranks}
    said = "\n".join(job.said for job in ranks)
    assert (ended == {0}) == agree, said
    assert ("another order than another rank" not in said) == agree, said
