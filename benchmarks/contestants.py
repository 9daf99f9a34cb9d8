"""Everything that is measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.floors import FLOORS
from benchmarks.ours import OURS
from benchmarks.rivals import RIVALS

if TYPE_CHECKING:
    from benchmarks.method import Method

METHODS: tuple[type[Method], ...] = (*RIVALS, *OURS)

__all__ = ["FLOORS", "METHODS"]
