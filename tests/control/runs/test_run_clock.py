"""The clock of a run on this machine, which goes on where the run was."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from spotguard.control.journal.journal import Journal
from spotguard.control.run_folder import RunFolder
from spotguard.shared import steady_clock

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.skipif(steady_clock._boot_id() is None, reason="nothing tells its boots apart")
def test_after_a_boot_no_run_goes_back_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A controller goes on no earlier than the last thing that the one before wrote down."""
    folder = RunFolder(tmp_path)
    told_at = time.time() - 600.0
    with Journal.create(folder.journal_path) as journal:
        for at in (told_at - 5.0, told_at, told_at - 50.0):
            journal.append("noted", at=at)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() - 3600.0)

    clock_after = folder.clock()

    assert clock_after.now() == pytest.approx(told_at, abs=1.0)
    monkeypatch.setattr(time, "time", real)
    assert folder.clock().now() == pytest.approx(clock_after.now(), abs=0.01)


def test_a_journal_that_cannot_be_read_does_not_stop_the_clock(tmp_path: Path) -> None:
    """Whoever needs the journal says so."""
    folder = RunFolder(tmp_path)
    folder.journal_path.write_bytes(b"no journal" * 1000)
    assert folder.clock().now() == pytest.approx(time.time(), abs=1.0)
