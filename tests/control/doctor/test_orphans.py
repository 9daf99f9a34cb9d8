"""`doctor` finds the clusters that nobody wants, names nobody else's, and ends them if asked."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pytest

from spotguard.control.doctor import checks as doctor
from spotguard.control.doctor import orphans
from spotguard.control.doctor.checks import Status
from spotguard.control.doctor.orphan_report import ClusterFate, Findings, Judgement, Leftover
from spotguard.control.doctor.orphans import end_named, end_orphans, find_leftovers
from spotguard.control.home_name import machine_id
from spotguard.control.journal.nodes.controller_node import ControllerNode
from spotguard.control.journal.stored.controller_nodes import publish_node, read_nodes, tell_ready
from spotguard.control.run_folder import RunFolder
from spotguard.control.supervisor.lease import VALID_S
from spotguard.errors import LauncherFailure, UsageError
from spotguard.events import keys
from spotguard.events.event import Heartbeat
from spotguard.launch.base import Unreachable
from spotguard.launch.skypilot.cluster_list import OurCluster
from spotguard.shared.json_documents import document
from spotguard.shared.units import to_iso
from spotguard.spec.model import JobSpec
from spotguard.storage import PrefixedStore, open_store
from spotguard.testing import FakeClock
from tests.control.made import ended, launched
from tests.control.run_folders import make_run

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from spotguard.storage.base import ObjectStore
    from tests.control.made import Line

NOW = 1_800_000_000.0
RUN = "job-1"
"""The run of `tests.control.made`, whose first attempt's cluster is `job-1-1`."""


@dataclass
class FakeBooks:
    """Implements `Books`: what it lists is set by the test, what it was asked is kept."""

    listed: list[OurCluster] = field(default_factory=list)
    gone: set[str] = field(default_factory=set)
    """Still listed, and found to be gone when the clouds are asked."""
    away: bool = False
    stubborn: bool = False
    ended: list[str] = field(default_factory=list)
    when_asked_anew: Callable[[], object] = lambda: None

    def ours(self, names: Sequence[str] | None = None, *, fresh: bool = False) -> list[OurCluster]:
        """Return what the test set."""
        if self.away:
            raise Unreachable("SkyPilot does not answer: connection refused")
        chosen = [each for each in self.listed if names is None or each.name in names]
        if not fresh:
            return chosen
        self.when_asked_anew()
        return [each for each in chosen if each.name not in self.gone]

    def end(self, cluster: str) -> None:
        """Take the order."""
        if self.stubborn:
            raise LauncherFailure("SkyPilot: no permission to terminate")
        self.ended.append(cluster)


def cluster(home: Path, name: str = "job-1-1", **changes: Any) -> OurCluster:
    """Return a cluster of two nodes that has run for an hour and a half."""
    plain = OurCluster(
        name=name,
        run_id=name.rpartition("-")[0],
        store=open_store(str(home / "store")).url,
        place="aws/us-east-1/us-east-1a",
        instance_type="m6i.large",
        market="spot",
        nodes=2,
        since=NOW - 5400.0,
        price_usd_per_h=0.04,
        sky_usd=0.13,
        status="UP",
    )
    return replace(plain, **changes)


def hold(store: ObjectStore, *, age_s: float, machine: str = "other", **more: bool) -> None:
    """Let a controller have renewed its lease so long ago."""
    body = {"machine": machine, "host": "far", "pid": 7, "renewed_at": to_iso(NOW - age_s)}
    store.put(keys.LEASE, json.dumps({**body, **more}).encode())


def beats(home: Path, at: float, *, stored_at: float | None = None) -> None:
    """Let the job have given a sign of life then, by its node's clock and the store's."""
    beat = Heartbeat(
        at=at,
        attempt=1,
        node=0,
        step=412,
        total_steps=600,
        epoch=0,
        train_s=9.0,
        step_s=None,
        loss=None,
        saved_step=None,
        saved_at=None,
    )
    store = PrefixedStore(open_store(home / "store"), RUN)
    store.put(keys.heartbeat(1, 0), beat.to_json())
    wrote_at = at if stored_at is None else stored_at
    os.utime(home / "store" / RUN / keys.heartbeat(1, 0), (wrote_at, wrote_at))


