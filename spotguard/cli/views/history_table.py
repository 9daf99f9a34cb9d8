"""What happened: the timeline of `history`, and the last lines of the live view."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from spotguard.cli.terminal.output import one_line as on_one_line
from spotguard.cli.views import formats

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from spotguard.api.documents import HistoryLine, RunView


_COLUMNS = "{:8} {:>3} {:>12}  {}"
HEADER = _COLUMNS.format("time", "#", "so far", "what happened")


def happenings_table(lines: Sequence[HistoryLine], *, one_line: bool = False) -> Table:
    """Return the lines as aligned columns: time, attempt, what, cost so far."""
    grid = Table.grid(padding=(0, 1, 0, 0), expand=True)
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(ratio=1, no_wrap=one_line, overflow="ellipsis" if one_line else "fold")
    grid.add_column(style="dim", no_wrap=True, justify="right")
    for line in lines:
        grid.add_row(
            formats.clock_time(line.at),
            _attempt(line.attempt),
            Text(on_one_line(line.text), style=line.colour),
            _cost(line.cost_usd, demo=line.demo_prices),
        )
    return grid


def happening(line: HistoryLine) -> str:
    """Return one happening as one plain line, for logs and pipes."""
    return _COLUMNS.format(
        formats.clock_time(line.at),
        _attempt(line.attempt),
        _cost(line.cost_usd, demo=line.demo_prices),
        on_one_line(line.text),
    )


def progress(view: RunView, now: float) -> str:
    """Return how far a run is, as one plain line between the happenings."""
    number = view.attempts[-1].attempt if view.attempts else None
    said = f"{formats.steps_done(view)} · {formats.pace(view)}"
    spent = _cost(view.spent_usd, demo=view.demo_prices)
    return _COLUMNS.format(formats.clock_time(now), _attempt(number), spent, said)


def by_day(lines: Iterable[HistoryLine]) -> Iterator[tuple[str, list[HistoryLine]]]:
    """Yield each local day with its lines, in order."""
    day = ""
    held: list[HistoryLine] = []
    for line in lines:
        of_line = formats.local_day(line.at)
        if of_line != day and held:
            yield day, held
            held = []
        day = of_line
        held.append(line)
    if held:
        yield day, held


def _cost(cost_usd: float | None, *, demo: bool) -> str:
    return "" if cost_usd is None else formats.usd(cost_usd, demo=demo)


def _attempt(number: int | None) -> str:
    return "" if number is None else f"#{number}"
