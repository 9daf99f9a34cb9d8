"""Says in one line, just above pytest's closing one, what was skipped, and for want of what."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    import pytest


def line_of(skipped: Iterable[pytest.TestReport | pytest.CollectReport]) -> str:
    """Return the line, "" if nothing was skipped; each reason once, the most frequent first."""
    # Every test process collects for itself, so a skipped file is reported by each of them.
    reasons = {report.nodeid: _reason(report) for report in skipped}
    counted = Counter(reasons.values()).most_common()
    return "skipped: " + "; ".join(f"{why} ({n})" for why, n in counted) if counted else ""


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    told = report.longrepr
    why = told[2] if isinstance(told, tuple) else str(told)
    return " ".join(why.removeprefix("Skipped:").split())
