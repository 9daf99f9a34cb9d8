"""Recorded spot markets: how many nodes could be had, tick by tick, and at what price.

A trace is a JSON object, plain or gzipped: `metadata` (`cloud`, `zone`, `instance`,
`gap_seconds`, and where known `on_demand_price` and `spot_price_const`), `capacity` (nodes that
could be had at each tick) and `spot_price` (USD per node and hour at each tick, or null).
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spotguard.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Mapping

FIELD = "trace"
"""The setting that errors name."""

_MAX_BYTES = 64 * 1024 * 1024
"""A real trace has some 100 kB; more, unpacked, is a mistake or a gzip bomb."""


@dataclass(frozen=True, kw_only=True)
class Trace:
    """One recorded market. After its end the last values hold."""

    cloud: str
    zone: str
    instance_type: str
    gap_s: float
    """Seconds between two ticks."""
    capacity: tuple[int, ...]
    spot_usd_per_h: tuple[float | None, ...] | None
    """Of one node, at each tick; None where it was not recorded."""
    constant_spot_usd_per_h: float | None
    on_demand_usd_per_h: float | None

    @property
    def region(self) -> str:
        """The zone's region: `us-east-2` for `us-east-2a`, `us-west1` for `us-west1-a`."""
        head, dash, tail = self.zone.rpartition("-")
        if dash and len(tail) == 1 and tail.isalpha():
            return head
        return self.zone.rstrip("abcdefghijklmnopqrstuvwxyz") or self.zone

    @property
    def duration_s(self) -> float:
        """How long the record is, before any speed-up."""
        return self.gap_s * len(self.capacity)

    def capacity_at(self, elapsed_s: float, speed_up: float = 1.0) -> int:
        """Return how many nodes can be had `elapsed_s` into the replay."""
        return self.capacity[self._tick(elapsed_s, speed_up)]

    def price_at(self, elapsed_s: float, speed_up: float = 1.0) -> float | None:
        """Return USD per node and hour `elapsed_s` into the replay; None if not recorded."""
        if self.spot_usd_per_h is None:
            return self.constant_spot_usd_per_h
        return self.spot_usd_per_h[self._tick(elapsed_s, speed_up)]

    def _tick(self, elapsed_s: float, speed_up: float) -> int:
        tick = int(max(0.0, elapsed_s) * speed_up / self.gap_s)
        return min(tick, len(self.capacity) - 1)


def read_trace(path: str | Path) -> Trace:
    """Return the trace in the file at `path` (`.json` or `.json.gz`; the content decides).

    Raises:
        SpecError: the file cannot be read, or is no trace; says what is wrong with it.
    """
    try:
        body = json.loads(_read(Path(path)))
    except OSError as problem:
        reason = problem.strerror or str(problem)
        raise SpecError(FIELD, f"{path} cannot be read: {reason}") from problem
    except (ValueError, EOFError, RecursionError, zlib.error) as problem:
        raise _bad(path, f"it is not JSON ({problem})") from problem
    if not isinstance(body, dict):
        raise _bad(path, "it is not a JSON object")
    try:
        return _from_json(body)
    except (ValueError, OverflowError) as problem:
        raise _bad(path, str(problem)) from problem


def _read(path: Path) -> bytes:
    with path.open("rb") as raw:
        zipped = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        if zipped:
            with gzip.GzipFile(fileobj=raw) as unzipped:
                data = unzipped.read(_MAX_BYTES + 1)
        else:
            data = raw.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise ValueError(f"more than {_MAX_BYTES} bytes")
    return data


def _from_json(body: Mapping[str, Any]) -> Trace:
    metadata = body.get("metadata")
    if not isinstance(metadata, dict):
        raise ValueError("'metadata' must be an object")
    gap_s = _number(metadata, "gap_seconds")
    if gap_s is None or gap_s == 0:
        raise ValueError("'gap_seconds' must be a number above 0")
    capacity = _capacity(body.get("capacity"))
    return Trace(
        cloud=_word(metadata, "cloud"),
        zone=_word(metadata, "zone"),
        instance_type=_word(metadata, "instance"),
        gap_s=gap_s,
        capacity=capacity,
        spot_usd_per_h=_prices(body.get("spot_price"), len(capacity)),
        constant_spot_usd_per_h=_number(metadata, "spot_price_const"),
        on_demand_usd_per_h=_number(metadata, "on_demand_price"),
    )


def _word(metadata: Mapping[str, Any], name: str) -> str:
    word = metadata.get(name)
    if not isinstance(word, str) or not word:
        raise ValueError(f"'{name}' must be a text, not {word!r}")
    return word


def _number(metadata: Mapping[str, Any], name: str) -> float | None:
    number = metadata.get(name)
    if number is None:
        return None
    if not _is_amount(number):
        raise ValueError(f"'{name}' must be a number from 0, not {number!r}")
    return float(number)


def _capacity(ticks: object) -> tuple[int, ...]:
    if not isinstance(ticks, list) or not ticks:
        raise ValueError("'capacity' must be a list with at least one tick")
    for tick, nodes in enumerate(ticks):
        if type(nodes) is not int or nodes < 0:
            raise ValueError(f"'capacity' at tick {tick} must be a count of nodes, not {nodes!r}")
    return tuple(ticks)


def _prices(ticks: object, expected: int) -> tuple[float | None, ...] | None:
    if ticks is None:
        return None
    if not isinstance(ticks, list) or len(ticks) != expected:
        raise ValueError(f"'spot_price' must be null or a list of {expected} ticks, as 'capacity'")
    for tick, price in enumerate(ticks):
        if price is not None and not _is_amount(price):
            raise ValueError(f"'spot_price' at tick {tick} must be a price, not {price!r}")
    return tuple(None if price is None else float(price) for price in ticks)


def _is_amount(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return math.isfinite(value) and value >= 0


def _bad(path: str | Path, problem: str) -> SpecError:
    return SpecError(
        FIELD,
        f"{path} is not a trace: {problem}",
        hint="a trace holds metadata, capacity and spot_price; see spotguard/shared/spot_traces.py",
    )
