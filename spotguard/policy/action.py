"""What a policy says to do; each action says why, in one sentence for the journal."""

from __future__ import annotations

from dataclasses import dataclass

SPOT, ON_DEMAND = "spot", "on_demand"


@dataclass(frozen=True, kw_only=True)
class Buy:
    """Nothing runs: ask this place for nodes."""

    place: str
    market: str
    nodes: int
    why: str
    then: tuple[str, ...] = ()
    """Spot places to ask next, in this order, should the first refuse."""
    probe: tuple[str, ...] = ()
    """Places of which it would help to know whether they answer."""


@dataclass(frozen=True, kw_only=True)
class Stay:
    """Go on with what runs."""

    why: str
    probe: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Move:
    """Save, give up what runs, and buy these nodes instead. The place has just answered."""

    place: str
    market: str
    nodes: int
    why: str
    probe: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Leave:
    """Save and give up what runs; buy nothing."""

    why: str
    probe: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class HoldOff:
    """Nothing runs, and nothing is bought."""

    why: str
    probe: tuple[str, ...] = ()


Action = Buy | Stay | Move | Leave | HoldOff
