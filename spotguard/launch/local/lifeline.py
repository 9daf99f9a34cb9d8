"""Ends a process with the one that started it, however that one came to its end.

The parent keeps one end of a pipe open, and nobody else has it: the other end reads as ended as
soon as the parent is gone, also by `kill -9`. Linux and macOS alike.
"""

from __future__ import annotations

import os
import signal
import threading


def hold(descriptor: int) -> None:
    """Have this process and its group killed once the other end of `descriptor` is closed.

    Args:
        descriptor: of a pipe to which nobody writes. This process leads a group of its own.
    """
    threading.Thread(target=_end_with, args=(descriptor,), name="lifeline", daemon=True).start()


def _end_with(descriptor: int) -> None:
    os.read(descriptor, 1)
    os.killpg(0, signal.SIGKILL)
