"""The controller's process: looks after all runs that are begun in one environment.

Each run has a thread of its own, which is its controller as if it were alone: what goes wrong in
one ends its control of that run, and of no other. The process ends with its last run.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from spotguard.control.controller.one_run import control
from spotguard.control.controller.rest import Bell, LetGo, Rest
from spotguard.control.controller.run_logs import logged_to
from spotguard.control.controller.start import new_process
from spotguard.control.run_folder import folder_of
from spotguard.errors import SpotguardError

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TextIO

    from spotguard.control.controller.roster import Order, Roster
    from spotguard.control.run_folder import RunFolder

log = logging.getLogger(__name__)

_PREDECESSOR_PATIENCE_S = 10.0
_LOOK_S = 0.1
_LIST_S = 1.0
"""A folder's time may miss what is written twice within some milliseconds."""
_LINGER_S = 1.0
"""Who handed a run over may still read what ended its control."""
_LEAVE_PATIENCE_S = 3.0
"""How long a thread may take to let go of its run: SkyPilot's calls cannot be broken off."""


def look_after_all(roster: Roster, *, settled: Callable[[RunFolder], None]) -> None:
    """Look after the runs of the roster until none is left; return at once if another one does.

    `settled` is called with each run that has come to rest. Blocks.
    """
    with roster.held(patience_s=_PREDECESSOR_PATIENCE_S) as alone:
        if alone:
            _Process(roster, settled).run()


@dataclass
class _Hand:
    """A run that is looked after."""

    order: Order
    rest: Rest
    thread: threading.Thread = field(init=False)
    leaves_since: float | None = None
    """When it was told to let go of the run."""


class _Process:
    def __init__(self, roster: Roster, settled: Callable[[RunFolder], None]) -> None:
        self._roster = roster
        self._settled = settled
        self._bell = Bell()
        self._hands: dict[str, _Hand] = {}

    def run(self) -> None:
        changed_at, listed_at, ended_at = -1, float("-inf"), float("-inf")
        while True:
            found, now = self._roster.changed_at(), time.monotonic()
            ended = [run for run, hand in self._hands.items() if not hand.thread.is_alive()]
            for run_id in ended:
                del self._hands[run_id]
                ended_at = now
            if ended or found != changed_at or now - listed_at >= _LIST_S:
                changed_at, listed_at = found, now
                self._look(now)
            if not self._hands and now - ended_at >= _LINGER_S and self._roster.leave():
                return
            time.sleep(_LOOK_S)

    def _look(self, now: float) -> None:
        """Obey the orders. Where they cannot be read, all stays as it is until the next look."""
        try:
            orders = self._roster.orders()
        except OSError as problem:
            log.warning("the orders in %s cannot be read: %s", self._roster.path, problem)
        else:
            self._obey(orders, now)

    def _obey(self, orders: dict[str, Order], now: float) -> None:
        for run_id, order in orders.items():
            if run_id not in self._hands:
                self._begin(run_id, order)
        for run_id, hand in self._hands.items():
            if run_id in orders:
                continue
            if hand.leaves_since is None:
                hand.leaves_since = now
                hand.rest.let_go()
            elif now - hand.leaves_since > _LEAVE_PATIENCE_S:
                log.warning("%s is not let go of: its thread hangs", run_id)
                _begin_anew(self._roster)

    def _begin(self, run_id: str, order: Order) -> None:
        try:
            folder = folder_of(run_id)
            rest = Rest(folder, self._bell)
        except SpotguardError as problem:  # its folder is gone
            self._roster.finish(run_id, order, problem.message)
            return
        hand = self._hands[run_id] = _Hand(order, rest)
        hand.thread = threading.Thread(
            target=self._look_after, args=(folder, hand), name=f"control {run_id}", daemon=True
        )
        try:
            hand.thread.start()
        except RuntimeError as problem:  # the machine has no thread left: the others go on
            del self._hands[run_id]
            self._roster.finish(run_id, order, f"no thread can be started for it: {problem}")

    def _look_after(self, folder: RunFolder, hand: _Hand) -> None:
        problem: str | None = "its controller's thread has ended"
        try:
            with logged_to(folder.log_path) as told:
                problem = _controlled(folder, hand.rest, told)
                if problem is None:
                    self._settled(folder)
        except OSError as failure:
            problem = f"{folder.log_path} cannot be written: {failure.strerror}"
        finally:
            self._roster.finish(folder.run_id, hand.order, problem)


def _controlled(folder: RunFolder, rest: Rest, told: TextIO) -> str | None:
    """Control the run until it is at rest or let go of; return what has ended that before."""
    try:
        control(folder, rest)
    except LetGo:
        log.info("let go of the run")
    except SpotguardError as problem:
        told.write(words := f"{problem.message} {problem.hint}".rstrip())
        told.write("\n")
        return words
    except SystemExit as problem:  # a library's
        log.warning("the controller of this run has left: exit code %s", problem.code)
        return f"it left with exit code {problem.code}"
    except Exception as problem:  # a thread's top: other runs must go on
        log.exception("the controller of this run has failed, others go on")
        return f"{type(problem).__name__}: {problem}"
    return None


def _begin_anew(roster: Roster) -> None:
    """Leave all runs as they are to a new process of the same environment; end this one.

    Return if none can be started: a process that hangs with one run still has the others.
    """
    try:
        if _has_orders(roster):
            new_process(roster)
    except OSError as problem:
        log.warning("no new process can be started: %s", problem)
        return
    os._exit(0)


def _has_orders(roster: Roster) -> bool:
    try:
        return bool(roster.orders())
    except OSError:  # a process too many ends by itself
        return True
