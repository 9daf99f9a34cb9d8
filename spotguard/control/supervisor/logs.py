"""What the job printed: one stream of lines across nodes and attempts."""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spotguard.errors import LauncherFailure, SpotguardError
from spotguard.launch.base import LogGone

if TYPE_CHECKING:
    from collections.abc import Iterator

    from spotguard.control.journal.record import AttemptRecord, RunRecord
    from spotguard.launch.base import Launcher

_TAIL_LINES = 40
_TORCHRUN = re.compile(r"[EWI]\d{4} .*torch/distributed/")
"""torchrun's own report of a failed script, which follows it and says nothing of its cause."""


@dataclass(frozen=True, kw_only=True)
class LogLine:
    """One line that a node printed."""

    attempt: int
    node: int | None
    """None: no node printed it, it is told of the attempt."""
    text: str


class NodeLog:
    """Reads one node's output line by line, each line once."""

    def __init__(self, launcher: Launcher, cluster: str, *, attempt: int, node: int) -> None:
        self._launcher = launcher
        self._cluster = cluster
        self._attempt = attempt
        self._node = node
        self._offset = 0
        self._rest = b""

    def lines(self, *, final: bool = False) -> Iterator[LogLine]:
        """Yield the whole lines printed since the last call; with `final` also the rest."""
        while True:
            chunk = self._launcher.read_log(self._cluster, self._node, self._offset)
            if not chunk.data:
                break
            self._offset = chunk.offset + len(chunk.data)
            *whole, self._rest = (self._rest + chunk.data).split(b"\n")
            for line in whole:
                yield self._line(line)
        if final and self._rest:
            yield self._line(self._rest)
            self._rest = b""

    def _line(self, raw: bytes) -> LogLine:
        text = raw.decode(errors="replace").rstrip("\r")
        return LogLine(attempt=self._attempt, node=self._node, text=text)


class RunLog:
    """Reads what all attempts of a run printed, each line once.

    A log that is gone, or cannot be read, costs one line and never those of other attempts.
    """

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._readers: dict[tuple[int, int], NodeLog] = {}
        self._done: set[int] = set()
        """Attempts that print nothing more, or are lost."""

    def lines(self, record: RunRecord, *, last: bool) -> Iterator[LogLine]:
        """Yield what was printed since the last call, attempt after attempt.

        The record must be older than the logs. With `last`, nobody asks again: also what is not
        a whole line, and why a log cannot be read.
        """
        for attempt in record.attempts:
            if attempt.in_place or attempt.number in self._done:
                continue  # in place, its nodes go on printing into the logs of the one before
            over = _is_over(record, attempt.cluster)
            try:
                yield from self._of(attempt, final=last or over)
            except LogGone:
                if over:
                    yield _told(attempt, "its cluster is gone, and what it printed with it")
                    self._done.add(attempt.number)
                elif last:
                    yield _told(attempt, "its nodes have printed nothing yet")
            except LauncherFailure as problem:
                if last:
                    yield _told(attempt, f"its log cannot be read now: {problem.message}")
            else:
                self._done |= {attempt.number} if over else set()

    def _of(self, attempt: AttemptRecord, *, final: bool) -> Iterator[LogLine]:
        for node in range(attempt.nodes):
            reader = self._readers.setdefault(
                (attempt.number, node),
                NodeLog(self._launcher, attempt.cluster, attempt=attempt.number, node=node),
            )
            yield from reader.lines(final=final)


def _told(attempt: AttemptRecord, text: str) -> LogLine:
    return LogLine(attempt=attempt.number, node=None, text=text)


def _is_over(record: RunRecord, cluster: str) -> bool:
    """Return True once nothing more is printed on a cluster, by any attempt."""
    return all(a.end is not None for a in record.attempts if a.cluster == cluster)


def log_tail(launcher: Launcher, cluster: str, node: int) -> str | None:
    """Return the last lines that the script printed on a node, or None if there are none.

    What torchrun adds is left out, unless there is nothing else.
    """
    reader = NodeLog(launcher, cluster, attempt=0, node=node)
    printed: deque[str] = deque(maxlen=_TAIL_LINES)
    try:
        for line in reader.lines(final=True):
            if printed and _TORCHRUN.match(line.text):
                break
            printed.append(line.text)
    except SpotguardError:
        return None
    return "\n".join(printed) or None
