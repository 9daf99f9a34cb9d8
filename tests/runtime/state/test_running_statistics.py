"""Buffers that forward passes change: the same on all ranks, whoever is lost."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.runtime.harness.processes import digest

if TYPE_CHECKING:
    from tests.runtime.harness.processes import Jobs

RUNNING = Path(__file__).parents[1] / "jobs" / "running_statistics.py"

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


@pytest.mark.parametrize("odd", ["", "1"], ids=["batchnorm", "odd"])
@pytest.mark.parametrize("wrap", ["none", "ddp", "fsdp"])
def test_a_lost_first_rank_changes_no_statistics(jobs: Jobs, wrap: str, odd: str) -> None:
    """Weights and buffers of 3 ranks with uneven shares end the same, on every rank, to the bit.

    The first rank, whose buffers count, is killed in the midst of a step; the others save.
    """
    how: dict[str, Any] = {"script": RUNNING, "WRAP": wrap, "ODD": odd}
    undisturbed = jobs.start_ranks(3, SPOTGUARD_RUN_ID="undisturbed", **how)
    assert [job.wait() for job in undisturbed] == [0, 0, 0], undisturbed[0].said
    [aim] = {digest(job.said) for job in undisturbed}

    hurt = jobs.start_ranks(3, HURT=5, **how)
    assert [job.wait() for job in hurt] == [-9, 75, 75], hurt[1].said
    saved = {end["saved_step"] for end in jobs.ends()}
    # Shards alone are no state: what counts is the save before, if it got there in time.
    assert saved <= {3, None} if wrap == "fsdp" else saved == {5}
    resumed = jobs.start_ranks(3, **how)

    assert [job.wait() for job in resumed] == [0, 0, 0], resumed[0].said
    assert {digest(job.said) for job in resumed} == {aim}


@pytest.mark.parametrize("wrap", ["none", "fsdp"])
def test_statistics_that_moved_since_the_boundary_are_not_saved(jobs: Jobs, wrap: str) -> None:
    """Told to stop after forward passes before a step, all ranks save the boundary's buffers."""
    how: dict[str, Any] = {"script": RUNNING, "WRAP": wrap, "LOOK": 5}
    undisturbed = jobs.start_ranks(3, SPOTGUARD_RUN_ID="undisturbed", **how)
    assert [job.wait() for job in undisturbed] == [0, 0, 0], undisturbed[0].said

    told = jobs.start_ranks(3, TOLD=1, **how)
    assert [job.wait() for job in told] == [75, 75, 75], told[1].said
    resumed = jobs.start_ranks(3, **how)

    assert [job.wait() for job in resumed] == [0, 0, 0], resumed[0].said
    assert {digest(j.said) for j in resumed} == {digest(j.said) for j in undisturbed}
