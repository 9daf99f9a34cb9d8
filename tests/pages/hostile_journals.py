"""Journals that nobody can have written in earnest, and all that is ever shown of a run."""

from __future__ import annotations

import copy
import json
import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from spotguard.cli.terminal.output import _finite
from spotguard.control.journal.fold import fold, limits_to_json
from spotguard.control.journal.journal import NO_SENSE, Entry, _entry
from spotguard.control.journal.record import Limits
from spotguard.control.report.document import assemble
from spotguard.control.report.measures import run_measures
from spotguard.control.report.reading import Stored
from spotguard.control.report.series import LOSS, Point, series
from spotguard.control.status.history_words import history_lines
from spotguard.control.status.make_view import run_summary, run_view
from spotguard.pages.html import as_json, report_html
from spotguard.pages.metrics import exposition
from spotguard.pages.run_page import run_page
from spotguard.pages.runs_page import runs_page
from spotguard.shared.json_documents import document
from tests.control.made import (
    down_asked,
    ended,
    launched,
    node_ended,
    said,
    saved,
    training,
)
from tests.pages.hostile_text import MARK, SCRIPT

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

HOSTILE: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 10**30, -(10**30), 1e308, -1e308, 1e-320, 2**63, 0.1),
    *("", "7", "nan", SCRIPT + MARK, "\ud800", "x" * 5000, [], [1], {}, {"a": [{}]}),
    *("preempted", "finished", "spot", "2025-01-01T00:00:00Z"),
)
NOW = 20_000.0


def whole_story() -> list[Entry]:
    """Return a journal in which everything happens once, over three attempts."""
    created = {
        "run_id": "job-1",
        "name": "job",
        "store_root": "memory://",
        "limits": limits_to_json(Limits(budget_usd=20.0, deadline_at=90_000.0)),
        "spec": {"script": "/job.py", "env": {"A": "b"}, "gpus": "A100:8", "notify_on": ["ended"]},
    }
    lines: list[tuple[Any, ...]] = [("run_created", 0.0, None, created)]
    lines += [
        ("controller_started", 1.0, None, {"pid": 3}),
        ("clock_moved", 1.5, None, {"by_s": 3.0, "ahead_s": 3.0}),
        ("no_capacity", 2.0, 1, {"nodes": 2, "place": "a/b", "problem": "none", "paid_s": 3.0}),
        ("waiting", 3.0, None, {"retry_at": 9.0, "rounds": 1}),
        ("adopted", 4.0, None, {"lost_launches": [{"at": 1.0, "paid_s": 2.0, "usd": 0.5}]}),
    ]
    for attempt in (1, 2, 3):
        at = attempt * 1000.0
        lines += [
            *launched(at, attempt, down_at=9e9, budget_stop_at=8e9, infra="aws"),
            ("cluster_up", at + 1, attempt, {"at": at + 1}),
            training(at + 4, attempt, step=(attempt - 1) * 9, source="checkpoints/x/"),
            ("job_first_step", at + 5, attempt, {"step": 1}),
            ("job_emergency_fit", at + 5, attempt, {"grace_s": 30.0, "needed_s": 3.0}),
            saved(at + 5, attempt * 9, attempt, size_bytes=1e3, duration_s=0.5, stall_s=0.1),
            (
                "progress",
                at + 6,
                attempt,
                {"step": 9, "total_steps": 99, "loss": 0.5, "train_s": 5},
            ),
            ("job_warning", at + 7, attempt, {"message": "so"}),
            ("job_save_failed", at + 7, attempt, {"step": 4, "problem": "full"}),
            ("job_notice", at + 8, attempt, {"source": "aws", "deadline_at": at + 100}),
            ("job_notice_withdrawn", at + 8, attempt, {"source": "aws"}),
            ("job_stop_agreed", at + 8, attempt, {"stop_step": 9}),
            ("job_peer_lost", at + 8, attempt, {"rank": 1, "problem": "dead"}),
            ("job_node_exited", at + 8, attempt, {"node": 1, "exit_code": 1}),
            ("job_rescaled", at + 8, attempt, {"nodes": 2}),
            ("job_given_back", at + 8, attempt, {"bytes": 5}),
            ("contact_lost", at + 9, attempt, {"detail": "silent"}),
            ("contact_back", at + 10, attempt, {}),
            ("budget_alert", at + 11, None, {"percent": 50}),
            ("set_aside", at + 12, attempt, {"key": "k", "problem": "p"}),
            ("stop_asked", at + 13, attempt, {"reason": "preempted"}),
            down_asked(at + 14, "preempted", attempt),
            node_ended(at + 15, attempt=attempt, end="lost"),
            said(at + 16, "preempted", attempt, step=9, saved_step=9, train_s=9.0),
        ]
        if attempt < 3:
            lines.append(ended(at + 20, "preempted", attempt, last_step=9))
    lines += [
        ("user_stop", 4000.0, None, {}),
        ended(4001.0, "failed", 3, last_step=12),
        ("settled", 4002.0, None, {"state": "failed", "detail": "so", "exit_code": 1}),
    ]
    return [
        Entry(seq=seq, kind=kind, at=at, attempt=(*rest, None)[0], data=(*rest, None, {})[1] or {})
        for seq, (kind, at, *rest) in enumerate(lines, start=1)
    ]


