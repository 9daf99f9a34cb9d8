"""`down` and `stop` end what was launched, whatever became of the journal and the controller."""

from __future__ import annotations

import json
import shutil
import sqlite3
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from spotguard.cli import main
from spotguard.control import without_journal
from spotguard.control.journal import fold, journal
from spotguard.control.journal.launches import Launches
from spotguard.control.journal.record import Kind
from spotguard.control.run_folder import RunFolder
from spotguard.control.supervisor.lease import Lease, read_holder
from spotguard.control.supervisor.policy import Policy
from spotguard.control.supervisor.supervisor import Supervisor
from spotguard.errors import EnvironmentFailure, LauncherFailure, LaunchesDamaged, UsageError
from spotguard.events import keys
from spotguard.shared.units import SystemClock
from spotguard.testing.clock import FakeClock
from spotguard.testing.job import FakeJob, JobFate
from spotguard.testing.launcher import FAKE_OFFER, FakeLauncher
from tests.control.run_folders import make_run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from spotguard.launch.base import Offer

RUN = "job-250101-000000-aaaa"


class Abandoned:
    """A run that trains on a fake cloud, without a controller."""

    def __init__(
        self, home: Path, *, offer: Offer = FAKE_OFFER, living: int = 1, **job: Any
    ) -> None:
        self.store = make_run(home, RUN)
        self.folder = RunFolder(home / "runs" / RUN)
        self.clock = FakeClock()
        self.job = FakeJob(store=self.store, total_steps=1000, **job)
        self.launcher = FakeLauncher(self.clock, self.job, offers=(offer,))
        self.told: list[str] = []
        with self.folder.journal() as opened:
            supervisor = self.supervisor(opened)
            for _ in range(20):
                supervisor.tick()
                self.clock.sleep(0.5)
        assert self.launcher.living() == [f"{RUN}-{number}" for number in range(1, living + 1)]

    def supervisor(self, opened: journal.Journal) -> Supervisor:
        """Return a new controller."""
        return Supervisor(
            journal=opened,
            launcher=self.launcher,
            store=self.store,
            clock=self.clock,
            policy=Policy(),
            live_path=self.folder.live_path,
            launches=Launches.of(self.folder.launches_path, fold.read_record(opened)),
        )

    def control(self) -> Any:
        """Control the run to its end; return its last record."""
        with self.folder.journal() as opened:
            return self.supervisor(opened).run()

    def down(self) -> None:
        """Be the command."""
        without_journal.down(self.folder, self.told.append, self.clock)

    def stop(self) -> int | None:
        """Be the command."""
        return without_journal.stop(self.folder, self.told.append, self.clock)


@pytest.fixture
def run(home: Path, monkeypatch: pytest.MonkeyPatch) -> Abandoned:
    """A run that trains; commands find its cloud."""
    return abandoned(home, monkeypatch)


def abandoned(home: Path, monkeypatch: pytest.MonkeyPatch, **job: Any) -> Abandoned:
    """Return such a run."""
    made = Abandoned(home, **job)
    monkeypatch.setattr(without_journal, "launcher_for", lambda spec, run_dir: made.launcher)
    monkeypatch.setattr(without_journal, "SystemClock", lambda: made.clock)
    return made


def _delete(path: Path) -> None:
    path.unlink()


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:1000])


def _replace(path: Path) -> None:
    path.write_text("this is no journal\n" * 100)


