"""Where runs' controllers live: on this machine, or on a small node of their own."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from spotguard.api.run import Run
from spotguard.control.handover.move import Mover, Standing, bring_back, end_node, standing
from spotguard.control.handover.node import (
    LOCAL,
    cheapest,
    check_job,
    check_price,
    check_where,
    sky_host,
)
from spotguard.control.handover.not_in_store import read_private
from spotguard.control.handover.serve import Service
from spotguard.control.journal.cost import node_usd
from spotguard.control.run_folder import folder_of
from spotguard.shared.units import SystemClock

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from spotguard.launch.base import Offer
    from spotguard.spec.model import JobSpec

__all__ = [
    "bring_here",
    "check_where",
    "end_own_node",
    "LOCAL",
    "move_away",
    "node_for",
    "node_for_job",
    "node_usd",
    "serve",
    "Standing",
    "where_is",
]


def where_is(run: Run) -> Standing:
    """Return who controls a run, and on which node; reads its store alone.

    Raises:
        UsageError: what stands there makes no sense.
        StoreError: the store cannot be read.
    """
    return standing(run.place, time.time())


def node_for(run: Run, where: str) -> Offer:
    """Return the node that the controller of a run of this machine would have there."""
    from spotguard.control import api

    job = api.job_of(run.name)
    check_job(job, where)
    return cheapest(job)


def node_for_job(job: JobSpec, where: str) -> Offer:
    """Return the node that a job's controller gets; takes some seconds.

    Raises:
        SpecError: its nodes, or its store, are out of that node's reach; or there is none; or its
            price is unknown, and there is a budget to be kept.
        EnvironmentFailure: SkyPilot's prices can be neither read nor fetched.
    """
    check_where(where)
    for part in (job, *map(job.in_phase, range(len(job.phases)))):
        check_job(part, where)
    offer = cheapest(job.in_phase(0))
    check_price(offer, job)
    return offer


def move_away(run: Run, tell: Callable[[str], None]) -> Run:
    """Move the controller of a run to a node of its own; return the run, known by its place.

    Blocks for minutes. Broken off anywhere, repeat it.

    Raises:
        UsageError: the run is at rest, or another machine's.
        SpecError: a node cannot have its controller; says why.
        EnvironmentFailure: the node does not come, or does not take over; says the way out.
    """
    return Run(Mover(folder_of(run.name), sky_host(), tell).move())


def bring_here(run: Run, tell: Callable[[str], None]) -> Run:
    """Bring a run's controller to this machine; return the run, known by its id.

    Raises:
        EnvironmentFailure: its node holds the run and does not hear.
        StoreError: the store cannot be read or written.
    """
    place = run.place
    bring_back(place, SystemClock(), tell)
    return run.adopt(place, tell)


def end_own_node(run: Run, tell: Callable[[str], None]) -> None:
    """Ask for the end of the node that a run's controller had for itself.

    Raises:
        UsageError: it has the run, which goes on; or there is none.
        LauncherFailure: SkyPilot does not end it; it does so itself a while after the run's rest.
    """
    end_node(run.place, sky_host(), SystemClock(), tell)


def serve(
    place: str,
    *,
    node: int | None = None,
    price_usd_per_h: float = 0.0,
    private: Path | None = None,
) -> None:
    """Control one run from this machine until it is at rest; blocks until then.

    Args:
        place: `STORE/RUN_ID`.
        node: the number of the node that a move asked for; None: it is a machine of the user's.
        price_usd_per_h: what an hour of this machine costs the run.
        private: a file with the job's variables, and whom it tells, as JSON.
    """
    from spotguard.control import api

    carried = None
    if private is not None:
        carried = read_private(private)
        os.environ.update(carried.env)
    Service(place, api, number=node, price_usd_per_h=price_usd_per_h, private=carried).run()