def spoiled(seed: int) -> list[Entry]:
    """Return that journal with one to four things wrong; the seed says which."""
    chance = random.Random(seed)
    entries = copy.deepcopy(whole_story())
    for _ in range(chance.randint(1, 4)):
        _spoil(entries, chance)
    return [replace(entry, seq=seq) for seq, entry in enumerate(entries, start=1)]


def _spoil(entries: list[Entry], chance: random.Random) -> None:
    at = chance.randrange(len(entries))
    entry = entries[at]
    match chance.randrange(8):
        case 0:
            del entries[at if len(entries) > 1 else 0 : at + 1]
        case 1:
            entries.insert(chance.randrange(len(entries)), entry)
        case 2:
            entries[at] = replace(entry, attempt=chance.choice((None, -1, 0, 2, 4, 10**9)))
        case 3:
            entries[at] = replace(entry, at=chance.choice((-1e300, 0.0, 1e300, 5e9, -5.0)))
        case 4:
            entries[at] = replace(entry, kind=chance.choice(entries).kind)
        case _:
            _spoil_data(entry.data, chance)


def _spoil_data(data: dict[str, Any], chance: random.Random) -> None:
    if not data:
        data["node"] = chance.choice(HOSTILE)
        return
    name = chance.choice(sorted(data))
    inner = data[name]
    if isinstance(inner, dict) and inner and chance.random() < 0.8:
        _spoil_data(inner, chance)
    elif chance.random() < 0.2:
        del data[name]
    else:
        data[name] = copy.deepcopy(chance.choice(HOSTILE))


@dataclass(frozen=True)
class Shown:
    """All that is made of one journal."""

    report: str
    page: str
    runs: str
    numbers: bytes


def show(entries: Sequence[Entry], *, now: float = NOW) -> Shown | None:
    """Make all pages, documents and numbers of a journal; None if it is refused as senseless."""
    try:
        entries = [_read_back(entry) for entry in entries]
        record = fold(iter(entries))
        lines = tuple(history_lines(iter(entries)))
        view = run_view(record, live=None, now=now, controller_alive=False, store_url="memory://")
        losses = [Point(3, 1e300, 1), Point(4, -0.5, 2), Point(10**18, 0.5, 10**9)]
        report = assemble(
            record,
            view,
            now=now,
            stored=Stored(series=(series(LOSS, losses, record),)),
            lines=lines,
            earlier=0,
        )
        summary = run_summary(record, now=now)
        told = run_measures(record, summary, now)
    except NO_SENSE:
        return None
    page = run_page(report, live=True)
    return Shown(
        report=json.dumps(_finite(document(report)), allow_nan=False),
        page=report_html(page),
        runs=as_json(runs_page([summary])),
        numbers=exposition([told]),
    )


def _read_back(entry: Entry) -> Entry:
    """Return an entry as a journal gives it back."""
    row = (entry.seq, entry.at, entry.kind, entry.attempt, json.dumps(entry.data))
    return _entry(row)


def spoiled_ones(first: int, count: int) -> Iterator[tuple[int, list[Entry]]]:
    """Yield (seed, journal)."""
    yield from ((seed, spoiled(seed)) for seed in range(first, first + count))
