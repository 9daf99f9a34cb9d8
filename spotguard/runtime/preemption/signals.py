"""SIGTERM: seen at once, even while the main thread sits in a collective.

A Python signal handler runs only between two bytecodes of the main thread, which can be seconds
late. `signal.set_wakeup_fd` is written by the C handler at once, so a thread that reads it knows
in time. The Python handler does nothing but chain to the script's own.

A script's own handler may raise, to end the script. It does so between any two bytecodes: with an
optimizer's step half counted, or in the middle of the last save, for SIGTERM comes twice or more.
The job leaves at the next boundary anyway, so in its loop what the handler raises is dropped.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import types
    from collections.abc import Callable

log = logging.getLogger("spotguard")

_MARK = 0  # is no signal's number
_JOIN_S = 5.0


class SignalWatch:
    """Calls `on_sigterm` from a thread of its own for every SIGTERM until `close`."""

    def __init__(self, on_sigterm: Callable[[], None]) -> None:
        self._on_sigterm = on_sigterm
        self._read, self._write = socket.socketpair()
        self._write.setblocking(False)
        self._pid = os.getpid()
        self._closed = False
        self._drained = threading.Event()
        self._holds = False
        self._later: Callable[[int, types.FrameType | None], object] | None = None
        """What the script has put in our handler's place since."""
        self._is_in_later = False
        self._previous = signal.signal(signal.SIGTERM, self._handle)
        self._previous_fd = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        # A forked child shares the pipe: its own SIGTERM would look like ours. Python keeps what is
        # registered for ever, and with it all that `on_sigterm` belongs to.
        myself = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _leave_child(myself()))
        self._thread = threading.Thread(target=self._watch, name="spotguard-signals", daemon=True)
        self._thread.start()

    def drain(self, timeout_s: float) -> None:
        """Block until `on_sigterm` has returned for all that came, `timeout_s` at most."""
        with contextlib.suppress(OSError):  # the pipe may be full
            self._drained.clear()
            self._write.send(bytes([_MARK]))
            self._drained.wait(timeout_s)

    def hold(self) -> None:
        """Be the first to handle SIGTERM again, and let no handler of the script's raise.

        Main thread only. What the script has put in place meanwhile is still called.
        """
        found = signal.getsignal(signal.SIGTERM)
        if found != self._handle and callable(found):
            self._later = found
            signal.signal(signal.SIGTERM, self._handle)
        self._holds = True

    def let_go(self) -> None:
        """Let the script's handlers raise again: its loop is over."""
        self._holds = False

    def close(self, *, leaving: bool = False) -> None:
        """Put back the handlers that were there, unless the script has put others in their place.

        `leaving`: the process is ending by itself. SIGTERM comes two or three times, and torchrun
        sends one to the ranks that leave last; where only the system would handle it, it is
        ignored, so that a saved and clean end does not become a death by a signal.
        """
        self._closed = True
        fd = signal.set_wakeup_fd(self._previous_fd)
        if not leaving and fd not in (-1, self._write.fileno()):
            signal.set_wakeup_fd(fd)
        before = self._later or self._previous
        late = before
        if leaving:  # what the script's own handler raises would be its exit code
            late = signal.SIG_IGN if before is signal.SIG_DFL else self._handle
            self._holds = True
        if leaving or signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, late)
        with contextlib.suppress(OSError):  # closing alone ends nothing while a child has it, too
            self._write.shutdown(socket.SHUT_RDWR)
        self._write.close()
        if not leaving and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)

    def _handle(self, number: int, frame: types.FrameType | None) -> None:
        if not self._closed and os.getpid() == self._pid:  # a script's handler may chain to it
            self._take_back_wakeup(number)
        try:
            self._call_script_s(number, frame)
        except BaseException as problem:
            if not self._holds or os.getpid() != self._pid:
                raise
            log.info(
                "the script's own handler of SIGTERM raised %r: not passed on, for the job leaves "
                "by itself, with code 75",
                problem,
            )

    def _call_script_s(self, number: int, frame: types.FrameType | None) -> None:
        """Call the handler that the script has put in place last; it may chain to ours."""
        if self._later is not None and not self._is_in_later:
            self._is_in_later = True
            try:
                self._later(number, frame)
            finally:
                self._is_in_later = False
        elif callable(self._previous):
            self._previous(number, frame)

    def _take_back_wakeup(self, number: int) -> None:
        """See to it that the thread hears of this signal, and of the next ones.

        `asyncio.add_signal_handler` takes the wakeup fd, and leaves none behind. While a loop has
        it, it stays the loop's.
        """
        mine = self._write.fileno()
        fd = signal.set_wakeup_fd(mine, warn_on_full_buffer=False)
        if fd == mine:
            return
        with contextlib.suppress(OSError):  # the pipe is full: the thread has enough to read
            self._write.send(bytes([number]))
        if fd != -1:
            signal.set_wakeup_fd(fd)

    def _watch(self) -> None:
        while received := self._receive():
            if signal.SIGTERM in received:
                self._on_sigterm()
            if _MARK in received:
                self._drained.set()
        self._read.close()

    def _receive(self) -> bytes:
        with contextlib.suppress(OSError):
            return self._read.recv(64)
        return b""

    def leave_child(self) -> None:
        """Take part in nothing any more: this is a forked child of the process that watches."""
        if self._closed or os.getpid() == self._pid:
            return
        with contextlib.suppress(ValueError, OSError):  # not the main thread, or already closed
            if signal.getsignal(signal.SIGTERM) == self._handle:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.set_wakeup_fd(-1)


def _leave_child(watch: SignalWatch | None) -> None:
    if watch is not None:
        watch.leave_child()
