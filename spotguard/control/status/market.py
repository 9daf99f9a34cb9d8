"""What `market show` tells: what own runs and price histories say of each place."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

from spotguard.launch.aws_prices import PricePoint, spot_prices
from spotguard.policy.market.sightings import (
    ASKED,
    GRANTED,
    LOST,
    PRICE,
    REFUSED,
    Sighting,
    newest_price,
)
from spotguard.shared.json_documents import INSTANT, document

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

SCHEMA: Final = 1
_PRICE_EVERY_S = 6 * 3600.0
"""Of a place's price history one value in so long is kept."""


@dataclass(frozen=True, kw_only=True)
class SeenPlace:
    """What was seen of spot nodes in one place."""

    place: str
    accelerator: str | None
    nodes: int | None
    """Of the newest sighting, as the two below; None if only prices are known."""
    has_nodes: bool | None
    seen_at: float | None = field(metadata=INSTANT)
    asked: int
    granted: int
    refused: int
    lost: int
    mean_life_s: float | None
    """Of the nodes that were lost; None if none was."""
    usd_per_h: float | None
    """Newest price of a node."""
    price_at: float | None = field(metadata=INSTANT)


@dataclass(frozen=True, kw_only=True)
class MarketDocument:
    """What `market show --json` prints."""

    schema: Literal[1] = field(default=SCHEMA, init=False)
    """Version of this document's form."""
    path: str
    """The file that it rests on."""
    sightings: int
    recorded: tuple[str, ...]
    """Accelerators of which a market comes with spotguard."""
    places: tuple[SeenPlace, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the object of `market show --json`."""
        return document(self)


def market_document(path: str, sightings: Sequence[Sighting]) -> MarketDocument:
    """Return what is known of all places, by name."""
    from spotguard.policy.market.recorded import accelerators

    names = sorted({each.place for each in sightings if each.market == "spot"})
    return MarketDocument(
        path=path,
        sightings=len(sightings),
        recorded=accelerators(),
        places=tuple(_place(name, sightings) for name in names),
    )


def _place(name: str, sightings: Iterable[Sighting]) -> SeenPlace:
    of_it = [each for each in sightings if each.place == name and each.market == "spot"]
    telling = [each for each in of_it if each.kind not in (ASKED, PRICE)]
    newest = telling[-1] if telling else None
    lives = [each.age_s for each in of_it if each.kind == LOST and each.age_s is not None]
    price = newest_price(of_it, name)
    counts = {
        kind: sum(each.kind == kind for each in of_it) for kind in (ASKED, GRANTED, REFUSED, LOST)
    }
    return SeenPlace(
        place=name,
        accelerator=next((each.accelerator for each in reversed(of_it) if each.accelerator), None),
        nodes=None if newest is None else newest.nodes,
        has_nodes=None if newest is None else newest.kind not in (REFUSED, LOST),
        seen_at=None if newest is None else newest.at,
        asked=counts[ASKED],
        granted=counts[GRANTED],
        refused=counts[REFUSED],
        lost=counts[LOST],
        mean_life_s=sum(lives) / len(lives) if lives else None,
        usd_per_h=None if price is None else price[1],
        price_at=None if price is None else price[0],
    )


def refreshed(
    sightings: Sequence[Sighting],
    *,
    regions: Sequence[str],
    instance_types: Sequence[str],
    days: float,
    now: float,
    tell: Callable[[str], None] = lambda _: None,
) -> list[Sighting]:
    """Return the prices that AWS tells of the places that runs have asked, and of those named.

    Only what is newer than what is known: of each place the newest one, and before it one in six
    hours.

    Raises:
        MissingExtra, EnvironmentFailure: as `spot_prices`.
    """
    wanted: dict[str, set[str]] = {region: set(instance_types) for region in regions}
    for each in sightings:
        words = each.place.split("/")
        if words[0] == "aws" and len(words) >= 3:
            wanted.setdefault(words[1], set()).add(words[-1])
    newest: dict[str, float] = {}
    for each in sightings:
        if each.kind == PRICE and each.at <= now:
            newest[each.place] = max(each.at, newest.get(each.place, 0.0))
    gpus = {each.place.split("/")[-1]: (each.accelerator, each.gpus) for each in sightings}
    made = []
    for region, kinds in sorted(wanted.items()):
        if not kinds:
            continue
        tell(f"spot prices of {', '.join(sorted(kinds))} in {region} ...")
        found: dict[str, list[PricePoint]] = {}
        for point in spot_prices(region, sorted(kinds), days=days, now=now):
            place = f"aws/{region}/{point.zone}/{point.instance_type}"
            if newest.get(place, 0.0) < point.at <= now:
                found.setdefault(place, []).append(point)
        kept = [(place, point) for place in found for point in _thinned(found[place])]
        for place, point in kept:
            accelerator, count = gpus.get(point.instance_type, ("", 1))
            made.append(
                Sighting(
                    at=point.at,
                    kind=PRICE,
                    place=place,
                    accelerator=accelerator,
                    gpus=count,
                    usd_per_h=point.usd_per_h,
                )
            )
    return made


def _thinned(points: Sequence[PricePoint]) -> list[PricePoint]:
    """Return the newest of some points of one place, and before it one in six hours; by time."""
    kept: list[PricePoint] = []
    for point in reversed(points):
        if not kept or point.at <= kept[-1].at - _PRICE_EVERY_S:
            kept.append(point)
    return kept[::-1]
