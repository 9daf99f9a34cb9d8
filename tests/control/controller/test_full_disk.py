"""A disk that is full for a while, or a journal that another program locks."""

from __future__ import annotations

import errno
import sqlite3
import time
from typing import TYPE_CHECKING, Any

import pytest

from spotguard.control import api
from spotguard.control.controller import one_run
from spotguard.control.controller.rest import Bell, Rest
from spotguard.control.journal import journal as journal_module
from spotguard.control.journal import launches as launches_module
from spotguard.control.journal.record import Kind
from spotguard.control.run_folder import folder_of
from spotguard.errors import EnvironmentFailure, JournalDamaged, LauncherFailure, StoreUnavailable
from spotguard.events.states import RunState
from tests.control.run_folders import make_run

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from spotguard.control.run_folder import RunFolder


RUN = "job-260101-000000-abcd"


class Waits(Rest):
    """Rests at once; something else happens while it waits for a file of the run's."""

    def __init__(self, folder: RunFolder, then: Callable[[], object]) -> None:
        super().__init__(folder, Bell())
        self.waited: list[float] = []
        self.still_controlled: list[bool] = []
        self._folder, self._then = folder, then

    def sleep(self, seconds: float) -> None:
        """Note it, and let it happen."""
        self.waited.append(seconds)
        self.still_controlled.append(self._folder.is_controlled())
        self._then()


def stopped_run(home: Path) -> RunFolder:
    """Return a run that its user has stopped, and whose controller has not seen it."""
    make_run(home, RUN)
    folder = folder_of(RUN)
    with folder.journal() as journal:
        journal.append(Kind.USER_STOP.value, at=time.time())
    return folder


@pytest.fixture
def lock(home: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[RunFolder], sqlite3.Connection]:
    """Return what locks a run's journal, as another program may for longer than one waits."""
    monkeypatch.setattr(journal_module, "_LOCK_PATIENCE_S", 0.0)

    def locked(folder: RunFolder) -> sqlite3.Connection:
        other = sqlite3.connect(folder.journal_path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        return other

    return locked


@pytest.mark.parametrize("at", ["launcher_for", "_shared_store"])
def test_a_controller_waits_until_its_journal_can_be_written(
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    lock: Callable[[RunFolder], sqlite3.Connection],
    caplog: pytest.LogCaptureFixture,
    at: str,
) -> None:
    """It stays in control meanwhile, and says in its log why nothing happens."""
    folder = stopped_run(home)
    other: list[sqlite3.Connection] = []
    real = getattr(one_run, at)

    def beside(*args: Any, **more: Any) -> Any:
        if not other:
            other.append(lock(folder))
            if at == "_shared_store":  # which is to be written down
                raise StoreUnavailable("no route to the bucket")
        return real(*args, **more)

    monkeypatch.setattr(one_run, at, beside)
    rest = Waits(folder, lambda: other[0].close())
    one_run.control(folder, rest)
    assert api.view(folder.run_id).state is RunState.STOPPED
    assert rest.waited == [one_run._DISK_RETRY_S]
    assert rest.still_controlled == [True]
    assert "database is locked" in caplog.text


def test_a_controller_waits_until_its_launches_can_be_written(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Which it names on the disk before it launches them."""
    folder, room = stopped_run(home), list[bool]()
    real = launches_module._replace

    def full(path: Path, body: bytes) -> None:
        if not room:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, body)

    monkeypatch.setattr(launches_module, "_replace", full)
    rest = Waits(folder, lambda: room.append(True))
    one_run.control(folder, rest)
    assert api.view(folder.run_id).state is RunState.STOPPED
    assert rest.still_controlled == [True]
    assert "No space left on device" in caplog.text


def test_a_journal_that_is_lost_meanwhile_is_not_waited_for(
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    lock: Callable[[RunFolder], sqlite3.Connection],
) -> None:
    """Who went on would act beside whoever has the one in its place."""
    folder = stopped_run(home)
    other: list[sqlite3.Connection] = []
    real = one_run.launcher_for

    def beside(*args: Any, **more: Any) -> Any:
        other.append(lock(folder))
        return real(*args, **more)

    def lose() -> None:
        other[0].close()
        folder.journal_path.rename(folder.path / "elsewhere.db")

    monkeypatch.setattr(one_run, "launcher_for", beside)
    with pytest.raises(JournalDamaged, match="the file is missing"):
        one_run.control(folder, Waits(folder, lose))


@pytest.mark.parametrize("problem", [EnvironmentFailure("no such place"), LauncherFailure("no")])
def test_what_no_wait_mends_ends_the_control_at_once(
    home: Path, monkeypatch: pytest.MonkeyPatch, problem: EnvironmentFailure
) -> None:
    """Its log has why, and the next command that looks says it."""

    def fails(*_: object, **__: object) -> None:
        raise problem

    folder = stopped_run(home)
    monkeypatch.setattr(one_run, "launcher_for", fails)
    rest = Waits(folder, lambda: None)
    with pytest.raises(EnvironmentFailure) as caught:
        one_run.control(folder, rest)
    assert caught.value is problem
    assert rest.waited == []
