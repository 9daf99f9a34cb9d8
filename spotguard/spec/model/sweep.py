"""The points of a sweep, as a person writes them: `lr=1e-3,3e-4 seed=1..4`."""

from __future__ import annotations

import itertools
import math
import re
from typing import TYPE_CHECKING, Final

from spotguard.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

MOST_POINTS: Final = 64
"""Each is a run with a controller of its own, which takes memory on this machine."""
ALLOWED: Final = "NAME=VALUES, values by commas, as 1..4, or as 1e-4..1e-1*10"
_HINT: Final = "as in: --sweep 'lr=1e-3,3e-4 seed=1..4'"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_COUNTED = re.compile(r"(-?\d+)\.\.(-?\d+)")
_MULTIPLIED = re.compile(r"(.+)\.\.(.+)\*(.+)")
_LIKE_RANGE = re.compile(r"-?[\d.]+(e[-+]?\d+)?\.\.(-?\d.*)?")
_ROUNDING = 1e-9


def points_of(text: str) -> list[dict[str, str]]:
    """Return the arguments of each point, by name: all combinations of the values.

    Raises:
        SpecError: says in one sentence what makes no sense, or that there are too many.
    """
    axes: dict[str, list[str]] = {}
    for word in text.split():
        name, given, values = word.partition("=")
        if not given or not _NAME.fullmatch(name):
            raise _wrong(f"{word!r} is no NAME=VALUES")
        if name in axes:
            raise _wrong(f"{name} is given twice")
        axes[name] = _values(name, values)
    if not axes:
        raise _wrong("it names no argument")
    count = math.prod(map(len, axes.values()))
    _check_count(count)
    return [dict(zip(axes, each, strict=True)) for each in itertools.product(*axes.values())]


def checked_points(points: Sequence[Mapping[str, object]]) -> list[dict[str, str]]:
    """Return points that a program made, with their values as text; raises as `points_of`."""
    _check_count(len(points))
    made = [{name: str(value) for name, value in each.items()} for each in points]
    for name in {name for each in made for name in each}:
        if not _NAME.fullmatch(name):
            raise _wrong(f"{name!r} is no name of an argument")
    return made


def arguments_of(point: Mapping[str, str]) -> list[str]:
    """Return what a point adds to the script's arguments: `--lr 1e-3 --seed 1`."""
    return [word for name, value in point.items() for word in (f"--{name}", value)]


def in_words(point: Mapping[str, str]) -> str:
    """Return a point for people: `lr=1e-3 seed=1`."""
    return " ".join(f"{name}={value}" for name, value in point.items())


def _check_count(count: int) -> None:
    if not 1 <= count <= MOST_POINTS:
        raise _wrong(f"these are {count} points; a sweep has 1 to {MOST_POINTS}")


def _values(name: str, text: str) -> list[str]:
    values = [value for part in text.split(",") for value in _expanded(name, part)]
    twice = next((value for value in values if values.count(value) > 1), None)
    if twice is not None:
        raise _wrong(f"{name} has {twice} twice")
    return values


def _expanded(name: str, part: str) -> Iterator[str]:
    if not part:
        raise _wrong(f"{name} has an empty value")
    counted, multiplied = _COUNTED.fullmatch(part), _MULTIPLIED.fullmatch(part)
    if counted:
        first, last = int(counted[1]), int(counted[2])
        if last < first:
            raise _wrong(f"{name}={part} goes down")
        _check_count(last - first + 1)
        yield from map(str, range(first, last + 1))
    elif multiplied:
        yield from _multiples(name, part, multiplied)
    elif _LIKE_RANGE.fullmatch(part):
        raise _wrong(f"{name}={part} is no range: one of whole numbers is 1..4, else say *FACTOR")
    else:
        yield part


def _multiples(name: str, part: str, found: re.Match[str]) -> Iterator[str]:
    try:
        first, last, factor = (float(found[group]) for group in (1, 2, 3))
    except ValueError:
        raise _wrong(f"{name}={part} has what is no number") from None
    if not (0 < first <= last < math.inf and 1 < factor < math.inf):
        raise _wrong(f"{name}={part} does not grow from a first to a last number above 0")
    # Neither the quotient of both ends nor the power that leads from one to the other need be a
    # number that a float can hold.
    steps = (math.log(last) - math.log(first)) / math.log(factor)
    count = math.floor(steps + _ROUNDING) + 1
    _check_count(count)
    value = first
    for _ in range(count):
        yield f"{value:.10g}"
        value = min(value * factor, last)


def _wrong(problem: str) -> SpecError:
    return SpecError("sweep", f"{problem}; allowed: {ALLOWED}", hint=_HINT)
