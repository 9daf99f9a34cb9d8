"""`up --sweep` and `sweep`: what they ask, what they refuse, and the table."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from spotguard.cli.policy.sweep import exit_code
from spotguard.control.controller import start
from spotguard.control.journal.record import Kind
from spotguard.control.sweep import table
from spotguard.control.sweep.table import SweepPoint
from spotguard.events.states import RunState

if TYPE_CHECKING:
    from spotguard.control.run_folder import RunFolder
    from tests.cli.conftest import Cli

ENDS: dict[str, dict[str, Any]] = {
    "01": {"state": "finished", "detail": "all steps done", "exit_code": 0},
    "02": {"state": "failed", "detail": "the script failed: boom", "exit_code": 10},
}


def _end(folder: RunFolder) -> None:
    with folder.journal() as journal:
        journal.append(Kind.SETTLED.value, at=folder.clock().now(), data=ENDS[folder.run_id[-2:]])


def test_it_is_followed_to_the_end_and_the_table_says_why_each_ended(
    cli: Cli, script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line for each change, the sums, and the code of the first that did not do as wanted."""
    monkeypatch.setattr(start, "start", _end)
    said = cli("up", script, "--sweep", "lr=0.1,0.2", "--budget", "4", "--yes")
    assert said.code == 10
    assert "sweep: 2 points, 4 at once; $4.00 for all, at most $2.00 for each" in said.out
    assert "01 lr=0.1 finished: all steps done" in said.out
    assert "02 lr=0.2 failed: the script failed: boom" in said.out
    assert "$0.00 of $4.00 spent" in said.out
    assert cli("sweep").code == 0
    told = cli("sweep", "--stop")
    assert "0 runs asked to save and stop" in told.err


def test_a_point_that_cannot_be_read_is_named_and_not_followed_for_ever(
    cli: Cli, script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody knows what it costs, so the sum is unknown; the code says that it is not the job."""

    def start_one(folder: RunFolder) -> None:
        if folder.run_id.endswith("01"):
            _end(folder)
        else:
            folder.journal_path.write_bytes(b"damaged" * 200)

    def no_wait(_: float) -> None:
        raise AssertionError("still followed")

    monkeypatch.setattr(start, "start", start_one)
    monkeypatch.setattr(table, "PATIENCE_S", 0.0)
    waiting = SimpleNamespace(sleep=no_wait, monotonic=time.monotonic)
    monkeypatch.setattr("spotguard.cli.policy.sweep.time", waiting)  # others' threads do wait
    said = cli("up", script, "--sweep", "lr=0.1,0.2", "--budget", "4", "--yes")
    assert said.code == 3
    assert said.out.count("02 lr=0.2 unreadable: The journal") == 1
    assert "unknown of $4.00 spent" in said.out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--sweep", "lr=1,2"), "A sweep needs a budget"),
        (("--sweep", "lr", "--budget", "2"), "'lr' is no NAME=VALUES"),
        (("--sweep-metric", "loss"), "--sweep-metric is of a sweep, and there is no --sweep"),
        (("--parallel", "2"), "--parallel is of a sweep, and there is no --sweep"),
        (("--sweep-goal", "max"), "--sweep-goal is of a sweep, and there is no --sweep"),
        (("--sweep", "n=1,2", "--budget", "2", "--point-budget", "x"), "--point-budget: given 'x'"),
    ],
)
def test_what_makes_no_sense_is_a_sentence(
    cli: Cli, script: str, words: tuple[str, ...], says: str
) -> None:
    """And nothing is begun."""
    said = cli("up", script, *words, "--yes")
    assert said.code == 2
    assert says in said.err
    assert "There is no sweep on this machine yet" in cli("sweep").err


def test_a_place_in_a_store_is_looked_at_and_not_steered(
    cli: Cli, script: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """With a home that knows nothing of it."""
    monkeypatch.setattr(start, "start", _end)
    store = str(tmp_path / "store")
    cli("up", script, "--store", store, "--sweep", "lr=0.1,0.2", "--budget", "4", "--yes")
    (sweep_id,) = [path.name for path in (tmp_path / "store" / "sweeps").iterdir()]
    monkeypatch.setenv("SPOTGUARD_HOME", str(tmp_path / "other"))
    said = cli("sweep", f"{store}/{sweep_id}")
    assert said.code == 0
    assert "lr=0.1" in said.out
    said = cli("sweep", f"{store}/{sweep_id}", "--down")
    assert said.code == 2
    assert "can be looked at there, and not steered" in said.err


def test_the_exit_code_is_of_the_first_that_neither_finished_nor_was_pruned() -> None:
    """Of one that goes on it is 75."""

    def point(code: int | None, *, pruned: bool = False) -> SweepPoint:
        return SweepPoint(
            number=1,
            run_id="r",
            arguments={},
            state=RunState.STOPPED,
            pruned=pruned,
            exit_code=code,
        )

    assert exit_code([point(0), point(75, pruned=True)]) == 0
    assert exit_code([point(0), point(20), point(10)]) == 20
    assert exit_code([point(None)]) == 75
