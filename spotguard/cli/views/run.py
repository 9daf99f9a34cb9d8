"""A run as `status` and the live view show it."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from spotguard.api.states import RunState
from spotguard.cli.terminal.output import clean, one_line
from spotguard.cli.views import formats, metrics
from spotguard.cli.views.attempts import attempts
from spotguard.cli.views.history_table import happenings_table
from spotguard.cli.views.recoveries import recoveries
from spotguard.shared.units import format_usd

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spotguard.api.documents import HistoryLine, RunView

TRACEBACK_LINES = 15
_BAR = 16
_RECENT = 6
"""Happenings in the live view, at most."""
_ROOMY = 12
"""Lines below the panel from which on happenings get a share."""
_TALL = 22
"""Below this many lines the live view leaves out what does not change much."""
_NOT_BRIEF = (*("logged", "a step", "in use", "nodes", "on demand", "goodput", "energy", "store"),)


def status(view: RunView, *, now: float, width: int, place: str | None = None) -> RenderableType:
    """Return the whole story: summary, attempts, warnings, traceback, what to do next.

    `place` is where it is in a store, if it is looked at there.
    """
    parts: list[RenderableType] = [summary(view, now=now, width=width)]
    if view.attempts:
        parts += [attempts(view.attempts, width=width, demo=view.demo_prices), Text("")]
    if view.recoveries:
        parts += [recoveries(view.recoveries, width=width), Text("")]
    parts += [_warning(text) for text in view.warnings]
    if view.traceback and view.state is RunState.FAILED:
        parts += _traceback(view.traceback)
    commands = formats.next_commands(view, place)
    parts += [Text.assemble(("next  ", "dim"), (each, "bold")) for each in commands]
    return Group(*parts)


def live(
    view: RunView, history: Sequence[HistoryLine], *, now: float, width: int, height: int
) -> RenderableType:
    """Return the picture that `up` and `status --watch` keep redrawing; fits into `height`."""
    head: list[RenderableType] = [summary(view, now=now, width=width, brief=height < _TALL)]
    tail: list[RenderableType] = [_warning(text) for text in view.warnings[-1:]]
    tail.append(Text("Ctrl-C leaves; the run goes on", style="dim"))
    room = height - 1 - _lines(Group(*head, *tail), width)
    recent = min(_RECENT, len(history), room // 3 if room >= _ROOMY else 0)
    table: list[RenderableType] = []
    if view.attempts:
        table = [_newest_attempts(view, width=width, room=room - recent - 1), Text("")]
    recent = min(_RECENT, len(history), max(0, room - _lines(Group(*table), width)))
    happened = list(history)[len(history) - recent :]
    return Group(*head, *table, happenings_table(happened, one_line=True), *tail)


def _newest_attempts(view: RunView, *, width: int, room: int) -> RenderableType:
    """As many attempts as fit into `room` lines, at least one."""
    newest = min(len(view.attempts), max(1, room))
    while True:
        table = attempts(view.attempts, width=width, demo=view.demo_prices, newest=newest)
        used = _lines(table, width)
        if used <= room or newest == 1:
            return table
        newest = max(1, min(newest - 1, newest * room // used))


def _lines(what: RenderableType, width: int) -> int:
    return len(Console(width=width, file=io.StringIO()).render_lines(what, pad=False))


def summary(view: RunView, *, now: float, width: int, brief: bool = False) -> Panel:
    """Return the panel at the top: state, progress, last save, money; `brief` leaves some out."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    if view.state_detail:
        grid.add_row(_state_name(view), Text(one_line(view.state_detail)))
    for label, value in _rows(view, now):
        if brief and label in _NOT_BRIEF:
            continue
        grid.add_row(label, value)
    return Panel(
        grid,
        box=box.ROUNDED,
        title=Text.assemble((view.run_id, "not dim bold"), "  ", formats.state(view)),
        title_align="left",
        border_style="dim",
        padding=(0, 1),
        width=min(width, formats.WIDEST),
    )


