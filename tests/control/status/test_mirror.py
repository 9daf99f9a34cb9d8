"""A run of another machine is told as its controller would tell it, overlaps included."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import pytest

from spotguard.checkpoint.lineage import Claim
from spotguard.control.handover.adopt import Rebuild, settle
from spotguard.control.journal.fold import limits_to_json, read_record
from spotguard.control.journal.journal import Journal
from spotguard.control.journal.record import Kind, Limits
from spotguard.control.report import mirror as mirroring
from spotguard.control.report.mirror import Mirror
from spotguard.control.status.watch import picture
from spotguard.control.supervisor.lease import Lease
from spotguard.events import keys
from spotguard.events.event import Event
from spotguard.events.states import EndReason
from spotguard.launch.base import ClusterState, ClusterView
from spotguard.shared.units import SystemClock, to_iso
from spotguard.spec.model import JobSpec
from spotguard.storage import PrefixedStore, open_store
from spotguard.testing.job import JobFate
from tests.control.supervisor.test_asking_ahead import a_run
from tests.control.world import RUN_ID

if TYPE_CHECKING:
    from pathlib import Path

    from spotguard.control.journal.record import RunRecord
    from spotguard.storage.base import ObjectStore

BEGAN = time.time() - 600


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each look is a look, into a home of its own."""
    monkeypatch.setattr(mirroring, "_LOOK_EVERY_S", 0.0)
    monkeypatch.setenv("SPOTGUARD_HOME", str(tmp_path / "home"))


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    """The store of a run that a controller elsewhere looks after."""
    root = str(tmp_path / "store")
    store = PrefixedStore(open_store(root), RUN_ID)
    spec = JobSpec(script="/job.py", workdir="/", name="job", store=root)
    body = {"schema": 1, "name": "job", "limits": limits_to_json(Limits())}
    body |= {"spec": spec.public_json(), "created_at": to_iso(BEGAN)}
    store.put(keys.RUN, json.dumps(body).encode())
    Lease(store, SystemClock(), "another machine").take()
    return store


def launch(store: ObjectStore, attempt: int, at_s: float, **more: Any) -> None:
    """Put what a controller publishes of a launch."""
    body = {"nodes": 2, "infra": "aws", "region": "us-east-1", "price_usd_per_h": 3.6}
    body |= {"cluster": f"{RUN_ID}-{attempt}", "intended_at": BEGAN + at_s, **more}
    store.put(keys.launch(attempt), json.dumps(body).encode())


def happen(store: ObjectStore, attempt: int, kind: str, at_s: float, **data: Any) -> None:
    """Put an event of a job."""
    event = Event(kind=kind, at=BEGAN + at_s, attempt=attempt, data=data)
    key = keys.event(attempt, at=event.at, node=0, rank=0, count=int(at_s))
    store.put(key, event.to_json())


class Looked:
    """A store view that is looked at again and again."""

    def __init__(self, tmp_path: Path) -> None:
        self.mirror = Mirror(str(tmp_path / "store"))

    def record(self) -> RunRecord:
        """Return what it tells now."""
        with self.mirror.folder(RUN_ID).journal() as journal:
            return read_record(journal)


def test_the_old_nodes_train_while_new_ones_start(tmp_path: Path, store: ObjectStore) -> None:
    """At a notice the next nodes are asked for: the attempt that still trains has not vanished."""
    launch(store, 1, 0)
    happen(store, 1, "started", 10, resumed_step=0)
    happen(store, 1, "saved", 20, step=5, checkpoint="c")
    looked = Looked(tmp_path)
    assert [each.number for each in looked.record().attempts] == [1]

    launch(store, 2, 30, after=1)
    record = looked.record()
    assert record.current is not None
    assert record.current.number == 1
    assert record.ahead is not None
    assert (record.ahead.number, record.ahead.nodes) == (2, 2)
    folder = looked.mirror.folder(RUN_ID)
    words = picture(folder, record, controlled=True).state_detail
    assert "the nodes of attempt 2 are started meanwhile" in words

    happen(store, 1, "saved", 40, step=9, checkpoint="d")  # of the attempt before the newest
    record = looked.record()
    assert record.current is not None
    assert record.current.last_step == 9

    happen(store, 1, "ended", 50, reason="preempted", step=9, saved_step=9)
    store.put(keys.go(2), b"{}")
    record = looked.record()
    assert record.ahead is None
    assert [each.number for each in record.attempts] == [1, 2]
    assert record.attempts[0].end is not None
    assert record.attempts[0].end.reason is EndReason.PREEMPTED


