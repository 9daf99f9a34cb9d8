"""The table of recoveries: where the time went between two attempts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from spotguard.cli.views import formats
from spotguard.cli.views.attempts import NARROW, with_word_on_hidden

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spotguard.api.documents import Recovery

NEWEST = 5
"""So many are shown; `status --json` has all."""
_PARTS = (
    ("detect", "detect_s"),
    ("release", "release_s"),
    ("wait", "waiting_s"),
    ("provision", "provision_s"),
    ("set up", "setup_s"),
    ("restore", "restore_s"),
    ("first\nstep", "first_step_s"),
    ("in all", "total_s"),
)


def recoveries(rows: Sequence[Recovery], *, width: int) -> RenderableType:
    """Return the newest recoveries, with a word on the others."""
    hidden, shown = max(0, len(rows) - NEWEST), rows[-NEWEST:]
    body: RenderableType = _table(shown) if width >= NARROW else _paragraphs(shown)
    return with_word_on_hidden(body, hidden, "recovery", "recoveries")


def _table(rows: Sequence[Recovery]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("recovery", no_wrap=True)
    for name, _ in _PARTS:
        table.add_column(name, justify="right", overflow="fold")
    for row in rows:
        table.add_row(_which(row), *(formats.seconds(getattr(row, part)) for _, part in _PARTS))
    return table


def _paragraphs(rows: Sequence[Recovery]) -> Group:
    return Group(*(_paragraph(row) for row in rows))


def _paragraph(row: Recovery) -> Text:
    parts = [
        f"{name.replace(chr(10), ' ')} {formats.seconds(getattr(row, part))}"
        for name, part in _PARTS
    ]
    return Text.assemble((f"recovery {_which(row)}", "bold"), f"\n   {', '.join(parts)}")


def _which(row: Recovery) -> str:
    return f"#{row.ended}→#{row.attempt}"
