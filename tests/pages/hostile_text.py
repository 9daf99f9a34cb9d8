"""Runs whose texts try to become markup."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from spotguard.control.journal.journal import Journal
from tests.control.made import launched, saved, training
from tests.control.run_folders import make_run

if TYPE_CHECKING:
    from pathlib import Path

SCRIPT = (
    "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
)
MARK = "<!--<script>\u2028\x1b[2J"


def hostile_run(home: Path, run_id: str = "job-1") -> None:
    """Make a run whose warnings, reasons, places and metrics hold markup."""
    store = make_run(home, run_id)
    lines: tuple[Any, ...] = (
        *launched(1.0),
        training(2.0),
        saved(3.0, 4, size_bytes=1000.0, duration_s=0.5),
        ("progress", 4.0, 1, {"step": 5, "loss": 2.5, "train_s": 1.0}),
        ("job_warning", 5.0, 1, {"message": SCRIPT + MARK}),
        ("contact_lost", 6.0, 1, {"detail": SCRIPT}),
        ("contact_back", 7.0, 1),
    )
    with Journal.open(home / "runs" / run_id / "journal.db") as journal:
        for kind, at, attempt, *data in lines:
            told = dict(data[0]) if data else {}
            if kind == "launch_intended":
                told["offer"] = {**told["offer"], "infra": "local", "region": SCRIPT}
            journal.append(kind, at=1_790_000_000.0 + at, attempt=attempt, data=told)
    assert store is not None
