"""Ctrl-C in the middle of a fork is heard after it.

Around each fork Python runs hooks; `logging` holds its lock from the first to the last of its own.
A KeyboardInterrupt that is raised inside a hook is thrown away, and with it the rest of the hook:
the lock stays held, and whatever thread logs next waits for ever. Data loaders fork their workers.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from typing import Any

_POLL_S = 0.001
_AFTER_S = 0.01
"""What is left of the hook takes microseconds."""


@functools.cache
def hold_ctrl_c_while_forking() -> None:
    """Let SIGINT wait while the main thread forks, from now on. Main thread only; once suffices.

    Only Python's own handler is held; one of the script's raises what it likes.
    """
    hold = _Hold()
    # Python runs what was registered last first before a fork, and last after it: ours is around
    # all that was registered by now.
    os.register_at_fork(
        before=hold.begin, after_in_parent=hold.end, after_in_child=hold.end_in_child
    )


class _Hold:
    def __init__(self) -> None:
        self._holding = False
        self._came = False

    def begin(self) -> None:
        """Hold what comes from here on."""
        if threading.current_thread() is not threading.main_thread():
            return  # Python handles signals in the main thread, which is in no hook now
        if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            return
        self._holding = True
        try:
            signal.signal(signal.SIGINT, self._on_sigint)
        except KeyboardInterrupt:  # it came just before
            self._came = True
            signal.signal(signal.SIGINT, self._on_sigint)

    def end(self) -> None:
        """Have what came said again, outside of all hooks."""
        if not self._holding:
            return
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if self._came:
            self._came = False
            threading.Thread(target=self._say_again, daemon=True).start()
        self._holding = False

    def end_in_child(self) -> None:
        """Leave it to the parent: a Ctrl-C reaches children by itself."""
        if self._holding:
            self._came = self._holding = False
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _on_sigint(self, *_: Any) -> None:
        self._came = True

    def _say_again(self) -> None:
        while self._holding:
            time.sleep(_POLL_S)
        time.sleep(_AFTER_S)
        os.kill(os.getpid(), signal.SIGINT)
