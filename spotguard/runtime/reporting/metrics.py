"""What a script logs and the runtime measures: taken in a microsecond, stored by a thread.

A value belongs to a step, and remembers how many steps were finished when it was logged. What an
attempt logged after the checkpoint from which a later one goes on is superseded: the later one
does those steps again, and logs them again. What was logged before it is stored before the
checkpoint is committed. So there is exactly one value for each step and name.
"""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from spotguard.errors import StoreError, UsageError
from spotguard.events import keys, metric
from spotguard.events.metric import NAME, OWN, MetricLine
from spotguard.events.untrusted import LARGEST
from spotguard.runtime.process import clock
from spotguard.runtime.process.device_number import number_of
from spotguard.runtime.process.finite import is_loss
from spotguard.runtime.reporting.machine_use import MachineUse
from spotguard.runtime.reporting.trackers import TrackerFeed
from spotguard.storage.deadline import give_up_after
from spotguard.storage.patterns.growing_lines import GrowingObjects, plain_lines

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from spotguard.runtime.data.loader import Loader, Share
    from spotguard.runtime.process.finite import LossWatch
    from spotguard.runtime.reporting.trackers import Tracker
    from spotguard.storage.base import ObjectStore

log = logging.getLogger("spotguard")

_MOST_WAITING = 1_000_000
"""Values that wait for a store which refuses them; then the oldest give way."""
_MOST_KEPT = 100_000
_MOST_NAMES = 1_000
_SHOWN = 64
"""Newest values that a heartbeat carries."""
_BEFORE_COMMIT_S = 1.0
"""How long a save waits for the metrics before it; they are then stored after it, or lost."""
_NUMBERS = (float, int)


class _Point(NamedTuple):
    name: str
    step: int
    done: int
    at: float
    value: Any
    """A number, or a tensor of another device with one element."""


class _Times:
    """Seconds of some steps, added up."""

    def __init__(self) -> None:
        self.steps = 0
        self.step_s = self.data_s = self.save_s = self.communication_s = 0.0


