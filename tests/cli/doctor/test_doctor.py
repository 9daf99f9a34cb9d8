"""`doctor` finds what would stop a run, says the way out, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from spotguard.control.doctor import checks as doctor
from spotguard.control.doctor import store as doctor_store
from spotguard.control.doctor.checks import Status
from spotguard.control.doctor.store import try_opened, try_store
from spotguard.control.doctor.store_trial import StoreTrial
from spotguard.errors import StoreError, StoreUnavailable, UsageError
from spotguard.events.env import PROGRESS
from spotguard.storage import open_store
from spotguard.storage.remote.store import RemoteStore
from spotguard.testing import FakeClock, FaultyStore, MemoryStore
from spotguard.testing.bucket import MemoryBucket
from tests.cli import pictures
from tests.storage.harness.servers import S3_SECRET, CannotRun, moto_server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from spotguard.storage.base import Content, ObjectInfo, ObjectStore, Target
    from tests.cli.conftest import Cli
    from tests.cli.fake_control import FakeControl


class Altered(FaultyStore):
    """A store that breaks one promise."""

    def __init__(self, inner: ObjectStore, broken: str) -> None:
        super().__init__(inner)
        self.broken = broken

    def put(
        self,
        key: str,
        data: Content,
        *,
        if_absent: bool = False,
        if_match: str | None = None,
    ) -> str:
        """Store; forget the condition if that is the broken promise."""
        absent = if_absent and self.broken != "create-if-absent"
        match = None if self.broken == "if-match" else if_match
        return super().put(key, data, if_absent=absent, if_match=match)

    def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        """Return the bytes; flipped if that is the broken promise."""
        data = super().get(key, max_bytes=max_bytes)
        return data[::-1] if self.broken == "reads back different" else data

    def get_into(self, key: str, offset: int, into: Target) -> None:
        """Fill `into`; with a flipped byte at the end if that is the broken promise."""
        super().get_into(key, offset, into)
        if self.broken == "in parts reads back different" and isinstance(into, memoryview):
            into[-1] ^= 1

    def list(self, prefix: str = "", *, start_after: str = "") -> Iterator[ObjectInfo]:
        """List; with a gap if that is the broken promise."""
        found = super().list(prefix, start_after=start_after)
        if self.broken == "listing":
            next(found)
        return found

    def delete(self, key: str) -> None:
        """Delete, or not."""
        if self.broken != "still there":
            super().delete(key)


def test_a_good_store_passes_and_is_left_as_it_was(tmp_path: Path) -> None:
    """Speed is measured, and no object stays behind."""
    trial = try_store(str(tmp_path / "store"), speed_bytes=2_000_000)
    assert trial.problem == ""
    assert trial.latency_s
    assert trial.write_bytes_per_s
    assert trial.read_bytes_per_s
    assert list(open_store(tmp_path / "store").list()) == []


@pytest.mark.parametrize(
    "broken",
    [
        "create-if-absent",
        "if-match",
        "reads back different",
        "in parts reads back different",
        "listing",
        "still there",
    ],
)
def test_each_broken_promise_of_a_store_is_named(tmp_path: Path, broken: str) -> None:
    """A store on which runs would not be safe is found before money is spent."""
    trial = try_opened(Altered(open_store(tmp_path), broken), speed_bytes=1_000_000)
    assert broken in trial.problem
    assert list(trial.rights.values()).count(False) == 1


def test_a_store_that_cannot_be_written_fails_the_check(tmp_path: Path) -> None:
    """The finding is the store's own sentence."""
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreUnavailable):
        try_store(str(tmp_path / "file" / "store"))
    ((check,), trial) = doctor.check_store(str(tmp_path / "file" / "store"))
    assert trial is None
    assert check.status is Status.FAILED
    assert "file" in check.detail


def test_an_unknown_kind_of_store_is_a_finding(tmp_path: Path) -> None:
    """A typo in the scheme does not end the examination."""
    with pytest.raises(UsageError):
        try_store("s4://bucket")
    ((check,), _) = doctor.check_store("s4://bucket")
    assert check.status is Status.FAILED


