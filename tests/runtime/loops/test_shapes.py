from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.runtime.harness.processes import digest

if TYPE_CHECKING:
    from tests.runtime.harness.processes import Jobs

pytestmark = pytest.mark.e2e

SCRIPT = Path(__file__).parents[1] / "jobs" / "shapes.py"
MOMENTS = {
    "framework": ("step 6", "evaluation 10"),
    "epochs": ("step 8", "evaluation 1", "end 1", "evaluation 2"),
    "get_batch": ("step 6",),
    "episodes": ("step 6",),
    "tokens": ("step 6",),
    "trainer": ("step 6",),
}


def ranks(jobs: Jobs, world: int, *, code: int = 0, **env: Any) -> list[str]:
    """Run the ranks of one attempt to their end; return what each said."""
    started = jobs.start_ranks(world, script=SCRIPT, **env)
    assert [rank.wait() for rank in started] == [code] * world, [rank.said for rank in started]
    return [rank.said for rank in started]


def norm(said: str) -> float:
    """Return the norm of the final weights."""
    return float(digest(said, "norm").split()[1])


@pytest.mark.parametrize("shape", MOMENTS)
def test_each_shape_of_loop_resumes_to_the_last_bit(jobs: Jobs, shape: str) -> None:
    """Interrupted on three ranks, wherever it is, a script ends as if nothing had happened."""
    calm = ranks(jobs, 3, SHAPE=shape, SPOTGUARD_RUN_ID="calm")
    assert len({digest(said) for said in calm}) == 1
    for number, moment in enumerate(MOMENTS[shape]):
        run_id = f"hurt-{number}"
        ranks(jobs, 3, code=75, SHAPE=shape, SPOTGUARD_RUN_ID=run_id, HURT=moment)
        said = ranks(jobs, 3, SHAPE=shape, SPOTGUARD_RUN_ID=run_id, SPOTGUARD_ATTEMPT=2)
        assert [digest(each) for each in said] == [digest(each) for each in calm], moment
        assert "evaluated 0" not in said[0]


@pytest.mark.parametrize("shape", ["framework", "epochs", "get_batch", "episodes", "tokens"])
def test_each_shape_of_loop_is_the_same_on_another_number_of_ranks(jobs: Jobs, shape: str) -> None:
    """One rank, and three that become two: the same samples, draws and episodes."""
    [alone] = ranks(jobs, 1, SHAPE=shape, SPOTGUARD_RUN_ID="alone")
    moment = MOMENTS[shape][0]
    ranks(jobs, 3, code=75, SHAPE=shape, HURT=moment)
    two = ranks(jobs, 2, SHAPE=shape, SPOTGUARD_ATTEMPT=2)
    assert norm(two[0]) == norm(two[1])
    assert norm(two[0]) == pytest.approx(norm(alone), rel=1e-4)


def test_a_frameworks_loop_trains_as_ours_does(jobs: Jobs) -> None:
    """Steps begun and ended from outside, and backward run elsewhere, end at the same weights."""
    ours = ranks(jobs, 3, SHAPE="steps", SPOTGUARD_RUN_ID="ours")
    theirs = ranks(jobs, 3, SHAPE="framework", SPOTGUARD_RUN_ID="theirs")
    assert digest(theirs[0]) == digest(ours[0])


def test_an_evaluation_after_the_step_is_left_and_told_to_the_next_attempt(jobs: Jobs) -> None:
    """All ranks leave it at one batch, saved; the framework hears that it was cut."""
    left = ranks(jobs, 3, code=75, SHAPE="framework", HURT="evaluation 10")
    assert "evaluated 5" in left[0]
    assert "evaluated 10" not in left[0]
    [end] = jobs.ends()
    assert (end["step"], end["saved_step"]) == (10, 10)
    went_on = ranks(jobs, 3, SHAPE="framework", SPOTGUARD_ATTEMPT=2)
    assert "done 10 cut True" in went_on[2]
    assert "evaluated 10" in went_on[2]


def test_an_evaluation_that_is_left_in_its_last_lines_was_cut(jobs: Jobs) -> None:
    """Its batches were all read, and what the script makes of them was not done."""
    left = ranks(jobs, 3, code=75, SHAPE="framework", HURT="tail 10")
    assert "evaluated 5" in left[0]
    assert "evaluated 10" not in left[0]
    went_on = ranks(jobs, 3, SHAPE="framework", SPOTGUARD_ATTEMPT=2)
    assert "done 10 cut True" in went_on[2]
    assert "evaluated 10" in went_on[2]
    ranks(jobs, 3, code=75, SHAPE="framework", HURT="step 12", SPOTGUARD_RUN_ID="later")
    later = ranks(jobs, 3, SHAPE="framework", SPOTGUARD_RUN_ID="later", SPOTGUARD_ATTEMPT=2)
    assert "done 13 cut False" in later[2]


def test_the_end_of_an_epoch_comes_once_for_each(jobs: Jobs) -> None:
    """Cut within, it comes again, with the state that it began with; done, it does not."""
    ranks(jobs, 3, code=75, SHAPE="epochs", HURT="evaluation 1")
    again = ranks(jobs, 3, SHAPE="epochs", SPOTGUARD_ATTEMPT=2)
    assert "evaluated 1" in again[0]
    assert "[0, 1, 2]" in digest(again[0])

    ranks(jobs, 3, code=75, SHAPE="epochs", HURT="end 1", SPOTGUARD_RUN_ID="after")
    again = ranks(jobs, 3, SHAPE="epochs", SPOTGUARD_RUN_ID="after", SPOTGUARD_ATTEMPT=2)
    assert "evaluated 2" in again[0]
    assert "[0, 1, 2]" in digest(again[0])
