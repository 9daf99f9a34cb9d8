from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from spotguard.testing import read_sample_trace
from tests.e2e.lab.lab_jobs import (
    EXAMPLES,
    OFTEN,
    STEADY,
    TORCHRUN,
    Lab,
    final_weights,
    reasons,
    weights_at,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.e2e.conftest import Calm

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def test_plain_python_and_torchrun(lab: Lab, calm: Callable[[int], Calm], tmp_path: Path) -> None:
    """The same script under `python`, `torchrun` and `spotguard up`: same samples, same losses."""
    traces = {}
    for name, launcher in (
        ("python", (sys.executable,)),
        ("torchrun", (*TORCHRUN, "--nproc-per-node", "2")),
    ):
        trace = tmp_path / f"{name}.jsonl"
        env = {
            "SPOTGUARD_TRACE_SAMPLES": str(trace),
            "SPOTGUARD_RUN_ID": name,
            "SPOTGUARD_STORE": str(tmp_path / "store"),
        }
        said = lab.run(*launcher, STEADY, "--pause", "0", env=env)
        assert said.code == 0, said.err
        traces[name] = read_sample_trace(trace)
    launched = {nodes: read_sample_trace(calm(nodes).trace) for nodes in (1, 2)}

    assert [s.loss for s in traces["python"]] == [s.loss for s in launched[1]]
    assert [s.loss for s in traces["torchrun"]] == [s.loss for s in launched[2]]
    for alone, together in zip(traces["python"], traces["torchrun"], strict=True):
        assert sorted(alone.samples) == sorted(together.samples)
        assert alone.loss == pytest.approx(together.loss, rel=1e-4)
    assert weights_at(tmp_path / "store" / "python", 64) == calm(1).weights
    assert weights_at(tmp_path / "store" / "torchrun", 64) == calm(2).weights


def test_plain_python_resumes_by_its_run_id(lab: Lab, calm: Callable[[int], Calm]) -> None:
    """Without a launcher, the same run id goes on from what an interrupted process saved."""
    env = {"SPOTGUARD_RUN_ID": "mine", "SPOTGUARD_SAVE_EVERY": "8 steps"}
    crashed = lab.run(sys.executable, STEADY, "--pause", "0", "--crash-at", "20", env=env)
    assert crashed.code == 1
    assert "on fire" in crashed.err

    said = lab.run(sys.executable, STEADY, "--pause", "0", env=env)

    assert said.code == 0, said.err
    assert "resumed at step 16" in said.err
    assert weights_at(lab.work / "spotguard-runs" / "mine", 64) == calm(1).weights


def test_example_survives_the_main_story(lab: Lab, tmp_path: Path) -> None:
    """The README's example, small, on two nodes through a notice, a SIGTERM and a kill."""
    script = EXAMPLES / "train_gpt.py"
    small = ("--steps", "120", "--width", "32", "--layers", "1", "--length", "32")
    env = {"SPOTGUARD_RUN_ID": "calm", "SPOTGUARD_STORE": str(tmp_path / "store")}
    calm = lab.run(*TORCHRUN, "--nproc-per-node", "2", script, *small, env=env)
    assert calm.code == 0, calm.err

    status = lab.up(
        script,
        *("--nodes", "2"),
        *("--interrupt", "node=1@step=10:notice"),
        *("--interrupt", "node=0@step=60:term"),
        *("--interrupt", "node=1@step=90:kill"),
        *("--speed-up", "40"),  # a notice of 3 s, in time on a loaded machine too
        *OFTEN,
        args=small,
        # Steps of a few milliseconds would run past the next interruption meanwhile.
        env={"SPOTGUARD_HOLD": "10:30,60:30,90:2"},
    )

    assert reasons(status) == ["preempted", "terminated", "node_lost", "finished"]
    assert final_weights(status) == weights_at(tmp_path / "store" / "calm", 120)
