"""`controller`: where a run's controller lives; to a node of its own, and back."""

from __future__ import annotations

import logging
import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from spotguard.cli.common import AnyRunArgument, YesOption, controlled, looked_at_run
from spotguard.cli.terminal.output import confirm, note, say
from spotguard.errors import UsageError

if TYPE_CHECKING:
    from spotguard.api.controllers import Standing
    from spotguard.api.documents import Offer

ControllerOption = Annotated[
    str,
    typer.Option(
        "--controller",
        metavar="WHERE",
        help="Where the run's controller lives: local; or on a small node of its own: vm, slurm, "
        "kubernetes.",
        rich_help_panel="Money and time",
    ),
]
WhereArgument = Annotated[
    str,
    typer.Argument(
        metavar="WHERE",
        help="`vm`, `slurm` or `kubernetes` for a small node of its own, `local` for here.",
    ),
]
RunAnywhere = Annotated[
    str,
    typer.Argument(metavar="RUN", help="The run's id, or its unique beginning, or STORE/RUN_ID."),
]


def status(run: AnyRunArgument = None) -> None:
    """Tell who controls a run, on which node, and what that has cost."""
    from spotguard.api.controllers import where_is
    from spotguard.api.run import Run

    for line in words(where_is(Run.find(run)), time.time()):
        say(line)


def words(seen: Standing, now: float) -> list[str]:
    """Return where a run's controller is, and the way on where nobody has it."""
    from spotguard.api.controllers import node_usd
    from spotguard.shared.units import format_duration, format_usd

    held = "is" if seen.lives else "was last"
    lines = [f"{seen.place} {held} in the hands of {seen.holder}"]
    for stored in seen.nodes:
        node = stored.node
        usd = node_usd(node, now)
        cost = "an unknown sum" if usd is None else format_usd(usd)
        if node.until is None:
            state = "serves" if stored.machine else "asked for, and not ready yet"
        else:
            state = (
                "gone" if node.until <= now else f"goes within {format_duration(node.until - now)}"
            )
        lines.append(f"  {node.cluster or 'a machine of yours'} in {node.place}: {state}; {cost}")
    if not seen.lives:
        lines.append("  nobody controls it now. At rest it needs nobody; else one of these:")
        if seen.node is not None and seen.node.machine:
            lines.append(f"  its node takes it up again, or: spotguard resume {seen.place}")
        lines.append(f"  bring it here:  spotguard controller move {seen.place} local")
    return lines


def move(run: RunAnywhere, where: WhereArgument, *, yes: YesOption = False) -> None:
    """Move a run's controller to a node of its own, or to this machine; the run goes on.

    Broken off anywhere, repeat it.
    """
    from spotguard.api import controllers
    from spotguard.api.run import Run

    controllers.check_where(where)
    found = Run.find(run)
    if where == controllers.LOCAL and not found.in_store:
        say(f"nothing to do: the controller of {controlled(found).name} is on this machine")
        return
    if where == controllers.LOCAL:
        say(f"the controller of {controllers.bring_here(found, note).name} is on this machine")
        return
    if found.in_store:
        raise UsageError(
            f"{found.name} is not this machine's to move.",
            hint=f"bring it here first: spotguard controller move {found.name} local",
        )
    offer = controllers.node_for(controlled(found), where)
    if not yes:
        confirm(f"Move the controller of {found.name} to {offer_words(offer)}?", refused="it stays")
    moved = controllers.move_away(found, note)
    say(f"the controller of {found.name} is on its own node: {moved.name}")


def offer_words(offer: Offer) -> str:
    """Return what a node for a controller is, and costs."""
    from spotguard.shared.units import format_usd

    price = offer.price_usd_per_h
    cost = "an unknown price" if price is None else f"{format_usd(price)} an hour"
    what = offer.instance_type or offer.zone
    where = " ".join(part for part in (offer.infra, offer.region, what) if part)
    market = ", on demand" if offer.instance_type else ""
    return f"a node of its own ({where}{market}, {cost}, counted in the budget)"


def down(run: AnyRunArgument = None) -> None:
    """End the node that a run's controller had for itself.

    It ends by itself a few minutes after the run came to rest; this does not wait for that.
    """
    from spotguard.api.controllers import end_own_node

    end_own_node(looked_at_run(run), note)
    say("its end is asked for")


def serve(
    url: Annotated[str, typer.Argument(metavar="URL", help="The run's own place: STORE/RUN_ID.")],
    *,
    node: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="The node that a move asked for; not by hand."),
    ] = None,
    price: Annotated[
        float,
        typer.Option(min=0.0, metavar="USD", help="What an hour of this machine costs the run."),
    ] = 0.0,
    private: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="The job's variables, and whom it tells, as JSON."),
    ] = None,
) -> None:
    """Control one run from this machine until it is at rest, for a machine that is always on.

    Takes the run over once no other controller lives, starts its controller again when that dies,
    and hears what other machines ask of it: stop, down, resume.
    """
    from pathlib import Path

    from spotguard.api import controllers

    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(asctime)s %(message)s")
    kept = None if private is None else Path(private)
    controllers.serve(url, node=node, price_usd_per_h=price, private=kept)
