"""The benchmark of the runtime's overhead runs and reports; its timings are not judged here."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from benchmarks.step_overhead.table import Result, stop_check_us, to_markdown
from tests.benchmarks.test_checkpoint_benchmark import run_module

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.e2e
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("only", "units"),
    [
        ("everything", ["µs", "µs", "%"]),
        ("kept and shared, 3 ranks", ["µs"]),
    ],
)
def test_the_command_measures_the_rows_asked_for(
    tmp_path: Path, only: str, units: list[str]
) -> None:
    """A tiny run reports each promise, from one process and from several ranks."""
    out = tmp_path / "out.json"
    printed = run_module(
        *("benchmarks.step_overhead", "--pairs", "1", "--steps", "2", "--json", str(out)),
        *("--only", only),
    )
    found = json.loads(out.read_text(encoding="utf-8"))["results"]

    assert [result["unit"] for result in found] == units
    assert all(result["what"] in printed for result in found)


def test_the_stop_check_is_timed() -> None:
    """The stop check costs something, and far less than a step."""
    assert 0 < stop_check_us(calls=1000) < 1000


def test_the_verdict_is_by_the_quiet_blocks() -> None:
    """Noise in the median does not miss a bar; the fastest blocks decide."""
    noisy = Result(what="x", unit="µs", quiet=0.5, median=9.0, low=0.4, high=99.0, most=1.0)

    assert noisy.verdict == "passed"
    assert "| passed |" in to_markdown([noisy], {"machine": "a"})
