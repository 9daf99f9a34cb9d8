"""The start page of the dashboard: all runs in one table."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from spotguard.control.status import words
from spotguard.events.states import RunState
from spotguard.pages.layout import Card, Cell, Table, WebPage
from spotguard.pages.run_page import usd
from spotguard.shared.units import format_usd
from spotguard.shared.version import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spotguard.control.status.view import RunSummary

_STUCK = (RunState.CONTACT_LOST, RunState.CLOUD_SILENT, RunState.WAITING)


def runs_page(runs: Sequence[RunSummary]) -> WebPage:
    """Return the page of all runs: those that go on first, each newest first."""
    ordered = sorted(runs, key=lambda run: run.state.settled)
    return WebPage(
        kind="runs",
        title="spotguard runs",
        cards=_cards(runs),
        tables=(
            Table(
                id="runs",
                title="runs",
                columns=(
                    *("run", "state", "progress", "now", "spent", "next alert", "attempts"),
                    *("interruptions", "created"),
                ),
                numbers=(3, 4, 6, 7),
                rows=tuple(map(_row, ordered)),
                empty="no runs yet; start one with: spotguard up train.py",
                find=True,
            ),
        ),
        version=__version__,
    )


def _cards(runs: Sequence[RunSummary]) -> tuple[Card, ...]:
    going = [run for run in runs if not run.state.settled]
    real = [run for run in going if not run.demo_prices]
    rates = [run.rate_usd_per_h for run in real]
    played = sum(run.rate_usd_per_h or 0.0 for run in going if run.demo_prices)
    rate = None if None in rates else sum(each or 0.0 for each in rates)
    stuck = [run for run in going if run.state in _STUCK and not run.queued]
    paid = [run.spent_usd for run in runs if not run.demo_prices]
    spent = None if None in paid else sum(each or 0.0 for each in paid)
    return (
        Card(label="under way", value=str(len(going)), note=f"of {len(runs)} runs"),
        Card(
            label="all runs cost now",
            value=words.rate(rate),
            note=f"and {words.rate(played)} of demo prices" if played else "at the paid price",
        ),
        Card(label="spent by all", value=format_usd(spent), note="demo prices not counted"),
        Card(
            label="need a look",
            value=str(len(stuck)),
            note="wait for capacity, or are not heard of",
            tone="yellow" if stuck else "default",
        ),
    )


def _rate(run: RunSummary) -> str:
    """Return what a run costs now; what is played says so."""
    played = " (demo)" if run.demo_prices and run.rate_usd_per_h is not None else ""
    return f"{words.rate(run.rate_usd_per_h)}{played}"


@lru_cache(4096)  # most runs are as they were a second ago
def _row(run: RunSummary) -> tuple[Cell, ...]:
    share = words.fraction(run.step, run.total_steps)
    steps = "–" if run.step is None else str(run.step)  # noqa: RUF001 - as DASH
    of = "" if run.total_steps is None else f" of {run.total_steps}"
    limit = "" if run.budget_usd is None else f" of {format_usd(run.budget_usd)}"
    spent = words.fraction(run.spent_usd, run.budget_usd)
    return (
        Cell(text=run.run_id, href=f"/runs/{run.run_id}"),
        Cell(text=run.state_label, tone=run.state.colour, pill=True),
        Cell(text=f"{steps}{of}", share=share, tone="green" if share is not None else "default"),
        Cell(text="" if run.state.settled else _rate(run)),
        Cell(
            text=usd(run.spent_usd, demo=run.demo_prices) + limit,
            share=spent,
            tone="default" if spent is None else "yellow" if spent >= 0.8 else "cyan",
        ),
        Cell(text=run.next_alert or "", tone="dim")
        if run.problem is None
        else Cell(text=run.problem, tone="yellow"),
        Cell(text=str(run.attempts)),
        Cell(text=str(run.interruptions)),
        Cell(at=run.created_at),
    )
