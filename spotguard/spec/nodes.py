"""How many nodes a run may have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spotguard.spec.setting import Whole

MAX_NODES = 1024
"""More is a typing mistake, and would make a ladder with that many rungs."""


@dataclass(frozen=True)
class NodeRange:
    """How many nodes a run may have: asks for `max`, goes on with less down to `min`."""

    min: int
    max: int

    def __post_init__(self) -> None:
        if not 1 <= self.min <= self.max <= MAX_NODES:
            raise ValueError(f"not a range of nodes: {self.min}:{self.max}")

    def __str__(self) -> str:
        return str(self.max) if self.min == self.max else f"{self.min}:{self.max}"

    @classmethod
    def parse(cls, raw: Any) -> NodeRange:
        """Return the range for `2`, `"2"`, `"1:4"` or a table of `min` and `max`."""
        if isinstance(raw, cls):
            return raw
        if isinstance(raw, Mapping):
            low, high = raw.get("min"), raw.get("max")
        else:
            low, _, high = str(raw).partition(":")
            high = high if ":" in str(raw) else low
        count = Whole(1, MAX_NODES)
        if isinstance(raw, (bool, float)):
            raise ValueError("not a count of nodes")
        return cls(count(low), count(high))
