"""Numbers and places in words; what is unknown says so and is never zero."""

from __future__ import annotations

import shlex
import time
from typing import TYPE_CHECKING

from rich.text import Text

from spotguard.api.states import RunState
from spotguard.api.words import DASH as DASH
from spotguard.api.words import DEMO as DEMO
from spotguard.api.words import cluster as cluster
from spotguard.api.words import co2e as co2e
from spotguard.api.words import energy as energy
from spotguard.api.words import fraction as fraction
from spotguard.api.words import last_save as last_save
from spotguard.api.words import machines as machines
from spotguard.api.words import pace as pace
from spotguard.api.words import percent as percent
from spotguard.api.words import place as place
from spotguard.api.words import rate as rate
from spotguard.api.words import saved_money as saved_money
from spotguard.api.words import seconds as seconds
from spotguard.api.words import steps_done as steps_done
from spotguard.api.words import steps_span as steps_span
from spotguard.api.words import why as why
from spotguard.errors import DeadlineReached
from spotguard.shared.units import format_duration, format_usd

if TYPE_CHECKING:
    from spotguard.api.documents import CostForecast, RunView

WIDEST = 100
"""Columns beyond which a panel does not grow."""
FULL, EMPTY = "━", "─"


def short_time(seconds: float) -> str:
    """Return a duration; one below a second in milliseconds."""
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else format_duration(seconds)


def count(value: int | None) -> str:
    """Return a whole number for a table cell; a dash for None."""
    return DASH if value is None else str(value)


def nodes(value: int | str) -> str:
    """Return how many nodes, in words; a range is `1:4`."""
    return "1 node" if str(value) == "1" else f"{value} nodes"


def usd(value: float | None, *, demo: bool = False) -> str:
    """Return money for a table cell; `unknown` for None, never zero; what is played says `demo`."""
    played = " demo" if demo and value is not None else ""
    return f"{format_usd(value)}{played}"


def value(value: float | None) -> str:
    """Return a number that a script logged, short; an empty text for None."""
    return "" if value is None else f"{value:.4g}"


def bar(share: float | None, width: int, style: str) -> Text:
    """Return a bar that reads the same without colour."""
    full = 0 if share is None else int(share * width)
    if share and not full:
        full = 1  # something is not nothing
    return Text.assemble((FULL * full, style), (EMPTY * (width - full), "dim"))


def state(view: RunView) -> Text:
    """Return the state's label in its colour."""
    return Text(view.state_label, style=f"not dim {view.state.colour}")


def clock_time(at: float) -> str:
    """Return the local time of day, `10:15:03`."""
    return time.strftime("%H:%M:%S", time.localtime(at))


def local_day(at: float) -> str:
    """Return the local date and zone, `2025-11-21 (UTC)`."""
    return time.strftime("%Y-%m-%d (%Z)", time.localtime(at))


def forecast(told: CostForecast, *, now: float, budget_usd: float | None) -> list[tuple[str, str]]:
    """Return what a forecast says, as labelled lines."""
    if told.none is not None:
        return [("forecast", f"no forecast: {told.none}")]
    cost = f"{usd(told.cost_usd)} (80 %: {usd(told.cost_low_usd)} to {usd(told.cost_high_usd)})"
    if told.on_demand_usd is not None:
        cost += f", on demand {usd(told.on_demand_usd)}"
    if budget_usd is not None and (told.cost_high_usd or 0.0) > budget_usd:
        cost += "; the budget may end it before"
    low, mean, high = (
        format_duration(60 * round(max(0.0, at - now) / 60)) if at is not None else "unknown"
        for at in (told.finish_low_at, told.finish_at, told.finish_high_at)
    )
    done = f"in {mean} (80 %: {low} to {high})"
    if told.late_pct is not None:
        late = "none" if told.late_pct == 0 else f"{told.late_pct:.0f} %"
        done += f", late in {late} of the futures"
    work = f"{format_duration(told.work_s)} of work, by {told.work_from}"
    market = told.market or ""
    if told.market_at is not None:
        market += f", {format_duration(max(0.0, now - told.market_at))} old"
    return [("forecast", cost), ("done", done), ("rests on", f"{work}; {market}")]


def next_commands(view: RunView, place: str | None = None) -> list[str]:
    """Return the commands that make sense now, the likeliest first.

    Of a run that is looked at in its store, at `place`, those that only look.
    """
    if place is not None:
        settled = view.state.settled
        return [f"spotguard {'history' if settled else 'status --watch'} {shlex.quote(place)}"]
    run = view.run_id
    if view.state is RunState.FINISHED:
        return [f"spotguard history {run}"]
    if view.state is RunState.FAILED:
        return [f"spotguard logs {run}", f"spotguard resume {run}"]
    if view.lacks_budget_of == run:
        return [f"spotguard resume {run} --budget USD"]
    if view.lacks_budget_of is not None:
        return [f"spotguard sweep {view.lacks_budget_of} --budget USD"]
    if view.exit_code == DeadlineReached.exit_code:
        return [f"spotguard resume {run} --deadline DURATION"]
    if view.state.settled:
        return [f"spotguard resume {run}"]
    return [f"spotguard status {run} --watch", f"spotguard stop {run}"]
