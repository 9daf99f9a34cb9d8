from __future__ import annotations

import pytest

from tests.guards.skips import line_of


def skipped(test: str, why: str) -> pytest.TestReport:
    """Return what pytest reports of a test that was skipped."""
    where = ("tests/test_it.py", 7, f"Skipped: {why}")
    return pytest.TestReport(test, where, {}, "skipped", where, "setup")


def test_what_a_missing_tool_skips_is_named_once() -> None:
    """Tests, and files that two test processes collected; whatever they say fits into one line."""
    told: list[pytest.TestReport | pytest.CollectReport] = [
        skipped("a", "no such Python"),
        skipped("b", "npm is\nmissing"),
        skipped("c", "npm is missing"),
        pytest.CollectReport("d", "skipped", ("d.py", 1, "Skipped: no boto3"), None),
        pytest.CollectReport("d", "skipped", ("d.py", 1, "Skipped: no boto3"), None),
    ]
    assert line_of(told) == "skipped: npm is missing (2); no such Python (1); no boto3 (1)"
    assert line_of([]) == ""
