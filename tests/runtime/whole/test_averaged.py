"""Averaged weights, in the model's place to be evaluated, are not taken for the training's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.runtime.harness.processes import digest

if TYPE_CHECKING:
    from tests.runtime.harness.processes import Jobs

pytestmark = pytest.mark.e2e

SCRIPT = Path(__file__).parents[1] / "jobs" / "averaged.py"


def ranks(jobs: Jobs, world: int, *, code: int = 0, **env: Any) -> list[str]:
    """Run the ranks of one attempt to their end; return what each said."""
    started = jobs.start_ranks(world, script=SCRIPT, **env)
    assert [rank.wait() for rank in started] == [code] * world, [rank.said for rank in started]
    return [rank.said for rank in started]


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize(("by", "reason"), [("cloud", "terminated"), ("budget", "budget")])
def test_weights_that_were_exchanged_are_not_saved(
    jobs: Jobs, world: int, by: str, reason: str
) -> None:
    """The last save counts, and the run ends with the weights that it had undisturbed.

    Whoever told it to stop, nobody is told that the store had failed.
    """
    calm = ranks(jobs, world, SPOTGUARD_RUN_ID="calm")
    left = ranks(jobs, world, code=75, HURT="9", BY=by)
    assert "evaluated 6" in left[0]
    assert "evaluated 9" not in left[0]
    [end] = jobs.ends()
    assert (end["reason"], end["step"], end["saved_step"]) == (reason, 9, 8)
    again = ranks(jobs, world, SPOTGUARD_ATTEMPT=2)
    assert "done 8" in again[0].splitlines()
    assert [digest(each) for each in again] == [digest(each) for each in calm]
