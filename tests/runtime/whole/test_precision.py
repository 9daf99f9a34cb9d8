"""Whole runs in each precision, and with recomputed activations: a resume is of the same bits."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.runtime.harness.processes import Jobs

PRECISION = Path(__file__).parents[1] / "jobs" / "levers" / "precision.py"


def steps(jobs: Jobs, mode: str, *, code: int = 0, **env: Any) -> dict[int, str]:
    """Run an attempt; return the state after each of its steps."""
    said = jobs.run(PRECISION, code=code, MODE=mode, **env)
    lines = [line.split(maxsplit=2) for line in said.splitlines() if line.startswith("state ")]
    return {int(number): state for _, number, state in lines}


@pytest.mark.e2e
@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", ["bf16", "fp16", "master", "reentrant", "not-reentrant", "all"])
def test_a_resume_is_of_the_same_bits(jobs: Jobs, mode: str) -> None:
    """Weights, moments, master weights and the scaler's scale after every step; with dropout.

    The scaler's first steps overflow, and it grows again after the interruption.
    """
    undisturbed = steps(jobs, mode, SPOTGUARD_RUN_ID="undisturbed")
    found = steps(jobs, mode, code=75, AT=4)
    found |= steps(jobs, mode, code=75, AT=11)
    found |= steps(jobs, mode)
    assert len(undisturbed) == 20
    assert found == undisturbed
    if mode == "fp16":
        scales = [float(state.split()[1]) for state in undisturbed.values()]
        changes = [after - before for before, after in pairwise(scales)]
        assert min(changes) < 0 < max(changes), "it backs off, and grows"
