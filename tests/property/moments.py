"""Which of the moments a script has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.property.child.moments import MOMENTS
from tests.property.draw import NOT_BY_MISTAKE

if TYPE_CHECKING:
    from collections.abc import Mapping

_RARE = {"shard", "manifest", "committed"}


def at_hand(moment: str, counts: Mapping[str, int], place: float, kind: str, save: str) -> str:
    """Return the moment if it comes, else another one that does, by the same chance."""
    there = [
        each
        for each in MOMENTS
        if counts.get(each)
        and not (kind == "raise" and each in NOT_BY_MISTAKE)
        and not (each in _RARE and save in ("100_steps", "auto"))
    ]
    if moment in there or not there:
        return moment
    return there[int(place * 997) % len(there)]
