from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.e2e.lab.lab_jobs import OFTEN, STEADY, Lab, final_weights, reasons

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.e2e.conftest import Calm

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

A_DIME_A_SECOND = ("--price", "360", "--on-demand-price", "1200")
WELL_UNDER_WAY = ("--nodes", "1", "--budget", "9.00", *A_DIME_A_SECOND, *OFTEN)
"""90 s: a job is deaf long before its money ends, also where a start takes a minute."""
SLOWLY = ("--pause", "1.5")
"""64 steps of it take 96 s, so undisturbed the job costs about 10 USD."""


def test_half_a_budget_pays_for_half_the_work(lab: Lab, calm: Callable[[int], Calm]) -> None:
    """Never exceeded: saved, torn down, exit 20; with more money, it ends with the same weights."""
    status = lab.up(
        STEADY, "--nodes", "1", "--budget", "6.00", *A_DIME_A_SECOND, args=SLOWLY, code=20
    )

    assert status["state"] == "paused"
    assert reasons(status) == ["budget"]
    assert 0 < status["step"] < 64
    assert status["saved_step"] == status["step"], "all that was paid for is kept"
    assert 1.0 < status["spent_usd"] <= status["budget_usd"] == 6.00
    assert not lab.on_nodes()
    run = status["run_id"]
    hint = lab.spotguard("status", run).out
    assert "budget" in hint

    refused = lab.spotguard("resume", run)
    assert refused.code == 20
    assert "--budget" in refused.err
    resumed = lab.spotguard("resume", run, "--budget", "24", "--json")
    assert resumed.code == 0, resumed.err
    assert reasons(resumed.json) == ["budget", "finished"]
    assert resumed.json["spent_usd"] <= resumed.json["budget_usd"] == 24
    assert final_weights(resumed.json) == calm(1).weights


def test_deaf_jobs_cannot_overspend(lab: Lab) -> None:
    """A busy loop that ignores all, and a frozen process: taken down before the money is gone."""
    busy = lab.start(STEADY, *WELL_UNDER_WAY, args=("--hang-at", "12"))
    frozen = lab.start(STEADY, *WELL_UNDER_WAY, args=("--pause", "0.5", "--freeze-at", "9"))

    for run in (busy, frozen):
        status = lab.follow(run)
        assert status["state"] == "paused"
        assert reasons(status) == ["budget"]
        assert status["spent_usd"] <= status["budget_usd"]
        assert status["saved_step"] == (10 if run == busy else 5)
        assert status["attempts"][0]["steps_lost"] > 0
    lab.wait_for_the_end()


def test_leak_guard_keeps_the_budget_without_a_controller(lab: Lab) -> None:
    """With the controller killed for good and a deaf job, the nodes still end within the budget."""
    run = lab.start(STEADY, *WELL_UNDER_WAY, args=("--hang-at", "12"))
    lab.wait_for_step(run, 6)
    lab.kill_controller(run)
    lab.wait_for_the_end(timeout_s=120.0)

    status = lab.follow(run)

    assert status["state"] == "paused"
    assert reasons(status) == ["budget"]
    assert status["spent_usd"] <= status["budget_usd"]


def test_deadline(lab: Lab, calm: Callable[[int], Calm]) -> None:
    """At the deadline the run saves and stops, exit 21; given more time, it finishes right."""
    status = lab.up(STEADY, "--nodes", "1", "--deadline", "60s", args=SLOWLY, code=21)

    assert status["state"] == "paused"
    assert reasons(status) == ["deadline"]
    assert status["saved_step"] == status["step"] > 0
    assert not lab.on_nodes()
    late = lab.spotguard("resume", status["run_id"])
    assert late.code == 21
    assert "--deadline" in late.out + late.err
    resumed = lab.spotguard("resume", status["run_id"], "--deadline", "1h", "--json")
    assert resumed.code == 0, resumed.err
    assert reasons(resumed.json) == ["deadline", "finished"]
    assert final_weights(resumed.json) == calm(1).weights
