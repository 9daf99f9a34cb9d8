"""Threads that give way to the job which trains beside them."""

from __future__ import annotations

import contextlib
import os
import threading

_CALM = 10
"""The job goes first: by so much these threads' nice value is higher."""


def be_calm() -> None:
    """Let this thread have what processor time the job leaves."""
    with contextlib.suppress(OSError, AttributeError):  # Linux: a thread has a nice value
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _CALM)
