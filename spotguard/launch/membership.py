"""The agreement of nodes that stay on when others leave: who begins the next attempt, in place.

Each node says in the run store that it stays or leaves; the first of those that stay creates the
next attempt's group, and the store decides races: a group is created if absent. Then the attempt
is one like any other, with a claim that fences what is left of the one before.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from spotguard.errors import AlreadyExists, NotFound
from spotguard.events import keys
from spotguard.events.event import Event, JobEvent
from spotguard.events.regrouping import Group, Joining
from spotguard.events.states import EndReason
from spotguard.events.untrusted import Refused, integer
from spotguard.shared.net import address_towards, free_port
from spotguard.shared.units import SystemClock
from spotguard.storage.small_objects import get_small

if TYPE_CHECKING:
    from spotguard.shared.units import Clock
    from spotguard.storage.base import ObjectStore

_JOIN_S = 4.0
"""How long a node that says nothing is waited for: it is gone, or its processes are not yet."""
_FORM_S = 10.0
"""The same for the group, once everybody has had the time to join."""
_POLL_S = 0.1
_LOOK_BACK_S = 120.0
GO_ON_AFTER = (EndReason.PREEMPTED, EndReason.TERMINATED, EndReason.NODE_LOST)
"""Ends for lack of nodes: those that are left may go on."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One node's part in one attempt."""

    attempt: int
    node: int
    """Its index in the cluster."""
    nodes: tuple[int, ...]
    """All that take part, ascending."""
    host: str
    port: int
    """Where the nodes gather."""


def next_part(
    store: ObjectStore, part: Part, *, leaves: bool, nodes_min: int, clock: Clock | None = None
) -> Part | None:
    """Return this node's part in the next attempt in place; None if it has none.

    Blocks for some seconds while the nodes agree.

    Args:
        store: The run's own.
        part: That in the attempt that ended.
        leaves: True if this node is to be taken.
        nodes_min: The fewest nodes on which the run may go on.
        clock: For tests.

    Raises:
        StoreError: the store cannot be used.
    """
    clock = clock or SystemClock()
    number = part.attempt + 1
    reasons = _why_go_on(store, part.attempt, clock)
    all_needed = nodes_min >= len(part.nodes)
    if not reasons or (all_needed and EndReason.NODE_LOST not in reasons):
        return None  # a lost node may be a lost process: then all of them join
    mine = Joining(node=part.node, leaves=leaves, host=part.host, port=free_port())
    if part.node != part.nodes[0]:
        mine = replace(mine, host=address_towards(part.host))
    store.put(keys.joining_node(number, part.node), mine.to_json())
    if leaves:
        return None
    joined_at = clock.monotonic()
    while (waited_s := clock.monotonic() - joined_at) < _JOIN_S + _FORM_S:
        group = read_group(store, number)
        if group is not None:
            return _part_in(group, part.node)
        words = _words(store, number)
        staying = sorted(word.node for word in words if not word.leaves)
        complete = len(words) == len(part.nodes) or waited_s >= _JOIN_S
        if complete and staying[:1] == [part.node]:
            if len(staying) < nodes_min:
                return None
            _create(store, number, staying, mine, clock)
            continue
        clock.sleep(_POLL_S)
    return None


def read_group(store: ObjectStore, number: int) -> Group | None:
    """Return the group that begins an attempt in place, if there is one and it can be read."""
    try:
        group = Group.from_json(get_small(store, keys.group(number)))
    except (NotFound, Refused):
        return None
    return group if group.attempt == number else None


def _create(
    store: ObjectStore, number: int, nodes: list[int], first: Joining, clock: Clock
) -> None:
    group = Group(
        attempt=number, nodes=tuple(nodes), host=first.host, port=first.port, at=clock.now()
    )
    try:
        store.put(keys.group(number), group.to_json(), if_absent=True)
    except AlreadyExists:
        return  # a node that joined late is the first, too: what stands there counts


def _part_in(group: Group, node: int) -> Part | None:
    if node not in group.nodes:
        return None
    return Part(
        attempt=group.attempt, node=node, nodes=group.nodes, host=group.host, port=group.port
    )


def _why_go_on(store: ObjectStore, attempt: int, clock: Clock) -> set[EndReason]:
    """Return for what lack of nodes the job says that it ended, if it had got further.

    What the script itself did wrong is never tried again blindly, nor is an attempt that did
    not get anywhere.
    """
    give_up_at = clock.monotonic() + _JOIN_S
    while True:
        ends = _ends(store, attempt, clock)
        if ends or clock.monotonic() >= give_up_at:
            break
        clock.sleep(_POLL_S)
    reasons = {str(end.get("reason")) for end in ends}
    allowed = {reason.value for reason in GO_ON_AFTER}
    steps = [(integer(end, "saved_step"), integer(end, "resumed_step")) for end in ends]
    got_further = any((saved or 0) > (resumed or 0) for saved, resumed in steps)
    return (
        {EndReason(reason) for reason in reasons} if got_further and reasons <= allowed else set()
    )


def _ends(store: ObjectStore, attempt: int, clock: Clock) -> list[dict[str, Any]]:
    since = keys.event(attempt, at=max(clock.now() - _LOOK_BACK_S, 0.0), node=0, rank=0, count=0)
    ends = []
    for info in store.list(keys.events(attempt), start_after=since):
        try:
            event = Event.from_json(get_small(store, info.key))
        except Refused:
            continue  # not ours to judge here
        if event.kind == JobEvent.ENDED.value:
            ends.append(event.data)
    return ends


def _words(store: ObjectStore, number: int) -> list[Joining]:
    words = []
    for info in store.list(keys.joining(number)):
        try:
            words.append(Joining.from_json(get_small(store, info.key)))
        except Refused:
            continue
    return words
