"""What `simulate` shows: a row for each policy, and where its median run was over time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from spotguard.cli.terminal.output import clean
from spotguard.shared.units import format_duration, format_usd

if TYPE_CHECKING:
    from spotguard.api.simulation import SimulatedPolicy, Simulation


def simulation_screen(made: Simulation) -> RenderableType:
    """Return the whole answer."""
    what = Text(
        clean(
            f"{format_duration(made.work_s)} of work by {format_duration(made.deadline_s)} on "
            f"{made.gang} x {made.market}: {made.runs} runs on a market recorded "
            f"for {made.recorded_days:g} days from {made.recorded_from}"
        )
    )
    bounds = Text(
        f"on demand {format_usd(made.on_demand_usd)}, with all known beforehand "
        f"{format_usd(made.omniscient_usd.median)} (median)",
        style="dim",
    )
    letters = ", ".join(
        f"{chr(ord('a') + index)} {name}" for index, name in enumerate(made.places[:26])
    )
    legend = Text(clean(f"{letters}, $ on demand, . nothing"), style="dim")
    return Group(what, Text(""), _table(made), bounds, Text(""), _strips(made), legend)


def _table(made: Simulation) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("policy", no_wrap=True)
    for name in ("cost", "10-90 %", "done after", "late", "saved", "over\nknown"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in made.policies:
        table.add_row(*_row(row))
    return table


def _row(row: SimulatedPolicy) -> tuple[str, ...]:
    late = f"{100 * row.late_share:.0f} % (<{100 * row.late_high:.0f})"
    return (
        row.policy,
        format_usd(row.cost_usd.median),
        f"{format_usd(row.cost_usd.p10)}-{format_usd(row.cost_usd.p90)}",
        format_duration(60 * round(row.finish_s.median / 60)),
        late,
        f"{row.saved_pct:.0f} %",
        f"{row.omniscient_ratio:.3f}",
    )


def _strips(made: Simulation) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), show_header=False)
    table.add_column(no_wrap=True, min_width=9)
    table.add_column(no_wrap=True)
    for row in made.policies:
        table.add_row(row.policy, row.strip)
    return table
