from __future__ import annotations

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from spotguard.testing import FakeClock
from tests.property.__main__ import seed_of_the_day
from tests.property.child.moments import MOMENTS
from tests.property.child.planted import BUGS
from tests.property.draw import KINDS, drawn, parsed
from tests.property.patience import Patience, queued_for_s
from tests.property.runner import Runner, Servers
from tests.property.scripts import corpus
from tests.property.table import tables

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

QUICK = [script for script in corpus().values() if script.server == "base"]
DRAWS = 24


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    """Return what forks ranks, for all tests of this file."""
    made = Servers()
    yield made
    made.close()


def test_a_line_is_one_draw() -> None:
    """So a run that went wrong can be played again alone."""
    for number in range(300):
        draw = drawn(7, number, QUICK)
        assert parsed(str(draw)) == draw
        assert draw == drawn(7, number, QUICK)
    assert drawn(7, 1, QUICK) != drawn(8, 1, QUICK)


def test_everything_comes() -> None:
    """Hundreds of draws leave no script, blow, moment, number of ranks or fault out."""
    every = [drawn(1, number, QUICK) for number in range(5 * len(QUICK))]
    lives = [life for draw in every for life in draw.lives]
    assert {draw.script for draw in every} == {script.name for script in QUICK}
    assert {life.kind for life in lives} == {"", *KINDS}
    assert {life.at for life in lives} == {"", *MOMENTS}
    assert {life.world for life in lives} == {1, 2, 3, 4}
    assert {life.fault for life in lives} == {"", "503", "slow", "torn", "away"}


def test_waiting_for_a_core_is_no_hang() -> None:
    """Patience runs out while all stand still, as far as they do, and not on a busy machine."""
    clock = FakeClock(0.0)
    queued = {1: 0.0, 2: 0.0}
    jobs: Any = [SimpleNamespace(pid=1), SimpleNamespace(pid=2)]
    patience = Patience(jobs, 10.0, now=clock.monotonic, queued_s=lambda pid: queued[pid])
    for _ in range(100):
        clock.advance(5.0)
        queued[1] += 3.0
        queued[2] += 3.0
        assert not patience.is_over()
    clock.advance(12.0)
    queued[1] += 3.0
    assert not patience.is_over()
    clock.advance(1.5)
    del queued[1]
    queued[1] = 0.0  # it ended
    assert patience.is_over()


def test_the_kernel_counts_who_waits_for_a_core() -> None:
    """And what is not there has waited for nothing."""
    assert queued_for_s(os.getpid()) >= 0.0
    assert queued_for_s(2**30) == 0.0


# By hand until a rank's death at an epoch's end is mended, which its draws find.
@pytest.mark.long
@pytest.mark.e2e
@pytest.mark.timeout(400)
def test_scripts_that_are_interrupted_end_as_if_nothing_had_happened(
    tmp_path: Path, servers: Servers
) -> None:
    """A few of the day's draws; `make soak` plays hundreds. What is printed plays one again."""
    runner, seed = Runner(tmp_path, servers), seed_of_the_day()
    began = time.monotonic()
    results = list(runner.many(seed, range(DRAWS), QUICK, beside=2))
    sys.stdout.write(f"seed {seed}\n" + "\n".join(tables(results, time.monotonic() - began)))
    wrong = {f"python -m tests.property --replay '{r.draw}'": r.wrong for r in results if r.wrong}
    assert wrong == {}


FOUND_BY = {
    "generator": "state/dice 1:term-all@stepped:0.40:0 1",
    "dict": "state/ema 1:term-all@stepped:0.40:0 1",
    "momentum": "loops/plain 1:term-all@stepped:0.40:0 1",
    "rate": "loops/clipped 1:term-all@stepped:0.60:0 1",
    "schedule": "schedules/lambda_of_groups 1:kill-all@boundary:0.60:0 1",
    "buffers": "models/batch_norm 1:term-all@boundary:0.60:0 1",
    "sample": "loops/plain 1:kill-all@batch:0.60:0 1",
    "third": "loops/plain 2:kill-all@batch:0.60:0 1",
    "seeds": "loops/noisy 1:term-all@step:0.60:0 1",
    "dice": "loops/own_seeds 1:term-all@step:0.60:0 1",
    "stream": "data/stream_of_shards 1:term-all@step:0.60:0 1",
    "best": "loops/ends_early 1:term-all@step:0.80:0 1",
    "epoch-end": "epochs/imagenet 1:term-all@epoch-end:0.30:0 1:term-all@epoch-end:0.30:0 1",
    "last-save": "loops/plain 1:term-all@stepped:0.40:0 1",
    "retries": "loops/own_seeds save=1_steps store=bucket 1+503@shard",
    "notice": "loops/plain 1:notice@stepped:0.20:0 1",
}
"""For each planted bug a draw that it spoils, and that ends well without it."""


# By hand until a rank's death at an epoch's end is mended, which its draws find.
@pytest.mark.long
@pytest.mark.e2e
@pytest.mark.timeout(400)
def test_planted_bugs_are_found(tmp_path: Path, servers: Servers) -> None:
    """Each way of breaking the runtime spoils a run that ends well when nothing is broken."""
    assert set(FOUND_BY) == set(BUGS)

    def spoils(bug: str) -> bool:
        return bool(Runner(tmp_path, servers, bug=bug).play(parsed(FOUND_BY[bug])).wrong)

    with ThreadPoolExecutor(2) as pool:
        found = dict(zip(BUGS, pool.map(spoils, BUGS), strict=True))
    assert [bug for bug, spoilt in found.items() if not spoilt] == []
    whole = Runner(tmp_path, servers)
    with ThreadPoolExecutor(2) as pool:
        wrong = [result.wrong for result in pool.map(whole.play, map(parsed, FOUND_BY.values()))]
    assert [each for each in wrong if each] == []
