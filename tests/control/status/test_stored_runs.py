"""Runs known by their store alone: a list is cheap, a look is whole, and nothing is written."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from spotguard.cli.main import main
from spotguard.control import api
from spotguard.control.controller import one_run
from spotguard.control.controller.rest import Bell, Rest
from spotguard.control.journal.fold import limits_to_json
from spotguard.control.journal.record import Kind, Limits
from spotguard.control.report import stored
from spotguard.control.run_folder import folder_of
from spotguard.control.status.published_line import read_told
from spotguard.control.status.view import RunSummary
from spotguard.control.supervisor.lease import VALID_S, Lease
from spotguard.errors import UsageError
from spotguard.events import keys
from spotguard.events.checksummed import with_checksum
from spotguard.events.event import Event
from spotguard.events.states import RunState
from spotguard.events.untrusted import Refused
from spotguard.shared.json_documents import document
from spotguard.shared.units import to_iso
from spotguard.spec.model import JobSpec
from spotguard.storage import PrefixedStore, open_store
from spotguard.testing.clock import FakeClock
from tests.control.runs.test_api import a_spec

if TYPE_CHECKING:
    from pathlib import Path

    from spotguard.storage.base import ObjectStore


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home that is not there."""
    monkeypatch.setenv("SPOTGUARD_HOME", str(tmp_path / "home"))
    api._stored_runs.clear()
    return tmp_path / "home"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The store of a team."""
    return tmp_path / "team"


def told(run_id: str, state: RunState = RunState.RUNNING, **more: Any) -> RunSummary:
    """Return a line as a controller tells it."""
    fields: dict[str, Any] = {"spent_usd": 1.5, "budget_usd": 20.0, "step": 7, "total_steps": 40}
    return RunSummary(
        run_id=run_id, name="job", state=state, created_at=1.7e9, **{**fields, **more}
    )


def a_run(root: Path, run_id: str, line: RunSummary | None = None, *, age_s: float = 0.0) -> None:
    """Put what a controller and its job leave in a store: an attempt, and a word so old."""
    store = PrefixedStore(open_store(str(root)), run_id)
    spec = JobSpec(script="/job.py", workdir="/", name="job", store=str(root))
    body = {"schema": 1, "name": "job", "limits": limits_to_json(Limits(budget_usd=20.0))}
    body |= {"spec": spec.public_json(), "created_at": to_iso(time.time() - 60)}
    store.put(keys.RUN, json.dumps(body).encode())
    launch = {"nodes": 3, "infra": "aws", "region": "us-east-1", "intended_at": time.time() - 50}
    store.put(keys.launch(1), json.dumps(launch).encode())
    happened(store, "started", 1, {"resumed_step": 0})
    if line is not None:
        hold(store, line, age_s=age_s)
        os.utime(root / run_id / keys.LEASE, (time.time() - age_s,) * 2)


def hold(store: ObjectStore, line: RunSummary, *, age_s: float = 0.0) -> None:
    """Write a controller's word."""
    clock = FakeClock()
    clock.advance(time.time() - age_s - clock.now())
    Lease(store, clock, "another machine", tell=lambda: document(line)).take()


def happened(store: ObjectStore, kind: str, count: int, data: dict[str, Any]) -> None:
    """Put an event of the job."""
    event = Event(kind=kind, at=time.time() - 40 + count, attempt=1, data=data)
    store.put(keys.event(1, at=event.at, node=0, rank=0, count=count), event.to_json())


def files(root: Path) -> dict[str, tuple[bytes, int]]:
    """Return all that is in a store, and when it was written."""
    return {
        str(path): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in root.rglob("*")
        if path.is_file()
    }


class Counted:
    """A store that counts what it is asked."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._counting = threading.Lock()
        self.asked: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        if callable(found):
            with self._counting:
                self.asked[name] += 1
        return found


def test_a_list_of_many_runs_is_a_request_for_each(
    home: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one for their names: nothing of their attempts is read while a controller tells."""
    for number in range(200):
        name = f"job-{number:04d}"
        folder = root / name
        folder.mkdir(parents=True)
        if number == 0:
            hold(PrefixedStore(open_store(str(root)), name), told(name))
            word = (folder / keys.LEASE).read_bytes()
            continue
        body = json.loads(word)
        body["run"]["run_id"] = name
        del body["checksum"]
        (folder / keys.LEASE).write_bytes(with_checksum(json.dumps(body, sort_keys=True).encode()))
    counted = Counted(open_store(str(root)))
    monkeypatch.setattr(stored, "open_existing", lambda _: counted)
    runs, unreadable = stored.list_stored(str(root))
    assert (len(runs), unreadable) == (200, [])
    assert counted.asked == {"list_folders": 1, "get": 200}


def test_a_line_says_how_a_run_stands_and_who_controls_it(home: Path, root: Path) -> None:
    """What its controller told a moment ago, the machine, and the money."""
    a_run(root, "job-1", told("job-1"))
    [run], unreadable = stored.list_stored(str(root))
    assert not unreadable
    assert (run.state, run.step, run.spent_usd, run.budget_usd) == (RunState.RUNNING, 7, 1.5, 20.0)
    assert run.controlled_by is not None
    assert run.store == (root / "job-1").as_uri()
    assert not home.exists()


def test_a_dead_controllers_last_word_is_not_believed(home: Path, root: Path) -> None:
    """What came after it is read from the store; a run that was at rest by then stays so."""
    a_run(root, "job-1", told("job-1"), age_s=VALID_S + 1)
    a_run(root, "job-2", told("job-2", RunState.FINISHED, step=40), age_s=VALID_S + 1)
    runs = {run.run_id: run for run in stored.list_stored(str(root))[0]}
    assert (runs["job-1"].controlled_by, runs["job-1"].step) == (None, 0)
    assert runs["job-1"].attempts == 1
    assert (runs["job-2"].state, runs["job-2"].step) == (RunState.FINISHED, 40)


