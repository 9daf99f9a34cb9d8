"""The benchmark of bitwise mode runs and reports; its timings are not judged here."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from benchmarks.bitwise import Case, to_markdown
from tests.benchmarks.test_checkpoint_benchmark import run_module

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.e2e
@pytest.mark.timeout(600)
def test_the_command_measures_all_rows(tmp_path: Path) -> None:
    """It prints one row per number of ranks and size, and writes every pair of steps."""
    out = tmp_path / "out.json"
    said = run_module("benchmarks.bitwise", "--pairs", "1", "--layers", "1", "--json", str(out))

    assert sum(line.startswith(("| 1 ", "| 2 ", "| 3 ")) for line in said.splitlines()) == 6
    body = json.loads(out.read_text())
    assert [len(row["pairs"]) for row in body["results"]] == [1] * 6


def test_a_row_tells_ratio_and_spread() -> None:
    """The ratio of the fastest steps, the median of the pairs' ratios, and half of them."""
    case = Case(ranks=2, micro_batches=8, samples=4, layers=1, pairs=5)
    pairs = [(0.03, 0.02), (0.02, 0.02), (0.012, 0.01), (0.06, 0.02), (0.026, 0.02)]
    text = to_markdown([(case, pairs)], {"machine": "a fast one"})

    assert "| 2 | 8 | 4 | 10.0 ms | 1.20 | 1.30 | 1.20..1.50 |" in text
    assert "- machine: a fast one" in text
