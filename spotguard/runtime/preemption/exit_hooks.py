"""How the script ends: the hooks that Python has for it, and what it has none for.

Python calls no hook for a `SystemExit`, and keeps none.
Without it a script that catches its own error and calls `sys.exit(1)` looks like one that left
its loop on purpose.
"""

from __future__ import annotations

import atexit
import builtins
import sys
import threading
import traceback
from functools import wraps
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, FrameType, TracebackType

    Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]

_CALLS = ((sys, "exit"), (builtins, "exit"), (builtins, "quit"))


class ExitWatch:
    """Hangs in all hooks; remembers the last `sys.exit`, `exit` or `quit` of who trains.

    These do what they did. A script may train in another thread than the main one, which has a hook
    of its own for what is not caught.
    """

    def __init__(self, on_exception: Hook, at_exit: Callable[[], None]) -> None:
        self._on_exception = on_exception
        self._at_exit = at_exit
        self.previous_hook: Hook = sys.excepthook
        self._last: SystemExit | None = None
        self._loop: CodeType | None = None
        """The script's code that left its loop in the body of a step."""
        self._shown_before: TracebackType | None = None
        self._replaced: list[tuple[Any, str, Any, Any]] = []
        self._trains = {threading.main_thread()}
        self._before_in_threads = threading.excepthook

    def start(self) -> None:
        """Hang in the hooks."""
        self.trains_here()
        self.previous_hook = sys.excepthook
        sys.excepthook = self._on_exception
        self._before_in_threads = threading.excepthook
        threading.excepthook = self._on_thread_s_exception
        self._replaced.append(
            (threading, "excepthook", self._before_in_threads, threading.excepthook)
        )
        atexit.register(self._at_exit)
        for place, name in _CALLS:
            if hasattr(place, name):  # the builtins are not there for `python -S`
                before = getattr(place, name)
                ours = self._watched(before)
                setattr(place, name, ours)
                self._replaced.append((place, name, before, ours))

    def trains_here(self) -> None:
        """Take the end of this thread for that of the training, as the main thread's is."""
        self._trains.add(threading.current_thread())

    def _on_thread_s_exception(self, args: threading.ExceptHookArgs) -> None:
        error = args.exc_value
        if args.thread not in self._trains or error is None:
            self._before_in_threads(args)
            return
        shown, self.previous_hook = self.previous_hook, lambda *_: self._before_in_threads(args)
        try:
            self._on_exception(args.exc_type, error, args.exc_traceback)
        finally:
            self.previous_hook = shown

    def close(self) -> None:
        """Put back what was there, unless somebody else has replaced it since."""
        for place, name, before, ours in self._replaced:
            if getattr(place, name, None) == ours:  # a bound method is another one each time
                setattr(place, name, before)
        if sys.excepthook == self._on_exception:
            sys.excepthook = self.previous_hook
        atexit.unregister(self._at_exit)

    @property
    def called(self) -> bool:
        """True if the script ended itself that way."""
        return self._last is not None

    @property
    def error(self) -> BaseException | None:
        """The error that the script ended itself with or because of; None if it meant well."""
        last = self._last
        if last is None:
            return self._shown
        if last.code is None or (isinstance(last.code, int) and not last.code):
            return None
        return last.__context__ or last

    @property
    def _shown(self) -> BaseException | None:
        """The error by which the loop was left, where a notebook shows it and asks no hook."""
        trace = _last_traceback()
        if trace is self._shown_before:
            return None
        codes = {frame.f_code for frame, _ in traceback.walk_tb(trace)}
        return getattr(sys, "last_value", None) if self._loop in codes else None

    def loop_left(self, frame: FrameType | None) -> None:
        """Take note of who left the loop in the body of a step: on purpose, or by an error."""
        self._loop = frame.f_code if frame is not None else None
        self._shown_before = _last_traceback()

    def forget(self) -> None:
        """Take it that the script went on: it caught its own exit."""
        self._last = None

    def _watched(self, leave: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(leave)
        def watched(*args: Any, **kwargs: Any) -> Any:
            try:
                return leave(*args, **kwargs)
            except SystemExit as last:
                if threading.current_thread() in self._trains:  # else a thread ends
                    self._last = last
                raise

        return watched


def _last_traceback() -> TracebackType | None:
    return getattr(sys, "last_traceback", None)
