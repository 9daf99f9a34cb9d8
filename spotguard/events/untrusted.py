"""Reads what others wrote, without trust: jobs, nodes, clouds, whoever can write into the store.

`parse` makes JSON of bytes or raises `Refused`, and nothing else, quickly. What it returns is
small, shallow, and can be written down, printed and calculated with. The other functions take one
value out of an object: what is missing, of the wrong type or beyond all reason is None, and
`needed` refuses what cannot be done without.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, TypeVar

from spotguard.shared.units import from_iso

if TYPE_CHECKING:
    from collections.abc import Mapping

MOST_BYTES = 4 << 20
"""Of one object that is not a checkpoint's. Ours have some hundred bytes, with a traceback a few
thousand."""
LARGEST = 2**63 - 1
"""What SQLite, and everybody else, takes for an integer."""
_DEEPEST = 32
_LARGEST_NUMBER = 1e18
"""More seconds, bytes or dollars than there are; products of such numbers are still finite."""
_LATEST_AT = 32_503_680_000.0
"""The year 3000: what is added to an instant still has a date."""
_LONGEST_TEXT = 100_000

_T = TypeVar("_T")


class Refused(ValueError):
    """What somebody else wrote is too large, too deep, or not what it should be."""


def parse(raw: bytes | str, what: str, *, most_bytes: int = MOST_BYTES) -> Any:
    """Return the JSON value of `raw`, which `what` names; NaN and infinities are taken for null.

    Raises:
        Refused: it is none, larger than `most_bytes`, nested too deeply, or holds an integer of
            more than 64 bits.
    """
    check_size(raw, what, most_bytes=most_bytes)
    try:
        text = raw if isinstance(raw, str) else str(raw, "utf-8")
        return _plain(json.loads(text, parse_int=_integer), _DEEPEST)
    except RecursionError:
        raise Refused(f"{what} is nested too deeply") from None
    except ValueError as problem:
        raise Refused(f"{what} makes no sense: {ascii(str(problem)[:200])[1:-1]}") from None


def check_size(raw: bytes | str, what: str, *, most_bytes: int = MOST_BYTES) -> None:
    """Raise `Refused` if there are more bytes than anybody reads."""
    if len(raw) > most_bytes:
        raise Refused(f"{what} is too large ({len(raw)} bytes)")


def parse_object(raw: bytes | str, what: str, *, most_bytes: int = MOST_BYTES) -> dict[str, Any]:
    """Return the JSON object of `raw`; raises as `parse`, also for other values."""
    return an_object(parse(raw, what, most_bytes=most_bytes), what)


def an_object(value: Any, what: str) -> dict[str, Any]:
    """Return a parsed value if it is an object; else raise `Refused`."""
    if not isinstance(value, dict):
        raise Refused(f"{what} is not an object")
    return value


def needed(value: _T | None, what: str) -> _T:
    """Return a value; raise `Refused` if there is none that makes sense."""
    if value is None:
        raise Refused(f"it has no {what} that makes sense")
    return value


def number(data: Mapping[str, Any], name: str) -> float | None:
    """Return a finite number, or None."""
    value = data.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if abs(value) <= _LARGEST_NUMBER else None  # NaN is no number, either


def amount(data: Mapping[str, Any], name: str) -> float | None:
    """Return a finite number that is not negative, such as a price, or None."""
    value = number(data, name)
    return value if value is not None and value >= 0 else None


def integer(
    data: Mapping[str, Any], name: str, *, low: int = -LARGEST, high: int = LARGEST
) -> int | None:
    """Return a whole number from `low` to `high`, or None."""
    value = data.get(name)
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if low <= value <= high else None


def text(data: Mapping[str, Any], name: str) -> str | None:
    """Return a text, cut if it is very long, or None."""
    value = data.get(name)
    return value[:_LONGEST_TEXT] if isinstance(value, str) else None


def objects(data: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """Return the objects in a list; nothing if it is none."""
    value = data.get(name)
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def seconds(data: Mapping[str, Any], name: str) -> float | None:
    """Return an instant that stands as seconds since the epoch, or None."""
    value = amount(data, name)
    return value if value is not None and value <= _LATEST_AT else None


def instant(data: Mapping[str, Any], name: str) -> float | None:
    """Return the epoch seconds of an ISO 8601 instant, or None."""
    value = text(data, name)
    try:
        return None if value is None else seconds({name: from_iso(value)}, name)
    except (ValueError, OverflowError):
        return None


def _plain(value: Any, levels: int) -> Any:
    """Return a value that can be written as JSON and as UTF-8; `Refused` if it is too deep."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "replace").decode()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if not isinstance(value, (dict, list)):
        return value
    if not levels:
        raise Refused("it is nested too deeply")
    if isinstance(value, list):
        return [_plain(each, levels - 1) for each in value]
    return {_plain(name, 0): _plain(each, levels - 1) for name, each in value.items()}


def _integer(digits: str) -> int:
    if len(digits) > len(str(-LARGEST)) or abs(value := int(digits)) > LARGEST:
        raise Refused("an integer has too many digits")
    return value
