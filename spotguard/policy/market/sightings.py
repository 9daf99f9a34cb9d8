"""What own runs saw of places: asked, granted, refused, lost, left; and prices. Pure.

One sighting is one line of `market.jsonl` in spotguard's home. It says something of other jobs,
too: nodes that were granted for eight can be had for one, nodes that one could not get eight do
not get either.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from spotguard.policy.view import Seen

if TYPE_CHECKING:
    from collections.abc import Iterable

    from spotguard.policy.market.hazard import Hazard

ASKED, GRANTED, REFUSED, LOST, LEFT, PRICE = "asked", "granted", "refused", "lost", "left", "price"
KINDS: Final = (ASKED, GRANTED, REFUSED, LOST, LEFT, PRICE)
FREE: Final = "free"
"""The place itself says now that it has so many nodes. That is not kept: it will change."""
_HAD, _NOT_HAD = (GRANTED, LEFT), (REFUSED, LOST)
ENOUGH: Final = 10
"""With fewer grants, refusals and losses than this, there is nothing to forecast from."""


@dataclass(frozen=True, kw_only=True)
class Sighting:
    """One thing that was seen of one place at one instant."""

    at: float
    """Epoch seconds."""
    kind: str
    """One of `KINDS`: nodes were asked for, had, not to be had, taken, or given back; or `FREE`."""
    place: str
    """`aws/us-east-1/us-east-1a/p3.2xlarge`."""
    accelerator: str = ""
    """`V100`; empty for none."""
    gpus: int = 1
    """Of a node."""
    nodes: int = 1
    market: str = "spot"
    usd_per_h: float | None = None
    """Of one node; None is unknown."""
    age_s: float | None = None
    """For how long the nodes had lived; of those that were lost or left."""
    run: str = ""
    attempt: int | None = None

    @property
    def key(self) -> tuple[str, int | None, str]:
        """What tells it from others of its run; an attempt is granted, lost or left once."""
        return (self.run, self.attempt, self.kind)


def answers_of(
    sightings: Iterable[Sighting], *, place: str, nodes: int, without_run: str = ""
) -> list[tuple[float, bool]]:
    """Return when a place was seen to have spot for so many nodes, and when not; by time."""
    told = []
    for each in sightings:
        if each.place != place or each.market != "spot" or (each.run and each.run == without_run):
            continue
        if each.kind in _HAD and each.nodes >= nodes:
            told.append((each.at, True))
        elif each.kind in _NOT_HAD and each.nodes <= nodes:
            told.append((each.at, False))
    return sorted(told)


def says_free(sightings: Iterable[Sighting], *, place: str, nodes: int) -> bool:
    """Tell whether a place says now that it has spot for so many nodes."""
    return any(
        each.kind == FREE and each.place == place and each.nodes >= nodes for each in sightings
    )


def seen_by(told: Iterable[tuple[float, bool]], now: float, hazard: Hazard) -> Seen:
    """Return what is known of a place now from when it had nodes and when it had none, by time."""
    from spotguard.policy.market.memory import (
        PlaceAnswer,
        remembered,
    )  # NumPy: not for a plain look

    seen, last_at = Seen(), None
    for at, up in told:
        if at > now:
            continue
        elapsed_s = 0.0 if last_at is None else max(0.0, at - last_at)
        seen = remembered(seen, PlaceAnswer(up=up), elapsed_s, hazard)
        last_at = at
    if last_at is None or last_at >= now:
        return seen
    return remembered(seen, PlaceAnswer(up=None), now - last_at, hazard)


def newest_price(sightings: Iterable[Sighting], place: str) -> tuple[float, float] | None:
    """Return when spot's price was last seen in a place, and what it was; None if never."""
    known = [
        (each.at, each.usd_per_h)
        for each in sightings
        if each.place == place and each.market == "spot" and each.usd_per_h is not None
    ]
    return max(known, default=None)


def telling(sightings: Iterable[Sighting], accelerator: str) -> list[Sighting]:
    """Return those that tell of the availability of an accelerator's spot nodes."""
    return [
        each
        for each in sightings
        if each.accelerator == accelerator
        and each.market == "spot"
        and each.kind in (*_HAD, *_NOT_HAD)
    ]
