"""Runs on pages and in numbers: the report's page, the dashboard, what Prometheus reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spotguard.api.run import silent
from spotguard.pages.dashboard import serve
from spotguard.pages.html import report_html
from spotguard.pages.metrics import exposition
from spotguard.pages.run_page import run_page

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from spotguard.control.report.document import ReportDocument

__all__ = ["prometheus_text", "report_page", "serve_dashboard"]


def report_page(told: ReportDocument) -> str:
    """Return all that is known of a run as one HTML page, which opens without a network."""
    return report_html(run_page(told))


def serve_dashboard(
    stores: Sequence[str] = (),
    *,
    port: int = 8650,
    token_file: Path | None = None,
    read_only: bool = False,
    tell: Callable[[str], None] = silent,
    ready: Callable[[str, int], None] = lambda address, count: None,
) -> None:
    """Show all runs of this machine and of these stores in a browser; blocks until Ctrl-C.

    Args:
        stores: their URLs.
        port: on loopback; 0 takes a free one.
        token_file: keeps the token by which a browser is let in; None: a new one each time.
        read_only: nothing can be stopped or resumed.
        tell: hears how far a long list of runs is.
        ready: hears the address, and how many runs there are, once it serves.

    Raises:
        UsageError, StoreError: a store makes no sense or cannot be read.
        EnvironmentFailure: the port is taken, or the token's file cannot be used.
    """
    from spotguard.control import api

    fleet = api.fleet(stores, tell)
    token = serve.token_in(token_file)
    fleet.refresh()
    serve.serve(
        fleet,
        port=port,
        token=token,
        read_only=read_only,
        ready=lambda address: ready(address, len(fleet.summaries())),
    )


def prometheus_text(stores: Sequence[str] = ()) -> str:
    """Return the numbers of all runs of this machine and of these stores, as Prometheus reads them.

    Raises:
        MissingExtra: its client is not installed.
        UsageError, StoreError: a store makes no sense or cannot be read.
    """
    from spotguard.control import api

    return exposition(api.measures(stores)).decode()
