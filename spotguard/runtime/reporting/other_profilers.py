"""The script's own profilers of torch: the process has room for one, and theirs goes first.

Where two are on in one thread torch raises an error; in two threads the process crashes.
"""

from __future__ import annotations

import functools
import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.autograd import profiler

if TYPE_CHECKING:
    from collections.abc import Callable

_LONGEST_WAIT_S = 120.0
_START: Final = "_start_trace"
_BEGINNINGS: Final = (
    (profiler.profile, "_prepare_trace"),
    (profiler.profile, _START),
    (profiler.emit_nvtx, "__enter__"),
    (profiler.emit_itt, "__enter__"),
)
"""What all of torch's profilers begin with; those of `torch.profiler` wrap the first class."""


def script_profiles_itself() -> bool:
    """Return True if a profiler is on, in whichever thread."""
    return bool(torch._C._autograd._profiler_enabled()) or profiler._is_profiler_enabled


class GivesWay:
    """While it is open, whoever begins another profiler has ours stopped first.

    To be opened before ours is on, and closed when it is off for good, by the loop's thread.
    """

    def __init__(self, stop: Callable[[], None]) -> None:
        """`stop` stops ours; it is called by the loop's thread only, and raises nothing."""
        self._stop = stop
        self._loop = threading.get_ident()
        self._closed = threading.Event()
        self._hooks = ExitStack()
        self.ours: Any = None
        self.is_asked = False
        """True once another thread waits for ours to be off."""
        for owner, name in _BEGINNINGS:
            begin = getattr(owner, name)
            setattr(owner, name, self._after_ours(begin, prepares=name == _START))
            self._hooks.callback(setattr, owner, name, begin)

    def close(self) -> None:
        """Let others begin as if we were not there."""
        self._hooks.close()
        self._closed.set()

    def _after_ours(self, begin: Callable[[Any], Any], *, prepares: bool) -> Callable[[Any], Any]:
        @functools.wraps(begin)
        def begin_after(own: Any) -> Any:
            if own is not self.ours and not self._closed.is_set():
                self._make_room()
                if prepares:
                    own._prepare_trace()  # ours has overwritten what it had prepared
            return begin(own)

        return begin_after

    def _make_room(self) -> None:
        if threading.get_ident() == self._loop:
            self._stop()
            return
        self.is_asked = True
        if not self._closed.wait(_LONGEST_WAIT_S):
            raise RuntimeError("spotguard profiles a step that does not end; two would crash")
