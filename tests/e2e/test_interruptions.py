from __future__ import annotations

import json
import math
from datetime import datetime
from typing import TYPE_CHECKING

import pytest

from spotguard.testing import read_sample_trace
from tests.e2e.lab.lab_jobs import (
    FAST_CLOUD,
    OFTEN,
    STEADY,
    STEADY_STEPS,
    Lab,
    final_weights,
    reasons,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.e2e.conftest import Calm

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

RUN_FIELDS = {
    *("run_id", "state", "step", "total_steps", "store", "spent_usd", "budget_usd"),
    *("on_demand_usd", "saved_pct", "goodput", "attempts"),
}
ATTEMPT_FIELDS = {
    *("attempt", "infra", "region", "zone", "instance_type", "market", "nodes"),
    *("price_usd_per_h", "started_at", "ended_at", "end_reason", "notice_s"),
    *("saved_before_end_s", "steps_lost", "cost_usd"),
}


def test_three_interruptions_cost_nothing_but_time(lab: Lab, calm: Callable[[int], Calm]) -> None:
    """A notice, a bare SIGTERM and a kill -9: four attempts, and the weights of a calm run."""
    status = lab.up(
        STEADY,
        *("--nodes", "2"),
        *("--interrupt", "node=1@step=6:notice"),
        *("--interrupt", "node=0@step=30:term"),
        *("--interrupt", "node=1@step=48:kill"),
        *("--speed-up", "40"),  # a notice of 3 s, in time on a loaded machine too
        *OFTEN,
        env={"SPOTGUARD_HOLD": "6:30,30:30,48:2"},  # each blow falls before the next is due
    )

    assert reasons(status) == ["preempted", "terminated", "node_lost", "finished"]
    weights = final_weights(status)
    assert weights == calm(2).weights
    assert {name.split(".")[0] for name in weights} == {"model", "optimizer", "ema"}
    alive = {"controller_alive": False}  # it may be about to end when `up` prints
    assert {**status, **alive} == {**lab.status(status["run_id"]), **alive}

    assert status.keys() >= RUN_FIELDS
    assert all(attempt.keys() >= ATTEMPT_FIELDS for attempt in status["attempts"])
    assert (status["state"], status["step"], status["total_steps"]) == ("finished", 64, 64)
    assert status["budget_usd"] is None  # there is none, which is not zero
    noticed, terminated, lost, finished = status["attempts"]
    # 3 s are given, cut to whole ones; a loaded machine may take a part of them to look.
    assert 0 <= noticed["notice_s"] <= 3.5
    assert terminated["notice_s"] is lost["notice_s"] is finished["notice_s"] is None
    assert [a["zone"] for a in status["attempts"]] == [None] * 4
    for attempt in status["attempts"]:
        assert (attempt["infra"], attempt["market"], attempt["nodes"]) == ("local", "spot", 2)
        assert 0.0 <= attempt["saved_before_end_s"] < 5.0
        lived_s = _at(attempt["ended_at"]) - _at(attempt["started_at"])
        assert attempt["cost_usd"] == pytest.approx(2 * 0.918 * lived_s / 3600, rel=0.01)
    assert [each["reason"] for each in status["recoveries"]] == reasons(status)[:3]
    for recovery in status["recoveries"]:
        parts = [value for name, value in recovery.items() if name.endswith("_s")]
        assert sum(parts) == pytest.approx(2 * recovery["total_s"], abs=0.01)
    for attempt in (noticed, terminated, finished):
        assert attempt["steps_lost"] == 0
    assert lost["steps_lost"] <= 5
    costs = [attempt["cost_usd"] for attempt in status["attempts"]]
    assert status["spent_usd"] == pytest.approx(math.fsum(costs))
    assert status["on_demand_usd"] > 0
    assert status["saved_pct"] == pytest.approx(
        100 * (1 - status["spent_usd"] / status["on_demand_usd"])
    )
    assert 0 < status["goodput"] < 1

    shown = lab.spotguard("status", status["run_id"]).out
    for words in ("preempted with notice", "told to end by SIGTERM", "a node vanished"):
        assert words in " ".join(shown.replace("│", " ").split()), shown
    for line in lab.history(status["run_id"]):
        assert line["text"]
        assert line["at"]


def _at(text: str) -> float:
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


def test_changed_node_count_trains_on_each_sample_once(
    lab: Lab, calm: Callable[[int], Calm], tmp_path: Path
) -> None:
    """From 2 nodes to 1 and back to 2: every sample once an epoch, and the losses of a calm run."""
    trace = tmp_path / "samples.jsonl"
    status = lab.up(
        STEADY,
        *("--nodes", "1:2"),
        *("--interrupt", "capacity=1@step=10"),
        *("--interrupt", "capacity=2@step=30", "--interrupt", "all@step=40:kill"),
        *FAST_CLOUD,
        *OFTEN,
        env={"SPOTGUARD_TRACE_SAMPLES": str(trace)},
    )

    assert [attempt["nodes"] for attempt in status["attempts"]] == [2, 1, 2]
    steps = read_sample_trace(trace)
    assert [step.step for step in steps] == list(range(STEADY_STEPS))
    assert {step.world_size for step in steps} == {1, 2}
    for epoch in range(4):
        samples = [s for step in steps if step.epoch == epoch for s in step.samples]
        assert sorted(samples) == list(range(500)), f"epoch {epoch}"
    undisturbed = read_sample_trace(calm(2).trace)
    assert [sorted(s.samples) for s in steps] == [sorted(s.samples) for s in undisturbed]
    for ours, theirs in zip(steps, undisturbed, strict=True):
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-4), f"step {ours.step}"


