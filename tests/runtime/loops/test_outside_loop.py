from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest

from spotguard.errors import JobFailed, SpotguardError
from spotguard.launch.ranks.worker_environment import look_after_workers
from spotguard.runtime.process.outside_loop import WITH_RUN, WITHOUT_RUN, OutsideLoop
from spotguard.testing import FakeClock

if TYPE_CHECKING:
    from pathlib import Path


class Watched:
    """A process without or with a run, that is watched."""

    def __init__(self, *, launched: bool = True, with_run: bool = True) -> None:
        self.clock = FakeClock()
        self.told: list[str] = []
        self.ended: list[SpotguardError] = []
        self.loop = OutsideLoop(self.clock.monotonic)
        self.loop._tell, self.loop._end = self.told.append, self.ended.append
        if with_run:
            end = self.ended.append if launched else None
            self.loop.join(tell=self.told.append, end=end)

    def step(self, times: int, *, each_s: float = 0.0) -> None:
        """Have an optimizer step."""
        for _ in range(times):
            self.loop.stepped()
            self.clock.advance(each_s)


def test_the_third_step_is_told_with_the_ways_in() -> None:
    """Whoever trains outside is told at once what to do; once, and the job goes on."""
    watched = Watched()
    watched.step(2)
    assert watched.told == []
    watched.step(50)
    [words] = watched.told
    for way in ("run.steps", "spotguard.integrations", "run.begin_step"):
        assert way in words
    assert watched.ended == []
    watched.loop.enter()


@pytest.mark.parametrize("with_run", [True, False])
def test_a_job_that_goes_on_is_ended_once(with_run: bool) -> None:
    """Many steps over a long time are the evidence; one without the other is not."""
    patience = WITH_RUN if with_run else WITHOUT_RUN
    quick = Watched(with_run=with_run)
    quick.step(patience.steps * 50, each_s=patience.seconds / patience.steps / 100)
    assert quick.ended == []
    slow = Watched(with_run=with_run)
    slow.step(patience.steps - 1, each_s=1000.0)
    assert slow.ended == []
    slow.step(10, each_s=1.0)
    [problem] = slow.ended
    assert isinstance(problem, JobFailed)
    assert "run.steps" in problem.hint
    quick.loop.enter()
    slow.loop.enter()


def test_an_honest_job_is_left_alone() -> None:
    """A warm-up before the loop, steps in a loop of ours, and other threads are no evidence."""
    watched = Watched()
    with watched.loop.warm_up():
        watched.step(1000, each_s=10.0)
    watched.step(2)
    thread = threading.Thread(target=watched.step, args=(1000,))
    thread.start()
    thread.join()
    assert watched.told == []
    watched.loop.enter()
    watched.step(1000, each_s=10.0)
    assert (watched.told, watched.ended) == ([], [])


def test_a_run_that_nobody_launched_is_told_and_never_ended() -> None:
    """At a prompt, people try things."""
    watched = Watched(launched=False)
    watched.step(1000, each_s=10.0)
    assert len(watched.told) == 1
    assert watched.ended == []
    watched.loop.enter()


STEPS = """
import os, torch
weight = torch.nn.Parameter(torch.ones(1))
optimizer = torch.optim.SGD([weight], lr=0.1)
for _ in range(5):
    weight.grad = torch.ones(1)
    optimizer.step()
print("PYTHONPATH", os.environ.get("PYTHONPATH"))
"""
INIT = "import spotguard.runtime as s\nrun = s.init()\n"
LOOP = """
run.track(optimizer=optimizer, weight={"weight": weight})
for step in run.steps(run.episodes(1), total=2):
    for _ in step:
        step.backward((weight * 2).sum())
    optimizer.step()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "rank", "times"),
    [
        (STEPS, 0, 1),
        (STEPS, 1, 0),
        (INIT + STEPS, 0, 1),
        (INIT + STEPS.replace("range(5)", "range(2)") + LOOP, 0, 0),
    ],
    ids=["never imports us", "another rank", "never loops", "loops"],
)
def test_a_worker_is_watched_whatever_it_imports(
    tmp_path: Path, script: str, rank: int, times: int
) -> None:
    """The watch is there without an import; children of the script are not watched by it."""
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("print('their own')")
    given = {k: v for k, v in os.environ.items() if not k.startswith(("SPOTGUARD_", "PYTEST"))}
    given |= {"RANK": str(rank), "PYTHONPATH": str(own), "OMP_NUM_THREADS": "1"}
    look_after_workers(given)
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=given,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert done.stderr.count("outside of a loop of spotguard") == times, done.stderr
    assert done.stdout.startswith("their own")
    assert f"PYTHONPATH {own}" in done.stdout
