"""What the job printed: one stream of lines across nodes and attempts."""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spotguard.errors import SpotguardError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from spotguard.launch.base import Launcher

_TAIL_LINES = 40
_TORCHRUN = re.compile(r"[EWI]\d{4} .*torch/distributed/")
"""torchrun's own report of a failed script, which follows it and says nothing of its cause."""


@dataclass(frozen=True, kw_only=True)
class LogLine:
    """One line that a node printed."""

    attempt: int
    node: int
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
