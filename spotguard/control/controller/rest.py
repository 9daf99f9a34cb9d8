"""Resting between two looks: the longer, the longer nothing happens, and never over news.

A look takes a millisecond, and a hundred runs looked at ten times a second would take a whole core
to find that nothing is new. So a run that is quiet is looked at less and less often. What is
written meanwhile ends the rest at once: a wish of the user's, an event of its job in a folder, a
node of this machine that ends. One thread of the process looks for all runs whether that is so.
"""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, TypeAlias

from spotguard.control.supervisor.supervisor import TICK_S

if TYPE_CHECKING:
    from collections.abc import Iterator

    from spotguard.control.journal.record import RunRecord
    from spotguard.control.run_folder import RunFolder
    from spotguard.shared.units import Clock

_QUIET_SHARE = 0.05
"""Of the time for which nothing has happened, so much is rested until the next look."""
_MOST_S = 2.5
"""A job gives a sign of life every five seconds: who rests longer takes it for silent."""
_MOST_UNHURRIED_S = 5.0
"""Where a look costs a request or two, and where all that matters ends the rest by itself."""
_MOST_WAITING_S = 10.0
"""While there are no nodes, there is nothing to see that does not end the rest."""
_NOTED_EVERY_S = 10.0
"""How often a controller leaves a sign that it looks."""
_PEEK_S = 0.1
_PEEKS_SHARE = 0.01
"""Of a core, for the looks at the files of all runs: with many runs they come less often."""


Signs: TypeAlias = "tuple[tuple[int, int, int] | None, ...]"


class LetGo(Exception):
    """The run is to be looked after by somebody else; raised in a rest, not an error."""


class Bell:
    """Wakes who waits for files to change. One thread, for all of them; thread-safe."""

    def __init__(self) -> None:
        self._waiting: dict[threading.Event, tuple[tuple[str, ...], Signs]] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def wait(
        self, rung: threading.Event, paths: tuple[str, ...], signs: Signs, seconds: float
    ) -> bool:
        """Block until a file differs from its `signs`, or `rung` is set; or for `seconds`.

        Returns whether it was set, here or by somebody else.
        """
        with self._lock:
            self._waiting[rung] = paths, signs
            if self._thread is None:
                thread = threading.Thread(target=self._watch, name="spotguard-bell", daemon=True)
                thread.start()  # which may fail: then the next one to wait tries it again
                self._thread = thread
        try:
            return rung.wait(seconds)
        finally:
            with self._lock:
                self._waiting.pop(rung, None)

    def _watch(self) -> None:
        while True:
            with self._lock:
                waiting = list(self._waiting.items())
            began_s = time.thread_time()  # on a busy machine a look takes longer, and no more
            for rung, (paths, signs) in waiting:
                if signs_of(paths) != signs:
                    rung.set()
            time.sleep(max(_PEEK_S, (time.thread_time() - began_s) / _PEEKS_SHARE))


def signs_of(paths: tuple[str, ...]) -> Signs:
    """Return what changes when one of the files, or the content of one of the folders, does."""
    return tuple(map(_sign, paths))


def _sign(path: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)  # noqa: PTH116 - a thousand times a second
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


class Rest:
    """The rests of one run. Only `let_go` may be called from another thread."""

    def __init__(self, folder: RunFolder, bell: Bell, clock: Clock | None = None) -> None:
        self._folder = folder
        self._noted_at = float("-inf")
        journal = str(folder.journal_path)
        self._journal = journal, f"{journal}-wal"
        self._clock = clock or folder.clock()
        self._bell = bell
        self._leaves = False
        self._rung = threading.Event()
        self._quiet_since = self._clock.monotonic()
        self._before: tuple[tuple[str, ...], Signs] = (), ()
        """What stood there when the last rest was over, and what has been looked at since began."""

    def let_go(self) -> None:
        """Have the next rest, or what is left of this one, raise `LetGo`."""
        self._leaves = True
        self._rung.set()

    def until_next(
        self, record: RunRecord, news: tuple[str, ...], *, acted: bool, unhurried: bool = False
    ) -> None:
        """Block until it is time for the next look.

        Args:
            record: what the journal says.
            news: the files and folders that change with what is to be seen next.
            acted: something was done in the last look.
            unhurried: the run may be looked at seldom: what the job writes has to be asked for
                from a bucket, or what becomes of its nodes is written into files, too.

        Raises:
            LetGo: somebody else is to look after the run.
        """
        if self._clock.monotonic() - self._noted_at >= _NOTED_EVERY_S:
            self._noted_at = self._clock.monotonic()
            self._folder.note_look()
        paths = (*self._journal, *news)
        signs = signs_of(paths)
        if acted:
            self._quiet_since = self._clock.monotonic()
        is_new = self._before != (paths, signs)  # since the look began: it may have missed it
        quiet_s = self._clock.monotonic() - self._quiet_since
        self._sleep(paths, signs, TICK_S if is_new else self._pause_s(record, quiet_s, unhurried))
        self._before = paths, signs_of(paths)

    def sleep(self, seconds: float) -> None:
        """Block for `seconds`, unless the user writes something; `LetGo` as in `until_next`."""
        self._sleep(self._journal, signs_of(self._journal), seconds)

    def _sleep(self, paths: tuple[str, ...], signs: Signs, seconds: float) -> None:
        self._rung = rung = threading.Event()  # what ends the rest before must not end this one
        if not self._leaves and self._bell.wait(rung, paths, signs, seconds):
            self._quiet_since = self._clock.monotonic()
        if self._leaves:
            raise LetGo

    def _pause_s(self, record: RunRecord, quiet_s: float, unhurried: bool) -> float:
        now = self._clock.now()
        due_s = [at - now for at in _due(record) if at is not None and at > now]
        most_s = _MOST_UNHURRIED_S if unhurried else _MOST_S
        if not record.may_cost and not record.queued:
            most_s = _MOST_WAITING_S
        return max(TICK_S, min([quiet_s * _QUIET_SHARE, most_s, *due_s]))


def _due(record: RunRecord) -> Iterator[float | None]:
    """Yield the instants at which there is something to do, whatever is heard until then."""
    yield from (record.retry_at, record.start_at, record.limits.deadline_at)
    if record.current is not None:
        allotment = record.current.allotment
        yield from (allotment.budget_stop_at, allotment.deadline_stop_at, allotment.down_at)
