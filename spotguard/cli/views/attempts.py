"""The table of attempts: each cluster's life in one row."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from spotguard.cli.views import formats

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spotguard.api.documents import AttemptView

NARROW = 76
"""Below this many columns a row no longer fits; each attempt becomes a short paragraph."""


def attempts(
    rows: Sequence[AttemptView], *, width: int, demo: bool, newest: int | None = None
) -> RenderableType:
    """Return the attempts, or only the `newest` of them with a word on the others.

    `demo`: what all of them cost is played, and says so; else that of some of them may be.
    """
    hidden = 0 if newest is None else max(0, len(rows) - newest)
    shown = list(rows)[hidden:]
    body: RenderableType = _table(shown, demo) if width >= NARROW else _paragraphs(shown, demo)
    return with_word_on_hidden(body, hidden, "attempt", "attempts")


def with_word_on_hidden(body: RenderableType, hidden: int, one: str, many: str) -> RenderableType:
    """Return the newest rows, below how many are hidden, if any are."""
    if not hidden:
        return body
    word = one if hidden == 1 else many
    return Group(Text(f"({hidden} earlier {word} not shown)", style="dim"), body)


def _table(rows: Sequence[AttemptView], demo: bool) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for name in ("#", "where", "nodes", "steps"):
        table.add_column(name, no_wrap=name != "where", vertical="top", overflow="fold")
    table.columns[2].justify = "right"
    table.add_column("why it ended", overflow="fold")
    for name in ("notice", "saved\nbefore", "steps\nlost", "demo\ncost" if demo else "cost"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        text, colour = formats.why(row)
        table.add_row(
            str(row.attempt),
            formats.cluster(row),
            str(row.nodes),
            formats.steps_span(row),
            Text(text, style=colour),
            formats.seconds(row.notice_s),
            formats.seconds(row.saved_before_end_s),
            formats.count(row.steps_lost),
            formats.usd(row.cost_usd, demo=row.demo_prices and not demo),
        )
    return table


def _paragraphs(rows: Sequence[AttemptView], demo: bool) -> Group:
    return Group(*(_paragraph(row, demo) for row in rows))


def _paragraph(row: AttemptView, demo: bool) -> Text:
    text, colour = formats.why(row)
    plural = "node" if row.nodes == 1 else "nodes"
    return Text.assemble(
        (f"#{row.attempt} ", "bold"),
        (text, colour),
        f"\n   {formats.cluster(row)}, {row.nodes} {plural}, steps {formats.steps_span(row)}",
        f"\n   notice {formats.seconds(row.notice_s)}, "
        f"saved {formats.seconds(row.saved_before_end_s)} before the end,"
        f"\n   steps lost {formats.count(row.steps_lost)}, cost "
        f"{formats.usd(row.cost_usd, demo=demo or row.demo_prices)}",
    )
