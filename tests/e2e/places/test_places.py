"""A run in more than one place: phases that follow each other, and moves by the user's word."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from spotguard.testing import read_sample_trace
from tests.e2e.lab.lab_jobs import FAST_CLOUD, OFTEN, STEADY, STEADY_STEPS, Lab, store_of

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]


def trained_once(trace: Path) -> None:
    """Check that each epoch has each sample once, whoever trained on it."""
    steps = read_sample_trace(trace)
    assert len(steps) == STEADY_STEPS
    for epoch in range(4):
        samples = [s for step in steps if step.epoch == epoch for s in step.samples]
        assert sorted(samples) == list(range(500)), f"epoch {epoch}"


def test_two_phases_each_interrupted(lab: Lab, tmp_path: Path) -> None:
    """First on 2 nodes, then by itself on 3; an interruption within a phase goes on in it."""
    (lab.work / "spotguard.toml").write_text(
        "phases = [{ until_step = 24, nodes = 2 }, { nodes = 3, price = 0.5 }]\n"
    )
    trace = tmp_path / "samples.jsonl"
    status = lab.up(
        STEADY,
        *("--interrupt", "node=1@step=10:notice", "--interrupt", "node=0@step=40:kill"),
        *FAST_CLOUD,
        *OFTEN,
        args=("--pause", "0.1"),
        env={"SPOTGUARD_TRACE_SAMPLES": str(trace)},
        timeout_s=1000,
    )
    attempts = status["attempts"]
    assert status["state"] == "finished"
    assert [each["nodes"] for each in attempts] == [2, 2, 3, 3]
    reasons = [each["end_reason"] for each in attempts]
    assert (reasons[1], reasons[3]) == ("phase_done", "finished")
    assert "phase_done" not in (reasons[0], reasons[2])
    assert attempts[1]["last_step"] == attempts[2]["first_step"] == 24
    assert [each["price_usd_per_h"] for each in attempts] == [0.918, 0.918, 0.5, 0.5]
    # Beside the second phase's own price, the demo price of the first counts for nothing.
    assert [each["demo_prices"] for each in attempts] == [True, True, False, False]
    paid = [each["cost_usd"] for each in attempts[2:]]
    assert status["spent_usd"] == pytest.approx(sum(paid))
    trained_once(trace)
    lines = [line["kind"] for line in lab.history(status["run_id"])]
    assert lines.count("phase_begun") == 1
    assert lines.count("run_created") == 1


def test_a_run_moves_and_its_controller_is_killed(lab: Lab, tmp_path: Path) -> None:
    """Refused while it lives; with --stop it goes on elsewhere, whenever its controller dies."""
    trace = tmp_path / "samples.jsonl"
    run = lab.start(
        STEADY,
        *("--nodes", "2", *OFTEN),
        args=("--pause", "0.3"),
        env={"SPOTGUARD_TRACE_SAMPLES": str(trace)},
    )
    lab.wait_for_step(run, 6)
    refused = lab.spotguard("resume", run, "--infra", "local", "--nodes", "3", "--yes")
    assert refused.code == 2
    assert "still goes on" in refused.err
    assert "--stop" in refused.err
    words = ("resume", run, "--infra", "local", "--nodes", "3", "--price", "0.5")
    moved = lab.spotguard(*words, "--stop", "--yes", "--detach", timeout_s=600)
    assert moved.code == 0, moved.err
    pid = lab.controller_pid(run)
    if pid is not None:
        os.kill(pid, signal.SIGKILL)
    status = lab.follow(run)
    attempts = status["attempts"]
    assert status["state"] == "finished"
    assert [each["nodes"] for each in attempts] == [2, 3]
    assert [each["end_reason"] for each in attempts] == ["stopped", "finished"]
    assert attempts[1]["first_step"] == attempts[0]["last_step"] >= 6
    assert [each["price_usd_per_h"] for each in attempts] == [0.918, 0.5]
    trained_once(trace)
    (line,) = [each for each in lab.history(run) if each["kind"] == "moved"]
    assert "local on 3 nodes" in line["text"]
    assert (store_of(status) / "places" / "000001.json").exists()
