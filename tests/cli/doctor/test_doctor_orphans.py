"""`doctor --end-orphans`: what is asked first, what is printed, and the exit codes."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING

import pytest

from tests.control.doctor.test_orphans import RUN, FakeBooks, beats, cluster
from tests.control.run_folders import make_run

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.conftest import Cli
    from tests.cli.fake_control import FakeControl

pytestmark = pytest.mark.usefixtures("quick_doctor")


@pytest.fixture
def books(home: Path, control: FakeControl, monkeypatch: pytest.MonkeyPatch) -> FakeBooks:
    """A SkyPilot with one orphan."""
    make_run(home, RUN)
    fake = FakeBooks(listed=[cluster(home)])
    monkeypatch.setattr("spotguard.api.doctor.skypilot_books", lambda: fake)
    return fake


def test_an_orphan_is_told_and_left_alone(cli: Cli, books: FakeBooks) -> None:
    """The doctor ends nothing unless asked; exit 3, as for anything that needs care."""
    said = cli("doctor")
    assert said.code == 3
    assert "orphan" in said.out
    assert "--end-orphans" in said.out
    assert max(map(len, said.out.splitlines())) <= 80
    assert books.ended == []


def test_without_a_terminal_nothing_is_ended_unless_told(cli: Cli, books: FakeBooks) -> None:
    """A question needs somebody to answer it."""
    said = cli("doctor", "--end-orphans")
    assert (said.code, books.ended) == (2, [])
    assert "--yes" in said.err


@pytest.mark.parametrize(("answer", "ended"), [("y\n", ["job-1-1"]), ("n\n", [])])
def test_on_a_terminal_it_asks(
    cli: Cli, books: FakeBooks, monkeypatch: pytest.MonkeyPatch, answer: str, ended: list[str]
) -> None:
    """With what it is about."""

    class Terminal:
        def isatty(self) -> bool:
            return True

        def readline(self) -> str:
            return answer

    monkeypatch.setattr(sys, "stdin", Terminal())
    said = cli("doctor", "--end-orphans")
    assert books.ended == ended
    assert said.code == (0 if ended else 1)
    assert "1 cluster that nobody wants costs $0." in said.err


def test_once_they_are_ended_the_doctor_is_content(cli: Cli, books: FakeBooks) -> None:
    """The JSON says which; each is a line on stderr."""
    said = cli("doctor", "--end-orphans", "--yes", "--json")
    body = json.loads(said.out)
    assert (said.code, body["ok"]) == (0, True)
    assert [each["ended"] for each in body["clusters"]["leftovers"]] == [True]
    assert "job-1-1: ended" in said.err


def test_a_job_that_trains_is_ended_only_by_the_name_of_its_cluster(
    cli: Cli, books: FakeBooks, home: Path
) -> None:
    """`--yes` answers for what nobody wants; a silent controller's job may be the user's week."""
    beats(home, time.time())
    said = cli("doctor", "--end-orphans", "--yes")
    assert (said.code, books.ended) == (0, [])
    assert "doctor --end job-1-1" in " ".join(said.out.split())
    assert cli("doctor", "--end", "job-1-2").code == 2
    assert books.ended == []
    said = cli("doctor", "--end", "job-1-1")
    assert (said.code, books.ended) == (0, ["job-1-1"])
    assert "job-1-1: ended" in said.err


def test_what_cannot_be_ended_keeps_the_exit_code(cli: Cli, books: FakeBooks) -> None:
    """And says why."""
    books.stubborn = True
    said = cli("doctor", "--end-orphans", "-y")
    assert said.code == 3
    assert "job-1-1: SkyPilot: no permission to terminate" in said.err


def test_where_there_is_no_orphan_nothing_is_asked(cli: Cli, books: FakeBooks) -> None:
    """The flag does no harm."""
    books.listed.clear()
    said = cli("doctor", "--end-orphans")
    assert said.code == 0
    assert "none that nobody wants" in said.out


def test_without_skypilot_there_is_nothing_to_end(cli: Cli, control: FakeControl) -> None:
    """As on a machine on which it was never used."""
    said = cli("doctor", "--end-orphans", "--json")
    assert said.code == 0
    assert json.loads(said.out)["clusters"]["asked"] is False


def test_where_skypilot_was_never_used_that_is_said(cli: Cli, home: Path) -> None:
    """Who asks for the end of clusters must not be left to guess whether any was looked for."""
    said = cli("doctor", "--end-orphans")
    assert said.code == 0
    assert "no cluster to end: SkyPilot was never used here" in said.err
