"""Finds and signals the processes of a node, whatever session or group they moved into.

Each rank has a session of its own, and helpers call setsid. What they keep is the
environment that they were started with, or a parent that has it; so that is how they are found.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL, Signals
from typing import TYPE_CHECKING

import psutil

from spotguard.events import env

if TYPE_CHECKING:
    from collections.abc import Iterator

_RESCAN_S = 0.02
_KILL_TIMEOUT_S = 10.0


@dataclass(frozen=True, kw_only=True)
class NodeProcess:
    """A living process that was started on a local node."""

    process: psutil.Process
    folder: Path
    """The node's own folder."""

    @property
    def pid(self) -> int:
        """Its process id."""
        return int(self.process.pid)


def find_processes(below: Path) -> Iterator[NodeProcess]:
    """Yield the living processes of the nodes whose folder is `below` or inside it."""
    living: list[psutil.Process] = []
    parents: dict[int, int] = {}
    marks: dict[int, Path] = {}
    for process in psutil.process_iter():
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            parents[process.pid] = process.ppid()
            living.append(process)
            progress = process.environ().get(env.PROGRESS)
        except (psutil.Error, OSError):
            continue  # it ended meanwhile, or is another user's
        if progress and below in Path(progress).parents:
            marks[process.pid] = Path(progress).parent
    for process in living:
        folder = _inherit(process.pid, parents, marks)
        if folder is not None:
            yield NodeProcess(process=process, folder=folder)


def _inherit(pid: int | None, parents: dict[int, int], marks: dict[int, Path]) -> Path | None:
    """Return the mark of the process or of its nearest marked ancestor."""
    seen: set[int] = set()  # pids are reused, so a snapshot of parents may have a loop
    while pid is not None and pid not in seen:
        if pid in marks:
            return marks[pid]
        seen.add(pid)
        pid = parents.get(pid)
    return None


def signal_all(below: Path, number: Signals) -> int:
    """Send a signal to every process that `find_processes` finds; return how many got it."""
    count = 0
    for found in list(find_processes(below)):
        try:
            # psutil compares start times first: a recycled pid is never hit.
            found.process.send_signal(number)
            count += 1
        except psutil.Error:
            continue  # it ended meanwhile
    return count


def kill_all(below: Path) -> int:
    """SIGKILL every process below until none is left; return how many were hit.

    Blocks until they are gone, for 10 s at most: one that sits in the kernel cannot be helped.
    """
    give_up_at = time.monotonic() + _KILL_TIMEOUT_S
    total = 0
    while count := signal_all(below, SIGKILL):
        total += count
        if time.monotonic() > give_up_at:
            break
        # One may have been born between the look and the kill: look again.
        time.sleep(_RESCAN_S)
    return total
