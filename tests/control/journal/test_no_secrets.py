"""No value of a job's `env` leaves a process, whichever way its words go out."""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pytest

from spotguard.control.handover.stored_wishes import AskedThere, refuse
from spotguard.control.journal.journal import Journal
from spotguard.control.journal.record import Limits, RunRecord, Tiding
from spotguard.control.journal.stored.published_launch import publish
from spotguard.control.supervisor.notify import body_of
from spotguard.events import keys
from spotguard.events.event import Event, JobEvent
from spotguard.pages.html import as_json
from spotguard.pages.layout import WebPage
from spotguard.spec.model import build_spec
from spotguard.testing import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SECRET = "s3cr%t wörd"
WORDS = (
    f"ValueError: cannot log in as {SECRET} at https://x/?k={quote(SECRET)}, "
    f"header {base64.b64encode(b'me:' + SECRET.encode()).decode()}, body {json.dumps(SECRET)}"
)


def _event(_: Path) -> object:
    event = Event(
        kind=JobEvent.ENDED.value,
        at=1e9,
        attempt=1,
        data={"reason": "job_failed", "message": WORDS, "traceback": f"Traceback\n  {WORDS}\n"},
    )
    return json.loads(event.to_json())["data"]


def _journal(folder: Path) -> object:
    with Journal.create(folder / "journal.db") as journal:
        spec = {"env": {"MINE": SECRET}}
        journal.append("created", at=1e9, data={"spec": spec, "detail": WORDS})
        journal.append("ended", at=1e9, attempt=1, data={"end": {"message": WORDS, "n": 1}})
        first, last = journal.events()
    assert first.data.pop("spec") == spec, "the run could not be launched again"
    return [first.data, last.data]


def _end(_: Path) -> object:
    store = MemoryStore()
    assert publish(store, keys.end(1), {"reason": "job_failed", "message": WORDS}) is None
    return json.loads(store.get(keys.end(1)))


def _answer(_: Path) -> object:
    store = MemoryStore()
    refuse(store, AskedThere(key="wishes/1-a.json", kind="stop", data={}, answer=""), WORDS)
    return json.loads(store.get("wishes/1-a.json"))


def _webhook(_: Path) -> object:
    """As a journal of an earlier version has it: with the secret."""
    limits = Limits(budget_usd=None, deadline_at=None, nodes_min=1, nodes_max=1)
    record = RunRecord(
        run_id="r-1", name="r", created_at=1.0, store_root="file:///s", spec={}, limits=limits
    )
    return body_of(record, Tiding(seq=1, kind="ended", text=WORDS), 2.0)


def _page(_: Path) -> object:
    """As a journal of an earlier version has it: with the secret."""
    return json.loads(as_json(WebPage(kind="report", title="r", error=WORDS, warnings=(WORDS,))))


WAYS_OUT: list[Callable[[Path], Any]] = [_event, _journal, _end, _answer, _webhook, _page]


@pytest.mark.parametrize("way_out", WAYS_OUT, ids=lambda way: way.__name__)
def test_a_value_of_env_is_in_nothing_that_leaves(way_out: Any, tmp_path: Path) -> None:
    """In no form: plain, in a URL, in base64, in JSON. What stands around it is told."""
    job = {"name": "r", "script": "job.py", "workdir": "/w", "store": "/s"}
    build_spec({**job, "env": {"MINE": SECRET}, "args": ["--token", "a-b-c-d"]})
    said = json.dumps(way_out(tmp_path), ensure_ascii=False)
    assert "ValueError: cannot log in as *** at https://x/?k=***, header" in said
    for part in ("s3cr", "wörd", "a-b-c-d"):
        assert part not in said
    assert base64.b64encode(SECRET.encode()).decode()[4:12] not in said