def happened(home: Path, *lines: Line) -> None:
    """Add to the journal of the run."""
    with RunFolder(home / "runs" / RUN).journal() as journal:
        for line in lines:
            kind, at, attempt, data = (*line, None, None)[:4]
            journal.append(kind, at=at, attempt=attempt, data=data or {})


def found(*listed: OurCluster, **more: Any) -> Findings:
    """Return what is found with these clusters in SkyPilot's books."""
    return find_leftovers(FakeBooks(listed=list(listed), **more), lambda: NOW)


def fate(home: Path) -> Judgement:
    """Return the verdict on the first cluster of the run."""
    return orphans.judge(cluster(home), NOW)


# ---------------------------------------------------------------- who is an orphan


def test_a_run_with_a_living_controller_is_never_an_orphan(home: Path) -> None:
    """Whatever the journal and the store say: it lives, so it sees to its clusters."""
    store = make_run(home, RUN, settled=True)
    hold(store, age_s=10 * VALID_S)
    with RunFolder(home / "runs" / RUN).control(patience_s=0.0) as alone:
        assert alone
        assert fate(home).fate is ClusterFate.WANTED
    assert fate(home).fate is ClusterFate.ORPHAN


@pytest.mark.parametrize("age_s", [0.0, VALID_S - 1.0])
def test_a_controller_on_another_machine_wants_its_cluster(home: Path, age_s: float) -> None:
    """The lease in the store says that it lives, also of a run that came to rest here before."""
    for settled in (False, True):
        shutil.rmtree(home / "runs", ignore_errors=True)
        shutil.rmtree(home / "store", ignore_errors=True)
        store = make_run(home, RUN, settled=settled)
        hold(store, age_s=age_s)
        assert fate(home).fate is ClusterFate.WANTED
        shutil.rmtree(home / "runs")
        assert fate(home).fate is ClusterFate.WANTED


def test_a_lease_that_ran_out_leaves_an_orphan(home: Path) -> None:
    """With both ways on: to end it by its run, or to let the run go on."""
    store = make_run(home, RUN)
    happened(home, *launched(NOW))
    hold(store, age_s=VALID_S + 1.0, machine=machine_id(home))
    (orphan,) = found(cluster(home)).orphans
    assert orphan.verdict.why == "its controller on far has been silent for 1 min 31 s"
    assert orphan.end_with == f"spotguard down {RUN}"
    assert orphan.keep_with == f"spotguard status {RUN}"


def test_a_run_that_came_to_rest_wants_nothing(home: Path) -> None:
    """Its journal is proof enough: no store is asked, which may be gone."""
    make_run(home, RUN)
    settled = {"state": "finished", "detail": "", "exit_code": 0}
    lines = (*launched(NOW), ended(NOW, "finished"), ("settled", NOW, None, settled))
    happened(home, *lines)
    nowhere = cluster(home, store="s4://nowhere")
    (orphan,) = found(nowhere).orphans
    assert orphan.verdict.why == "its run is finished"
    assert orphan.end_with == "sky down -y job-1-1"
    assert orphan.keep_with == ""


def test_an_attempt_that_ended_leaves_an_orphan(home: Path) -> None:
    """Without a controller nobody sees that its cluster is still there."""
    make_run(home, RUN)
    happened(home, *launched(NOW), ended(NOW, "preempted"))
    (orphan,) = found(cluster(home)).orphans
    assert orphan.verdict.why.startswith("its attempt ended: preempted")
    assert orphan.end_with == "sky down -y job-1-1"


def test_what_a_refused_launch_left_is_not_its_runs_cluster(home: Path) -> None:
    """To take the run down would end another one: the order goes to SkyPilot."""
    make_run(home, RUN)
    happened(home, *launched(NOW))
    refused = cluster(home, "job-1-1r0", run_id=RUN)
    by_name = {each.cluster.name: each for each in found(cluster(home), refused).orphans}
    assert by_name["job-1-1r0"].end_with == "sky down -y job-1-1r0"
    assert by_name["job-1-1"].end_with == f"spotguard down {RUN}"


