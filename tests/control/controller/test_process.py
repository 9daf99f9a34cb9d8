from __future__ import annotations

import logging
import os
import subprocess
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from spotguard.control.controller import one_run, process, start
from spotguard.control.controller.roster import Roster
from spotguard.control.controller.run_logs import log_by_run, logged_to
from spotguard.control.run_folder import RunFolder
from spotguard.errors import EnvironmentFailure, JournalDamaged
from spotguard.testing.stores import SimulatedCrash
from tests.e2e.lab.lab_jobs import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from spotguard.control.controller.rest import Rest

RUNS = [f"job-260101-00000{number}-abcd" for number in range(3)]


class Controlled:
    """Stands in for the control of runs: each is held until it may settle, or is let go of."""

    def __init__(self) -> None:
        self.begun: Counter[str] = Counter()
        self.now: Counter[str] = Counter()
        self.may_settle = {run: threading.Event() for run in RUNS}
        self.fails: dict[str, Exception] = {}
        self.hangs: set[str] = set()

    def __call__(self, folder: RunFolder, rest: Rest) -> None:
        """Control a run."""
        with folder.control(patience_s=0.0) as in_control:
            assert in_control
            self.now[folder.run_id] += 1
            self.begun[folder.run_id] += 1
            try:
                if folder.run_id in self.fails:
                    raise self.fails[folder.run_id]
                while not self.may_settle[folder.run_id].wait(0.01):
                    if folder.run_id not in self.hangs:
                        rest.sleep(0.01)
            finally:
                self.now[folder.run_id] -= 1


class ThreadAsProcess:
    """Begins the controller's process as a thread of this one."""

    def __init__(self) -> None:
        self.begun: list[threading.Thread] = []

    def __call__(self, roster: Roster) -> ThreadAsProcess:
        """Stand in for `new_process`."""
        thread = threading.Thread(
            target=process.look_after_all, args=(roster,), kwargs={"settled": lambda folder: None}
        )
        self.begun.append(thread)
        thread.start()
        return self

    def poll(self) -> None:
        """Stand in for `Popen.poll`: it lives."""


@pytest.fixture
def begun(home: Path, monkeypatch: pytest.MonkeyPatch) -> ThreadAsProcess:
    """The processes that were begun."""
    for run in RUNS:
        (home / "runs" / run).mkdir(parents=True)
    made = ThreadAsProcess()
    monkeypatch.setattr(start, "new_process", made)
    monkeypatch.setattr(process, "_LOOK_S", 0.005)
    monkeypatch.setattr(process, "_LINGER_S", 0.05)
    return made


@pytest.fixture
def controlled(begun: ThreadAsProcess, monkeypatch: pytest.MonkeyPatch) -> Iterator[Controlled]:
    """What the processes control."""
    control = Controlled()
    monkeypatch.setattr(process, "control", control)
    yield control
    for event in control.may_settle.values():
        event.set()
    for thread in begun.begun:
        thread.join()


def folder(home: Path, run: str) -> RunFolder:
    """Return a run's folder."""
    return RunFolder(home / "runs" / run)


def test_one_process_looks_after_all_runs_and_ends_with_the_last(
    home: Path, begun: ThreadAsProcess, controlled: Controlled
) -> None:
    """Commands that race for it begin one; each returns once its run is controlled."""
    racing = [threading.Thread(target=start.start, args=(folder(home, run),)) for run in RUNS]
    for each in racing:
        each.start()
    for each in racing:
        each.join()
    assert len(begun.begun) == 1
    assert controlled.now == Counter(RUNS)
    start.start(folder(home, RUNS[0]))
    for event in controlled.may_settle.values():
        event.set()
    begun.begun[0].join()
    assert list((home / "controllers").glob("*/runs/*")) == []


@pytest.mark.parametrize(
    "problem", [JournalDamaged("it is torn"), RuntimeError("a bug"), SystemExit(3)], ids=repr
)
def test_a_run_that_fails_takes_no_other_one_with_it(
    home: Path, begun: ThreadAsProcess, controlled: Controlled, problem: Exception
) -> None:
    """Who asked for it hears why, its log has it, and it may be tried again."""
    start.start(folder(home, RUNS[0]))
    controlled.fails[RUNS[1]] = problem
    with pytest.raises(EnvironmentFailure, match=str(problem)):
        start.start(folder(home, RUNS[1]))
    assert controlled.now[RUNS[0]] == 1
    if isinstance(problem, JournalDamaged):
        assert str(problem) in folder(home, RUNS[1]).log_path.read_text()
    assert not folder(home, RUNS[0]).log_path.read_text()

    del controlled.fails[RUNS[1]]
    start.start(folder(home, RUNS[1]))
    assert controlled.now[RUNS[1]] == 1
    assert len(begun.begun) == 1


