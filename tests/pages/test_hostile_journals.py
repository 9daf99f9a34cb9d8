"""A journal that makes no sense is refused in a sentence, or shown as far as it makes some."""

from __future__ import annotations

import copy
import json
import sqlite3
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from spotguard.cli.main import main
from spotguard.control import api
from spotguard.control.journal.journal import Entry, Journal
from spotguard.control.status.view import RunSummary
from spotguard.errors import JournalDamaged
from spotguard.events.states import RunState
from spotguard.shared.json_documents import document
from tests.pages.hostile_journals import HOSTILE, show, spoiled, spoiled_ones, whole_story
from tests.pages.test_guard import KNOWN, ask

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


SEEDS = 250
ON_DISK = (*range(1000, 1010), 2258, 2814)
"""The last two make no sense only once they are shown."""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of its own, and a folder to write reports into."""
    monkeypatch.setenv("SPOTGUARD_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"


def write(home: Path, run_id: str, entries: Sequence[Entry]) -> None:
    """Write a journal as it must not be, past all that looks after it."""
    path = home / "runs" / run_id / "journal.db"
    path.parent.mkdir(parents=True)
    Journal.create(path).close()
    rows = [(e.seq, e.at, e.kind, e.attempt, json.dumps(e.data)) for e in entries]
    connection = sqlite3.connect(path)
    with connection:
        connection.executemany("INSERT INTO events VALUES (?, ?, ?, ?, ?)", rows)
    connection.close()


def test_the_whole_story_is_shown() -> None:
    """Else the others would prove nothing."""
    shown = show(whole_story())
    assert shown is not None
    assert json.loads(shown.report)["run"]["state"] == "failed"


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, SEEDS, 50))
def test_what_makes_no_sense_raises_nothing_else(first: int) -> None:
    """Fields of another type, huge numbers, markup, events twice, missing, of another attempt."""
    refused = 0
    for seed, entries in spoiled_ones(first, 50):
        try:
            shown = show(entries)
        except Exception as problem:
            raise AssertionError(f"seed {seed}: {problem!r}") from problem
        refused += shown is None
        if shown is not None:
            assert shown.page.count("<script") == 3, f"seed {seed}"
    assert 0 < refused < 50


@pytest.mark.slow
@pytest.mark.same_everywhere
@pytest.mark.parametrize("kind", ["moved", "phase_begun"])
def test_a_place_that_makes_no_sense_raises_nothing_else(kind: str) -> None:
    """Where a run goes on: each field of it, and of its phases, is each odd thing once."""
    story = whole_story()
    job = {"infra": "aws", "phases": [{"until_step": 9, "nodes": 1}, {"gpus": "A100:8"}]}
    data = {**story[0].data, "job": job, "phase": 1, "phases": 2, "until_step": None}
    spots: list[tuple[str, ...]] = [(name,) for name in data]
    spots += [("job", "phases"), ("spec", "infra"), ("spec", "gpus"), ("limits", "nodes_min")]
    shown = 0
    for *outer, name in spots:
        for odd in HOSTILE:
            senseless = copy.deepcopy(data)
            (senseless[outer[0]] if outer else senseless)[name] = copy.deepcopy(odd)
            placed = Entry(seq=8, kind=kind, at=5.0, attempt=None, data=senseless)
            try:
                shown += show([*story[:8], placed, *story[8:]]) is not None
            except Exception as problem:
                raise AssertionError(f"{outer} {name} {odd!r}: {problem!r}") from problem
    assert 0 < shown < len(spots) * len(HOSTILE)


def test_an_instant_that_nobody_meant_is_none(home: Path) -> None:
    """Neither a journal nor a document holds one of the year 10^292."""
    write(home, "job-1", [replace(whole_story()[0], at=1e300)])
    with pytest.raises(JournalDamaged, match="no instant"):
        api.report("job-1")
    for at in (1e300, -1e300, float("nan")):
        run = RunSummary(run_id="a", name="a", state=RunState.FAILED, created_at=at, spent_usd=None)
        assert document(run)["created_at"] is None


@pytest.mark.slow
@pytest.mark.parametrize("seed", ON_DISK)
def test_commands_and_pages_say_it_in_a_sentence(
    seed: int, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As JSON, as a page, as a list and as numbers; another run stands beside it unharmed."""
    write(home, "job-1", spoiled(seed))
    write(home, "job-2", whole_story())
    code = main(["report", "job-1"])
    said = capsys.readouterr()
    assert code in (0, JournalDamaged.exit_code)
    assert "Traceback" not in said.err + said.out
    assert (home.parent / "job-1.html").exists() == (code == 0)
    assert main(["report", "job-1", "--json"]) == code
    assert (json.loads(capsys.readouterr().out or "0") != 0) == (code == 0)
    assert main(["runs", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["runs"]
    assert "failed" in {run["state"] for run in listed}
    assert main(["metrics"]) == 0
    capsys.readouterr()
    page = ask("/runs/job-1", headers=KNOWN)
    assert page.status_code == (200 if code == 0 else 400)
    if code:
        assert page.headers["content-type"].startswith("text/plain")
        assert "adopt" in page.text
    for path in ("/", "/runs/job-2", "/metrics"):
        assert ask(path, headers=KNOWN).status_code == 200
    assert len(api.list_runs()) == 2
