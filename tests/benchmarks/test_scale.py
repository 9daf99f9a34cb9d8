"""The benchmark of very long runs works; its timings are not judged here."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from benchmarks.scale.long_run import LongRun
from benchmarks.scale.table import Row, to_markdown
from spotguard.control.journal.job_events import recall
from spotguard.events import keys
from spotguard.runtime.reporting.event_log import EventLog
from spotguard.testing import MemoryStore
from tests.benchmarks.test_checkpoint_benchmark import run_module

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.e2e
@pytest.mark.timeout(600)
def test_the_command_measures_folder_bucket_and_commands(tmp_path: Path) -> None:
    """Requests do not grow with the events: a small run needs hardly fewer than a large one."""
    out = tmp_path / "out.json"
    size = ("--events", "4000", "--checkpoints", "40", "--attempts", "4", "--request-ms", "0")
    too_slow = 1  # for its limits, which a busy machine does not hold
    run_module("benchmarks.scale", *size, "--json", str(out), codes=(0, too_slow))
    rows = json.loads(out.read_text(encoding="utf-8"))["results"]

    assert {row["where"] for row in rows} == {"command", "journal", "folder", "bucket"}
    restart = next(row for row in rows if row["what"] == "controller restarts" and row["requests"])
    assert restart["requests"] <= 3


def test_the_made_up_run_is_as_an_event_log_leaves_it() -> None:
    """What is measured is what a job writes: the same objects, to the byte."""
    run = LongRun(events=1200, checkpoints=10, attempts=1)
    made_up, written = MemoryStore(), MemoryStore()
    run.put_events(lambda key, raw: void(made_up.put(key, raw)), 1)
    log = EventLog(written, attempt=1, node=0, rank=0)
    for _, event in run.events_of(1):
        log.write(event)
        log.tidy(lambda: True)

    assert contents(made_up).keys() == contents(written).keys()
    assert contents(made_up) == contents(written)
    assert recall(made_up, 1).events


def test_a_row_says_whether_its_limits_hold() -> None:
    """Too slow or too large is named, and makes the command fail."""
    slow = Row(what="a", where="folder", wall_s=2.1, requests=None, peak_mb=10)
    large = Row(what="b", where="bucket", wall_s=1.0, requests=7, peak_mb=1000)
    good = Row(what="c", where="folder", wall_s=1.0, requests=None, peak_mb=10)

    assert [row.holds for row in (slow, large, good)] == [False, False, True]
    assert to_markdown(LongRun(), [slow, large]).count("too much") == 2


def contents(store: MemoryStore) -> dict[str, bytes]:
    """Return all events' objects."""
    return {info.key: store.get(info.key) for info in store.list(keys.ATTEMPTS)}


def void(_: object) -> None:
    """Return nothing."""
