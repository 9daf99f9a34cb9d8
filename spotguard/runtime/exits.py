"""How the script ended itself: Python calls no hook for a `SystemExit`, and keeps none.

Without it a script that catches its own error and calls `sys.exit(1)` looks like one that left
its loop on purpose.
"""

from __future__ import annotations

import builtins
import sys
import threading
from functools import wraps
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_CALLS = ((sys, "exit"), (builtins, "exit"), (builtins, "quit"))


class ExitWatch:
    """Remembers the main thread's last `sys.exit`, `exit` or `quit`; they do what they did."""

    def __init__(self) -> None:
        self._last: SystemExit | None = None
        for place, name in _CALLS:
            if hasattr(place, name):  # the builtins are not there for `python -S`
                setattr(place, name, self._watched(getattr(place, name)))

    @property
    def called(self) -> bool:
        """True if the script ended itself that way."""
        return self._last is not None

    @property
    def error(self) -> BaseException | None:
        """The error that the script ended itself with or because of; None if it meant well."""
        last = self._last
        if last is None or last.code is None or (isinstance(last.code, int) and not last.code):
            return None
        return last.__context__ or last

    def forget(self) -> None:
        """Take it that the script went on: it caught its own exit."""
        self._last = None

    def _watched(self, leave: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(leave)
        def watched(*args: Any, **kwargs: Any) -> Any:
            try:
                return leave(*args, **kwargs)
            except SystemExit as last:
                if threading.current_thread() is threading.main_thread():  # else a thread ends
                    self._last = last
                raise

        return watched
