from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.lab.lab_jobs import STEADY, Lab

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

SCRIPTS = Path(__file__).parent / "drill_scripts"


def test_a_good_script_passes(lab: Lab) -> None:
    """A script that tracks all its state passes every sort of interruption, on 2 nodes and on 1."""
    said = lab.spotguard("drill", STEADY, "--steps", "40", "--json", "--", "--pause", "0.01")

    assert said.code == 0, said.out + said.err
    report = said.json
    assert report["passed"]
    assert report["findings"] == []
    assert report["parted_at"] is None
    kinds = [interruption["end_reason"] for interruption in report["interruptions"]]
    assert {"preempted", "terminated", "vanished"} <= set(kinds)
    assert {interruption["nodes"] for interruption in report["interruptions"]} >= {2}
    assert report["largest_loss_difference"] < 1e-4
    assert not list((lab.home / "drills").iterdir()), "nothing is left of it"


@pytest.mark.parametrize(
    ("script", "nodes", "label", "variable"),
    [
        ("forgets_scheduler.py", 2, "scheduler", "schedule"),
        ("forgets_ema.py", 1, "EMA", "average"),
        ("forgets_rng.py", 1, "random generator", "noise"),
    ],
)
def test_a_forgetful_script_is_told_what_it_forgot(
    lab: Lab, script: str, nodes: int, label: str, variable: str
) -> None:
    """The drill fails, exit 10, and names the state that was not restored, and the step."""
    said = lab.spotguard("drill", SCRIPTS / script, "--nodes", str(nodes), "--kills", "2", "--json")

    assert said.code == 10, said.out + said.err
    report = said.json
    assert not report["passed"]
    found = report["findings"][0]
    assert found["label"] == label
    assert found["variable"].split(".")[0] == variable
    first_resume = report["interruptions"][0]["last_step"]
    assert 0 < found["step"] - first_resume + report["interruptions"][0]["steps_lost"] <= 3
    assert "run.track(" in found["detail"], "it says what to do"
    assert label in report["summary"]


def test_an_unseeded_script_with_running_statistics_passes(lab: Lab) -> None:
    """Set-up is seeded by `init`, statistics are the first rank's: nothing is left to forget."""
    said = lab.spotguard(
        "drill", SCRIPTS / "unseeded_statistics.py", "--nodes", "3", "--kills", "2", "--json"
    )

    assert said.code == 0, said.out + said.err
    assert said.json["passed"]


def test_a_script_that_draws_before_init_is_told_so(lab: Lab) -> None:
    """Two undisturbed runs differ already; one sentence says where that comes from."""
    said = lab.spotguard(
        "drill", SCRIPTS / "draws_too_early.py", "--nodes", "1", "--kills", "1", "--json"
    )

    assert said.code == 10, said.out + said.err
    assert [found["label"] for found in said.json["findings"]] == ["not reproducible"]
    assert "before spotguard.init()" in said.json["findings"][0]["detail"]


@pytest.mark.parametrize("script", ["gan.py", "closure.py"])
def test_steps_of_several_backward_passes_pass(lab: Lab, script: str) -> None:
    """Adversarial networks, and L-BFGS with its closure, on 3 nodes and on 2."""
    said = lab.spotguard("drill", SCRIPTS / script, "--nodes", "3", "--kills", "2", "--json")

    assert said.code == 0, said.out + said.err
    assert said.json["passed"]
