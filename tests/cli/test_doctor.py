"""`doctor` finds what would stop a run, says the way out, and leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from spotguard.control import doctor
from spotguard.control.doctor import Status
from spotguard.control.doctor_store import try_opened, try_store
from spotguard.errors import StoreUnavailable, UsageError
from spotguard.events.env import PROGRESS
from spotguard.storage import open_store
from spotguard.testing import FaultyStore
from tests.cli import pictures

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from spotguard.storage.base import Content, ObjectInfo, ObjectStore
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
        return super().put(key, data, if_absent=absent, if_match=if_match)

    def get(self, key: str) -> bytes:
        """Return the bytes; flipped if that is the broken promise."""
        data = super().get(key)
        return data[::-1] if self.broken == "reads back different" else data

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
    assert trial.latency_s > 0
    assert trial.write_bytes_per_s
    assert trial.read_bytes_per_s
    assert list(open_store(tmp_path / "store").list()) == []


@pytest.mark.parametrize(
    "broken", ["create-if-absent", "reads back different", "listing", "still there"]
)
def test_each_broken_promise_of_a_store_is_named(tmp_path: Path, broken: str) -> None:
    """A store on which runs would not be safe is found before money is spent."""
    trial = try_opened(Altered(open_store(tmp_path), broken), speed_bytes=1_000_000)
    assert broken in trial.problem


def test_a_store_that_cannot_be_written_fails_the_check(tmp_path: Path) -> None:
    """The finding is the store's own sentence."""
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreUnavailable):
        try_store(str(tmp_path / "file" / "store"))
    (check,) = doctor.check_store(str(tmp_path / "file" / "store"))
    assert check.status is Status.FAILED
    assert "file" in check.detail


def test_an_unknown_kind_of_store_is_a_finding(tmp_path: Path) -> None:
    """A typo in the scheme does not end the examination."""
    with pytest.raises(UsageError):
        try_store("s4://bucket")
    assert doctor.check_store("s4://bucket")[0].status is Status.FAILED


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
