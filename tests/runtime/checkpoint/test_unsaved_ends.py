"""Ends of jobs whose last save failed, or could never have been made."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.runtime.harness.processes import Jobs

EIGHT_BIT = Path(__file__).parents[1] / "jobs" / "eight_bit.py"

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


@pytest.mark.parametrize("begins", [0, 3])
def test_state_that_cannot_be_stored_is_found_when_it_turns_up(jobs: Jobs, begins: int) -> None:
    """A tensor subclass in an optimizer ends the job in one sentence at its first step.

    Not at the first save, hours later, nor at the notice.
    """
    said = jobs.run(EIGHT_BIT, FROM=begins, TOLD=begins, code=10)

    assert "Traceback" not in said
    assert "cannot store optimizer.state.0.moment" in said
    assert "saved in time" not in said
    [end] = jobs.ends()
    assert (end["reason"], end["step"]) == ("failed", begins + 1)


def test_a_failed_last_save_is_told(jobs: Jobs) -> None:
    """The checkpoint of before is there, but this save failed: nobody says that it was in time."""
    job = jobs.start(HURT="13:begin:full", EVERY="10 steps", WIDTH=2000, PACE_S=0.3, STEPS=30)
    job.wait_for("hurt at 13")
    job.kill(signal.SIGTERM)

    assert job.wait() == 75, job.said
    [end] = jobs.ends()
    assert (end["reason"], end["saved"], end["saved_step"]) == ("terminated", False, 10)
    assert "told to end by SIGTERM, not saved in time" in job.said
