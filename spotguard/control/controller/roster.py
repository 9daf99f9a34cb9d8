"""Which runs a controller process looks after: a folder that says so, whoever lives or dies.

controllers/key                what keys the processes' names
controllers/handing-over       held (flock) while a run is handed over, or a process leaves
controllers/NAME/lock          held by the process for as long as it lives; its id is in it
controllers/NAME/log           what the process printed; each run has its own controller.log
controllers/NAME/runs/RUN_ID   an order: look after this run. It goes once the run is at rest
controllers/NAME/failed/RUN_ID why control of a run has ended, until the next order

An order is what counts: who hands a run over writes one, a process that finds one it does not know
begins to look after that run, and one whose order has gone lets go of it. So whoever is killed in
between, the next to come finds what is to be done.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spotguard.control.controller.environment import process_name
from spotguard.control.run_folder import lock_held, lock_holder
from spotguard.events import keys
from spotguard.spec.home_folder import spotguard_home

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

_GONE = (FileNotFoundError, NotADirectoryError)
"""Any other error of the file system says nothing of what is there: it may be over in a second."""
Order = tuple[int, int]
"""What tells an order from a later one for the same run: the file's inode and its time."""


@dataclass(frozen=True)
class Roster:
    """The orders of one process. Any process of this user may read and write them."""

    path: Path

    @classmethod
    def of_this_environment(cls) -> Roster:
        """Return the roster for what is begun by this process; `OSError` as for `process_name`."""
        home = spotguard_home()
        return cls(home / "controllers" / process_name(home))

    @property
    def log_path(self) -> Path:
        """What the process printed."""
        return self.path / "log"

    def pid(self) -> int | None:
        """Return the id of the living process, 0 if it has not said; None if there is none."""
        return lock_holder(self.path / "lock")

    def held(self, *, patience_s: float) -> AbstractContextManager[bool]:
        """Be the process inside the block; yields False if another one is."""
        self._runs.mkdir(parents=True, exist_ok=True, mode=0o700)
        return lock_held(self.path / "lock", patience_s=patience_s)

    @contextmanager
    def handing_over(self) -> Iterator[None]:
        """Let no process leave inside the block, and nobody else hand over; blocks until free."""
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with self._handing_over(fcntl.LOCK_EX):
            yield

    def give(self, run_id: str) -> Order:
        """Order that the process look after a run, also if it does so already."""
        self._runs.mkdir(parents=True, exist_ok=True, mode=0o700)
        (self.path / "failed" / run_id).unlink(missing_ok=True)
        fresh = self.path / f".{run_id}.{os.getpid()}.{secrets.token_hex(4)}"
        fresh.touch(0o600)
        fresh.replace(self._runs / run_id)
        return self._order(run_id) or (0, 0)

    def stands(self, run_id: str, order: Order) -> bool:
        """Return whether an order is still to be obeyed, and none came after it."""
        return self._order(run_id) == order

    def orders(self) -> dict[str, Order]:
        """Return the runs to look after; none where the folder is gone, with a moved home.

        Raises:
            OSError: nobody can tell it now. What was ordered before still counts.
        """
        try:
            names = os.listdir(self._runs)  # noqa: PTH208 - the names alone
        except _GONE:
            return {}
        found = {name: self._order(name) for name in names if keys.RUN_ID_PATTERN.fullmatch(name)}
        return {name: order for name, order in found.items() if order is not None}

    def changed_at(self) -> int:
        """Return what changes with the orders, in most cases; 0 where their folder is gone."""
        with contextlib.suppress(OSError):
            return self._runs.stat().st_mtime_ns
        return 0

    def finish(self, run_id: str, order: Order, problem: str | None) -> None:
        """Take an order back that was obeyed, unless a later one came; `problem` ended it."""
        with contextlib.suppress(OSError), self.handing_over():
            if self.stands(run_id, order):
                if problem is not None:
                    self._note(run_id, problem)
                (self._runs / run_id).unlink(missing_ok=True)

    def _note(self, run_id: str, problem: str) -> None:
        """Write down what ended the control of a run; a full disk must not keep the order alive."""
        with contextlib.suppress(OSError):
            failed = self.path / "failed"
            failed.mkdir(exist_ok=True, mode=0o700)
            (failed / run_id).write_text(problem, "utf-8")

    def problem(self, run_id: str) -> str | None:
        """Return what ended the control of a run that was ordered last; None if nothing did."""
        with contextlib.suppress(OSError):
            return (self.path / "failed" / run_id).read_text("utf-8")
        return None

    def leave(self) -> bool:
        """Remove the roster if nothing is ordered; False if the process has to stay.

        It must not hold `handing_over`, and end at once if it may: what is ordered from here on
        finds no process, or a new one.
        """
        try:
            with self._handing_over(fcntl.LOCK_EX | fcntl.LOCK_NB):
                if self.orders():
                    return False
                shutil.rmtree(self.path, ignore_errors=True)
                return True
        except _GONE:  # with its home
            return True
        except OSError:  # somebody hands over, or nobody can tell it now
            return False

    @property
    def _runs(self) -> Path:
        return self.path / "runs"

    def _order(self, run_id: str) -> Order | None:
        try:
            found = os.stat(f"{self._runs}/{run_id}")  # noqa: PTH116 - for each run, again and again
        except _GONE:
            return None
        return found.st_ino, found.st_mtime_ns

    @contextmanager
    def _handing_over(self, how: int) -> Iterator[None]:
        path = self.path.parent / "handing-over"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, how)
            yield
        finally:
            os.close(descriptor)


def take_back(run_id: str) -> None:
    """Take back each order to look after a run: the process that has it lets go of it."""
    for roster in (spotguard_home() / "controllers").glob(f"*/runs/{run_id}"):
        roster.unlink(missing_ok=True)