def test_attempts_in_place_share_a_cluster(home: Path) -> None:
    """It is wanted for as long as any attempt on it goes on."""
    store = make_run(home, RUN)
    second = launched(NOW, 2)
    second[0][3]["cluster"] = "job-1-1"
    happened(home, *launched(NOW), ended(NOW, "preempted"), *second)
    hold(store, age_s=1.0)
    assert fate(home).fate is ClusterFate.WANTED


def test_a_run_of_another_machine_can_be_adopted(home: Path) -> None:
    """This machine does not know it, its store does, and its controller is gone."""
    store = make_run(home, RUN)
    store.put(keys.RUN, b"{}")
    hold(store, age_s=3600.0)
    shutil.rmtree(home / "runs")
    (orphan,) = found(cluster(home)).orphans
    assert orphan.verdict.why == "its controller on far has been silent for 1 h 00 min"
    assert orphan.end_with == "sky down -y job-1-1"
    assert orphan.keep_with == f"spotguard adopt {open_store(str(home / 'store')).url}/{RUN}"


def test_a_silent_controller_makes_no_orphan_of_a_job_that_trains(home: Path) -> None:
    """A controller may be stuck, or its machine asleep: nothing is ended but by its name."""
    store = make_run(home, RUN)
    store.put(keys.RUN, b"{}")
    hold(store, age_s=VALID_S + 1.0)
    beats(home, NOW - 5.0)
    shutil.rmtree(home / "runs")
    books = FakeBooks(listed=[cluster(home)])
    findings = find_leftovers(books, lambda: NOW)
    (leftover,) = findings.leftovers
    assert findings.orphans == ()
    assert leftover.words().endswith(
        "its controller on far has been silent for 1 min 31 s; its job still trains, at step 412"
    )
    assert leftover.end_with == "spotguard doctor --end job-1-1"
    assert leftover.keep_with == f"spotguard adopt {open_store(str(home / 'store')).url}/{RUN}"
    assert end_orphans(findings, books, lambda doing: None, FakeClock(NOW)) == findings
    assert books.ended == []

    (ended,) = end_named(findings, ["job-1-1"], books, print, FakeClock(NOW)).leftovers
    assert ended.ended
    assert books.ended == ["job-1-1"]


def test_a_lost_controller_of_this_machine_makes_no_orphan_of_a_job_that_trains(
    home: Path,
) -> None:
    """The command that names the run restarts its controller, which is what is missing."""
    store = make_run(home, RUN)
    happened(home, *launched(NOW))
    hold(store, age_s=3600.0, machine=machine_id(home))
    beats(home, NOW - 5.0)
    findings = found(cluster(home))
    (leftover,) = findings.leftovers
    assert findings.orphans == ()
    assert leftover.keep_with == f"spotguard status {RUN}"
    assert leftover.end_with == f"spotguard down {RUN}"


def test_the_stores_clock_proves_a_beat_as_well(home: Path) -> None:
    """A node whose clock is an hour behind trains all the same."""
    make_run(home, RUN)
    beats(home, NOW - 3600.0, stored_at=NOW - 5.0)
    findings = found(cluster(home))
    assert findings.orphans == ()
    assert [each.training_at_step for each in findings.leftovers] == [412]


def test_a_job_that_trains_while_the_next_nodes_wait_is_no_orphan(home: Path) -> None:
    """What was asked for ahead says nothing before its turn, and has a folder in the store."""
    store = make_run(home, RUN)
    beats(home, NOW - 5.0)
    store.put(keys.launch(2), b"{}")
    findings = found(cluster(home))
    assert findings.orphans == ()
    assert [each.training_at_step for each in findings.leftovers] == [412]


