"""What `market show` shows: a row for each place."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from spotguard.cli.terminal.output import clean
from spotguard.cli.views import formats
from spotguard.shared.units import format_duration

if TYPE_CHECKING:
    from spotguard.api.market import MarketDocument, SeenPlace


def market_screen(made: MarketDocument, *, now: float) -> RenderableType:
    """Return what is known of all places."""
    records = Text(f"records that come with spotguard: {', '.join(made.recorded)}", style="dim")
    if not made.places:
        nothing = Text(clean(f"nothing was seen of spot nodes yet ({made.path})"))
        return Group(nothing, records)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("place", overflow="fold")
    table.add_column("newest", no_wrap=True)
    for name in ("granted", "refused", "lost", "mean\nlife", "a node"):
        table.add_column(name, justify="right", no_wrap=True)
    for place in made.places:
        table.add_row(*(clean(cell) for cell in _row(place, now)))
    source = Text(clean(f"{made.sightings} sightings in {made.path}"), style="dim")
    return Group(table, source, records)


def _row(place: SeenPlace, now: float) -> tuple[str, ...]:
    newest = formats.DASH
    if place.seen_at is not None:
        said = f"had {place.nodes}" if place.has_nodes else f"no {place.nodes}"
        newest = f"{said}, {_age(place.seen_at, now)} ago"
    price = formats.DASH
    if place.usd_per_h is not None and place.price_at is not None:
        price = f"{formats.usd(place.usd_per_h)}, {_age(place.price_at, now)} ago"
    life = formats.DASH if place.mean_life_s is None else format_duration(place.mean_life_s)
    return (
        place.place,
        newest,
        *(str(count) for count in (place.granted, place.refused, place.lost)),
        life,
        price,
    )


def _age(at: float, now: float) -> str:
    return format_duration(max(0.0, now - at))
