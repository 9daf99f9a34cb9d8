from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.runtime.processes import Zygote
from tests.soak.__main__ import Soak
from tests.soak.play import Play
from tests.soak.scenario import Kind, Life, scenario

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


@pytest.mark.e2e
@pytest.mark.timeout(600)
def test_random_runs_end_as_if_nothing_had_happened(tmp_path: Path) -> None:
    """A few runs of `python -m tests.soak`, which plays as many as one has time for."""
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