def test_heartbeats_that_are_seldom_are_waited_for(home: Path) -> None:
    """A job that was told to give a sign of life every five minutes is not silent after two."""
    store = make_run(home, RUN)
    spec = JobSpec(script="/j.py", workdir="/", name="j", store="s3://b", heartbeat_s=300.0)
    store.put(keys.RUN, json.dumps({"spec": spec.to_json()}).encode())
    beats(home, NOW - 600.0)
    shutil.rmtree(home / "runs")
    assert fate(home).fate is ClusterFate.TRAINING


def test_a_run_that_moved_is_not_judged_by_what_is_left_here(home: Path) -> None:
    """It came to rest here when the other machine took it over, and goes on there."""
    store = make_run(home, RUN)
    store.put(keys.RUN, b"{}")
    settled = {"state": "stopped", "detail": "taken over", "exit_code": 75}
    happened(home, *launched(NOW), ("settled", NOW, None, settled))
    hold(store, age_s=VALID_S + 1.0)
    beats(home, NOW - 5.0)
    verdict = fate(home)
    assert verdict.fate is ClusterFate.TRAINING
    assert verdict.adoptable
    assert not verdict.run_goes_on


def test_a_name_that_is_not_there_ends_nothing(home: Path) -> None:
    """A slip of the hand is told, with the names that could have been meant."""
    make_run(home, RUN)
    books = FakeBooks(listed=[cluster(home)])
    findings = find_leftovers(books, lambda: NOW)
    with pytest.raises(UsageError, match="job-1-2") as caught:
        end_named(findings, ["job-1-2"], books, print, FakeClock(NOW))
    assert "job-1-1" in caught.value.hint
    assert books.ended == []


def test_not_even_its_name_ends_what_a_controller_wants(home: Path) -> None:
    """One that came back between the look and the end sees to its cluster."""
    store = make_run(home, RUN)
    books = FakeBooks(listed=[cluster(home)])
    findings = find_leftovers(books, lambda: NOW)
    hold(store, age_s=1.0)
    (left,) = end_named(findings, ["job-1-1"], books, print, FakeClock(NOW)).leftovers
    assert books.ended == []
    assert left.problem.startswith("left alone: a controller on far")


def test_a_lease_that_was_let_go_wants_nothing(home: Path) -> None:
    """Its controller left a moment ago, and is not called silent for it."""
    store = make_run(home, RUN)
    store.put(keys.RUN, b"{}")
    hold(store, age_s=1.0, released=True)
    shutil.rmtree(home / "runs")
    (orphan,) = found(cluster(home)).orphans
    assert orphan.verdict.why == "its run has no controller"


