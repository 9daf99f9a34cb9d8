"""Nodes that stay go on by themselves, on the cluster that they are on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from spotguard.testing import read_sample_trace
from tests.e2e.lab.lab_jobs import FAST_CLOUD, OFTEN, STEADY, STEADY_STEPS, Lab, reasons

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.e2e.conftest import Calm

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def clusters(lab: Lab, run: str) -> list[str]:
    """Return the names of all clusters that were ever started."""
    return sorted(path.name for path in (lab.home / "runs" / run / "local" / "clusters").iterdir())


def test_the_first_node_dies_and_the_others_go_on(
    lab: Lab, calm: Callable[[int], Calm], tmp_path: Path
) -> None:
    """kill -9 of the node that hosts the rendezvous, then a notice: 3, 2, then 1 node, one cluster.

    Each sample still comes once, with the losses of a run that nobody disturbed.
    """
    trace = tmp_path / "samples.jsonl"
    status = lab.up(
        STEADY,
        *("--nodes", "1:3"),
        *("--interrupt", "node=0@step=10:kill", "--interrupt", "node=2@step=30:notice"),
        *FAST_CLOUD,
        *OFTEN,
        env={"SPOTGUARD_TRACE_SAMPLES": str(trace)},
    )

    run = status["run_id"]
    assert reasons(status) == ["node_lost", "preempted", "finished"]
    assert [(a["nodes"], a["in_place"]) for a in status["attempts"]] == [
        (3, False),
        (2, True),
        (1, True),
    ]
    assert clusters(lab, run) == [f"{run}-1"]
    for recovery in status["recoveries"]:
        parts = [value for name, value in recovery.items() if name.endswith("_s")]
        assert recovery["in_place"]
        assert recovery["release_s"] == recovery["provision_s"] == 0.0
        assert sum(parts) == pytest.approx(2 * recovery["total_s"], abs=0.01)
    steps = read_sample_trace(trace)
    assert [step.step for step in steps] == list(range(STEADY_STEPS))
    assert {step.world_size for step in steps} == {1, 2, 3}
    for ours, theirs in zip(steps, read_sample_trace(calm(2).trace), strict=True):
        assert sorted(ours.samples) == sorted(theirs.samples)
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-4), f"step {ours.step}"

    told = [line["text"] for line in lab.history(run)]
    assert any("2 nodes that stayed go on in place" in text for text in told)
    assert any("1 node that stayed" in text for text in told)
    assert "loopback, in" in lab.spotguard("status", run).out
    printed = lab.spotguard("logs", run).out
    assert printed.count("goes on in place as attempt 2, on 2 node(s)") == 2
    assert printed.count("goes on in place as attempt 3, on 1 node(s)") == 1


def test_a_stop_is_no_reason_to_go_on(lab: Lab) -> None:
    """What the user stops stays stopped, although the nodes could have gone on."""
    run = lab.start(STEADY, "--nodes", "1:2", args=("--pause", "0.3"))
    lab.wait_for_step(run, 2)
    assert lab.spotguard("stop", run).code == 0
    status = lab.follow(run)
    assert reasons(status) == ["stopped"]
    assert status["state"] == "stopped"


def test_a_failure_is_not_tried_again_in_place(lab: Lab) -> None:
    """The script's own error ends the run, on two nodes as on one."""
    status = lab.up(STEADY, "--nodes", "1:2", args=("--crash-at", "5"), code=10)
    assert reasons(status) == ["failed"]