class Metrics:
    """The metrics of this rank. `log` is for the main thread; `flush` for any other."""

    def __init__(self, store: ObjectStore, *, attempt: int, node: int, local_rank: int, rank: int):
        """The first rank keeps what the script logs; the first of each node what the node does."""
        self._rank = rank
        self._use = MachineUse(node) if local_rank == 0 else None
        self._points: deque[_Point] = deque(maxlen=_MOST_WAITING)
        self._kept: deque[_Point] = deque(maxlen=_MOST_KEPT)
        """What another rank than the first logged since the last save: that one may be gone when
        this one saves, with what it had not stored yet."""
        self._saved_step = 0
        self._names: set[str] = set()
        self._done: int | None = None
        self._early: list[_Point] = []
        """What was logged before the loop: where that begins is not known yet."""
        self._newest: dict[str, float] = {}
        self._times = _Times()
        self._lock = threading.Lock()
        """Held for a moment where the times are added up."""
        self._storing = threading.Lock()
        self._objects = GrowingObjects(store, keys.metrics(attempt), owner=rank, at=clock.now())
        self._data_s = 0.0
        self.waited_for_data_s = 0.0
        """By the loop, since it began."""
        self._saved_s = self._communicated_s = 0.0
        self._began: float | None = None
        self._loader: Loader | None = None
        self.communicated_s: Callable[[], float | None] = lambda: None
        """Seconds spent so far in waiting for other ranks; None where nobody knows."""
        self.waits_for_data: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
        """Returns what names that wait in a profile."""
        self._feeds: list[TrackerFeed] = []
        self.losses: LossWatch | None = None
        """What hears of the values of all that is called a loss."""

    # ------------------------------------------------------------------ the script's

    def log(self, step: int | None, values: dict[str, Any]) -> None:
        """Take what a script logs; see `Run.log`."""
        done = self._done
        if step is None:
            if done is None:
                raise UsageError(
                    "run.log() before the loop needs a step", hint="run.log(step=0, name=value)"
                )
            step = done
        elif not isinstance(step, int) or isinstance(step, bool) or not 0 <= step <= LARGEST:
            raise UsageError(f"run.log: step is {step!r}, but must be a count of steps, from 0")
        names = self._names
        at = clock.now()
        taken = []
        for name, value in values.items():
            if name not in names:
                self._check_name(name)
            if type(value) not in _NUMBERS:
                value = _number(name, value)
            taken.append(_Point(name, step, done or 0, at, value))
        if done is None:
            self._early += taken
        else:
            (self._points if self._rank == 0 else self._kept).extend(taken)

    def _check_name(self, name: str) -> None:
        if not NAME.fullmatch(name) or name.startswith(OWN):
            raise UsageError(
                f"run.log: {name!r} is no name for a metric",
                hint="letters, digits, blanks and _ . / -, a letter or _ first, at most 128; "
                f"{OWN}... is the runtime's own",
            )
        if len(self._names) >= _MOST_NAMES:
            raise UsageError(
                f"run.log: {name!r} would be metric number {_MOST_NAMES + 1}",
                hint="put what changes into the value, not into the name",
            )
        self._names.add(name)

    # ------------------------------------------------------------------ the loop's

    def begin(self, first: int) -> None:
        """Take note that the loop begins with `first` steps done."""
        early = [point._replace(done=first) for point in self._early]
        (self._points if self._rank == 0 else self._kept).extend(early)
        self._early.clear()
        for feed in self._feeds:
            feed.begin(first)
        self._done = first
        self._began = None  # the first step is longer than any other: it sets things up

    def timed(
        self, batches: Iterator[tuple[Share, Any]], loader: Loader
    ) -> Iterator[tuple[Share, Any]]:
        """Yield from `batches` of the loader, and add up how long each was waited for."""
        self._loader = loader
        while True:
            began = time.perf_counter()
            try:
                with self.waits_for_data():
                    batch = next(batches)
            except StopIteration:
                return
            waited_s = time.perf_counter() - began
            self._data_s += waited_s
            self.waited_for_data_s += waited_s
            yield batch

    def finished_step(self, finished: int, saved_s: float, saved_step: int | None) -> None:
        """Take note of a finished step, of the newest save, and of how long saves took so far."""
        now = time.perf_counter()
        communicated_s = self.communicated_s() or 0.0
        if self._began is not None:
            with self._lock:
                times = self._times
                times.steps += 1
                times.step_s += now - self._began
                times.data_s += self._data_s
                times.save_s += saved_s - self._saved_s
                times.communication_s += communicated_s - self._communicated_s
        self._began = now
        self._data_s, self._saved_s, self._communicated_s = 0.0, saved_s, communicated_s
        self._done = finished
        if self._kept and saved_step is not None and saved_step != self._saved_step:
            self._saved_step = saved_step
            while self._kept and self._kept[0].done < saved_step:
                self._kept.popleft()

    # ------------------------------------------------------------------ other threads'

    def newest(self) -> dict[str, float]:
        """Return the newest finite values by name, as a heartbeat carries them."""
        newest = list(self._newest.items())[-_SHOWN:]
        return {name: value for name, value in newest if math.isfinite(value)}

    def measure(self) -> None:
        """Take the mean of the steps since the last call, and what this node uses."""
        with self._lock:
            times, self._times = self._times, _Times()
        measured = self._use.look() if self._use is not None else {}
        if self._rank == 0 and times.steps:
            measured |= self._of_steps(times)
        if self._done is None:
            return
        step, at = max(self._done - 1, 0), clock.now()
        self._points.extend(_Point(name, step, step, at, v) for name, v in measured.items())

    def _of_steps(self, times: _Times) -> dict[str, float]:
        mean_s = times.step_s / times.steps
        parts = {metric.DATA_S: times.data_s, metric.SAVE_S: times.save_s}
        if self.communicated_s() is not None:
            parts[metric.COMMUNICATION_S] = times.communication_s
        rest = {metric.COMPUTE_S: max(0.0, times.step_s - sum(parts.values()))}
        means = {name: total / times.steps for name, total in (parts | rest).items()}
        if self._loader is not None and mean_s > 0:
            means[metric.SAMPLES_PER_S] = self._loader.global_batch_size / mean_s
        return {metric.STEP_S: mean_s, **means}

    def flush(self) -> None:
        """Store what was logged so far. Blocks.

        Raises:
            StoreError: it is not stored; the next call tries again.
        """
        with self._storing:
            if not self._objects.is_full:
                points = [self._points.popleft() for _ in range(len(self._points))]
                lines = list(self._lines(points))
                self._objects.add(list(plain_lines(line.to_body() for line in lines)))
                for feed in self._feeds:
                    feed.take(lines)
            self._objects.store()

    def before_commit(self) -> None:
        """Store what was logged before a checkpoint that is about to be committed, if it can be."""
        self._points.extend(self._kept)  # another rank's only if it saves alone
        self._kept.clear()
        until = time.monotonic() + _BEFORE_COMMIT_S
        try:
            with give_up_after(_BEFORE_COMMIT_S):
                self.flush()
        except StoreError as problem:
            log.warning("metrics could not be stored yet: %s", problem)
        for feed in self._feeds:
            feed.wait(until - time.monotonic())

    def report_to(self, tracker: Tracker) -> None:
        """Tell a tracker of all that is logged from here on; on the first rank only."""
        if self._rank == 0:
            self._feeds.append(TrackerFeed(tracker))

    def told_to_stop(self) -> None:
        """Tell trackers that the nodes are about to be taken."""
        for feed in self._feeds:
            feed.preempting()

    def close(self, *, finished: bool, timeout_s: float) -> None:
        """Let trackers end, once all is flushed; blocks `timeout_s` at most."""
        until = time.monotonic() + timeout_s
        for feed in self._feeds:
            feed.close(finished=finished, timeout_s=until - time.monotonic())

    def _lines(self, points: list[_Point]) -> Iterator[MetricLine]:
        by_name: dict[str, list[_Point]] = {}
        for point in points:
            by_name.setdefault(point.name, []).append(point)
        for name, logged in by_name.items():
            read = [(point, _plain(point.value)) for point in logged]
            of_name = [point for point, value in read if value is not None]
            values = [value for _, value in read if value is not None]
            if not values:
                continue
            self._newest.pop(name, None)  # the order is that of the last time
            self._newest[name] = values[-1]
            if self.losses is not None and is_loss(name):
                for point, value in read:
                    self.losses.look(name, point.step, value)
            yield MetricLine(
                name=name,
                steps=[point.step for point in of_name],
                done=[point.done for point in of_name],
                at=[point.at for point in of_name],
                values=values,
            )


def _number(name: str, value: Any) -> Any:
    """Return a value that is no plain number as one, or as a tensor to ask later.

    To ask a GPU for a number would hold up the step until all before it is done.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        if value.numel() == 1 and not value.is_complex():
            return value.item() if value.device.type == "cpu" else value.detach().clone()
    elif not isinstance(value, (str, bytes, bytearray, complex)):
        try:
            return float(value)
        except (TypeError, ValueError, OverflowError):
            pass
    shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
    raise UsageError(
        f"run.log: {name} is a {type(value).__name__}{shape}, but must be a number",
        hint="a float, an int, a NumPy number, or a tensor with one element",
    )


def _plain(value: Any) -> float | None:
    try:
        return number_of(lambda: value)
    except OverflowError:  # an int of more than a thousand digits
        return math.inf if value > 0 else -math.inf
