"""Numbers over a run's steps, over all attempts: what a plot is drawn from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from spotguard.control.journal.fold_attempt import progress_of
from spotguard.control.journal.record import Kind

if TYPE_CHECKING:
    from collections.abc import Iterable

    from spotguard.control.journal.journal import Journal
    from spotguard.control.journal.record import RunRecord

MOST_POINTS = 2000
"""A screen has no more pixels in a row."""


@dataclass(frozen=True, kw_only=True)
class Series:
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


def thinned(points: list[Point], most: int = MOST_POINTS) -> list[Point]:
    """Return at most so many of them, evenly, with the last one; the extremes may be lost."""
    if len(points) <= most:
        return points
    every = -(-len(points) // most)
    kept = points[::every]
    return kept if kept[-1] is points[-1] else [*kept, points[-1]]


def series(name: str, points: Iterable[Point], record: RunRecord) -> Series:
    """Return a series by attempt and step, each point marked by whether it counts."""
    ordered = sorted(points, key=lambda point: (point.attempt, point.step))
    resumed = _resumed_steps(record)
    return Series(
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
