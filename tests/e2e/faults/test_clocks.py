from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.faults.clocks import HOUR_S, WrongClocks
from tests.e2e.lab.lab_jobs import OFTEN, STEADY, Lab, final_weights, reasons

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.e2e.conftest import Calm

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

A_CENT_A_SECOND = ("--price", "36", "--on-demand-price", "120")
TWO_MINUTES = ("--nodes", "1", "--budget", "1.20", *A_CENT_A_SECOND, *OFTEN)


@pytest.fixture
def clocks(tmp_path: Path) -> WrongClocks:
    """All clocks are right until one is set wrong."""
    return WrongClocks(tmp_path / "clocks")


def check_story(lab: Lab, status: dict[str, Any]) -> list[dict[str, Any]]:
    """Fail unless no line costs more than the run, and none is of another hour."""
    story = lab.history(status["run_id"])
    begun = story[0]["at"]
    most_usd = status["spent_usd"] + 1.0  # what is told behind the end may cost a moment more
    assert all(line["cost_usd"] <= most_usd for line in story if line["cost_usd"])
    assert all(line["at"][:10] == begun[:10] or line["at"] >= begun for line in story)
    return story


@pytest.mark.parametrize("hours", [1, -1])
def test_a_wrong_clock_of_a_node_ends_no_run(
    lab: Lab, clocks: WrongClocks, calm: Callable[[int], Calm], hours: int
) -> None:
    """With a budget and a deadline that are enough, it trains to the end, and costs no hour."""
    clocks.set("node-0", hours * HOUR_S)

    status = lab.up(
        STEADY,
        *("--nodes", "1", "--budget", "12", "--deadline", "50m"),
        *A_CENT_A_SECOND,
        env=clocks.environ(),
        timeout_s=500.0,
    )

    assert reasons(status) == ["finished"]
    assert final_weights(status) == calm(1).weights
    assert 0 < status["spent_usd"] < 12
    story = check_story(lab, status)
    words = f"1 h 00 min {'ahead of' if hours > 0 else 'behind'} the controller's"
    assert any(words in line["text"] for line in story), "it is told"
    times = [line["at"] for line in story]
    assert times == sorted(times)


def test_three_nodes_with_three_clocks_keep_a_budget(lab: Lab, clocks: WrongClocks) -> None:
    """One is ahead, one behind, one right: the job saves and stops itself when its money ends."""
    clocks.set("node-0", HOUR_S)
    clocks.set("node-2", -2 * HOUR_S)

    status = lab.up(
        STEADY,
        *("--nodes", "3", "--budget", "3", *A_CENT_A_SECOND),
        args=("--pause", "3"),
        env=clocks.environ(),
        code=20,
        timeout_s=500.0,
    )

    assert reasons(status) == ["budget"]
    assert 0 < status["step"] < 64
    assert status["saved_step"] == status["step"]
    assert 1.0 < status["spent_usd"] <= 3
    check_story(lab, status)


def test_a_jump_on_every_machine_changes_no_limit(labs: Callable[[], Lab]) -> None:
    """Mid-run all clocks jump, then the controller dies: the money ends when it would have."""
    with ThreadPoolExecutor() as beside:  # of their two minutes both do little but wait
        jumps = [beside.submit(check_jump, labs(), hours) for hours in (1, -1)]
    for jump in jumps:
        jump.result()


def check_jump(lab: Lab, hours: int) -> None:
    """Let all clocks of a machine jump by so many hours, and look at what its run does."""
    clocks = WrongClocks(lab.work / "clocks")
    run = lab.start(
        STEADY,
        *TWO_MINUTES,
        args=("--pause", "2.5"),
        env=clocks.environ(),
    )
    lab.wait_for_step(run, 6, timeout_s=200.0)
    for machine in ("home", "node-0"):
        clocks.set(machine, hours * HOUR_S)
    lab.wait_for_history(run, "jumped")
    before = lab.status(run)["spent_usd"]
    assert before < 1.20
    lab.kill_controller(run)

    said = lab.spotguard("status", run, "--watch", env=clocks.environ())

    assert said.code == 0, said.err
    status = lab.status(run)
    assert reasons(status) == ["budget"]
    assert status["saved_step"] == status["step"] > 6
    assert before < status["spent_usd"] <= 1.20
    check_story(lab, status)


def test_a_frozen_job_under_a_wrong_clock_is_taken_down_in_time(
    lab: Lab, clocks: WrongClocks
) -> None:
    """Nobody but the leak guard is left, and its machine's clock jumps back: never over budget."""
    run = lab.start(
        STEADY,
        *TWO_MINUTES,
        args=("--pause", "0.5", "--freeze-at", "9"),
        env=clocks.environ(),
    )
    lab.wait_for_step(run, 8, timeout_s=200.0)
    lab.kill_controller(run)
    clocks.set("home", -HOUR_S)
    lab.wait_for_the_end(timeout_s=200.0)

    said = lab.spotguard("status", run, "--watch", env=clocks.environ())

    assert said.code == 0, said.err
    status = lab.status(run)
    assert reasons(status) == ["budget"]
    assert status["saved_step"] == 5
    assert 0.5 < status["spent_usd"] <= 1.20
