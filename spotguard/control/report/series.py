"""Numbers over a run's steps, over all attempts: what a plot is drawn from."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spotguard.control.journal.fold_attempt import progress_of
from spotguard.control.journal.record import Kind
from spotguard.events.metric import OWN

if TYPE_CHECKING:
    from collections.abc import Iterable

    from spotguard.control.journal.journal import Journal
    from spotguard.control.journal.record import RunRecord
    from spotguard.control.status.metrics import SeriesReader

LOSS = "loss"
MOST_SERIES = 24
"""A page of hundreds shows none."""
_POINTS_OF_OTHERS = 500
MOST_POINTS = 2000
"""A screen has no more pixels in a row."""


@dataclass(frozen=True, kw_only=True)
class PlottedSeries:
    """One number over the steps; the lists are as long as each other."""

    name: str
    steps: tuple[int, ...]
    values: tuple[float, ...]
    attempts: tuple[int, ...]
    """Which attempt told each value."""
    counts: tuple[bool, ...]
    """False where a later attempt did the step again: its value is the one that counts."""


@dataclass(frozen=True)
class Point:
    """One value of a series."""

    step: int
    value: float
    attempt: int


def read_losses(journal: Journal, *, after_seq: int = 0) -> list[Point]:
    """Return the losses that the journal has from heartbeats, in the order in which it has them."""
    points = []
    for entry in journal.of_kinds((Kind.PROGRESS.value,), after_seq=after_seq):
        progress = progress_of(entry.data, entry.at)
        if progress is not None and progress.loss is not None:
            points.append(Point(progress.step, progress.loss, entry.attempt or 0))
    return points


def all_series(
    reader: SeriesReader | None, record: RunRecord, losses: list[Point]
) -> tuple[PlottedSeries, ...]:
    """Return what the run logged, `loss` first; where it logged none, that of its heartbeats.

    Raises:
        StoreError: the store cannot be read.
    """
    read = reader.read(record, points=MOST_POINTS) if reader is not None else {}
    names = sorted(read, key=lambda name: (name != LOSS, name.startswith(OWN), name))
    logged = []
    for name in names[:MOST_SERIES]:
        told = read[name]
        every = 1 if name == LOSS else -(-len(told.steps) // _POINTS_OF_OTHERS)
        kept = [i for i in range(len(told.steps)) if (len(told.steps) - 1 - i) % every == 0]
        kept = [i for i in kept if math.isfinite(told.values[i])]
        logged.append(
            PlottedSeries(
                name=name,
                steps=tuple(told.steps[i] for i in kept),
                values=tuple(told.values[i] for i in kept),
                attempts=tuple(told.attempts[i] for i in kept),
                counts=(True,) * len(kept),
            )
        )
    if LOSS in read:
        return tuple(logged)
    return (series(LOSS, thinned(losses), record), *logged)


def thinned(points: list[Point], most: int = MOST_POINTS) -> list[Point]:
    """Return at most so many of them, evenly, with the last one; the extremes may be lost."""
    if len(points) <= most:
        return points
    every = -(-len(points) // most)
    kept = points[::every]
    return kept if kept[-1] is points[-1] else [*kept, points[-1]]


def series(name: str, points: Iterable[Point], record: RunRecord) -> PlottedSeries:
    """Return a series by attempt and step, each point marked by whether it counts."""
    ordered = sorted(points, key=lambda point: (point.attempt, point.step))
    resumed = _resumed_steps(record)
    return PlottedSeries(
        name=name,
        steps=tuple(point.step for point in ordered),
        values=tuple(point.value for point in ordered),
        attempts=tuple(point.attempt for point in ordered),
        counts=tuple(
            all(point.step <= step for number, step in resumed if number > point.attempt)
            for point in ordered
        ),
    )


def _resumed_steps(record: RunRecord) -> list[tuple[int, int]]:
    """Return (attempt, step) of where each attempt that trained began."""
    return [
        (attempt.number, attempt.resumed_step)
        for attempt in record.attempts
        if attempt.started_at is not None and attempt.resumed_step is not None
    ]
