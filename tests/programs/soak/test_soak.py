from __future__ import annotations

import os
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from spotguard.testing import FakeClock
from tests.programs.soak.__main__ import Soak
from tests.programs.soak.patience import Patience, queued_for_s
from tests.programs.soak.play import Play
from tests.programs.soak.scenario import Kind, Life, scenario
from tests.runtime.harness.processes import Zygote

if TYPE_CHECKING:
    from pathlib import Path

FIRST, RUNS = 2, 5


def test_a_seed_is_one_scenario() -> None:
    """So a run that went wrong can be played again alone."""
    assert scenario(7) == scenario(7)
    assert scenario(7) != scenario(8)


def test_every_kind_of_death_and_training_comes() -> None:
    """Hundreds of runs leave nothing out."""
    every = [scenario(seed) for seed in range(300)]
    assert {life.kind for each in every for life in each.lives} == {None, *Kind}
    assert {life.world for each in every for life in each.lives} == {1, 2, 3, 4}
    assert {each.training.wrap for each in every} == {"plain", "ddp", "fsdp"}
    assert {each.training.workers for each in every} == {0, 1, 2}
    assert {each.bitwise for each in every} == {True, False}


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


@pytest.mark.e2e
@pytest.mark.timeout(600)
def test_random_runs_end_as_if_nothing_had_happened(tmp_path: Path) -> None:
    """A few runs of `python -m tests.programs.soak`, which plays as many as one has time for."""
    plays = Soak(tmp_path, beside=2).play(FIRST, RUNS)

    assert {play.scenario.seed: play.wrong for play in plays if play.wrong} == {}
    assert sum(play.ends["finished"] + play.ends["finished first"] for play in plays) == RUNS


@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_ranks_that_wait_for_one_that_never_came_are_ended(tmp_path: Path) -> None:
    """A rank dies before there is a process group: the controller ends the others, the run goes on.

    By themselves they would wait in torch's rendezvous for half an hour.
    """
    seed = next(seed for seed in range(1000) if scenario(seed).training.wrap == "plain")
    early = Life(world=2, kind=Kind.KILL_ONE, victim=1, after_steps=-1)
    run = replace(scenario(seed), lives=(early, Life(world=2)))
    zygote = Zygote()
    try:
        play = Play(run, zygote, tmp_path)
        play.run()
    finally:
        zygote.close()

    assert play.wrong == []
    assert play.ends == {"kill -9 of one rank": 1, "finished": 1}
