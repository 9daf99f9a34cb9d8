"""An optimizer whose state lies on all ranks, each a part, goes on over an interruption."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.runtime.harness.processes import Jobs

pytestmark = pytest.mark.e2e

SCRIPT = Path(__file__).with_name("shared_out.py")


def trained(jobs: Jobs, world: int, *, code: int = 0, **env: Any) -> tuple[list[str], str]:
    """Run an attempt; return the weights after each step, and what the first rank said."""
    started = jobs.start_ranks(world, script=SCRIPT, **env)
    assert [rank.wait() for rank in started] == [code] * world, [rank.said for rank in started]
    said = [line for line in started[0].said.splitlines() if line.startswith("weights")]
    return said, started[0].said


def test_each_rank_goes_on_with_its_part_of_the_optimizer(jobs: Jobs) -> None:
    """The weights of three ranks are those of an undisturbed run; on two it is refused."""
    calm, told = trained(jobs, 3, SPOTGUARD_RUN_ID="calm")
    assert "rank 1 holds another optimizer than rank 0" in told
    assert "resumed on 3 ranks only" in told
    before, _ = trained(jobs, 3, code=75, HURT="5")
    after, _ = trained(jobs, 3, SPOTGUARD_ATTEMPT=2)
    assert [*before, *after] == calm
    trained(jobs, 3, code=75, HURT="5", SPOTGUARD_RUN_ID="fewer")
    refused = jobs.start_ranks(2, script=SCRIPT, SPOTGUARD_RUN_ID="fewer", SPOTGUARD_ATTEMPT=2)
    codes = [rank.wait() for rank in refused]
    assert 0 not in codes, codes
    said = refused[0].said
    assert "optimizer was another one on each of 3 ranks" in said
    assert "start as many ranks as the checkpoint has" in said
    assert "Traceback" not in said
