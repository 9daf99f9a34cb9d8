"""What a run logged and measured, as series over all attempts: one value for each step and name."""

from __future__ import annotations

import logging
import math
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from spotguard.events import keys
from spotguard.events.metric import MetricLine
from spotguard.events.untrusted import Refused
from spotguard.storage.patterns.growing_lines import read_piece, stored_pieces

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from spotguard.control.journal.record import RunRecord
    from spotguard.storage.base import ObjectStore

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Series:
    """One metric over the whole run, by step; all sequences are as long, and no step comes twice.

    What was logged after the checkpoint from which a later attempt went on is not in it: that
    attempt did those steps again.
    """

    name: str
    """As the script called it; what the runtime measures begins with `spotguard/`."""
    steps: Sequence[int]
    """Ascending. A step's number is how many were done before it: 0 for the first."""
    values: Sequence[float]
    """May be NaN or infinite."""
    attempts: Sequence[int]
    """Which attempt logged each."""
    at: Sequence[float]
    """When, in seconds since the epoch."""


def read_series(
    store: ObjectStore,
    record: RunRecord,
    *,
    names: Collection[str] | None = None,
    points: int | None = None,
) -> dict[str, Series]:
    """Return what the run logged, by name. Blocks: reads what the attempts stored.

    Args:
        store: the run's own.
        record: the folded journal, which says where each attempt began.
        names: only these; None is all.
        points: at most about so many of each, evenly thinned, the last one always among them.

    Raises:
        StoreError: the store cannot be read.
    """
    return SeriesReader(store).read(record, names=names, points=points)


class SeriesReader:
    """Reads a run's metrics again and again, at the price of what is new."""

    def __init__(self, store: ObjectStore) -> None:
        """Read from the run's own store."""
        self._store = store
        self._seen: dict[str, tuple[MetricLine, ...]] = {}
        """By the key of a piece, whose content never changes."""

    def read(
        self,
        record: RunRecord,
        *,
        names: Collection[str] | None = None,
        points: int | None = None,
    ) -> dict[str, Series]:
        """Return what `read_series` does; what cannot be read of one piece costs only that."""
        found: dict[str, _Growing] = {}
        used: set[str] = set()
        ends = superseded_from(record)
        for number, end in ends.items():
            for rank, line in self._lines(number, used):
                if names is None or line.name in names:
                    found.setdefault(line.name, _Growing()).take(number, rank, line, end)
        self._seen = {key: lines for key, lines in self._seen.items() if key in used}
        return {name: found[name].series(name, points) for name in sorted(found)}

    def _lines(self, attempt: int, used: set[str]) -> Iterator[tuple[int, MetricLine]]:
        for pieces in stored_pieces(self._store, keys.metrics(attempt)).values():
            for piece in pieces:
                key = piece.keys[0]
                used.add(key)
                if key not in self._seen:
                    try:
                        read = read_piece(self._store, piece)
                    except Refused as problem:
                        log.warning("metrics of attempt %d: %s", attempt, problem)
                        read = None
                    if read is None:
                        continue
                    self._seen[key] = tuple(_parsed(read.lines))
                for line in self._seen[key]:
                    yield piece.name.owner, line


class ValuesOfRun:
    """One metric of a run, read again and again."""

    def __init__(self, store: ObjectStore, name: str) -> None:
        """Read `name` from the run's own store."""
        self._reader = SeriesReader(store)
        self._name = name

    def first_from(self, record: RunRecord, done: int) -> tuple[int, float] | None:
        """Return its first value that counts once so many steps are done, and how many were then.

        None if none is stored.

        Raises:
            StoreError: the store cannot be read.
        """
        series = self._reader.read(record, names=[self._name]).get(self._name)
        if series is None:
            return None
        found = zip(series.steps, series.values, strict=True)
        return next(((step + 1, value) for step, value in found if step + 1 >= done), None)

    def newest(self, record: RunRecord) -> float | None:
        """Return its newest value that counts; None if none is stored. Raises as `first_from`."""
        series = self._reader.read(record, names=[self._name]).get(self._name)
        return series.values[-1] if series is not None and len(series.values) else None


def superseded_from(record: RunRecord) -> dict[int, int | None]:
    """Return, by attempt, the count of steps from which on what it did counts no more.

    That is where a later attempt went on, the earliest if there are several. None: all counts.
    """
    ends: dict[int, int | None] = {}
    earliest: int | None = None
    for attempt in reversed(record.attempts):
        ends[attempt.number] = earliest
        if attempt.started_at is not None and attempt.resumed_step is not None:
            begin = attempt.resumed_step
            earliest = begin if earliest is None else min(earliest, begin)
    return dict(sorted(ends.items()))


def _parsed(lines: Sequence[bytes]) -> Iterator[MetricLine]:
    for raw in lines:
        try:
            yield MetricLine.from_json(raw)
        except Refused as problem:
            log.warning("a line of metrics: %s", problem)


@dataclass
class _Growing:
    """A series that is being put together."""

    by_step: dict[int, tuple[float, int, float]] = field(default_factory=dict)
    order: dict[int, tuple[int, int, float]] = field(default_factory=dict)

    def take(self, attempt: int, rank: int, line: MetricLine, end: int | None) -> None:
        """Take an attempt's values as far as they count; a later one replaces an earlier one.

        Of one attempt the first rank's count: others log only when it is gone.
        """
        for step, done, at, value in zip(line.steps, line.done, line.at, line.values, strict=True):
            if end is not None and done >= end:
                continue
            order = (attempt, -rank, at)
            if step not in self.order or self.order[step] <= order:
                self.order[step] = order
                self.by_step[step] = (value, attempt, at)

    def series(self, name: str, points: int | None) -> Series:
        steps = sorted(self.by_step)
        if points is not None and len(steps) > points:
            stride = math.ceil(len(steps) / max(points, 1))
            steps = steps[(len(steps) - 1) % stride :: stride]
        kept = [self.by_step[step] for step in steps]
        return Series(
            name=name,
            steps=array("q", steps),
            values=array("d", (value for value, _, _ in kept)),
            attempts=array("l", (attempt for _, attempt, _ in kept)),
            at=array("d", (at for _, _, at in kept)),
        )
