"""Accounts for the suite, and what it spent."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.e2e.cloud.account import SPENT, Account, chosen, why_not

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session", params=chosen(), ids=str)
def account(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Account]:
    """An account on each place that was chosen; nothing may be left on it."""
    reason = why_not(request.param)
    if reason:
        pytest.skip(reason)
    account = Account(tmp_path_factory.mktemp("account"), request.param)
    try:
        yield account
    finally:
        left = account.tidy_up()
    assert not left, f"left behind, look at them: {left}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Tell what each run cost."""
    if SPENT:
        terminalreporter.section("spent in clouds")
        for each in SPENT:
            terminalreporter.write_line(str(each))
        total = sum(each.usd or 0.0 for each in SPENT)
        terminalreporter.write_line(f"together: ${total:.4f}")