def test_what_is_no_run_or_damaged_is_one_line(
    home: Path, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And hides none of the others; one of an earlier version, whose lease says less, is read."""
    a_run(root, "job-1")
    (root / "holiday").mkdir()
    (root / "holiday" / "photo.jpg").write_bytes(b"\xff")
    a_run(root, "job-3", told("job-4"))
    (root / "job-3" / keys.RUN).write_text("[")
    (root / "job-5").mkdir()
    (root / "job-5" / keys.LEASE).mkdir()
    (root / "job-5" / keys.LEASE / "odd").write_text("")
    assert main(["runs", str(root)]) == 0
    shown = capsys.readouterr()
    assert "job-1" in shown.out
    assert [line.split(" cannot be read: ")[0] for line in shown.err.splitlines()] == [
        (root / name).as_uri() for name in ("holiday", "job-3", "job-5")
    ]
    assert main(["runs", str(root), "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert [run["run_id"] for run in body["runs"]] == ["job-1"]
    assert len(body["unreadable"]) == 3


@pytest.mark.parametrize(
    "body",
    [{}, {"state": "odd"}, {"created_at": "yesterday"}, {"run_id": "job-2"}, {"name": 4}],
    ids=str,
)
def test_a_told_line_that_makes_no_sense_is_refused(body: dict[str, Any]) -> None:
    """Then the run is read from what else it left."""
    whole = document(told("job-1"))
    assert read_told(whole, "job-1") == told("job-1")
    with pytest.raises(Refused):
        read_told({**whole, **body} if body else {}, "job-1")


@pytest.mark.parametrize(
    "command", [["status"], ["status", "--json"], ["history"], ["logs"], ["report", "--json"]]
)
def test_a_run_is_looked_at_by_its_place_alone(
    home: Path, root: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    """No home is needed or made, and nothing is written into the store."""
    a_run(root, "job-1", told("job-1"))
    before = files(root)
    assert main([command[0], str(root / "job-1"), *command[1:]]) == 0
    shown = capsys.readouterr()
    assert "job-1" in shown.out or command == ["logs"] or "us-east-1" in shown.out
    assert "in the hands of a controller on" in shown.err
    assert "Traceback" not in shown.out + shown.err
    assert files(root) == before
    assert not home.exists()


def test_a_run_came_to_rest_when_its_nodes_went(
    home: Path, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not when somebody looked; and what is told to do next is what can be done from here."""
    a_run(root, "job-1")
    store = PrefixedStore(open_store(str(root)), "job-1")
    gone_at = time.time() - 20
    store.put(keys.end(1), json.dumps({"reason": "finished", "gone_at": gone_at}).encode())
    assert main(["status", str(root / "job-1"), "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert (body["state"], body["finished_at"]) == ("finished", to_iso(gone_at))
    assert main(["status", str(root / "job-1")]) == 0
    said = capsys.readouterr().out.replace("\n", "")
    assert f"spotguard history {(root / 'job-1').as_uri()}" in said


def test_no_run_at_a_place_is_said(
    home: Path, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the code of a usage error."""
    root.mkdir()
    assert main(["status", str(root / "job-1")]) == 2
    assert "There is no run at" in capsys.readouterr().err


def test_who_watches_a_run_of_a_store_hears_each_thing_once(
    home: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though its journal is rebuilt with each thing that happens."""
    monkeypatch.setattr(stored, "_LOOK_EVERY_S", 0.0)
    a_run(root, "job-1", told("job-1"))
    watch = api.watch(str(root / "job-1"))
    first = watch.look()
    assert first.news
    assert first.view.controller_alive
    assert watch.look().news == ()
    store = PrefixedStore(open_store(str(root)), "job-1")
    happened(store, "saved", 2, {"step": 12, "checkpoint": "c"})
    look = watch.look()
    assert [line.kind for line in look.news] == ["saved"]
    assert look.view.saved_step == 12


@pytest.mark.parametrize("command", ["stop", "down", "resume"])
def test_a_run_of_a_store_is_not_steered_from_here(
    home: Path, root: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    """Before anything is asked; the way to take it over is told."""
    a_run(root, "job-1", told("job-1"))
    before = files(root)
    assert main([command, str(root / "job-1")]) == 2
    assert f"spotguard adopt file://{root / 'job-1'}" in capsys.readouterr().err
    assert files(root) == before


def test_a_controller_tells_how_its_run_stands(home: Path, root: Path) -> None:
    """In its lease, and at last how the run came to rest."""
    run_id = api.create_run(a_spec(home, store=str(root), budget_usd=20.0))
    folder = folder_of(run_id)
    with folder.journal() as journal:
        journal.append(Kind.USER_STOP.value, at=time.time())
    one_run.control(folder, Rest(folder, Bell()))
    word = json.loads((root / run_id / keys.LEASE).read_bytes())
    assert read_told(word["run"], run_id).state is RunState.STOPPED
    [run], _ = stored.list_stored(str(root))
    assert (run.state, run.budget_usd, run.controlled_by) == (RunState.STOPPED, 20.0, None)


def test_an_unknown_place_is_refused(home: Path) -> None:
    """A name that climbs out of a store is the name of no run."""
    for place in ("./..", "s3://", "/"):
        with pytest.raises(UsageError):
            api.find_any_run(place)
