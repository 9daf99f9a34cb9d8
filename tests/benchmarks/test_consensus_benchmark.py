"""The benchmark of idle consensus runs and reports; its timings are not judged here."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from benchmarks.consensus import WAYS, rows, to_markdown
from tests.benchmarks.test_checkpoint_benchmark import run_module

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.e2e
@pytest.mark.timeout(600)
def test_the_command_measures_ours_and_the_bare_collectives(tmp_path: Path) -> None:
    """Whatever is installed, two ranks time our gate and both collectives in every round."""
    out = tmp_path / "out.json"
    run_module(
        "benchmarks.consensus",
        *("--rounds", "2", "--steps", "5", "--ranks", "2", "--json", str(out)),
    )
    found = {row["way"]: row for row in json.loads(out.read_text(encoding="utf-8"))["results"]}

    assert {"spotguard", "a bare all-reduce", "a bare broadcast"} <= set(found)
    assert all(len(row["us"]) == 2 and min(row["us"]) > 0 for row in found.values())


def test_a_row_tells_the_median_the_spread_and_the_ratio_of_the_same_rounds() -> None:
    """A ratio is that of one round, so that noise which hits both cancels out."""
    found = rows(2, {"spotguard": [0.5, 1.0, 5.0], "a bare broadcast": [50.0, 200.0, 100.0]})
    text = to_markdown(found, [], {"machine": "a fast one"})

    assert "| 2 | spotguard | 1.00 | 0.50..5.00 | 1 |" in text
    assert "| 2 | a bare broadcast | 100.00 | 50.00..200.00 | 100 |" in text
    assert "- machine: a fast one" in text


def test_a_rival_that_is_not_installed_is_named_with_the_way_to_install_it() -> None:
    """One sentence says who is missing, why, and what to type."""
    absent = replace(WAYS[1], package="no_such_package")

    assert absent.missing().startswith("Accelerate `check_trigger`: left out, because")
    assert absent.missing().endswith("pip install -c constraints.txt '.[bench]'")
    assert not WAYS[0].missing()
