"""`market`: what is known of spot markets, and price histories from the user's own account."""

# No postponed annotations: typer reads them, and ruff would move their imports away.
import time
from typing import TYPE_CHECKING, Annotated

import typer

from spotguard.cli.common import JsonOption
from spotguard.cli.terminal.output import console, note, print_json, say

if TYPE_CHECKING:
    from spotguard.api.market import MarketDocument


def show(*, as_json: JsonOption = False) -> None:
    """Tell what own runs saw of spot nodes, place by place, and what they cost.

    It is kept in market.jsonl in spotguard's home and never leaves this machine; `learn_market =
    false` keeps nothing.
    """
    from spotguard.api import market

    made = market.show()
    if as_json:
        print_json(made.to_json())
    else:
        _show(made)


def refresh(
    *,
    region: Annotated[
        list[str] | None,
        typer.Option("--region", metavar="NAME", help="A region of AWS; may be repeated."),
    ] = None,
    instance_type: Annotated[
        list[str] | None,
        typer.Option("--instance-type", metavar="NAME", help="To ask for there: p4d.24xlarge."),
    ] = None,
    days: Annotated[
        float, typer.Option(min=0.1, max=90.0, metavar="N", help="Days to look back, at most 90.")
    ] = 7.0,
    as_json: JsonOption = False,
) -> None:
    """Fetch spot prices from AWS, by your own account, for the places that runs have asked.

    With --region and --instance-type for others, too.
    """
    from spotguard.api import market

    new, made = market.refresh(region or (), instance_type or (), days=days, tell=note)
    if as_json:
        print_json(made.to_json())
        return
    say(f"{new} new prices")
    _show(made)


def _show(made: "MarketDocument") -> None:
    from spotguard.cli.views.market import market_screen

    console().print(market_screen(made, now=time.time()))