def test_a_run_that_a_bucket_knows_nothing_of_is_unknown(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bucket that answers is proof; a folder may just not be mounted here."""
    assert fate(home).fate is ClusterFate.UNSURE
    monkeypatch.setattr(
        orphans, "run_store", lambda url, run: PrefixedStore(open_store(home / "b"), run)
    )
    verdict = orphans.judge(cluster(home, store="s3://bucket/runs"), NOW)
    assert verdict.fate is ClusterFate.ORPHAN
    assert verdict.why == "its run is known neither here nor in its store"


def test_a_store_that_cannot_be_asked_proves_nothing(home: Path) -> None:
    """The cluster is told of, as one to look at, and is never ended."""
    books = FakeBooks(listed=[cluster(home, store="s4://nowhere")])
    findings = find_leftovers(books, lambda: NOW)
    (check,) = doctor.check_clusters(findings)
    assert findings.orphans == ()
    assert "its run's store cannot be asked" in check.detail
    assert end_orphans(findings, books, lambda doing: None, FakeClock(NOW)) == findings
    assert books.ended == []


def test_a_damaged_lease_keeps_a_cluster_until_it_is_old(home: Path) -> None:
    """Its controller may live: only the store's own stamp tells how long it has been silent."""
    make_run(home, RUN).put(keys.LEASE, b"[]")
    path = home / "store" / RUN / keys.LEASE
    os.utime(path, (NOW - 10, NOW - 10))
    assert fate(home).fate is ClusterFate.WANTED
    os.utime(path, (NOW - 3600, NOW - 3600))
    assert fate(home).fate is ClusterFate.ORPHAN
    assert "a controller whose lease is damaged, and was stored 1 h" in fate(home).why


def test_a_damaged_journal_is_no_proof(home: Path) -> None:
    """The store decides then, and the run can be adopted."""
    store = make_run(home, RUN)
    (home / "runs" / RUN / "journal.db").write_bytes(b"not a database" * 100)
    hold(store, age_s=1.0)
    assert fate(home).fate is ClusterFate.WANTED
    hold(store, age_s=1e6)
    assert fate(home).fate is ClusterFate.ORPHAN


def test_what_took_itself_down_is_no_orphan(home: Path) -> None:
    """SkyPilot's books are old until it asks the cloud: the leak guard may have struck."""
    make_run(home, RUN)
    assert found(cluster(home), gone={"job-1-1"}).leftovers == ()
    assert len(found(cluster(home)).orphans) == 1


# ---------------------------------------------------------------- what is told


def test_each_is_told_with_its_price_its_reason_and_the_way_out(home: Path) -> None:
    """The dearest first; nothing is required of it, but the doctor is not content."""
    make_run(home, RUN)
    small = cluster(home)
    large = cluster(home, "job-2-1", nodes=1, price_usd_per_h=3.0, instance_type=None, sky_usd=None)
    findings = found(small, replace(large, store=small.store, run_id=RUN))
    checks = doctor.check_clusters(findings)
    assert [check.detail.partition(":")[0] for check in checks] == ["job-2-1", "job-1-1"]
    assert checks[1].detail == (
        "job-1-1: 2 nodes (m6i.large) on aws/us-east-1/us-east-1a for 1 h 30 min, $0.0800/h, "
        "$0.12 so far (SkyPilot: $0.13); its run has no controller"
    )
    assert checks[1].hint == "end it: sky down -y job-1-1"
    assert "1 node on aws" in checks[0].detail
    assert "SkyPilot" not in checks[0].detail
    report = doctor.DoctorReport(checks=tuple(checks), clusters=findings)
    assert report.works
    assert not report.ok
    assert report.verdict == (
        "all that is required works, but 2 clusters that nobody wants cost $3.08/h: "
        "spotguard doctor --end-orphans"
    )


def test_an_unknown_price_is_never_nothing(home: Path) -> None:
    """Neither in words nor in numbers."""
    make_run(home, RUN)
    findings = found(cluster(home, price_usd_per_h=None, sky_usd=None))
    (orphan,) = findings.orphans
    assert "price unknown, unknown so far;" in orphan.words()
    assert document(orphan.told())["cost_usd"] is None
    assert findings.words() == "1 cluster that nobody wants costs money"
    two = found(cluster(home, price_usd_per_h=None), cluster(home, "job-1-2"))
    assert two.words() == "2 clusters that nobody wants cost $0.0800/h and more"


@pytest.mark.parametrize(("age_s", "step"), [(5.0, 412), (120.0, None)])
def test_a_job_that_still_trains_is_told(home: Path, age_s: float, step: int | None) -> None:
    """Whoever ends it should know; an old sign of life is none."""
    make_run(home, RUN, settled=True)
    beats(home, NOW - age_s)
    (orphan,) = found(cluster(home)).orphans
    assert orphan.training_at_step == step
    assert ("its job still trains, at step 412" in orphan.words()) is (step is not None)


def test_a_skypilot_that_cannot_be_asked_is_one_sentence() -> None:
    """The doctor goes on, and says what would not be found."""
    findings = find_leftovers(FakeBooks(away=True))
    (check,) = doctor.check_clusters(findings)
    assert check.status is Status.NOTED
    assert check.detail == "SkyPilot does not answer: connection refused"
    assert "would not be found" in check.hint
    assert doctor.DoctorReport(checks=(check,), clusters=findings).ok


def test_nobody_is_asked_where_skypilot_was_never_used(home: Path) -> None:
    """No line, and no request; with clusters that are all wanted there is one line."""
    assert doctor.check_clusters(Findings()) == []
    hold(make_run(home, RUN), age_s=1.0)
    (check,) = doctor.check_clusters(found(cluster(home)))
    assert check.status is Status.OK
    assert check.detail == "1 of spotguard's at SkyPilot, none that nobody wants"


def test_the_json_has_all_of_it(home: Path) -> None:
    """Programs decide on it: the keys are frozen."""
    make_run(home, RUN)
    body = document(found(cluster(home)).told())
    assert set(body) == {"asked", "problem", "wanted", "leftovers"}
    assert body["leftovers"] == [
        {
            "cluster": "job-1-1",
            "run_id": RUN,
            "place": "aws/us-east-1/us-east-1a",
            "instance_type": "m6i.large",
            "market": "spot",
            "nodes": 2,
            "since": to_iso(NOW - 5400.0),
            "age_s": 5400.0,
            "usd_per_h": 0.08,
            "cost_usd": pytest.approx(0.12),
            "skypilot_usd": 0.13,
            "orphan": True,
            "why": "its run has no controller",
            "training_at_step": None,
            "end_with": "sky down -y job-1-1",
            "keep_with": "",
            "ended": False,
            "problem": "",
        }
    ]


# ---------------------------------------------------------------- ending them


def ending(books: FakeBooks) -> tuple[Leftover, ...]:
    """Look, end what is an orphan, and return what came of it."""
    findings = find_leftovers(books, lambda: NOW)
    return end_orphans(findings, books, lambda doing: None, FakeClock(NOW)).leftovers


def test_orphans_are_ended_and_are_none_any_more(home: Path) -> None:
    """By SkyPilot, where no run of this machine would do it."""
    make_run(home, RUN)
    books = FakeBooks(listed=[cluster(home)])
    (leftover,) = ending(books)
    assert books.ended == ["job-1-1"]
    assert leftover.ended
    assert Findings(asked=True, leftovers=(leftover,)).orphans == ()


def test_what_cannot_be_ended_stays_an_orphan_with_its_reason(home: Path) -> None:
    """The doctor goes on to the next one."""
    make_run(home, RUN)
    books = FakeBooks(listed=[cluster(home)], stubborn=True)
    (leftover,) = ending(books)
    assert not leftover.ended
    assert leftover.problem == "SkyPilot: no permission to terminate"


def test_a_controller_that_came_back_meanwhile_keeps_its_cluster(home: Path) -> None:
    """Between the look and the end, somebody may have restarted or adopted the run."""
    store = make_run(home, RUN)
    books = FakeBooks(listed=[cluster(home)], when_asked_anew=lambda: hold(store, age_s=1.0))
    (leftover,) = ending(books)
    assert books.ended == []
    assert leftover.problem.startswith("left alone: a controller on far")


@pytest.mark.parametrize("patient", [True, False])
def test_a_run_that_goes_on_is_taken_down_by_its_own_controller(
    home: Path, monkeypatch: pytest.MonkeyPatch, patient: bool
) -> None:
    """So that its journal and its bill are right; that nothing is gone after minutes is told."""
    from spotguard.control import api

    make_run(home, RUN)
    happened(home, *launched(NOW))
    started: list[str] = []

    def controller(run_id: str) -> None:
        started.append(run_id)
        settled = {"state": "stopped", "detail": "", "exit_code": 75}
        if patient:
            happened(home, ended(NOW, "stopped"), ("settled", NOW, None, settled))

    monkeypatch.setattr(api, "start_controller", controller)
    books = FakeBooks(listed=[cluster(home)])
    (leftover,) = ending(books)
    assert started == [RUN]
    assert books.ended == []
    assert leftover.ended is patient
    assert ("not gone yet" in leftover.problem) is not patient


# ---------------------------------------------------------------- controllers' own nodes

HOUR_S = 3600.0


def node(
    home: Path, *, since: float = NOW - 3 * HOUR_S, ready: str = "node", until: float | None = None
) -> Judgement:
    """Return the verdict on the controller's node that the run's store has like this."""
    name = f"{RUN}-c1"
    made = ControllerNode(
        number=1, cluster=name, place="aws", price_usd_per_h=0.04, since=since, until=until
    )
    publish_node(own_store(home), made)
    if ready:
        tell_ready(own_store(home), 1, ready)
    return orphans.judge(cluster(home, name, run_id=RUN, controller=1, since=since), NOW)


def own_store(home: Path) -> ObjectStore:
    """Return the run's part of the store."""
    return PrefixedStore(open_store(home / "store"), RUN)


def test_a_node_whose_controller_lives_is_wanted(home: Path) -> None:
    """Also if this machine, from which it was moved, has long forgotten the run."""
    hold(own_store(home), age_s=20.0, machine="node")
    assert node(home).fate is ClusterFate.WANTED


def test_a_node_that_was_asked_for_a_moment_ago_is_wanted(home: Path) -> None:
    """Nobody serves there yet."""
    assert node(home, since=NOW - 600.0, ready="").fate is ClusterFate.WANTED


def test_a_node_that_was_told_to_go_has_its_time(home: Path) -> None:
    """SkyPilot needs some minutes to end it."""
    assert node(home, until=NOW - 60.0).fate is ClusterFate.WANTED


def test_a_node_that_stays_though_told_to_go_is_an_orphan(home: Path) -> None:
    """Its own guard has failed."""
    hold(own_store(home), age_s=20.0, machine="node")
    assert node(home, until=NOW - HOUR_S).fate is ClusterFate.ORPHAN


@pytest.mark.parametrize("ready", ["", "node"])
def test_a_node_on_which_nobody_serves_is_an_orphan(home: Path, ready: str) -> None:
    """Another machine has the run; this one never came to life, or lost it."""
    hold(own_store(home), age_s=20.0, machine="other")
    assert node(home, ready=ready).fate is ClusterFate.ORPHAN


@pytest.mark.parametrize("released", [True, False])
def test_a_node_whose_controller_is_silent_for_long_is_an_orphan(
    home: Path, released: bool
) -> None:
    """The run itself goes on by `adopt`, unless it is at rest."""
    hold(own_store(home), age_s=2 * HOUR_S, machine="node", released=released)
    verdict = node(home)
    assert verdict.fate is ClusterFate.ORPHAN
    assert verdict.adoptable is not released


def test_a_node_that_is_ended_costs_its_run_no_more(home: Path) -> None:
    """The store has when it went: the run's bill ends there."""
    hold(own_store(home), age_s=20.0, machine="other")
    node(home)
    lost = cluster(home, f"{RUN}-c1", run_id=RUN, controller=1, since=NOW - 3 * HOUR_S)
    books = FakeBooks(listed=[lost])
    clock = FakeClock(NOW)
    end_orphans(find_leftovers(books, lambda: NOW), books, lambda _: None, clock)
    assert books.ended == [lost.name]
    (stored,) = read_nodes(own_store(home))
    assert stored.node.until == pytest.approx(NOW, abs=60)


def test_a_node_whose_controller_is_silent_for_a_moment_is_wanted(home: Path) -> None:
    """It may be starting again."""
    hold(own_store(home), age_s=600.0, machine="node")
    assert node(home).fate is ClusterFate.WANTED


def test_a_node_that_no_store_knows_is_an_orphan_if_the_run_is_there(home: Path) -> None:
    """A folder that is not on this machine proves nothing."""
    lost = cluster(home, f"{RUN}-c1", run_id=RUN, controller=1)
    assert orphans.judge(lost, NOW).fate is ClusterFate.UNSURE
    own_store(home).put(keys.RUN, b"{}")
    assert orphans.judge(lost, NOW).fate is ClusterFate.ORPHAN


def test_a_node_of_which_the_store_has_nonsense_is_left_alone(home: Path) -> None:
    """Nobody can say whether it is wanted."""
    own_store(home).put(keys.controller_node(1), b"{")
    lost = cluster(home, f"{RUN}-c1", run_id=RUN, controller=1)
    assert orphans.judge(lost, NOW).fate is ClusterFate.UNSURE
