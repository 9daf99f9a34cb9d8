from __future__ import annotations

import os
import signal
import sqlite3
from typing import TYPE_CHECKING

import pytest

from tests.e2e.faults.test_bad_input import check_said
from tests.e2e.lab.lab_jobs import STEADY, Lab, final_weights, reasons

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.e2e.conftest import Calm

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def _truncate(journal: Path) -> None:
    journal.write_bytes(journal.read_bytes()[:1000])


def _overwrite(journal: Path) -> None:
    body = bytearray(journal.read_bytes())
    body[4096:] = b"\xff" * len(body[4096:])
    journal.write_bytes(bytes(body))


def _delete(journal: Path) -> None:
    journal.unlink()


def _replace(journal: Path) -> None:
    journal.write_text("this is no journal\n" * 100)


def test_damaged_journal(lab: Lab, calm: Callable[[int], Calm]) -> None:
    """Said in one sentence with the way out; `adopt` rebuilds it; nothing is lost."""
    run = lab.start(STEADY, "--nodes", "1", args=("--pause", "0.2"))
    lab.wait_for_step(run, 8)
    assert lab.spotguard("stop", run).code == 0
    before = lab.status(run)
    journal = lab.home / "runs" / run / "journal.db"
    store = before["store"]

    for damage in (_truncate, _overwrite, _replace, _delete):
        damage(journal)
        for command in ("status", "resume", "stop"):
            check_said(lab.spotguard(command, run), 3, run, "spotguard adopt")
        listed = lab.spotguard("runs", "--json")
        assert listed.code == 0, listed.err
        assert [r["run_id"] for r in listed.json["runs"]] == [run]
        adopted = lab.spotguard("adopt", store, "--yes")
        assert adopted.code == 0, adopted.err
        after = lab.status(run)
        for name in ("saved_step", "total_steps", "store", "budget_usd"):
            assert after[name] == before[name], name
        assert after["spent_usd"] == pytest.approx(before["spent_usd"])
        assert reasons(after) == reasons(before)
    assert lab.spotguard("adopt", store).code == 2, "a whole journal is not replaced"

    resumed = lab.spotguard("resume", run, "--json")
    assert resumed.code == 0, resumed.err
    assert reasons(resumed.json) == ["stopped", "finished"]
    assert final_weights(resumed.json) == calm(1).weights


@pytest.mark.timeout(600)
def test_down_without_a_journal(lab: Lab) -> None:
    """Nodes are released, and a controller that hangs is ended, by what is written of launches."""
    run = lab.start(STEADY, "--nodes", "1", args=("--pause", "0.5"))
    lab.wait_for_step(run, 4, timeout_s=150.0)
    pid = lab.controller_pid(run)
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    _delete(lab.home / "runs" / run / "journal.db")
    check_said(lab.spotguard("down", run), 2, "pass --yes")
    assert lab.controller_pid(run) == pid, "nobody has said yes"

    down = lab.spotguard("down", run, "--yes")
    assert down.code == 0, down.err
    assert f"{run}-1 released" in down.out
    assert f"/{run}" in down.out, "where `adopt` finds it"
    assert not lab.on_nodes()


@pytest.mark.timeout(600)
def test_stop_with_a_locked_journal(lab: Lab) -> None:
    """The job saves, its nodes go, and the run is at rest once the journal is free again."""
    run = lab.start(STEADY, "--nodes", "1", args=("--pause", "0.5"))
    lab.wait_for_step(run, 4, timeout_s=150.0)
    other = sqlite3.connect(lab.home / "runs" / run / "journal.db", isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    stopped = lab.spotguard("stop", run, "--yes")
    assert stopped.code == 0, stopped.err
    assert f"{run}-1 released" in stopped.out
    assert "saved at step" in stopped.out
    assert not lab.on_nodes()

    other.close()
    status = lab.follow(run)
    assert status["state"] == "stopped"
    assert reasons(status) == ["stopped"]
    assert status["saved_step"] == status["step"]


def test_other_machine_takes_over(lab: Lab, calm: Callable[[int], Calm], tmp_path: Path) -> None:
    """Whoever holds the store can tell the story and carry on the run, with a home that is new."""
    run = lab.start(STEADY, "--nodes", "1", args=("--pause", "0.2"))
    lab.wait_for_step(run, 8)
    assert lab.spotguard("stop", run).code == 0
    store = lab.status(run)["store"]

    lab.home = tmp_path / "another"
    adopted = lab.spotguard("adopt", store, "--yes")
    assert adopted.code == 0, adopted.err
    resumed = lab.spotguard("resume", run, "--json")

    assert resumed.code == 0, resumed.err
    assert final_weights(resumed.json) == calm(1).weights
