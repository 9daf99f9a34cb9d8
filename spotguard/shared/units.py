"""Durations, money, bytes and instants: parsed once, printed one way."""

from __future__ import annotations

import math
import re
import time
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable

_SECONDS_PER = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_LONGEST = 64
"""Characters of a duration: looking for its parts takes quadratic time."""
_DURATION_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|min|s|m|h|d)")


class Clock(Protocol):
    """Where time comes from, so that tests can own it."""

    def now(self) -> float:
        """Return seconds since the epoch (wall clock; may jump)."""
        ...

    def monotonic(self) -> float:
        """Return seconds that never go back."""
        ...

    def sleep(self, seconds: float) -> None:
        """Block for `seconds`."""
        ...


class SystemClock:
    """The machine's own clock."""

    def now(self) -> float:
        """Return seconds since the epoch."""
        return time.time()

    def monotonic(self) -> float:
        """Return seconds that never go back."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Block for `seconds`."""
        time.sleep(seconds)


def parse_duration_s(text: str | float) -> float:
    """Return seconds for `90`, `"90s"`, `"1h30m"`, `"2d"`, `"500ms"`.

    Raises:
        ValueError: it is not a duration, or negative, or not finite.
    """
    if isinstance(text, (int, float)):
        seconds = float(text)
    else:
        if len(text) > _LONGEST:
            raise ValueError("not a duration: it is too long")
        compact = text.strip().lower().replace(" ", "")
        parts = _DURATION_PART.findall(compact)
        if parts and "".join(n + u for n, u in parts) == compact:
            seconds = sum(float(n) * _SECONDS_PER[u] for n, u in parts)
        else:
            seconds = float(compact)  # a bare number, or a ValueError
    if not math.isfinite(seconds) or seconds < 0:
        raise ValueError(f"not a duration: {text!r}")
    return seconds


def sum_known(parts: Iterable[float | None]) -> float | None:
    """Return the sum of what is known; None if a part is not."""
    every = list(parts)
    known = [part for part in every if part is not None]
    return sum(known) if len(known) == len(every) else None


def format_duration(seconds: float | None) -> str:
    """Return `3 s`, `2 min 05 s`, `1 h 20 min`, `3 d 4 h`; `unknown` for None."""
    if seconds is None:
        return "unknown"
    if seconds < 0:
        return f"-{format_duration(-seconds)}"
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def format_usd(usd: float | None) -> str:
    """Return `$1,234.50`, with more digits below ten cents; `unknown` for None, never zero."""
    if usd is None:
        return "unknown"
    digits = 2 if abs(usd) >= 0.1 or usd == 0 else 4
    return f"${usd:,.{digits}f}"


def format_bytes(size: float | None) -> str:
    """Return `512 B`, `3.2 MB`, `1.4 GB` (decimal units); `unknown` for None."""
    if size is None:
        return "unknown"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(size) < 1000 or unit == "TB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    raise AssertionError("unreachable")


def to_iso(at: float) -> str:
    """Return an instant (seconds since the epoch) as ISO 8601 UTC with milliseconds."""
    return (
        datetime.fromtimestamp(at, tz=timezone.utc)
        .isoformat(timespec="milliseconds")
        .replace("+00:00", "Z")
    )


def from_iso(text: str) -> float:
    """Return seconds since the epoch for an ISO 8601 instant with a zone.

    Raises:
        ValueError: it is not an instant, or has no zone.
    """
    instant = datetime.fromisoformat(text.replace("Z", "+00:00"))
    if instant.tzinfo is None:
        raise ValueError(f"instant without a zone: {text!r}")
    return instant.timestamp()
