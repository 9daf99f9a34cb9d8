"""All runs at once: what is new is seen, at the price of what is new, and no store is touched."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from spotguard.control import api
from spotguard.control.journal.journal import Journal
from spotguard.control.journal.record import Kind
from spotguard.control.report import mirror as mirroring
from spotguard.control.report.mirror import Mirror
from spotguard.errors import UsageError
from spotguard.events import keys
from spotguard.events.event import Event
from spotguard.events.states import RunState
from spotguard.storage import open_store
from spotguard.testing import FaultyStore
from tests.control.made import launched, training
from tests.control.run_folders import make_run
from tests.control.world import RUN_ID, World

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of its own."""
    monkeypatch.setenv("SPOTGUARD_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def _tell(home: Path, run_id: str, *lines: tuple[object, ...]) -> None:
    with Journal.open(home / "runs" / run_id / "journal.db") as journal:
        for kind, at, attempt, *data in lines:
            told = data[0] if data else {}
            journal.append(str(kind), at=time.time() + float(str(at)), attempt=attempt, data=told)  # type: ignore[arg-type]


def test_only_a_run_that_changed_is_read_again(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two hundred runs, one that goes on costs one reading."""
    for name in ("job-1", "job-2", "job-3"):
        make_run(home, name)
    fleet = api.fleet()
    assert fleet.refresh()
    fleet.refresh()  # closing a journal moves its write-ahead log into it, once
    opened: list[str] = []
    real = Journal.open.__func__  # type: ignore[attr-defined]

    def opens(cls: type[Journal], /, path: Path, **more: bool) -> Journal:
        opened.append(path.parent.name)
        return real(cls, path, **more)  # type: ignore[no-any-return]

    monkeypatch.setattr(Journal, "open", classmethod(opens))
    assert not fleet.refresh()
    assert opened == []
    _tell(home, "job-2", *launched(0.0), training(1.0))
    opened.clear()
    assert fleet.refresh()
    assert set(opened) == {"job-2"}
    states = {run.run_id: run.state for run in fleet.summaries()}
    assert states["job-2"] is RunState.RUNNING


def test_a_damaged_journal_hides_no_other_run(home: Path) -> None:
    """It is shown as lost, as in `spotguard runs`."""
    make_run(home, "job-1")
    make_run(home, "job-2")
    (home / "runs" / "job-1" / "journal.db").write_bytes(b"rubbish")
    fleet = api.fleet()
    fleet.refresh()
    states = {run.run_id: run.state for run in fleet.summaries()}
    assert states == {"job-1": RunState.CONTACT_LOST, "job-2": RunState.LAUNCHING}
    assert [each.summary.run_id for each in fleet.measures()] == ["job-2"]


def test_no_other_run_is_found_by_a_path(home: Path) -> None:
    """A name that climbs out of the folder of runs is the name of no run."""
    make_run(home, "job-1")
    fleet = api.fleet()
    fleet.refresh()
    for name in ("../job-1", "job-1/../job-1", "", ".", "/etc/passwd"):
        with pytest.raises(UsageError, match="no run"):
            fleet.follower(name)


def test_a_run_of_another_machine_is_seen_in_its_store(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With each thing that happens there, though this machine never knew it, and read-only."""
    monkeypatch.setattr(mirroring, "_LOOK_EVERY_S", 0.0)
    elsewhere = tmp_path / "elsewhere"
    store = make_run(elsewhere, "job-7")
    _publish(store, elsewhere)
    before = {info.key for info in store.list("")}
    fleet = api.fleet([str(elsewhere / "store")])
    fleet.refresh()
    [run] = fleet.summaries()
    assert (run.run_id, run.attempts) == ("job-7", 1)
    assert not fleet.is_ours("job-7")
    assert {info.key for info in store.list("")} == before
    event = Event(kind="saved", at=time.time(), attempt=1, data={"step": 12, "checkpoint": "c"})
    store.put(keys.event(1, at=event.at, node=0, rank=0, count=2), event.to_json())
    assert fleet.refresh()
    report = fleet.follower("job-7").look()
    assert report.run.saved_step == 12


def _publish(store: object, home: Path) -> None:
    """Put what a controller and a job leave in the store of a run."""
    import json

    from spotguard.control.journal.fold import limits_to_json
    from spotguard.control.journal.record import Limits
    from spotguard.shared.units import to_iso
    from spotguard.spec.model import JobSpec

    spec = JobSpec(script="/job.py", workdir="/", name="job", store=str(home / "store"))
    body = {"schema": 1, "name": "job", "limits": limits_to_json(Limits())}
    body |= {"spec": spec.public_json(), "created_at": to_iso(time.time())}
    put = store.put  # type: ignore[attr-defined]
    put(keys.RUN, json.dumps(body).encode())
    put(keys.launch(1), json.dumps({"nodes": 3, "infra": "aws", "region": "us-east-1"}).encode())
    event = Event(kind="started", at=time.time(), attempt=1, data={"resumed_step": 0})
    put(keys.event(1, at=event.at, node=0, rank=0, count=1), event.to_json())


def test_a_store_that_fails_leaves_the_last_picture(home: Path, tmp_path: Path) -> None:
    """A page of what was known is better than none."""
    (tmp_path / "store").mkdir()
    mirror = Mirror(str(tmp_path / "store"))
    mirror._store = FaultyStore(open_store(str(tmp_path / "store"))).fail("list_folders")
    from spotguard.control.report.fleet import Fleet

    make_run(home, "job-1")
    fleet = Fleet([mirror])
    fleet.refresh()
    assert [run.run_id for run in fleet.summaries()] == ["job-1"]


def test_a_report_tells_what_happened(home: Path) -> None:
    """A run with losses and refusals is told whole, though its store cannot be read any more."""
    folder = home / "runs" / RUN_ID
    folder.mkdir(parents=True)
    world = World(folder, total_steps=40)
    world.run_until(6.0)
    world.write(Kind.USER_STOP)
    world.run()
    told = api.report(RUN_ID)
    assert told.run.state is RunState.STOPPED
    assert told.store_problem is not None
    assert told.history[-1].kind == "settled"
    assert sum(share.seconds for share in told.time) > 0
