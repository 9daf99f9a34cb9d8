"""Each run has a log of its own, though one process looks after many.

What is logged goes to the run for which it is done: that is part of a thread's context, which the
threads that a run starts take with them. What belongs to no run goes to the process's own log.
"""

from __future__ import annotations

import logging
import os
import sys
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_stream: ContextVar[TextIO | None] = ContextVar("spotguard_run_log", default=None)


if TYPE_CHECKING:
    _StreamHandler = logging.StreamHandler[TextIO]
else:
    _StreamHandler = logging.StreamHandler  # of Python 3.10, which takes no type


class _ByRun(_StreamHandler):
    """Writes each record where its run's context says."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = run_log()
        super().emit(record)

    def flush(self) -> None:
        """Flush only what may still be open: a run's log is closed once it is at rest."""
        if not self.stream.closed:
            super().flush()


def log_by_run() -> None:
    """Have all loggers write to the logs of the runs; for the whole process."""
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        handlers=[_ByRun(sys.stderr)],
        force=True,
    )


def run_log() -> TextIO:
    """Return where this thread's words go: to its run's log, or the process's own."""
    stream = _stream.get()
    return sys.stderr if stream is None or stream.closed else stream


@contextmanager
def logged_to(path: Path) -> Iterator[TextIO]:
    """Log to this file inside the block, which only this user may read, and not elsewhere."""
    with open(  # pathlib's open takes no opener
        path,
        "a",
        buffering=1,
        encoding="utf-8",
        errors="replace",
        opener=lambda name, flags: os.open(name, flags, 0o600),
    ) as stream:
        token = _stream.set(stream)
        try:
            yield stream
        finally:
            _stream.reset(token)
