"""A run of a team whose machine is lost, and which another machine adopts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spotguard.control.handover.adopt import adopt_run
from spotguard.control.journal.team.books import Stake, TeamBooks
from spotguard.control.journal.team.stored_books import read_books, to_bytes
from spotguard.events import keys
from spotguard.spec.model import TeamCap
from spotguard.storage import open_store
from tests.control.status.test_stored_runs import a_run, told

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_who_adopts_a_run_without_nodes_gives_its_promise_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes to rest without a controller of its own, and would bar the others for a month."""
    monkeypatch.setenv("SPOTGUARD_HOME", str(tmp_path / "home"))
    root = tmp_path / "team"
    a_run(root, "job-1", told("job-1"), age_s=1e5)
    store = open_store(str(root))
    stakes = {
        "job-1": Stake(promised_usd=90.0, launched=True),
        "job-2": Stake(promised_usd=5.0, launched=True),
    }
    store.put(keys.TEAM, to_bytes(TeamBooks(cap=TeamCap(100.0), period="2026-11", stakes=stakes)))
    adopt_run(f"{root}/job-1", ask=lambda job: True)
    found = read_books(store)
    assert found is not None
    assert list(found.books.stakes) == ["job-2"]