def test_a_command_believes_no_controller_that_may_still_find_its_journal_damaged(
    home: Path, begun: ThreadAsProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock alone says nothing: who looks between it and the journal waits, and hears why.

    The second time, the process that has failed before stands in the same lock file.
    """
    looked, over = threading.Event(), threading.Event()

    def damaged(held: RunFolder) -> Any:
        assert held.is_controlled()
        looked.clear()
        while not (looked.wait(0.01) or over.is_set()):
            pass
        raise JournalDamaged("it is torn")

    def saw_the_lock(roster: Roster, run_id: str, order: Any) -> bool:
        if folder(home, run_id).is_controlled():
            looked.set()
        return stands(roster, run_id, order)

    stands, leave = Roster.stands, Roster.leave
    monkeypatch.setattr(Roster, "stands", saw_the_lock)
    monkeypatch.setattr(Roster, "leave", lambda roster: over.is_set() and leave(roster))
    monkeypatch.setattr(RunFolder, "journal", damaged)
    try:
        for _ in range(2):
            with pytest.raises(EnvironmentFailure, match="it is torn"):
                start.start(folder(home, RUNS[0]))
    finally:
        over.set()
        for thread in begun.begun:
            thread.join()
    assert len(begun.begun) == 1


def test_who_controlled_a_run_is_not_taken_for_who_does(home: Path) -> None:
    """A lock that is held anew names nobody until its holder does."""
    held = RunFolder(home / "runs" / RUNS[0])
    held.path.mkdir(parents=True)
    with held.control(patience_s=0.0):
        assert held.controller_pid() == os.getpid()
    with held.control(patience_s=0.0, says_who=False):
        assert held.controller_pid() == 0
        held.say_who_controls()
        assert held.controller_pid() == os.getpid()
    assert held.lock_path.read_bytes() == b""
    assert held.controller_pid() is None


def test_a_run_that_is_resumed_while_its_control_ends_is_controlled_again(
    home: Path, begun: ThreadAsProcess, controlled: Controlled
) -> None:
    """The order that came last counts, whichever is seen first."""
    start.start(folder(home, RUNS[0]))
    roster = Roster.of_this_environment()
    roster.give(RUNS[0])
    controlled.may_settle[RUNS[0]].set()
    wait_until(lambda: controlled.begun[RUNS[0]] == 2, "it is controlled again")
    begun.begun[0].join()
    assert not roster.orders()


def test_a_run_is_let_go_of_for_who_wants_it_alone(home: Path, controlled: Controlled) -> None:
    """The process goes on with the others, and takes the run again when it is given back."""
    start.start(folder(home, RUNS[0]))
    start.start(folder(home, RUNS[1]))
    with start.control_alone(folder(home, RUNS[0])):
        assert controlled.now == Counter([RUNS[1]])
    start.start(folder(home, RUNS[0]))
    assert controlled.now == Counter(RUNS[:2])


def test_a_run_that_cannot_be_let_go_of_has_the_process_begin_anew(
    home: Path,
    begun: ThreadAsProcess,
    controlled: Controlled,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A call of SkyPilot's cannot be broken off: a successor goes on with the other runs."""
    left: list[dict[str, Any]] = []

    def begin_anew(roster: Roster) -> None:
        left.append(dict(roster.orders()))
        controlled.may_settle[RUNS[0]].set()

    monkeypatch.setattr(process, "_begin_anew", begin_anew)
    monkeypatch.setattr(process, "_LEAVE_PATIENCE_S", 0.0)
    monkeypatch.setattr(process, "_LIST_S", 0.0)
    controlled.hangs.add(RUNS[0])
    start.start(folder(home, RUNS[0]))
    start.start(folder(home, RUNS[1]))
    with start.control_alone(folder(home, RUNS[0])):
        assert set(left[0]) == {RUNS[1]}


def crash(at: str) -> Callable[..., Any]:
    """Return what dies in the place of a step."""

    def die(*_: object, **__: object) -> Any:
        raise SimulatedCrash(at)

    return die


@pytest.mark.parametrize("step", ["give", "pid", "new_process", "stands"])
def test_a_command_that_dies_while_it_hands_over_loses_nothing(
    home: Path,
    begun: ThreadAsProcess,
    controlled: Controlled,
    monkeypatch: pytest.MonkeyPatch,
    step: str,
) -> None:
    """Killed between any two steps: the next command has the run controlled, and once."""
    with monkeypatch.context() as patch:
        patch.setattr(start if step == "new_process" else Roster, step, crash(step))
        patch.setattr(RunFolder, "controller_pid", lambda _: None)
        if step == "stands":  # after its process has begun
            patch.setattr(Roster, "pid", lambda roster: 0 if begun.begun else None)
        with pytest.raises(SimulatedCrash):
            start.start(folder(home, RUNS[0]))
    start.start(folder(home, RUNS[0]))
    assert controlled.now == Counter([RUNS[0]])
    assert len(begun.begun) == 1


def test_a_process_that_dies_with_the_order_is_replaced(
    home: Path, begun: ThreadAsProcess, controlled: Controlled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it obeys: the command that waits for it begins another, which has the older ones."""
    Roster.of_this_environment().give(RUNS[1])  # of one that was killed long ago
    begin, tries = begun.__call__, iter([False, True])
    monkeypatch.setattr(
        start, "new_process", lambda roster: begin(roster) if next(tries) else begun
    )
    alive = Roster.pid
    asked = [None, 1, None, None]  # none yet; it has begun; it is dead; none yet
    monkeypatch.setattr(Roster, "pid", lambda roster: asked.pop(0) if asked else alive(roster))
    start.start(folder(home, RUNS[0]))
    wait_until(lambda: controlled.now == Counter(RUNS[:2]), "both are looked after")
    assert len(begun.begun) == 1


def test_a_process_that_cannot_begin_says_why(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is what it printed, not a timeout."""
    (home / "runs" / RUNS[0]).mkdir(parents=True)
    real = subprocess.Popen

    def broken(_: list[str], **options: Any) -> subprocess.Popen[bytes]:
        return real(["sh", "-c", "echo no such module >&2; exit 1"], **options)

    monkeypatch.setattr(subprocess, "Popen", broken)
    with pytest.raises(EnvironmentFailure, match="no such module"):
        start.start(folder(home, RUNS[0]))


def test_each_run_has_its_own_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also what its own threads say; what belongs to no run is the process's."""
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    log_by_run()

    def talk(name: str) -> None:
        with logged_to(tmp_path / name):
            logging.getLogger("spotguard").info("this is %s", name)

    try:
        threads = [threading.Thread(target=talk, args=(name,)) for name in ("one", "two")]
        for thread in threads:
            thread.start()
            thread.join()
        logging.getLogger("spotguard").info("nobody's")
    finally:
        root.handlers[:] = before
        root.setLevel(level)
    for name in ("one", "two"):
        assert (tmp_path / name).read_text().endswith(f"INFO spotguard: this is {name}\n")
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600
    assert "nobody's" in capsys.readouterr().err


def test_runs_of_one_bucket_share_its_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would take 12 MB; a folder's store costs nothing, and forgets nothing of a lost one."""
    opened: list[str] = []

    def open_store(url: str) -> object:
        opened.append(url)
        return object()

    monkeypatch.setattr(one_run, "open_store", open_store)
    monkeypatch.setattr(one_run, "_buckets", {})
    bucket, folder = "s3://team/runs", "file:///store"
    assert one_run._opened(bucket) is one_run._opened(bucket)
    assert one_run._opened(folder) is not one_run._opened(folder)
    assert opened == [bucket, folder, folder]


def test_a_machine_without_threads_costs_one_run(
    home: Path,
    begun: ThreadAsProcess,
    controlled: Controlled,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The run that came last is told; those before it go on in the same process."""
    start.start(folder(home, RUNS[0]))
    real = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == f"control {RUNS[1]}":
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(EnvironmentFailure, match="can't start new thread"):
        start.start(folder(home, RUNS[1]))
    assert controlled.now[RUNS[0]] == 1
    assert len(begun.begun) == 1


def test_orders_that_cannot_be_read_let_go_of_no_run(
    home: Path,
    begun: ThreadAsProcess,
    controlled: Controlled,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A disk that stalls is not a user who takes all runs back."""
    start.start(folder(home, RUNS[0]))
    looks = Counter[str]()

    def stalls(roster: Roster) -> dict[str, Any]:
        looks["orders"] += 1
        raise OSError("stale")

    with monkeypatch.context() as patch:
        patch.setattr(process, "_LIST_S", 0.0)
        patch.setattr(Roster, "orders", stalls)
        wait_until(lambda: looks["orders"] > 3, "it looks again", every_s=0.01)
        assert controlled.now[RUNS[0]] == 1
    assert controlled.begun[RUNS[0]] == 1
