"""Everything that is measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.checkpoint.floors import FLOORS
from benchmarks.checkpoint.ours import OURS
from benchmarks.checkpoint.rivals import RIVALS

if TYPE_CHECKING:
    from benchmarks.checkpoint.method import Method

METHODS: tuple[type[Method], ...] = (*RIVALS, *OURS)

__all__ = ["FLOORS", "METHODS"]
