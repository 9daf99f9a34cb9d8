"""`market`: what is known of spot markets, and price histories from the user's own account."""

# No postponed annotations: typer reads them, and ruff would move their imports away.
import time
from typing import TYPE_CHECKING, Annotated

import typer

from spotguard.cli.common import JsonOption
from spotguard.cli.terminal.output import console, note, print_json, say
from spotguard.errors import UsageError

if TYPE_CHECKING:
    from spotguard.control.status.market import MarketDocument


def show(*, as_json: JsonOption = False) -> None:
    """Tell what own runs saw of spot nodes, place by place, and what they cost.

    It is kept in market.jsonl in spotguard's home and never leaves this machine; `learn_market =
    false` keeps nothing.
    """
    from spotguard.control.journal.market_log import market_path, read_market
    from spotguard.control.status.market import market_document

    path = market_path()
    made = market_document(str(path), read_market(path))
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
    from spotguard.control.journal.market_log import market_path, note_market, read_market
    from spotguard.control.status.market import market_document, refreshed

    if bool(region) != bool(instance_type):
        raise UsageError("--region and --instance-type belong together")
    path = market_path()
    known = read_market(path)
    if not region and not any(each.place.startswith("aws/") for each in known):
        raise UsageError(
            "no run of this machine has asked AWS for spot nodes yet",
            hint="name places: --region us-east-1 --instance-type p4d.24xlarge",
        )
    new = refreshed(
        known,
        regions=region or (),
        instance_types=instance_type or (),
        days=days,
        now=time.time(),
        tell=note,
    )
    note_market(path, new)
    made = market_document(str(path), read_market(path))
    if as_json:
        print_json(made.to_json())
        return
    say(f"{len(new)} new prices")
    _show(made)


def _show(made: "MarketDocument") -> None:
    from spotguard.cli.views.market import market_screen

    console().print(market_screen(made, now=time.time()))