def _state_name(view: RunView) -> str:
    if not view.state.settled:
        return "now"
    return "end" if view.state is RunState.FINISHED else "why"


def _rows(view: RunView, now: float) -> list[tuple[str, Text]]:
    rows = [("progress", _progress(view))]
    if not view.state.settled:
        rows.append(("pace", Text(formats.pace(view))))
    if not view.state.settled and view.attempts and view.attempts[-1].ended_at is None:
        newest = view.attempts[-1]
        rows.append(("nodes", Text(f"{formats.machines(newest)}, {formats.place(newest)}")))
    if not view.state.settled and view.on_demand_infra is not None:
        rows.append(("on demand at", Text(clean(view.on_demand_infra))))
    rows += [(label, Text(clean(words))) for label, words in metrics.rows(view.metrics)]
    rows.append(("saved", Text(formats.last_save(view, now))))
    rows.append(("spent", _spent(view)))
    rows.append(("on demand", _on_demand(view)))
    if view.forecast is not None:
        foretold = formats.forecast(view.forecast, now=now, budget_usd=view.budget_usd)
        rows += [(label, Text(clean(words))) for label, words in foretold]
    if view.goodput is not None:
        share = f"{formats.percent(view.goodput)} of the billed time went into steps that count"
        rows.append(("goodput", Text(share)))
    else:
        rows.append(("goodput", Text("unknown", style="dim")))
    if view.carbon.energy_kwh is not None:
        how = "measured" if view.carbon.measured else "at most, estimated"
        told = f"{formats.energy(view.carbon.energy_kwh)} · {formats.co2e(view.carbon.co2e_kg)}"
        rows.append(("energy", Text.assemble(told, (f", {how}", "dim"))))
    rows.append(("store", Text(view.store)))
    return rows


def _progress(view: RunView) -> Text:
    line = Text()
    share = formats.fraction(view.step, view.total_steps)
    if share is not None:
        line.append_text(formats.bar(share, _BAR, "green"))
        line.append(f" {formats.percent(share)}  ")
    line.append(formats.steps_done(view))
    if view.state.settled and view.loss is not None:
        line.append(f" · loss {view.loss:.4g}")
    return line


def _spent(view: RunView) -> Text:
    line = Text()
    share = formats.fraction(view.spent_usd, view.budget_usd)
    if share is not None:
        line.append_text(formats.bar(share, _BAR, "yellow" if share >= 0.8 else "cyan"))
        line.append(f" {formats.percent(share)}  ")
    line.append(format_usd(view.spent_usd))
    if view.spent_most_usd is not None:
        line.append(f" to {format_usd(view.spent_most_usd)}", style="yellow")
    if view.budget_usd is None:
        line.append(", no budget set", style="dim")
    else:
        line.append(f" of {format_usd(view.budget_usd)}")
    if view.demo_prices:
        line.append(" · demo prices", style="cyan")
    return line


def _on_demand(view: RunView) -> Text:
    if view.on_demand_usd is None:
        return Text("unknown", style="dim")
    same = f"{formats.usd(view.on_demand_usd, demo=view.demo_prices)} for the same work"
    return Text.assemble(f"{same} · ", (formats.saved_money(view.saved_pct), "bold"))


def _warning(text: str) -> Text:
    return Text.assemble(("note  ", "yellow"), one_line(text))


def _traceback(text: str) -> list[RenderableType]:
    lines = clean(text).rstrip().splitlines()
    cut = len(lines) - TRACEBACK_LINES
    head = f"the job's own error (last {TRACEBACK_LINES} of {len(lines)} lines)"
    title = Text(head if cut > 0 else "the job's own error", style="red")
    body = "\n".join(f"  {line}" for line in lines[max(0, cut) :])
    return [title, Text(body, overflow="fold"), Text("")]
