"""Handing a run to the controller's process, which is begun if there is none; and taking it back.

Killed at any point, this leaves a run with an order that some process obeys, or a run without a
controller, which the next command that looks at it hands over again.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING

from spotguard.control.controller.roster import Roster, take_back
from spotguard.control.journal.fold import newest_record
from spotguard.control.journal.record import Kind
from spotguard.errors import EnvironmentFailure

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from spotguard.control.journal.journal import Journal
    from spotguard.control.run_folder import RunFolder

_START_PATIENCE_S = 60.0
_POLL_S = 0.02
_LOG_TAIL_CHARS = 2000
_LET_GO_PATIENCE_S = 8.0
"""How long a living process may take to let go of a run, or to begin anew without it."""
_END_PATIENCE_S = 5.0
"""A controller dies of its SIGTERM at once, unless it is frozen."""

_children: list[subprocess.Popen[bytes]] = []
"""Controllers started by this process; kept so that they are reaped, not waited for."""


def start(folder: RunFolder) -> None:
    """Have a background process look after the run; return once it does.

    It is the one that looks after all runs of this home that were begun in this environment by
    this version of spotguard. If it lives it takes the run, else it is started, with a session of
    its own, so that it survives the terminal. Where another controller is alive, nothing changes.

    Raises:
        EnvironmentFailure: it did not start, or could not control the run; says what it printed.
    """
    give_up_at = time.monotonic() + _START_PATIENCE_S
    try:
        roster = Roster.of_this_environment()
        while not _hand_over(folder, roster, give_up_at):
            pass  # the process died with the order in its hand: another one is begun
    except OSError as problem:
        raise EnvironmentFailure(
            f"The controller of {folder.run_id} did not start: {problem}",
            hint="set SPOTGUARD_HOME to a folder that you can write",
        ) from problem


def _hand_over(folder: RunFolder, roster: Roster, give_up_at: float) -> bool:
    """Give the order and wait until it is obeyed; return False if the process has died."""
    run_id = folder.run_id
    with roster.handing_over():
        order = roster.give(run_id)
        if roster.pid() is None:
            _begin_process(folder, roster, give_up_at)
    while True:
        pid = roster.pid()
        if pid and folder.controller_pid() == pid:
            return True
        if not roster.stands(run_id, order):  # it settled at once, or another one is in control
            problem = roster.problem(run_id)
            if problem is not None:
                raise _did_not_start(folder, problem, folder.log_path)
            return True
        if time.monotonic() > give_up_at:
            raise _did_not_start(folder, "it takes too long", roster.log_path)
        if pid is None:
            return False
        time.sleep(_POLL_S)


def _begin_process(folder: RunFolder, roster: Roster, give_up_at: float) -> None:
    begin = roster.log_path.stat().st_size if roster.log_path.exists() else 0
    child = new_process(roster)
    while roster.pid() is None:
        if child.poll() is not None or time.monotonic() > give_up_at:
            if folder.run_id not in roster.orders():
                return  # it has done all that there was to do
            raise _did_not_start(folder, _printed(roster.log_path, begin), roster.log_path)
        time.sleep(_POLL_S)


def new_process(roster: Roster) -> subprocess.Popen[bytes]:
    """Begin the process of a roster; raises `OSError`. It ends by itself if another one lives."""
    with open(  # pathlib's open takes no opener, and only this user may read the log
        roster.log_path, "ab", opener=lambda path, flags: os.open(path, flags, 0o600)
    ) as output:
        child = subprocess.Popen(
            [sys.executable, "-m", "spotguard.control", roster.path.name],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd="/",
            start_new_session=True,
        )
    _children[:] = [child, *(old for old in _children if old.poll() is None)]
    return child


def _printed(path: Path, begin: int) -> str:
    try:
        with path.open("rb") as file:
            file.seek(begin)
            printed = file.read().decode(errors="replace").strip()
    except OSError as problem:
        return str(problem)
    last = printed[-_LOG_TAIL_CHARS:].splitlines()[-1:] or ["it printed nothing"]
    return last[0]


def _did_not_start(folder: RunFolder, said: str, log_path: Path) -> EnvironmentFailure:
    return EnvironmentFailure(
        f"The controller of {folder.run_id} did not start: {said}",
        hint=f"all that it printed is in {log_path}",
    )


def lacks_controller(folder: RunFolder, journal: Journal) -> bool:
    """Return whether the run is to go on, and nobody controls it."""
    # In this order: a controller leaves only after its run has settled.
    return newest_record(journal).settled is None and folder.controller_pid() is None


def tell_repair(folder: RunFolder, journal: Journal) -> None:
    """Write down that the controller was gone: once, however often one is tried to be started."""
    told = journal.newest(Kind.CONTROLLER_REPAIRED.value)
    begun = journal.newest(Kind.CONTROLLER_STARTED.value)
    if told is None or (begun is not None and begun.seq > told.seq):
        journal.append(Kind.CONTROLLER_REPAIRED.value, at=folder.clock().now())


# ---------------------------------------------------------------- taking back


@contextmanager
def control_alone(folder: RunFolder) -> Iterator[None]:
    """Hold the controller's lock inside the block, once a living controller has let go of the run.

    It keeps nothing in memory that matters, so it may be ended anywhere. One that does not let go
    is killed; its other runs are handed to a new process.

    Raises:
        EnvironmentFailure: something else than a controller holds the lock, or it does not end.
    """
    with ExitStack() as stack:
        take_back(folder.run_id)
        in_control = stack.enter_context(folder.control(patience_s=_LET_GO_PATIENCE_S))
        has_to_die = not in_control
        for number in (signal.SIGTERM, signal.SIGKILL):
            if not in_control:
                _signal_controller(folder, number)
                in_control = stack.enter_context(folder.control(patience_s=_END_PATIENCE_S))
        if not in_control:
            raise EnvironmentFailure(
                f"The controller of {folder.run_id} (process {folder.controller_pid()}) does not "
                "end.",
                hint="end that process, then repeat the command",
            )
        if has_to_die:
            _begin_again()
        yield


def _begin_again() -> None:
    """Hand the other runs of a process that had to die to a new one, if they are of this
    environment; a run of another one gets its controller when a command looks at it."""
    with suppress(OSError):  # then the next command that looks at one of them does it
        roster = Roster.of_this_environment()
        with roster.handing_over():
            if roster.orders() and roster.pid() is None:
                new_process(roster)


def _signal_controller(folder: RunFolder, number: signal.Signals) -> None:
    import psutil

    pid = folder.controller_pid()
    if not pid:  # it has just left, or not written its number yet
        return
    try:
        process = psutil.Process(pid)
        command = process.cmdline()
        if "spotguard.control" in command:
            process.send_signal(number)
            return
    except psutil.NoSuchProcess:
        return
    except psutil.Error:
        command = []
    raise EnvironmentFailure(
        f"Process {pid} holds run {folder.run_id} and is no controller that could be ended: "
        f"{' '.join(command)[:200] or 'it belongs to somebody else'}.",
        hint="wait for its end, then repeat the command",
    )
