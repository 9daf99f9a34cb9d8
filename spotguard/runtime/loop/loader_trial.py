"""How fast the script's own loader reads, beside its training and alone: for `spotguard doctor`.

The script trains some steps as ever. Then its data are read without any training, with its own
number of workers and with others; what was measured is written down, and the process ends.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from spotguard.runtime.data.loader import ElasticLoader
from spotguard.runtime.process.surroundings import exit_now
from spotguard.runtime.reporting.recording import cores

if TYPE_CHECKING:
    from spotguard.runtime.data.loader import Loader
    from spotguard.runtime.reporting.metrics import Metrics

_TRAIN_S, _MOST_STEPS, _LEAST_STEPS = 8.0, 40, 2
_READ_S = 2.5
_WORKERS: Final = (0, 1, 2, 4, 8)
_READ_ERRORS = (RuntimeError, OSError, TypeError, AttributeError, ValueError)
"""What a dataset raises that workers cannot have."""


class LoaderTrial:
    """Looks on as the loop trains, then reads. For the loop's thread."""

    def __init__(self, path: str, loader: Loader, metrics: Metrics) -> None:
        """`path` is where to write what was measured."""
        self._path = Path(path)
        self._loader = loader
        self._metrics = metrics
        self._first: int | None = None
        self._began = self._data_s = 0.0

    def between_steps(self, finished: int, last: int) -> None:
        """Take note of a step's beginning; end the process once enough is known."""
        if self._first is None:
            # The step before it set things up: workers, caches, threads.
            if finished:
                self._first = finished
                self._began, self._data_s = time.perf_counter(), self._metrics.waited_for_data_s
            return
        steps, seconds = finished - self._first, time.perf_counter() - self._began
        is_enough = steps >= _MOST_STEPS or seconds >= _TRAIN_S or finished >= last - 1
        if steps >= _LEAST_STEPS and is_enough:
            self._end(steps, seconds, finished, last)

    def _end(self, steps: int, seconds: float, finished: int, last: int) -> None:
        loader = self._loader
        told: dict[str, Any] = {
            "steps": steps,
            "step_s": seconds / steps,
            "data_s": (self._metrics.waited_for_data_s - self._data_s) / steps,
            "reading": loader.reading(),
            "global_batch_size": loader.global_batch_size,
            "micro_batch_size": loader.micro_batch_size,
            "cores": cores(),
            "tried": [],
        }
        if isinstance(loader, ElasticLoader):
            told["tried"] = [_read(loader, each, last) for each in _numbers(loader)]
        draft = self._path.with_name(f"{self._path.name}.new")
        draft.write_text(json.dumps(told))
        draft.replace(self._path)
        exit_now(0)


def _numbers(loader: ElasticLoader) -> list[int]:
    """Return which numbers of workers to try: its own, and others up to the cores there are."""
    own = int(loader.reading()["num_workers"])
    return sorted({own, *(each for each in _WORKERS if each <= cores())})


def _read(loader: ElasticLoader, workers: int, last: int) -> dict[str, Any]:
    """Read from the first step on for some seconds; return how fast that goes."""
    batches = loader.with_workers(workers).read(0, max(last, 1))
    began = time.perf_counter()
    count, first_s, counted_from = 0, 0.0, began
    try:
        for number, (share, _) in enumerate(batches):
            now = time.perf_counter()
            if number == 0:
                first_s = now - began
            if now - began - first_s < _READ_S / 3:  # what was read ahead meanwhile is for nothing
                counted_from = now
                continue
            count += len(share.indices)
            if now - began - first_s >= _READ_S:
                break
        seconds = time.perf_counter() - counted_from
    except _READ_ERRORS as problem:
        return {"num_workers": workers, "problem": f"{type(problem).__name__}: {problem}"[:500]}
    finally:
        batches.close()
    rate = count / seconds if count and seconds > 0 else None
    return {"num_workers": workers, "samples_per_s": rate, "first_s": first_s}
