"""Steers a run whose controller has a node of its own, from any machine, through its store."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spotguard.control.handover import stored_wishes
from spotguard.control.handover.move import standing, store_of
from spotguard.control.journal.record import Kind
from spotguard.control.supervisor.lease import read_holder
from spotguard.errors import UsageError
from spotguard.shared.units import SystemClock

if TYPE_CHECKING:
    from spotguard.control.status.view import RunView
    from spotguard.spec.nodes import NodeRange

_BEGINS_WITHIN_S = 60.0
_POLL_S = 1.0
_KINDS = {Kind.USER_STOP: stored_wishes.STOP, Kind.USER_DOWN: stored_wishes.DOWN}


def ask_to_end(place: str, kind: Kind, seen: RunView) -> bool:
    """Ask the run at `place` to stop, or to release its nodes; False if it was `seen` at rest.

    Returns once its controller has heard of it.

    Raises:
        UsageError: nobody would hear it; says the way out.
        EnvironmentFailure: nobody heard it in time.
    """
    if seen.state.settled:
        return False
    check_heard(place)
    stored_wishes.ask(store_of(place), _KINDS[kind], SystemClock())
    return True


def ask_to_go_on(
    place: str,
    budget_usd: float | None,
    deadline_s: float | None,
    nodes: NodeRange | str | int | None,
) -> None:
    """Let the run at `place` go on under the controller that it has; returns once it does.

    Raises:
        UsageError: it cannot go on, or nobody would hear it; says the way out.
        EnvironmentFailure: nobody heard it in time.
    """
    check_heard(place)
    store, clock = store_of(place), SystemClock()
    said = {"budget_usd": budget_usd, "deadline_s": deadline_s, "nodes": nodes and str(nodes)}
    wanted = {name: value for name, value in said.items() if value is not None}
    stored_wishes.ask(store, stored_wishes.RESUME, clock, wanted)
    give_up_at = clock.monotonic() + _BEGINS_WITHIN_S
    while clock.monotonic() < give_up_at:
        found = read_holder(store)
        if found is not None and found[0].lives(clock.now()):
            return
        clock.sleep(_POLL_S)


def check_heard(place: str) -> None:
    """Let pass where somebody hears what is asked of the run at `place`.

    Raises:
        UsageError: nobody does; says the way out.
    """
    if standing(place, SystemClock().now()).node is None:
        raise UsageError(
            f"The controller of {place} is on no node of its own, so nobody hears what is asked.",
            hint=f"take the run over, then steer it: spotguard adopt {place}",
        )
