"""What a script draws before its loop."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from tests.runtime.harness.processes import digest

if TYPE_CHECKING:
    from tests.runtime.harness.processes import Jobs

DRAWS = Path(__file__).parents[1] / "jobs" / "setup_draws.py"

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def test_the_set_up_draws_the_same_everywhere(jobs: Jobs) -> None:
    """Weights and splits of an unseeded script follow from `init(seed=...)` alone.

    Neither the rank matters nor the attempt; another seed gives others.
    """
    ranks = jobs.start_ranks(2, script=DRAWS)
    assert [job.wait() for job in ranks] == [0, 0], ranks[0].said
    again = jobs.run(DRAWS)
    other = jobs.run(DRAWS, SEED=1, SPOTGUARD_RUN_ID="other")

    assert len({digest(said, "drawn") for said in (ranks[0].said, ranks[1].said, again)}) == 1
    for one, two in zip(
        digest(again, "drawn").split(", "), digest(other, "drawn").split(", "), strict=False
    ):
        assert one != two or "." not in one


def test_reseed_false_leaves_the_scripts_own_seeds(jobs: Jobs) -> None:
    """Whoever asks for that finds the generators as they were before `init`."""
    said = jobs.run(DRAWS, SEEDED=1)

    assert f"drawn [{random.Random(11).random()!r}, " in said
    assert f", {np.random.RandomState(11).rand()}, " in said
    expected = torch.empty(1, 2)
    bound = 1 / 2**0.5
    expected.uniform_(-bound, bound, generator=torch.Generator().manual_seed(11))
    assert repr(expected.tolist()) in said
