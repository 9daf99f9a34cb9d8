"""Whole runs that lose and gain ranks, at random steps, beside one that nobody disturbs."""

from __future__ import annotations

import random
import re
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.runtime.distributed.test_bitwise_reduce import digests_in, losses_in
from tests.runtime.harness.processes import digest

if TYPE_CHECKING:
    from tests.runtime.harness.processes import Jobs

ELASTIC = Path(__file__).parents[1] / "jobs" / "elastic.py"
STEPS = 12

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_interruptions_at_random_steps(jobs: Jobs, workers: int) -> None:
    """SIGTERM to any rank at any step, on 1, 3, 2, then 4 ranks, with and without workers.

    A GPT with dropout: at each step the very bits of one process that was never interrupted.
    """
    how: dict[str, Any] = {"EXACT": "bitwise", "WRAP": "none"}
    alone = jobs.run(ELASTIC, **how, SPOTGUARD_RUN_ID="alone")
    chance = random.Random(workers)
    stops = sorted(chance.sample(range(1, STEPS - 3), 3))
    said = []
    for world, stop in zip((1, 3, 2, 4), [*stops, None], strict=True):
        ranks = jobs.start_ranks(
            world, script=ELASTIC, WORKERS=workers, PACE_S=0.1 if stop else 0, **how
        )
        if stop is not None:
            told = chance.randrange(world)
            ranks[told].wait_for(f"state {stop} ")
            ranks[told].kill(signal.SIGTERM)
        codes = [job.wait() for job in ranks]
        assert codes == [0 if stop is None else 75] * world, ranks[0].said
        said += [job.said for job in ranks]

    assert losses_in(said) == pytest.approx(losses_in([alone]), rel=1e-5)
    assert digests_in(said) == digests_in([alone])
    assert {digest(text) for text in said[-4:]} == {digest(alone)}


def test_a_rank_killed_at_any_moment(jobs: Jobs) -> None:
    """kill -9, most often in the midst of an all-reduce: the others leave, saved, and it goes on.

    At most the step under way is done again, and the end is that of one process, to the last bit.
    """
    how: dict[str, Any] = {"EXACT": "bitwise", "WRAP": "none"}
    alone = jobs.run(ELASTIC, **how, SPOTGUARD_RUN_ID="alone")
    chance = random.Random(4)
    said = []
    for step in (1, 4, 7):
        ranks = jobs.start_ranks(3, script=ELASTIC, **how)
        victim = chance.randrange(3)
        ranks[victim].wait_for(f"state {step} ")
        time.sleep(chance.random() * 0.03)
        ranks[victim].kill(signal.SIGKILL)
        codes = [job.wait() for job in ranks]
        assert codes == [-9 if rank == victim else 75 for rank in range(3)], codes
        said += [job.said for rank, job in enumerate(ranks) if rank != victim]
    assert {end["reason"] for end in jobs.ends()} == {"node_lost"}
    last = jobs.run(ELASTIC, **how)

    assert digests_in([*said, last]) == digests_in([alone])
    assert digest(last) == digest(alone)


def test_a_sharded_run_is_that_of_replicas(jobs: Jobs) -> None:
    """FSDP2 on 4, 2, then 3 ranks: at each step the loss of DDP on as many, and of one process.

    So it is with an average of the weights in a dict, which is in parts like them.
    """
    losses, averages = [], []
    for wrap in ("fsdp", "ddp"):
        said = []
        for world, until in ((4, 4), (2, 8), (3, STEPS)):
            ranks = jobs.start_ranks(
                world,
                script=ELASTIC,
                SPOTGUARD_RUN_ID=wrap,
                SPOTGUARD_MAX_STEPS=until,
                EXACT="",
                WRAP=wrap,
                AVERAGE=1,
            )
            assert [job.wait() for job in ranks] == [0] * world, ranks[0].said
            said += [job.said for job in ranks]
        losses.append(losses_in(said))
        averages.append([float(v) for v in re.findall(r"average \d+ (\S+)", "".join(said))])
    sharded, replicated = losses
    assert list(sharded) == list(range(STEPS))
    assert sharded == pytest.approx(replicated, rel=1e-5)
    assert averages[0] == pytest.approx(averages[1], rel=1e-5)
    assert len(averages[0]) == 4 * 4 + 4 * 2 + 4 * 3
