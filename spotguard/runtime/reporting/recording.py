"""torch's profiler around some steps, and what of this process goes into an answer."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.profiler import profile, record_function

from spotguard.events.profile import STEP

if TYPE_CHECKING:
    from contextlib import AbstractContextManager


class Recording:
    """torch's profiler, on from the beginning: a step of warm-up first, then the steps that count.

    To be started and stopped by the loop's thread, whose operations it sees.
    """

    def __init__(self, *, with_trace: bool) -> None:
        self._with_trace = with_trace
        self.first: int | None = None
        """Steps done before the first one that counts; None in the warm-up."""
        self.duration_s = self.cpu_s = 0.0
        self._began = self._cpu_began = 0.0
        self._profiler: Any = None
        self._stopped: Any = None
        """The one that was stopped last, with what it recorded."""
        self._step: Any = None
        self._start()

    def end_warm_up(self, most_bytes: int) -> int:
        """Return how many steps such as that one fit into a trace of so many bytes; at least 1."""
        self._stop_profiler()
        if not self._with_trace:
            return most_bytes
        with tempfile.TemporaryDirectory(prefix="spotguard-profile-") as folder:
            path = Path(folder) / "trace.json"
            self.write(path)
            return max(1, most_bytes // max(1, path.stat().st_size))

    def begin(self, finished: int) -> None:
        """Begin with the steps that count."""
        self.first = finished
        self._start()
        self._began, self._cpu_began = time.perf_counter(), time.process_time()

    def next_step(self) -> None:
        """Take note that a step ends here, and the next one begins."""
        self._end_step()
        self._step = self.mark(STEP)
        self._step.__enter__()

    def mark(self, name: str) -> AbstractContextManager[Any]:
        """Return what names a piece of the trace."""
        return record_function(name)

    def stop(self) -> None:
        """Let the profiler go. It takes less than a second for the largest trace."""
        if self._profiler is None:
            return
        self._end_step()
        self.duration_s = time.perf_counter() - self._began
        self.cpu_s = time.process_time() - self._cpu_began
        self._stop_profiler()

    def write(self, path: Path) -> None:
        """Write what was recorded last, as Chrome and Perfetto read it."""
        self._stopped.export_chrome_trace(str(path))

    def _start(self) -> None:
        _finish_queued()
        # What `torch.profiler` wraps; that imports torch's compiler first, for a second or more.
        self._profiler = profile(use_kineto=True, use_device="cuda" if _uses_gpu() else None)
        self._profiler.__enter__()
        self.next_step()

    def _stop_profiler(self) -> None:
        self._end_step()
        _finish_queued()
        self._profiler.__exit__(None, None, None)
        self._stopped, self._profiler = self._profiler, None

    def _end_step(self) -> None:
        step, self._step = self._step, None
        if step is not None:
            step.__exit__(None, None, None)


def profiles_itself() -> bool:
    """Return True if the script's own profiler is on."""
    return bool(torch._C._autograd._profiler_enabled())


def _finish_queued() -> None:
    """Have a GPU finish what is queued, so that it belongs to the step that asked for it."""
    if _uses_gpu():
        torch.cuda.synchronize()


def cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def load() -> float | None:
    """Return how many processes of this node want a core, as the mean of the last minute."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):  # not on Windows
        return None


def device_name() -> str:
    """Return the GPU's name, or `cpu`."""
    if _uses_gpu():
        return torch.cuda.get_device_name()
    return "cpu"


def _uses_gpu() -> bool:
    return torch.cuda.is_available() and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
