from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.conftest import Cli


def test_a_teams_budget_is_set_shown_and_taken_away(cli: Cli, tmp_path: Path) -> None:
    """In words and as JSON; what is no budget is refused with what is allowed."""
    store = str(tmp_path / "store")
    (tmp_path / "store").mkdir()
    assert "have no budget together" in cli("team", store).out
    said = cli("team", store, "--budget", "2000 / week")
    assert said.code == 0
    assert "$2,000.00 for all, $0.00 spent, $0.00 promised, $2,000.00 left" in said.out
    shown = json.loads(cli("team", store, "--json").out)
    assert (shown["budget_usd"], shown["per"], shown["runs"]) == (2000.0, "week", [])
    said = cli("team", store, "--budget", "2000 / year")
    assert said.code == 2
    assert "allowed: an amount of USD above 0 for a month, week or day" in said.err
    said = cli("team", store, "--give-back", "job-1")
    assert said.code == 2
    assert "is promised to a run job-1" in said.err
    assert "have no budget together" in cli("team", store, "--budget", "none").out