def test_what_the_doctor_wrote_is_gone_also_when_it_fails_half_way(tmp_path: Path) -> None:
    """Wherever the store breaks down, no object of the trial stays."""
    for nth in range(1, 10):
        inner = MemoryStore()
        store = FaultyStore(inner).fail("put", nth=nth)
        with contextlib.suppress(StoreUnavailable):
            try_opened(store, speed_bytes=1_000_000)
        assert store.calls["put"] >= nth
        assert list(inner.list()) == []


@pytest.mark.parametrize(
    ("operation", "right"),
    [("put", "write"), ("get", "read"), ("list", "list"), ("delete", "delete")],
)
def test_a_missing_right_is_named_and_the_others_are_tried(operation: str, right: str) -> None:
    """One look tells all that the policy lacks, each with the store's own way out."""
    refused = StoreError(f"may not {operation}", hint=f"allow {operation}")
    store = FaultyStore(MemoryStore()).fail(operation, times=None, error=refused)
    trial = try_opened(store, speed_bytes=1_000_000)
    assert [name for name, works in trial.rights.items() if not works] == [right]
    assert {"write", "read", "list", "delete"} <= set(trial.rights)
    assert [(found.detail, found.hint) for found in trial.findings] == [
        (f"may not {operation}", f"allow {operation}")
    ]


def test_one_reason_for_everything_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a bucket no right is there; six lines of the same would hide it."""
    gone = StoreError("there is no bucket b", hint="create it")
    store = FaultyStore(MemoryStore()).fail("*", times=None, error=gone)
    monkeypatch.setattr(doctor_store, "open_store", lambda url: store)
    checks, trial = doctor.check_store("memory")
    assert trial is not None
    assert [(check.status, check.hint) for check in checks] == [(Status.FAILED, "create it")]
    assert "write, list, read, delete: there is no bucket b" in checks[0].detail


def test_a_line_too_slow_for_parts_is_a_finding_not_an_end() -> None:
    """What was found out before is told all the same."""
    store = FaultyStore(MemoryStore()).fail("put", key_contains="large", times=None)
    trial = try_opened(store)
    assert trial.rights["write in parts"] is False
    assert trial.rights["delete"] is True
    assert trial.latency_s is not None
    assert trial.saves == []


def test_a_full_store_has_no_speed_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little room is no reason to refuse the store."""
    store = FaultyStore(MemoryStore()).full(key_contains="large")
    monkeypatch.setattr(doctor_store, "open_store", lambda url: store)
    checks, _ = doctor.check_store("memory")
    assert all(check.status is not Status.FAILED for check in checks)
    assert any("no room to try 16.0 MB" in check.hint for check in checks)


def test_a_server_that_ignores_conditions_fails_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No run can be safe there; all else about it is told, and nothing stays behind."""
    bucket = MemoryBucket(heeds_conditions=None, ignores_conditions=True)
    monkeypatch.setattr(doctor_store, "open_store", lambda url: RemoteStore(bucket))
    monkeypatch.setattr(doctor_store, "SPEED_BYTES", 1_000_000)
    checks, trial = doctor.check_store("memory")
    assert trial is not None
    assert [right for right, may in trial.rights.items() if not may] == ["conditional write"]
    assert not bucket.objects
    (failed,) = [check for check in checks if check.status is Status.FAILED]
    assert "two nodes could both believe that they had won" in failed.detail
    assert "--store /shared/runs" in failed.hint


@pytest.mark.parametrize(
    ("ahead_s", "skew_s", "status"),
    [(0.0, 0.0, Status.OK), (3.0, 2.0, Status.OK), (60.0, 59.0, Status.NOTED)],
)
def test_a_skewed_clock_is_measured_against_the_stores(
    ahead_s: float, skew_s: float, status: Status, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store stamps to the second, so as much is uncertain; beyond five it is noted."""
    ours = FakeClock(1_700_000_000.0)
    for sign, side in ((1, "behind the store's"), (-1, "ahead of the store's")):
        store = RemoteStore(MemoryBucket(clock=FakeClock(1_700_000_000.0 + sign * ahead_s)))
        trial = try_opened(store, speed_bytes=1_000_000, clock=ours)
        assert trial.clock_skew_s is not None
        assert abs(trial.clock_skew_s - sign * skew_s) <= 1.0
        found = doctor._store_clock(trial.clock_skew_s)
        assert found.status is status
        assert (side in found.detail) is (status is Status.NOTED)


