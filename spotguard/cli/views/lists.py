"""Lists: runs, settings with their origin, the doctor's findings, a drill's verdict."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from spotguard.cli.terminal.output import clean
from spotguard.cli.views import formats
from spotguard.shared.units import format_bytes, format_duration

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from spotguard.api.doctor import DoctorReport, DrillReport, SaveTime
    from spotguard.api.documents import RunSummary, SweepDocument
    from spotguard.api.settings import ConfigValue


def plain_table(*columns: str) -> Table:
    """Return a table without borders whose cells fold rather than lose a character."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def runs_table(runs: Sequence[RunSummary]) -> Table:
    """Return the runs, one in a row."""
    table = plain_table("run", "state", "created", "steps", "now", "spent")
    for column in table.columns[3:]:
        column.justify = "right"
        column.no_wrap = True
    for run in runs:
        table.add_row(
            run.run_id,
            _state(run),
            f"{formats.local_day(run.created_at).split()[0]} {formats.clock_time(run.created_at)}",
            _steps(run),
            "" if run.state.settled else _rate(run),
            formats.usd(run.spent_usd, demo=run.demo_prices),
        )
    return table


def stored_runs_table(runs: Sequence[RunSummary]) -> Table:
    """Return the runs of stores, one in a row, with who controls each.

    When each began is in its id.
    """
    table = plain_table("run", "state", "controller", "steps", "spent", "of")
    for column in table.columns[:2]:
        column.no_wrap = True
    for column in table.columns[3:]:
        column.justify = "right"
        column.no_wrap = True
    for run in runs:
        table.add_row(
            run.run_id,
            _state(run),
            _controller(run),
            _steps(run),
            formats.usd(run.spent_usd) + (" demo" if run.demo_prices else ""),
            "" if run.budget_usd is None else formats.usd(run.budget_usd),
        )
    return table


def sweep_table(told: SweepDocument) -> Table:
    """Return the points of a sweep, one in a row, each with why it ended."""
    named = told.metric is not None
    table = plain_table("", "point", "state", "steps", told.metric or "", "spent", "")
    for column in table.columns[3:6]:
        column.justify = "right"
        column.no_wrap = True
    for point in told.points:
        colour = "" if point.state is None else point.state.colour
        style = "cyan" if point.pruned else "red" if point.unreadable else colour
        state = Text(point.state_label, style=style)
        detail = "" if point.queued else point.detail.removeprefix("pruned ")
        known = f"{point.step}/{point.total_steps or '?'}" if point.step is not None else ""
        table.add_row(
            f"{point.number:02d}",
            clean(point.words),
            state,
            known,
            formats.value(point.value) if named else "",
            formats.usd(point.spent_usd),
            Text(clean(detail), style="dim"),
            style="bold" if point.run_id == told.best else "",
        )
    return table


def _state(run: RunSummary) -> Text:
    return Text(run.state_label, style=run.state.colour)


def _controller(run: RunSummary) -> Text:
    if run.controlled_by is not None:
        return Text(clean(run.controlled_by))
    return Text("" if run.state.settled else "nobody", style="yellow")


def _rate(run: RunSummary) -> str:
    played = " demo" if run.demo_prices and run.rate_usd_per_h is not None else ""
    return f"{formats.rate(run.rate_usd_per_h)}{played}"


def _steps(run: RunSummary) -> str:
    of = "" if run.total_steps is None else f"/{run.total_steps}"
    return f"{formats.count(run.step)}{of}"


def config_table(values: Sequence[ConfigValue]) -> Table:
    """Return each setting with its value and its origin; what was set stands out."""
    table = plain_table("setting", "value", "from")
    table.columns[0].no_wrap = True
    for value in values:
        style = "dim" if value.origin == "default" else ""
        table.add_row(value.field, clean(value.text), value.origin, style=style)
    return table


def doctor_screen(report: DoctorReport) -> RenderableType:
    """Return the findings, one in a row, each with its way out."""
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for check in report.checks:
        said = Text(clean(check.detail))
        if check.hint:
            said.append(f"\n{check.hint}", style="dim")
        grid.add_row(Text(check.status.mark, style=check.status.colour), check.name, said)
    verdict = Text(report.verdict, style="green" if report.ok else "red")
    table = _saves_table(report.store.saves) if report.store else ()
    return Group(grid, Text(""), *table, verdict)


def _saves_table(saves: Sequence[SaveTime]) -> Iterator[RenderableType]:
    """Yield how long emergency saves would take, and whether each cloud's notice is enough."""
    if not saves:
        return
    from spotguard.api.doctor import NOTICES_S

    clouds = [f"{cloud} {format_duration(notice)}" for cloud, notice in NOTICES_S.items()]
    table = plain_table("emergency save", "from here", *clouds)
    for column in table.columns[:2]:
        column.justify = "right"
        column.no_wrap = True
    for save in saves:
        table.add_row(
            format_bytes(save.size_bytes),
            format_duration(save.seconds),
            *(_fit(fits) for fits in save.fits.values()),
        )
    yield table
    note = "of one node at this speed, with a fifth and a second kept free; nodes save side by side"
    yield Text(note, style="dim")
    yield Text("")


def _fit(fits: bool) -> Text:
    return Text("fits", style="green") if fits else Text("too long", style="yellow")


def drill_screen(report: DrillReport) -> RenderableType:
    """Return the verdict, and what is not restored."""
    verdict = Text("PASS", style="bold green") if report.passed else Text("FAIL", style="bold red")
    parts: list[RenderableType] = [Text.assemble(verdict, "  ", clean(report.summary))]
    if report.findings:
        table = plain_table("not restored", "variable", "step", "what is different")
        for finding in report.findings:
            table.add_row(
                clean(str(finding.label)),
                clean(str(finding.variable or formats.DASH)),
                formats.count(finding.step),
                clean(str(finding.detail)),
            )
        parts.append(table)
    parts += [Text(clean(f"note: {each}"), style="dim") for each in report.notes]
    return Group(*parts)
