"""What a drill says of two runs, from their fingerprints alone."""

from __future__ import annotations

import math
from typing import Any

import pytest

from spotguard.control.drill.report import ProbedRun, compare


def a_run(losses: list[float], *, ranks_after_2: int, seen: dict[str, list[str]]) -> ProbedRun:
    """Return a run that is on another number of ranks after two steps."""
    steps: dict[int, dict[str, Any]] = {
        step: {
            "attempt": 1 + (step > 2),
            "world_size": ranks_after_2 if step > 2 else 2,
            "tracked": {},
            "random": "r",
            **{"amplifiers": [], "iterating": [], **seen},
            "variables": {},
        }
        for step in range(1, len(losses) + 1)
    }
    return ProbedRun(steps=steps, losses=dict(enumerate(losses, 1)))


@pytest.mark.parametrize(
    ("seen", "who", "why"),
    [
        (
            {"amplifiers": ["second_order"]},
            "second_order",
            'init(exact="bitwise") adds them up in one order',
        ),
        ({"iterating": ["judge"]}, "judge", "its spectral_norm goes on by a power iteration"),
        ({}, "the loss", "is a loss or a statistic computed over the whole global batch?"),
    ],
)
def test_a_loss_that_drifts_on_other_ranks_names_its_cause(
    seen: dict[str, list[str]], who: str, why: str
) -> None:
    """L-BFGS makes much of the last bits, spectral norms count passes; else a loss may be wrong."""
    calm = a_run([4.0, 3.0, 2.0, 1.0], ranks_after_2=2, seen=seen)
    disturbed = a_run([4.0, 3.0, 2.001, 1.5], ranks_after_2=1, seen=seen)
    [finding], _, _, worst = compare(calm, disturbed)

    assert worst == pytest.approx(0.5)
    assert (finding.variable, finding.label, finding.step) == (who, "elastic step", 4)
    assert why in finding.detail


def test_a_loss_says_nothing_of_ranks_once_the_runs_have_parted() -> None:
    """What was not restored makes all later losses differ; the number of ranks is not to blame."""
    calm = a_run([4.0, 3.0, 2.0, 1.0], ranks_after_2=2, seen={})
    disturbed = a_run([4.0, 3.5, 2.5, 1.5], ranks_after_2=1, seen={})
    disturbed.steps[2]["attempt"] = 2
    disturbed.steps[2]["variables"] = {"ema": {"kind": "module", "type": "Net", "hash": "b"}}
    calm.steps[2]["variables"] = {"ema": {"kind": "module", "type": "Net", "hash": "a"}}
    findings, _, parted, worst = compare(calm, disturbed)

    assert [finding.variable for finding in findings] == ["ema"]
    assert (parted, worst) == (2, None)


@pytest.mark.parametrize(
    ("kind", "at", "named"),
    [("attribute", 2, True), ("value", 1, True), ("value", 2, False), ("attribute", 3, False)],
)
def test_a_plain_value_that_no_state_has_is_named(kind: str, at: int, named: bool) -> None:
    """A module's own, such as a dropout's rate, or one that parted before the losses did.

    What differs from the same step on, or later, may follow from the losses.
    """
    calm = a_run([4.0, 3.0, 2.0, 1.0], ranks_after_2=2, seen={})
    disturbed = a_run([4.0, 3.5, 2.5, 1.5], ranks_after_2=2, seen={})
    for run, digest in ((calm, "a"), (disturbed, "b")):
        for step in range(1, 5):
            run.steps[step]["attempt"] = 2
        run.steps[at]["variables"] = {"model.2.p": {"kind": kind, "type": "float", "hash": digest}}
    [finding], _, parted, _ = compare(calm, disturbed)

    assert parted == 2
    assert (finding.variable == "model.2.p") is named
    assert ("step.number" in finding.detail) is named


def test_two_losses_that_are_no_number_are_equal() -> None:
    """A loss that is none in both runs is no sign of randomness; that it is none is noted."""
    calm = a_run([4.0, math.nan, math.nan], ranks_after_2=2, seen={})
    disturbed = a_run([4.0, math.nan, math.nan], ranks_after_2=1, seen={})
    findings, notes, parted, worst = compare(calm, disturbed)
    assert (findings, parted, worst) == ([], None, 0.0)
    assert notes == ["the loss of step 2 is not a number, in both runs"]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_no_number_on_other_ranks_is_said_to_be_none(bad: float) -> None:
    """No number says by how much it differs."""
    calm = a_run([4.0, 3.0, 2.0, 1.0], ranks_after_2=2, seen={})
    disturbed = a_run([4.0, 3.0, bad, bad], ranks_after_2=1, seen={})
    [finding], _, _, worst = compare(calm, disturbed)
    assert worst == math.inf
    assert (finding.label, finding.step) == ("elastic step", 3)
    assert "is not a number" in finding.detail
