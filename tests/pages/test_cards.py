"""What pages count: interruptions that were some, and runs for which somebody has to look."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

import pytest

from spotguard.control import api
from spotguard.control.journal.journal import Journal
from spotguard.events.states import RunState
from spotguard.pages.html import as_json
from spotguard.pages.metrics import exposition
from spotguard.pages.run_page import run_page
from spotguard.pages.runs_page import runs_page
from tests.control.made import ended, launched
from tests.control.run_folders import make_run

if TYPE_CHECKING:
    from pathlib import Path

    from spotguard.pages.layout import WebPage
    from tests.control.made import Line


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with a run, which nothing controls."""
    monkeypatch.setenv("SPOTGUARD_HOME", str(tmp_path / "home"))
    make_run(tmp_path / "home", "job-1")
    return tmp_path / "home"


def _write(home: Path, *lines: Line) -> None:
    with Journal.open(home / "runs" / "job-1" / "journal.db") as journal:
        for kind, at, attempt, *data in lines:
            journal.append(kind, at=at, attempt=attempt, data=data[0] if data else {})


def _card(page: WebPage, label: str) -> str:
    return next(card.value for card in page.cards if card.label == label)


def test_a_run_that_waits_for_money_is_queued_and_needs_no_look(home: Path) -> None:
    """Nodes may be had at once, and nothing is wrong: the list, the page and the metrics say so."""
    waits = {
        "retry_at": time.time() + 60,
        "team": True,
        "why": "$3.00 of the team's money are left",
    }
    _write(home, ("waiting", time.time(), None, waits))
    fleet = api.fleet()
    fleet.refresh()
    runs = runs_page(fleet.summaries())
    assert _card(runs, "need a look") == "0"
    assert "waiting for capacity" not in as_json(runs)
    page = json.loads(as_json(run_page(api.report("job-1"))))
    assert page["state"]["text"] == "queued"
    told = exposition(api.measures()).decode()
    assert 'spotguard_run_queued{run="job-1"} 1.0' in told
    assert 'spotguard_run_state{run="job-1",state="waiting"} 1.0' in told


def test_a_run_that_finds_no_nodes_needs_a_look(home: Path) -> None:
    """Nobody but its owner can help it."""
    _write(home, ("waiting", time.time(), None, {"retry_at": time.time() + 60}))
    fleet = api.fleet()
    fleet.refresh()
    assert _card(runs_page(fleet.summaries()), "need a look") == "1"
    assert 'spotguard_run_queued{run="job-1"} 0.0' in exposition(api.measures()).decode()


def test_a_run_out_of_contact_needs_a_look_though_it_waited_for_money(home: Path) -> None:
    """A store that is lost while a run is queued is told as that, in each place."""
    waits = {"retry_at": time.time() + 60, "team": True, "why": "$3.00 are left"}
    lost = ("store_lost", time.time(), None, {"problem": "no route"})
    _write(home, ("waiting", time.time(), None, waits), lost)
    fleet = api.fleet()
    fleet.refresh()
    [line] = fleet.summaries()
    assert (line.state_label, line.queued) == (RunState.CONTACT_LOST.label, None)
    assert _card(runs_page(fleet.summaries()), "need a look") == "1"
    page = json.loads(as_json(run_page(api.report("job-1"))))
    assert page["state"]["text"] == RunState.CONTACT_LOST.label
    told = exposition(api.measures()).decode()
    assert 'spotguard_run_queued{run="job-1"} 0.0' in told
    assert 'spotguard_run_state{run="job-1",state="contact_lost"} 1.0' in told


def test_what_ends_by_its_budget_or_its_script_is_no_interruption(home: Path) -> None:
    """The report counts as the list of runs does."""
    began = time.time() - 1000
    for number, reason in enumerate(("preempted", "budget", "phase_done", "failed"), start=1):
        at = began + 100 * number
        _write(
            home,
            *launched(at, attempt=number),
            ended(at + 50, reason, attempt=number, last_step=10 * number),
        )
    [summary] = api.list_runs()
    assert summary.interruptions == 1
    page = run_page(api.report("job-1"))
    assert _card(page, "interruptions") == "1"
    assert page.charts[0].summary.endswith("1 interruptions")
    assert len(page.charts[0].marks) == 4
