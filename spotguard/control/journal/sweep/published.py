"""What each point of a sweep tells the others in the store: its value at each look so far."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from spotguard.errors import NotFound
from spotguard.events import keys
from spotguard.events.untrusted import Refused, integer, number, parse_object, text
from spotguard.storage.small_objects import get_small

if TYPE_CHECKING:
    from collections.abc import Mapping

    from spotguard.storage.base import ObjectStore

_WORDS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_MOST_LOOKS = 64


@dataclass(frozen=True, kw_only=True)
class Values:
    """What one point had at the looks that it came to."""

    by_step: Mapping[int, float] = field(default_factory=dict)
    """By the steps of the look."""
    stopped: str = ""
    """Why it was stopped; empty if it was not."""

    def to_bytes(self) -> bytes:
        """Return what is written into the store."""
        values = [
            [step, value if math.isfinite(value) else str(value)]
            for step, value in sorted(self.by_step.items())
        ]
        return json.dumps({"schema": 1, "values": values, "stopped": self.stopped}).encode()

    @classmethod
    def from_bytes(cls, raw: bytes) -> Values:
        """Return what `to_bytes` wrote; `Refused` if it makes no sense."""
        body = parse_object(raw, "the values of a point")
        pairs = body.get("values")
        if not isinstance(pairs, list) or len(pairs) > _MOST_LOOKS:
            raise Refused("the values of a point are none")
        return cls(by_step=dict(map(_pair, pairs)), stopped=text(body, "stopped") or "")


def _pair(pair: object) -> tuple[int, float]:
    if not isinstance(pair, list) or len(pair) != 2:
        raise Refused("the values of a point are none")
    named = {"step": pair[0], "value": pair[1]}
    step, value = integer(named, "step", low=1), number(named, "value")
    if value is None and isinstance(pair[1], str):
        value = _WORDS.get(pair[1])
    if step is None or value is None:
        raise Refused("the values of a point are none")
    return step, value


def read_values(store: ObjectStore, run_id: str) -> Values:
    """Return what a point told, from the sweep's store; nothing if it did not or makes no sense.

    Raises:
        StoreError: the store cannot be read.
    """
    try:
        return Values.from_bytes(get_small(store, keys.values(run_id)))
    except (NotFound, Refused):
        return Values()


def read_all(store: ObjectStore) -> dict[str, Values]:
    """Return what all points told, by run id; raises as `read_values`."""
    told = (keys.parse_values(info.key) for info in store.list(keys.VALUES))
    return {run_id: read_values(store, run_id) for run_id in told if run_id is not None}