CLAIM = Claim(attempt=2, claimed_at=BEGAN + 60, resumed_from=None, writer="w", extra={})


@pytest.mark.parametrize(("key", "word"), [(keys.go(2), b"{}"), (keys.claim(2), CLAIM.to_json())])
def test_a_turn_comes_by_either_word(
    tmp_path: Path, store: ObjectStore, key: str, word: bytes
) -> None:
    """The controller's, or the job's own, which may see the end of the one before by itself."""
    launch(store, 1, 0)
    happen(store, 1, "started", 10, resumed_step=0)
    launch(store, 2, 30, after=1)
    store.put(key, word)
    record = Looked(tmp_path).record()
    assert record.ahead is None
    assert record.current is not None
    assert record.current.number == 2


def test_a_verdict_on_an_older_attempt_is_seen(tmp_path: Path, store: ObjectStore) -> None:
    """Its nodes may go minutes after the next attempt began, and were paid until then."""
    launch(store, 1, 0)
    happen(store, 1, "started", 10, resumed_step=0)
    happen(store, 1, "ended", 50, reason="preempted", step=9, saved_step=9)
    launch(store, 2, 60)
    looked = Looked(tmp_path)
    first = looked.record().attempts[0]
    assert first.end is not None
    assert first.end.gone_at == pytest.approx(BEGAN + 50, abs=0.01)
    end = {"gone_at": BEGAN + 110, "reason": "preempted", "last_step": 9}
    store.put(keys.end(1), json.dumps(end).encode())
    first = looked.record().attempts[0]
    assert first.end is not None
    assert first.end.gone_at == pytest.approx(BEGAN + 110, abs=0.01)


def test_what_came_to_nothing_is_counted(tmp_path: Path, store: ObjectStore) -> None:
    """Launches that were given up cost money on another machine's run, too."""
    lost = {"at": BEGAN, "paid_s": 100.0, "usd": 0.5}
    launch(store, 1, 200, lost_launches=[lost])
    looked = Looked(tmp_path)
    [found] = looked.record().lost_launches
    assert (found.paid_s, found.usd) == (100.0, 0.5)
    happen(store, 1, "started", 210, resumed_step=0)
    assert len(looked.record().lost_launches) == 1


class Sees:
    """A launcher that knows how each cluster stands."""

    def __init__(self, **states: ClusterState) -> None:
        self._states = states

    def observe(self, cluster: str, *, heard: bool = False) -> ClusterView:
        """Return what is known of it."""
        return ClusterView(state=self._states[f"of_{cluster[-1]}"])


@pytest.mark.parametrize("old_lives", [True, False])
@pytest.mark.parametrize("new_lives", [True, False])
def test_who_adopts_in_an_overlap_goes_on_with_it(
    tmp_path: Path, old_lives: bool, new_lives: bool
) -> None:
    """No node is forgotten and none trains beside another, whichever of the two still live."""
    world = a_run(tmp_path, {1: JobFate(how="grace", at_s=20.0, for_s=60.0)}, total_steps=100)
    record = world.run_until(40.0)
    assert record.ahead is not None
    lives = {True: ClusterState.UP, False: ClusterState.GONE}
    sees = Sees(of_1=lives[old_lives], of_2=lives[new_lives])
    with Journal.open(tmp_path / "journal.db") as journal:
        first = journal.events()[0]
    with Journal.create(tmp_path / "adopted.db") as journal:
        journal.append(Kind.CREATED.value, at=first.at, data=first.data)
        Rebuild(journal, sees, RUN_ID).attempts(world.store)
        settle(journal, "adopted")
        adopted = read_record(journal)
    assert (adopted.current is not None) == old_lives
    assert (adopted.ahead is not None) == new_lives
    assert (adopted.settled is None) == (old_lives or new_lives)
    assert len(adopted.lost_launches) == (not new_lives)
    if adopted.ahead is not None:
        assert adopted.ahead.cluster == record.ahead.cluster
        assert adopted.ahead.launched


def test_a_store_is_looked_at_without_a_home(
    tmp_path: Path, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where none can be made, the journals are kept for as long as the process lives."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("SPOTGUARD_HOME", str(tmp_path / "file" / "home"))
    mirror = Mirror(str(tmp_path / "store"))
    (folder,) = mirror.folders(without=frozenset())
    assert folder.journal_path.exists()
    assert not mirror.problems