def test_whole_cluster_killed_loses_at_most_one_interval(
    lab: Lab, calm: Callable[[int], Calm]
) -> None:
    """kill -9 to everything at once: back to the last periodic save, then the same weights.

    The script is another one by then, and a module is gone: the run's code stays what it was.
    """
    script = lab.work / "job.py"
    edited = "pathlib.Path(__file__).write_text('raise SystemExit(3)')\n"
    gone = "pathlib.Path(__file__).with_name('beside.py').unlink(missing_ok=True)\n"
    (lab.work / "beside.py").write_text("")
    text = STEADY.read_text()
    at = text.index("\nimport ") + 1
    script.write_text(f"{text[:at]}import pathlib\nimport beside\n{edited}{gone}{text[at:]}")
    status = lab.up(
        script, "--nodes", "2", "--interrupt", "all@step=33:kill", "--save-every", "10 steps"
    )

    assert reasons(status) == ["vanished", "finished"]
    killed, after = status["attempts"]
    assert killed["last_step"] >= 33
    assert 0 <= killed["steps_lost"] <= 10 + 1  # a save that was still being written is lost too
    assert after["first_step"] == killed["last_step"] - killed["steps_lost"]
    assert after["first_step"] % 10 == 0
    assert final_weights(status) == calm(2).weights


@pytest.mark.parametrize("cloud", ["gcp", "azure"])
def test_notices_of_other_clouds(lab: Lab, calm: Callable[[int], Calm], cloud: str) -> None:
    """Google's and Azure's metadata services are understood as well: saved before the end."""
    status = lab.up(
        STEADY,
        *("--nodes", "1", "--metadata", cloud, "--interrupt", "node=0@step=10:notice"),
        *FAST_CLOUD,
    )

    assert reasons(status) == ["preempted", "finished"]
    first = status["attempts"][0]
    assert first["steps_lost"] == 0
    assert first["notice_s"] is not None
    assert final_weights(status) == calm(1).weights


def test_random_interruptions(lab: Lab, calm: Callable[[int], Calm]) -> None:
    """With a mean time between failures shorter than the run, it still ends, and ends right."""
    status = lab.up(
        STEADY,
        *("--nodes", "1", "--mtbf", "45s", "--interrupt-seed", "7"),
        *FAST_CLOUD,
        *OFTEN,
        args=("--pause", "0.9"),  # a busy machine may need twenty seconds for a start
    )

    assert len(status["attempts"]) > 1
    assert {"preempted", "terminated", "vanished"} & set(reasons(status))
    assert final_weights(status) == calm(1).weights


def test_recorded_market(lab: Lab, calm: Callable[[int], Calm], tmp_path: Path) -> None:
    """A recorded trace is replayed: its capacity takes nodes, its prices make the bill."""
    trace = tmp_path / "trace.json"
    # One tick a second: gone after 30 s, when a loaded machine, too, has begun to train, for 2 s.
    ticks = [1] * 30 + [0] * 2 + [1] * 500
    body = {
        "metadata": {
            "cloud": "aws",
            "zone": "us-east-2a",
            "instance": "p3.2xlarge",
            "gap_seconds": 80,
            "on_demand_price": 3.06,
        },
        "capacity": ticks,
        "spot_price": [1.0] * 30 + [2.0] * 502,
    }
    trace.write_text(json.dumps(body))

    status = lab.up(
        STEADY, "--trace", trace, *FAST_CLOUD, *OFTEN, "--nodes", "1", args=("--pause", "0.6")
    )

    assert reasons(status)[0] == "preempted"
    assert reasons(status)[-1] == "finished"
    first, last = status["attempts"][0], status["attempts"][-1]
    assert (first["zone"], first["instance_type"]) == ("us-east-2a", "p3.2xlarge")
    assert (first["price_usd_per_h"], last["price_usd_per_h"]) == (1.0, 2.0)
    assert final_weights(status) == calm(1).weights
