"""Whole runs of a script on Accelerate with our lines: interrupted anywhere, on changing ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.integrations.preloaded import Stories, Story, same, stories

if TYPE_CHECKING:
    from collections.abc import Iterator

pytest.importorskip("accelerate")
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]  # the first one loads the framework


@pytest.fixture(scope="module")
def accelerate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stories]:
    """Runs of the script, forked from a process that has Accelerate loaded."""
    yield from stories(tmp_path_factory.mktemp("accelerate"), "accelerate_job.py", "accelerate")


def test_interrupted_anywhere_it_is_the_same_run(accelerate: Stories) -> None:
    """In an epoch, and in an evaluation, which alone begins anew: the same to the bit."""
    calm = accelerate.tell([2])
    story = accelerate.tell([2, 2, 2], ["step 4 ", "evaluating after 14"])

    assert story.ends == calm.ends
    assert same(story, calm)
    assert story.samples() == calm.samples()
    again = [line for line in set(story.told) if story.told.count(line) != calm.told.count(line)]
    assert again == ["evaluating after 14"]


def test_a_step_whose_gradients_never_met_is_not_counted(accelerate: Stories) -> None:
    """A rank dies in its backward pass: the other saves the step before, and none is lost."""
    calm = accelerate.tell([2])
    jobs = accelerate.jobs()
    first = accelerate.start(jobs, 2, DIES_AT=3)
    assert first[0].wait() == 9
    assert first[1].wait() != 0
    [end] = jobs.ends()
    assert end["step"] == 3
    again = accelerate.start(jobs, 2, 2)
    assert [rank.wait() for rank in again] == [0, 0], again[0].said
    assert same(Story(jobs.folder, [first, again]), calm)


@pytest.mark.parametrize("steps", [0, 10])
def test_other_ranks_train_on_the_same_samples(accelerate: Stories, steps: int) -> None:
    """4, 1, then 3 ranks: each sample once, the same weights and rates, however long is said.

    A schedule's length counts the steps of all processes, or (with STEPS) of one; Accelerate steps
    it once for each process. A batch may be shared out over the processes.
    """
    calm = accelerate.tell([4], STEPS=steps)
    story = accelerate.tell([4, 1, 3], ["step 2 ", "step 6 "], STEPS=steps, SHARED=1)

    assert story.samples() == calm.samples()
    assert same(story, calm, within=1e-6)
    assert [line for line in story.told if line.startswith("step")] == [
        line for line in calm.told if line.startswith("step")
    ]


def test_accumulated_batches_and_another_precision(accelerate: Stories) -> None:
    """Three batches that were to be accumulated on 2 ranks are six of one.

    The schedule, which the script neither prepares nor registers, goes on where it was.
    """
    how: dict[str, Any] = {"ACCUMULATE": 3, "STEPS": 8, "PRECISION": "bf16", "OWN_SCHEDULE": 1}
    calm = accelerate.tell([2], **how)
    story = accelerate.tell([2, 1], ["step 3 "], **how)

    assert story.samples() == calm.samples()
    assert same(story, calm, within=1e-3)
    steps = [[line for line in s.told if line.startswith("step")] for s in (story, calm)]
    assert steps[0] == steps[1]


def test_batches_that_are_split(accelerate: Stories) -> None:
    """A batch is of all processes then: samples and rates are those of one process without it."""
    plain = accelerate.tell([1])
    calm = accelerate.tell([2], SPLIT=1)
    story = accelerate.tell([2, 1], ["step 4 "], SPLIT=1)

    assert story.samples() == calm.samples() == plain.samples()
    assert same(story, calm, within=1e-6)
    told = [[line for line in s.told if line.startswith("step")] for s in (story, calm, plain)]
    assert told[0] == told[1] == told[2]


def test_what_a_hook_would_save_is_told(accelerate: Stories) -> None:
    """One warning, with the way out, unless the script has gone that way."""
    words = "call accelerator.register_for_checkpointing(ema)"
    story = accelerate.tell([2], HOOK="hook", STEPS=1)
    assert [rank.said.count(words) for rank in story.attempts[0]] == [1, 0]
    story = accelerate.tell([1], HOOK="registered", STEPS=1)
    assert words not in story.attempts[0][0].said
