"""`controller`: where a run's controller lives; to a node of its own, and back."""

from __future__ import annotations

import logging
import os
import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from spotguard.cli.common import AnyRunArgument, YesOption, looked_at_run, named_run
from spotguard.cli.terminal.output import confirm, note, say
from spotguard.errors import UsageError

if TYPE_CHECKING:
    from spotguard.control.handover.move import Standing
    from spotguard.launch.base import Offer

ControllerOption = Annotated[
    str,
    typer.Option(
        "--controller",
        metavar="WHERE",
        help="Where the run's controller lives: local; or on a small node of its own: vm, slurm.",
        rich_help_panel="Money and time",
    ),
]
WhereArgument = Annotated[
    str,
    typer.Argument(
        metavar="WHERE", help="`vm` or `slurm` for a small node of its own, `local` for here."
    ),
]
RunAnywhere = Annotated[
    str,
    typer.Argument(metavar="RUN", help="The run's id, or its unique beginning, or STORE/RUN_ID."),
]


def status(run: AnyRunArgument = None) -> None:
    """Tell who controls a run, on which node, and what that has cost."""
    from spotguard.control import api
    from spotguard.control.handover.move import standing

    found = api.find_any_run(run)
    for line in words(standing(api.place_of(found), time.time()), time.time()):
        say(line)


def words(seen: Standing, now: float) -> list[str]:
    """Return where a run's controller is, and the way on where nobody has it."""
    from spotguard.control.journal.cost import node_usd
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
    from spotguard.control import api
    from spotguard.control.handover.move import bring_back
    from spotguard.control.handover.node import LOCAL, check_where
    from spotguard.shared.units import SystemClock

    check_where(where)
    found = api.find_any_run(run)
    if where == LOCAL and not api.is_place(found):
        say(f"nothing to do: the controller of {named_run(found)} is on this machine")
        return
    if where == LOCAL:
        place = api.place_of(found)
        bring_back(place, SystemClock(), note)
        run_id = api.adopt(place, note)
        say(f"the controller of {run_id} is on this machine")
        return
    if api.is_place(found):
        raise UsageError(
            f"{found} is not this machine's to move.",
            hint=f"bring it here first: spotguard controller move {found} local",
        )
    run_id = named_run(found)
    offer = node_offer(run_id, where)
    if not yes:
        confirm(f"Move the controller of {run_id} to {offer_words(offer)}?", refused="it stays")
    say(f"the controller of {run_id} is on its own node: {moved(run_id)}")


def node_offer(run_id: str, where: str) -> Offer:
    """Return the node that the controller of a run of this machine would have there."""
    from spotguard.control import api
    from spotguard.control.handover.node import cheapest, check_job

    job = api.job_of(run_id)
    check_job(job, where)
    return cheapest(job)


def offer_words(offer: Offer) -> str:
    """Return what a node for a controller is, and costs."""
    from spotguard.shared.units import format_usd

    price = offer.price_usd_per_h
    cost = "an unknown price" if price is None else f"{format_usd(price)} an hour"
    what = offer.instance_type or offer.zone
    where = " ".join(part for part in (offer.infra, offer.region, what) if part)
    market = ", on demand" if offer.instance_type else ""
    return f"a node of its own ({where}{market}, {cost}, counted in the budget)"


def moved(run_id: str) -> str:
    """Move the controller of a run to a node of its own; return the run's place."""
    from spotguard.control.handover.move import Mover
    from spotguard.control.handover.node import sky_host
    from spotguard.control.run_folder import folder_of

    return Mover(folder_of(run_id), sky_host(), note).move()


def down(run: AnyRunArgument = None) -> None:
    """End the node that a run's controller had for itself.

    It ends by itself a few minutes after the run came to rest; this does not wait for that.
    """
    from spotguard.control import api
    from spotguard.control.handover.move import end_node
    from spotguard.control.handover.node import sky_host
    from spotguard.shared.units import SystemClock

    end_node(api.place_of(looked_at_run(run)), sky_host(), SystemClock(), note)
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

    from spotguard.control import api
    from spotguard.control.handover.not_in_store import read_private
    from spotguard.control.handover.serve import Service

    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(asctime)s %(message)s")
    carried = None
    if private is not None:
        carried = read_private(Path(private))
        os.environ.update(carried.env)
    Service(url, api, number=node, price_usd_per_h=price, private=carried).run()