def test_saves_are_compared_with_each_clouds_notice() -> None:
    """At 100 MB/s 5 GB fit AWS's notice and nobody else's."""
    trial = StoreTrial(url="x", write_bytes_per_s=100e6)
    fits = {save.size_bytes / 1e9: save.fits for save in trial.saves}
    assert fits[1] == {"AWS": True, "GCP": True, "Azure": True}
    assert fits[5] == {"AWS": True, "GCP": False, "Azure": False}
    assert fits[80] == {"AWS": False, "GCP": False, "Azure": False}
    assert [save.seconds for save in trial.saves] == [13.0, 61.0, 241.0, 961.0]


@pytest.mark.slow
@pytest.mark.usefixtures("quick_doctor")
def test_a_bucket_is_tried_login_and_all_and_no_secret_is_told(
    cli: Cli, control: FakeControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S3: who we are, rights, speed, saves; no object and no unfinished upload stays."""
    boto3 = pytest.importorskip("boto3")
    try:
        with moto_server() as server:
            for name, value in server.env.items():
                monkeypatch.setenv(name, value)
            s3 = boto3.client("s3")
            s3.create_bucket(Bucket="bucket")
            monkeypatch.setattr(doctor_store, "SPEED_BYTES", 20_000_000)
            said = cli("doctor", "s3://bucket/runs", "--json")
            table = cli("doctor", "s3://bucket/runs")
            missing = cli("doctor", "s3://no-such-bucket", "--json")
            assert s3.list_objects_v2(Bucket="bucket")["KeyCount"] == 0
            assert "Uploads" not in s3.list_multipart_uploads(Bucket="bucket")
    except CannotRun as why:
        pytest.skip(str(why))
    body = json.loads(said.out)
    logins = [check["detail"] for check in body["checks"] if check["name"] == "store login"]
    assert (said.code, logins) == (0, ["AWS_ACCESS_KEY_ID"])
    assert set(body["store"]["rights"].values()) == {True}
    assert len(body["store"]["emergency_saves"]) == 4
    assert "80.0 GB" in table.out
    assert max(map(len, table.out.splitlines())) <= 80
    assert missing.code == 3
    told = [check["detail"] for check in json.loads(missing.out)["checks"]]
    assert sum("there is no bucket no-such-bucket" in detail for detail in told) == 1
    assert S3_SECRET not in said.out + said.err + table.out + table.err + missing.out


@pytest.mark.slow
def test_the_doctor_tells_what_it_does(cli: Cli, tmp_path: Path, control: FakeControl) -> None:
    """Once a second has passed, each step is a line on stderr, out of the way of the JSON."""
    said = cli("doctor", str(tmp_path / "store"), "--json")
    assert "trying file://" in said.err
    assert json.loads(said.out)["ok"] is True


def test_a_torch_that_does_not_import_fails_with_its_reason() -> None:
    """The last line of the error says why; a crash does not take the doctor with it."""
    check = doctor.check_torch("raise ImportError('libtorch.so: no such file')")
    assert check.status is Status.FAILED
    assert "libtorch.so: no such file" in check.detail
    assert doctor.check_torch("import os; os.abort()").status is Status.FAILED
    assert "2.6.0, no GPU" in doctor.check_torch("print('2.6.0', 0)").detail


def test_a_clock_in_the_past_fails_and_a_skewed_one_is_noted() -> None:
    """Budgets and deadlines are instants: a wrong clock breaks them all."""
    assert doctor.check_clock(now=lambda: 86_400.0).status is Status.FAILED
    skewed = doctor.check_clock(now=lambda: pictures.NOW, file_clock=lambda: pictures.NOW + 9)
    assert skewed.status is Status.NOTED
    assert doctor.check_clock().status is Status.OK


def test_a_full_temporary_folder_is_a_finding() -> None:
    """A machine without room is one that people ask the doctor about."""

    def full() -> float:
        raise OSError(errno.ENOSPC, "No space left on device")

    found = doctor.check_clock(now=lambda: pictures.NOW, file_clock=full)
    assert (found.name, found.status) == ("temporary folder", Status.FAILED)
    assert "No space left on device" in found.detail
    assert "TMPDIR" in found.hint


@pytest.mark.parametrize(
    ("free", "status"), [(1e8, Status.FAILED), (1e9, Status.NOTED), (1e11, Status.OK)]
)
def test_a_full_disk_is_found_before_a_save_finds_it(
    tmp_path: Path, free: float, status: Status
) -> None:
    """Too little fails, little is noted."""
    assert doctor.check_disk(tmp_path, int(free)).status is status


def test_a_home_that_cannot_be_written_names_the_way_out(tmp_path: Path) -> None:
    """It is required."""
    (tmp_path / "file").write_text("in the way")
    check = doctor.check_home(tmp_path / "file" / "home")
    assert check.status is Status.FAILED
    assert "SPOTGUARD_HOME" in check.hint


def test_a_missing_extra_is_noted_with_its_command() -> None:
    """None is required for local runs."""
    checks = list(doctor.check_extras())
    assert len(checks) == 4
    assert all(check.status is not Status.FAILED for check in checks)
    for check in checks:
        assert check.status is Status.OK or check.hint.startswith("pip install 'spotguard[")


def test_a_run_without_a_controller_is_found(control: FakeControl) -> None:
    """It is noted with the command that repairs it; the doctor itself changes nothing."""
    control.views, control.dead = [pictures.run(controller_alive=False)], True
    (check,) = [c for c in doctor.check_runs() if c.name == "run"]
    assert pictures.RUN in check.detail
    assert check.hint.endswith(f"spotguard status {pictures.RUN}")
    assert control.dead


@pytest.mark.parametrize(("cluster_of", "found"), [(pictures.RUN, True), ("another-run", False)])
def test_a_process_that_outlived_its_cluster_is_found(
    control: FakeControl, home: Path, cluster_of: str, found: bool
) -> None:
    """It is told with its pid; what belongs to others is none of our business."""
    node = home / "runs" / cluster_of / "local" / "clusters" / "c1" / "node-0"
    node.mkdir(parents=True)
    with subprocess.Popen(
        [sys.executable, "-c", "input()"],
        stdin=subprocess.PIPE,
        env={**os.environ, PROGRESS: str(node / "progress")},
    ) as stray:
        try:
            details = [check.detail for check in doctor.check_runs()]
        finally:
            stray.kill()
    assert any(said.startswith(f"{stray.pid} outlived") for said in details) is found


def test_a_machine_in_order_says_so(control: FakeControl) -> None:
    """No finding is a finding as well."""
    (check,) = doctor.check_runs()
    assert check.status is Status.OK


@pytest.mark.usefixtures("quick_doctor")
def test_doctor_prints_a_mark_for_each_finding_and_exits_with_3_when_needed(
    cli: Cli, control: FakeControl, tmp_path: Path
) -> None:
    """Each has a mark: a required thing that fails decides the exit code."""
    good = cli("doctor", str(tmp_path / "store"))
    assert good.code == 0
    assert "✓ python" in good.out
    assert "all that is required works" in good.out
    (tmp_path / "file").write_text("in the way")
    bad = cli("doctor", str(tmp_path / "file" / "store"))
    assert bad.code == 3
    assert "✗ store" in bad.out
    assert max(map(len, bad.out.splitlines())) <= 80


def test_a_login_in_a_url_is_not_told() -> None:
    """It is refused with the way out, and what was given is not repeated."""
    told: list[str] = []
    (check,), _ = doctor.check_store("s3://KEYID:hunter2@bucket/x", told.append)
    assert check.status is Status.FAILED
    assert "hunter2" not in f"{check}{told}"
    assert "holds a login" in check.detail
