"""Reads values out of data that a job wrote: what is missing or of the wrong type is None."""

from __future__ import annotations

import math
from typing import Any

from spotguard.units import from_iso


def number(data: dict[str, Any], name: str) -> float | None:
    """Return a finite number, or None."""
    value = data.get(name)
    if isinstance(value, (int, float)) and math.isfinite(value):
        return float(value)
    return None


def integer(data: dict[str, Any], name: str) -> int | None:
    """Return a whole number, or None."""
    value = data.get(name)
    return value if isinstance(value, int) else None


def text(data: dict[str, Any], name: str) -> str | None:
    """Return a text, or None."""
    value = data.get(name)
    return value if isinstance(value, str) else None


def instant(data: dict[str, Any], name: str) -> float | None:
    """Return the epoch seconds of an ISO 8601 instant, or None."""
    try:
        return from_iso(data[name])
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
