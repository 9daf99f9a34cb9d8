"""How far a search for nodes is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Search:
    """How far a search for capacity is: what a launch that is refused late goes back to."""

    tried: tuple[tuple[int, str], ...]
    full: tuple[tuple[int, str], ...]
    quota_refusal: str
    mendable: bool
    rounds: int
    waiting_since: float | None
    quota_until: float | None