HARMS = (_delete, _truncate, _replace)


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Return a function that runs a command: exit code, stdout, stderr."""

    def call(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main.main(words)
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return call


@pytest.mark.parametrize("harm", HARMS)
def test_down_ends_what_was_launched_without_a_journal(
    run: Abandoned, said: Any, harm: Callable[[Path], None]
) -> None:
    """It says which, and how the story is had again; a second time there is nothing to do."""
    harm(run.folder.journal_path)
    code, out, err = said("down", RUN, "--yes")
    assert code == 0, err
    assert f"{RUN}-1 released" in out
    assert f"spotguard adopt {run.store.url.rstrip('/')}" in out
    assert run.launcher.living() == []
    held = read_holder(run.store)
    assert held is not None
    assert held[0].released, "another machine may adopt it at once"

    code, out, _ = said("down", RUN, "--yes")
    assert code == 0
    assert "nothing to do" in out
    assert said("stop", RUN)[0] == 0


@pytest.mark.parametrize("harm", HARMS)
def test_stop_lets_the_job_save_without_a_journal(
    run: Abandoned, said: Any, harm: Callable[[Path], None]
) -> None:
    """The cluster goes once the job has left, and not before."""
    harm(run.folder.journal_path)
    saves = len(run.job.saves)
    code, out, err = said("stop", RUN)
    assert code == 0, err
    assert f"{RUN}-1 released" in out
    assert json.loads(run.store.get(keys.stop(1)))["reason"] == "stopped"
    assert len(run.job.saves) > saves
    assert run.launcher.living() == []
    assert run.launcher.clusters[f"{RUN}-1"].down_at is not None


def test_stop_asks_who_trains_also_where_a_later_attempt_waits(
    home: Path, monkeypatch: pytest.MonkeyPatch, said: Any
) -> None:
    """The newest attempt is not the one that has something to save."""
    fates = {1: JobFate(how="grace", at_s=4.0, for_s=900.0)}
    offer = replace(FAKE_OFFER, infra="aws")
    run = abandoned(home, monkeypatch, offer=offer, living=2, fates=fates)
    run.folder.journal_path.unlink()
    code, _, err = said("stop", RUN)
    assert code == 0, err
    assert run.store.head(keys.stop(1)) is not None
    assert run.job.saves[-1][1] == run.job.trained[-1][1], "the last thing it did is saved"
    assert {attempt for attempt, _ in run.job.trained} == {1}
    assert run.launcher.living() == []


@pytest.mark.parametrize("problem", [ValueError, AssertionError, RuntimeError, KeyError])
@pytest.mark.parametrize("command", ["stop", "down"])
def test_a_fold_that_fails_keeps_nothing_alive(
    run: Abandoned,
    said: Any,
    monkeypatch: pytest.MonkeyPatch,
    problem: type[Exception],
    command: str,
) -> None:
    """Whatever it raises."""

    def fail(*_: object) -> None:
        raise problem("a bug")

    monkeypatch.setattr(fold, "apply", fail)
    code, out, err = said(command, RUN, *(["--yes"] if command == "down" else []))
    assert code == 0, err
    assert "spotguard adopt" in out
    assert run.launcher.living() == []


@pytest.fixture
def locked(run: Abandoned, monkeypatch: pytest.MonkeyPatch) -> Iterator[sqlite3.Connection]:
    """Somebody else has the journal in his hands."""
    monkeypatch.setattr(journal, "_LOCK_PATIENCE_S", 0.01)
    other = sqlite3.connect(run.folder.journal_path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    yield other
    other.close()


@pytest.mark.parametrize("command", ["stop", "down"])
def test_a_locked_journal_keeps_nothing_alive(
    run: Abandoned, said: Any, locked: sqlite3.Connection, command: str
) -> None:
    """Once it is free, the controller writes down what was wanted, and launches nothing."""
    code, out, err = said(command, RUN, *(["--yes"] if command == "down" else []))
    assert code == 0, err
    assert f"{RUN}-1 released" in out
    assert f"spotguard status {RUN}" in out
    assert run.launcher.living() == []

    locked.rollback()
    record = run.control()
    assert record.settled.state.value == "stopped"
    assert run.launcher.started == [f"{RUN}-1"]


def test_stop_releases_nothing_if_the_job_cannot_be_asked(
    run: Abandoned, said: Any, home: Path
) -> None:
    """It says so, and names what ends the nodes all the same."""
    run.folder.journal_path.unlink()
    shutil.rmtree(home / "store")
    (home / "store").write_text("a file is here now")
    code, _, err = said("stop", RUN)
    assert code == 3
    assert "nothing was released" in err
    assert f"spotguard down {RUN}" in err
    assert run.launcher.living() == [f"{RUN}-1"]

    assert said("down", RUN, "--yes")[0] == 0
    assert run.launcher.living() == []


def test_a_job_that_does_not_leave_is_released_in_the_end(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After as long as its controller would have waited."""
    run = abandoned(home, monkeypatch, fates={1: JobFate(how="stuck", at_s=5)})
    began_at = run.clock.monotonic()
    run.stop()
    assert run.launcher.living() == []
    assert run.clock.monotonic() - began_at >= Policy().stop_patience_s
    assert "did not save and leave" in run.told[0]


def test_nothing_is_done_beside_another_machine(run: Abandoned) -> None:
    """Its clusters may be named here, too."""
    run.folder.journal_path.unlink()
    Lease(run.store, SystemClock(), "another").take()
    for act in (run.down, run.stop):
        with pytest.raises(UsageError, match=r"in the hands of|Another machine"):
            act()
    assert run.launcher.living() == [f"{RUN}-1"]
    assert run.store.head(keys.stop(1)) is None


def test_what_cannot_be_ended_is_named_and_stays_written_down(run: Abandoned) -> None:
    """A second `down` tries again."""
    run.folder.journal_path.unlink()
    run.launcher.fail_down("no answer")
    with pytest.raises(LauncherFailure, match=rf"{RUN}-1: no answer"):
        run.down()
    run.down()
    assert run.told == [f"released {RUN}-1"]


def test_a_cluster_that_was_never_launched_is_no_problem(run: Abandoned) -> None:
    """A controller died between the name and the launch."""
    launches = Launches.read(run.folder.launches_path)
    assert launches is not None
    launches.remember(f"{RUN}-2", 2)
    run.folder.journal_path.unlink()
    run.down()
    assert run.told == [f"released {RUN}-1", f"released {RUN}-2"]


def test_launches_that_make_no_sense_end_nothing(run: Abandoned, said: Any) -> None:
    """Said in one sentence, with what else may help."""
    run.folder.journal_path.unlink()
    run.folder.launches_path.write_text("{}")
    with pytest.raises(LaunchesDamaged):
        without_journal.what_is_left(run.folder)
    code, _, err = said("down", RUN, "--yes")
    assert code == 3
    assert "spotguard doctor" in err
    assert run.launcher.living() == [f"{RUN}-1"]


def test_without_launches_the_journals_problem_is_told(run: Abandoned, said: Any) -> None:
    """A run of an older version that has had no controller since."""
    run.folder.launches_path.unlink()
    run.folder.journal_path.unlink()
    code, _, err = said("down", RUN, "--yes")
    assert code == 3
    assert "spotguard adopt" in err


@pytest.mark.slow
@pytest.mark.same_everywhere
def test_a_process_that_is_no_controller_is_not_ended(run: Abandoned) -> None:
    """Such as an `adopt`: the lock's holder is looked at before it is told to end."""
    with run.folder.control(patience_s=0.0) as held:
        assert held
        with pytest.raises(EnvironmentFailure, match="is no controller"):
            run.down()
    assert run.launcher.living() == [f"{RUN}-1"]
    assert Kind.USER_DOWN.value not in run.folder.launches_path.read_text()
