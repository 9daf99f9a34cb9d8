"""What a device of a node says of the energy it took."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class EnergyCounter:
    """What a device of a node has counted: the first and the newest value that was heard."""

    name: str
    """As metrics name it: `spotguard/node0/gpu1/energy_j`."""
    first_j: float
    last_j: float
