"""What a drill says of two runs, from their fingerprints alone."""

from __future__ import annotations

import math

import pytest

from spotguard.control.drill.report import ProbedRun, compare


def a_run(
    losses: list[float], *, ranks_after_2: int, seen: dict[str, list[str]], begins: int = 2
) -> ProbedRun:
    """Return a run that is on another number of ranks after two steps.

    Its second attempt begins after `begins` steps.
    """
    run = ProbedRun(losses=dict(enumerate(losses, 1)))
    for attempt, steps in ((1, range(begins + 1)), (2, range(begins, len(losses) + 1))):
        for step in steps:
            run.add(
                {
                    "attempt": attempt,
                    "step": step,
                    "rank": 0,
                    "world_size": 2 if attempt == 1 else ranks_after_2,
                    "tracked": {},
                    "not_promised": {},
                    "random": 1,
                    **{"amplifiers": [], "iterating": [], **seen},
                    "others": {},
                }
            )
    return run


def put(run: ProbedRun, steps: tuple[int, ...], name: str, kind: str, digest: int) -> None:
    """Let the second attempt's lines of these boundaries, and the first one's, say a hash."""
    for attempt in run.lines.values():
        for step in steps:
            for line in attempt.get(step, {}).values():
                line["others"][name] = {
                    "kind": kind, "type": "X", "hash": digest, "carried": True,
                }  # fmt: skip


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
    calm = a_run([4.0, 3.0, 2.0, 1.0], ranks_after_2=2, seen={}, begins=1)
    disturbed = a_run([4.0, 3.5, 2.5, 1.5], ranks_after_2=2, seen={}, begins=1)
    put(calm, (1, 2), "ema", "module", 1)
    put(disturbed, (1, 2), "ema", "module", 1)
    for step in (1, 2):
        disturbed.lines[2][step][0]["others"]["ema"]["hash"] = 2
    findings, _, parted, worst = compare(calm, disturbed)

    assert [finding.variable for finding in findings] == ["ema"]
    assert (parted, worst) == (2, None)


@pytest.mark.parametrize(
    ("differs", "named"), [((1, 2, 3, 4), True), ((2, 3, 4), False), ((1,), False)]
)
@pytest.mark.parametrize("kind", ["value", "own value"])
def test_a_plain_value_that_no_state_has_is_named(
    kind: str, differs: tuple[int, ...], named: bool
) -> None:
    """If it differed when the attempt began, before any loss, and the step has not mended it.

    What differs after that step only may follow from the losses.
    """
    calm = a_run([4.0, 3.0, 2.0, 1.0], ranks_after_2=2, seen={}, begins=1)
    disturbed = a_run([4.0, 3.5, 2.5, 1.5], ranks_after_2=2, seen={}, begins=1)
    for run in (calm, disturbed):
        put(run, (0, 1, 2, 3, 4), "model.2.p", kind, 1)
    for step in differs:
        disturbed.lines[2][step][0]["others"]["model.2.p"]["hash"] = 2
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
