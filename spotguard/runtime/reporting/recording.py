"""torch's profiler around some steps, and what of this process goes into an answer."""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.profiler import profile, record_function

from spotguard.events.profile import STEP
from spotguard.runtime.reporting.other_profilers import GivesWay
from spotguard.shared.paths import scratch

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from pathlib import Path


class Recording:
    """torch's profiler, on from the beginning: a step of warm-up, one between, those that count.

    To be started and stopped by the loop's thread, whose operations it sees. In the step between it
    is off: a `record_function` of the script that begins in one recording and ends in the next
    writes into memory that torch has freed, and the process may crash.
    """

    def __init__(self, *, with_trace: bool, give_way: Callable[[], None]) -> None:
        """`give_way` stops it: the script begins a profiler of its own."""
        self._with_trace = with_trace
        self.first: int | None = None
        """Steps done before the first one that counts; None in the warm-up."""
        self.duration_s = self.cpu_s = 0.0
        self._began = self._cpu_began = 0.0
        self._profiler: Any = None
        self._stopped: Any = None
        """The one that was stopped last, with what it recorded."""
        self._step: Any = None
        self._step_began = 0.0
        self._others = GivesWay(give_way)
        try:
            self._start()
        except BaseException:
            with contextlib.suppress(Exception):
                self.stop()
            raise

    @property
    def step_s(self) -> float:
        """Return how long the step under way has taken so far."""
        return time.perf_counter() - self._step_began

    @property
    def is_unwanted(self) -> bool:
        """True if another thread of the script waits to begin a profiler of its own."""
        return self._others.is_asked

    @property
    def is_on(self) -> bool:
        """False between the warm-up and the steps that count."""
        return self._profiler is not None

    def end_warm_up(self) -> int:
        """Return how many bytes the trace of that step has; 0 if this rank keeps none."""
        self._stop_profiler()
        if not self._with_trace:
            return 0
        with scratch("spotguard-profile-") as folder:
            path = folder / "trace.json"
            self.write(path)
            return path.stat().st_size

    def begin(self, finished: int) -> None:
        """Begin with the steps that count."""
        self.first = finished
        self._start()
        self._began, self._cpu_began = time.perf_counter(), time.process_time()

    def next_step(self) -> None:
        """Take note that a step ends here, and the next one begins."""
        self._end_step()
        self._take_time()
        self._begin_step()

    def mark(self, name: str) -> AbstractContextManager[Any]:
        """Return what names a piece of the trace."""
        return record_function(name)

    def stop(self, *, within_step: bool = False) -> None:
        """Let the profiler go. It takes less than a second for the largest trace.

        `within_step`: the step under way does not count.
        """
        try:
            if self._profiler is not None:
                if not within_step:
                    self._take_time()
                self._stop_profiler()
        finally:
            self._others.close()

    def write(self, path: Path) -> None:
        """Write what was recorded last, as Chrome and Perfetto read it."""
        self._stopped.export_chrome_trace(str(path))

    def _start(self) -> None:
        _finish_queued()
        # What `torch.profiler` wraps; that imports torch's compiler first, for a second or more.
        profiler = profile(use_kineto=True, use_device="cuda" if _uses_gpu() else None)
        self._others.ours = profiler
        profiler.__enter__()  # type: ignore[no-untyped-call]
        self._profiler = profiler
        self._begin_step()

    def _stop_profiler(self) -> None:
        profiler, self._profiler = self._profiler, None
        self._stopped = profiler
        try:
            self._end_step()
            _finish_queued()
        finally:
            profiler.__exit__(None, None, None)
            self._step_began = time.perf_counter()

    def _begin_step(self) -> None:
        self._step_began = time.perf_counter()
        self._step = self.mark(STEP)
        self._step.__enter__()

    def _end_step(self) -> None:
        step, self._step = self._step, None
        if step is not None:
            step.__exit__(None, None, None)

    def _take_time(self) -> None:
        self.duration_s = time.perf_counter() - self._began
        self.cpu_s = time.process_time() - self._cpu_began


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
