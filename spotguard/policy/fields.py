"""The fields of JSON lines: read, bounded, and refused in one sentence that names them."""

from __future__ import annotations

import json
import reprlib
import sys
from typing import TYPE_CHECKING, Any

from spotguard.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

LONGEST_S = 100 * 365.25 * 86_400
"""No duration is longer than a century."""
SHORTEST_TICK_S = 1.0
MOST_NODES = 100_000
DEAREST_USD = 1e9
"""Of a price, per node (or gang) and hour, or per GB."""
RICHEST_USD = 1e15
"""Of a budget, and of what was spent."""
MOST = sys.float_info.max

UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0}
SPOT_PRICE = ("spot_usd_per_h", "price_usd_per_h", "price", "spot_price", "spot")
OVER_PRICE = ("on_demand_usd_per_h", "on_demand_price", "on_demand", "od_price", "ondemand_price")
NAME = ("name", "place", "zone", "id")

_SHOWN = reprlib.Repr()
_SHOWN.maxstring = _SHOWN.maxother = 60
_SHOWN.maxlong = 40


def shown(value: Any) -> str:
    """Return a value as it was told, shortened: it may be of a million characters."""
    return _SHOWN.repr(value)


def object_of(line: str, what: str) -> dict[str, Any]:
    """Return a line's JSON object; `what` names the line in the error."""
    try:
        line.encode()
        body = json.loads(line, parse_constant=_no_constant)
    except (ValueError, RecursionError) as problem:
        why = "it is not UTF-8" if isinstance(problem, UnicodeError) else problem
        raise UsageError(f"{what} must be a JSON object ({why})") from problem
    if not isinstance(body, dict):
        raise UsageError(f"{what} must be a JSON object, not {type(body).__name__}")
    return body


def _no_constant(word: str) -> float:
    raise ValueError(f"{word} is no JSON number")


def places_of(said: Any, field: str) -> dict[str, dict[str, Any]]:
    """Return what was said of places, by name: of a list or an object, in full or in short."""
    found: dict[str, dict[str, Any]] = {}
    for name, entry in _pairs(said, field):
        if isinstance(entry, bool) or entry is None:
            entry = {"answers": entry}
        elif isinstance(entry, (int, float)):
            entry = {"price": entry}
        if not isinstance(entry, dict):
            raise UsageError(f"{field}: {shown(name)} must be an object, not {shown(entry)}")
        if name in found:
            raise UsageError(f"{field}: {shown(name)} stands there twice")
        found[name] = entry
    return found


def _pairs(said: Any, field: str) -> Iterable[tuple[str, Any]]:
    if isinstance(said, dict):
        if "" in said:
            raise UsageError(f"{field}: each place needs a name, not ''")
        return said.items()
    if not isinstance(said, list):
        raise UsageError(f"{field} must be a list or an object, not {shown(said)}")
    pairs = []
    for entry in said:
        told = {"name": entry} if isinstance(entry, str) else entry
        name = first(told, NAME) if isinstance(told, dict) else None
        if not isinstance(name, str) or not name:
            raise UsageError(f"{field}: each place needs a name, not {shown(entry)}")
        pairs.append((name, told))
    return pairs


def first(entry: dict[str, Any], names: Iterable[str]) -> Any:
    """Return the value of the first of these names that has one; None if none has."""
    return next((entry[name] for name in names if entry.get(name) is not None), None)


def number(value: Any, name: str, most: float = MOST) -> float | None:
    """Return a number from 0 to `most`; None for None."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise UsageError(f"{name} must be a number, not {shown(value)}")
    if not 0 <= value <= most:  # neither are NaN, infinity, and whole numbers too long for a float
        upper = "" if most == MOST else f" to {most:,g}"
        raise UsageError(f"{name} must be a number from 0{upper}, not {shown(value)}")
    return float(value)


def count(entry: dict[str, Any], names: Iterable[str], least: int = 1) -> int | None:
    """Return a number of nodes, by the first of these names that is there; None if none is."""
    name = next((each for each in names if entry.get(each) is not None), None)
    value = None if name is None else number(entry[name], name)
    if value is None:
        return None
    if value != int(value):
        raise UsageError(f"{name} must be a whole number, not {shown(value)}")
    if not least <= value <= MOST_NODES:
        raise UsageError(f"{name} must be from {least} to {MOST_NODES}, not {shown(value)}")
    return int(value)


def duration(
    entry: dict[str, Any], stems: Iterable[str], unit_s: float, tick_s: float
) -> float | None:
    """Return seconds, by the first of these names that is there, with a unit or without."""
    suffixes = (*UNITS.items(), ("ticks", tick_s), ("seconds", 1.0), ("hours", 3600.0))
    for stem in stems:
        scales = {f"{stem}_{suffix}": scale for suffix, scale in suffixes} | {stem: unit_s}
        for name, scale in scales.items():
            value = number(entry.get(name), name)
            if value is None:
                continue
            if value * scale > LONGEST_S:
                raise UsageError(
                    f"{name} must be at most 100 years, which are {LONGEST_S:.10g} s, "
                    f"not {shown(value)}"
                )
            return value * scale
    return None


def text(value: Any, name: str) -> str | None:
    """Return a text; None for None."""
    if value is None or isinstance(value, str):
        return value
    raise UsageError(f"{name} must be a text, not {shown(value)}")
