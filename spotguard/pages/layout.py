"""What a page is made of. The script of the pages draws these parts and knows nothing else.

All text is data: the script sets it as text, never as markup.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One value in words. Of an instant the reader's own clock makes the words."""

    text: str = ""
    at: float | None = None
    """Epoch seconds, instead of the text."""
    tone: str = "default"
    """Colour: green, cyan, yellow, red, dim or default."""
    pill: bool = False
    """Drawn as a badge of its colour."""
    note: str = ""
    """Smaller, below."""
    href: str | None = None
    """A page of this dashboard."""
    share: float | None = None
    """Draws a bar, 0 to 1."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """One number that is seen at first sight."""

    label: str
    value: str
    note: str = ""
    share: float | None = None
    """Draws a bar, 0 to 1."""
    tone: str = "default"


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One line of a chart; as many values as the chart has positions, None is a gap."""

    name: str
    values: tuple[float | None, ...]
    tone: str
    unit: str = ""
    """`$`, `$/h` or nothing."""
    scale: str = "y"
    """Curves of one scale share an axis: `y` is on the left, `right` on the right."""
    stepped: bool = False
    """It stays until it changes."""
    dots: bool = False
    """Single points, no line."""


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A place of a chart at which something happened."""

    at: float
    text: str
    tone: str


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Lines over steps or over time."""

    id: str
    title: str
    summary: str
    """What it shows, in a sentence, for who cannot see it."""
    along: str
    """`step` or `time`."""
    positions: tuple[float, ...]
    curves: tuple[Curve, ...]
    marks: tuple[Mark, ...] = ()
    empty: str = "nothing to draw yet"


@dataclass(frozen=True, kw_only=True)
class Slice:
    """A part of a whole."""

    label: str
    hint: str
    tone: str
    """Of a scheme of its own: the use's name."""
    amount: float
    cells: tuple[str, ...]
    """What the table says of it, column by column."""


@dataclass(frozen=True, kw_only=True)
class Breakdown:
    """A whole and its parts: one bar, and a table that says the same."""

    id: str
    title: str
    summary: str
    columns: tuple[str, ...]
    slices: tuple[Slice, ...]
    empty: str = "nothing yet"


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows below a heading."""

    id: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    numbers: tuple[int, ...] = ()
    """Columns that stand right-aligned."""
    note: str = ""
    empty: str = "nothing yet"
    folded: bool = False
    """Shown when asked for."""
    find: bool = False
    """Gets a field that hides rows without the typed words."""


@dataclass(frozen=True, kw_only=True)
class WebPage:
    """Everything on one page."""

    kind: str
    """`report`, `run` or `runs`."""
    title: str
    subtitle: str = ""
    state: Cell | None = None
    banner: str = ""
    """What must not be overlooked: that money is played."""
    warnings: tuple[str, ...] = ()
    error: str = ""
    """A traceback, as it is."""
    actions: tuple[str, ...] = ()
    """What can be asked for: `stop`, `resume`."""
    run_id: str | None = None
    cards: tuple[Card, ...] = ()
    charts: tuple[Chart, ...] = ()
    breakdowns: tuple[Breakdown, ...] = ()
    tables: tuple[Table, ...] = ()
    made_at: float | None = None
    version: str = ""
    footer: tuple[str, ...] = field(default=())
