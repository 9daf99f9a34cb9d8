"""A node that a run's controller has for itself, as the journal and the run store know it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ControllerNode:
    """A node on which the run's controller lives, or lived: the run pays for it."""

    number: int
    """From 1; in the run store it has a key of its own."""
    cluster: str
    place: str
    """As a user writes it: `aws/us-east-1/us-east-1a`."""
    price_usd_per_h: float | None
    """None: unknown."""
    since: float
    """When it was asked for: from then on it may cost."""
    until: float | None = None
    """When it ceased to cost, or will at the latest; None while nobody has told it to go."""
