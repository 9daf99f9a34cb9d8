"""Nodes that the run's controller has for itself, as the run store has them.

Whoever moves the controller writes one before it is asked for, so that no node is ever paid for of
which the store says nothing. What runs on it adds that it is ready, and that it leaves. Both
change a word only where nobody else did meanwhile.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from spotguard.control.journal.fold import limits_to_json
from spotguard.control.journal.nodes.controller_node import ControllerNode
from spotguard.control.journal.stored.places import read_limits
from spotguard.errors import AlreadyExists, EnvironmentFailure, NotFound
from spotguard.events import keys
from spotguard.events.untrusted import (
    Refused,
    amount,
    an_object,
    integer,
    needed,
    parse_object,
    seconds,
    text,
)
from spotguard.storage.small_objects import get_small
from spotguard.storage.urls import below

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from spotguard.control.journal.record import Limits, RunRecord
    from spotguard.storage.base import ObjectStore

SCHEMA = 1
GONE_WITHIN_S = 300.0
"""How long SkyPilot may take to end an idle node; until then it is taken to cost."""
_TRIES = 5


@dataclass(frozen=True, kw_only=True)
class StoredNode:
    """One of them, and what it says of itself."""

    node: ControllerNode
    machine: str = ""
    """The name of the home on it, by which leases know it; empty until it is ready."""
    limits: dict[str, Any] | None = None
    """What the run was allowed when it was handed to this node, of which `run.json` knows nothing
    that a `resume` changed; None: it was not handed over."""
    limits_at: float = 0.0


def node_data(node: ControllerNode) -> dict[str, Any]:
    """Return what the journal holds of one."""
    return asdict(node)


def publish_node(store: ObjectStore, node: ControllerNode) -> None:
    """Write down one that is about to be asked for; `store` is the run's own.

    Raises:
        AlreadyExists: there is one of this number.
        StoreError: it cannot be written; so nothing may be asked for.
    """
    store.put(keys.controller_node(node.number), _written(StoredNode(node=node)), if_absent=True)


def place_in(record: RunRecord) -> str:
    """Return the run's own place: `STORE/RUN_ID`."""
    return below(record.store_root, record.run_id)


def moved_place(record: RunRecord) -> str | None:
    """Return the same if the run's controller moved from this machine to a node of its own."""
    moved = record.is_away and record.controller_node is not None
    return place_in(record) if moved else None


def host(store: ObjectStore, machine: str, *, place: str, price_usd_per_h: float, at: float) -> int:
    """Return the number of the node that `machine` is for the run, which nobody else asked for.

    Written down at the first call: from then on the run pays for it.
    """
    known = read_nodes(store)
    for stored in known:
        if stored.machine == machine and stored.node.until is None:
            return stored.node.number
    number = max((stored.node.number for stored in known), default=0) + 1
    node = ControllerNode(
        number=number, cluster="", place=place, price_usd_per_h=price_usd_per_h, since=at
    )
    body = _written(StoredNode(node=node, machine=machine))
    store.put(keys.controller_node(number), body, if_absent=True)
    return number


def read_nodes(store: ObjectStore) -> list[StoredNode]:
    """Return all of them, oldest first; blocks for a listing, and for a read each.

    Raises:
        Refused: one of them makes no sense.
        StoreError: the store cannot be read.
    """
    found = sorted(info.key for info in store.list(keys.CONTROLLER_NODES))
    return [
        _stored(get_small(store, key), key)
        for key in found
        if keys.parse_controller_node(key) is not None
    ]


def serving(nodes: Sequence[StoredNode]) -> StoredNode | None:
    """Return the newest one, unless it was told to go."""
    return nodes[-1] if nodes and nodes[-1].node.until is None else None


def tell_ready(store: ObjectStore, number: int, machine: str) -> StoredNode:
    """Write down that the home `machine` waits on a node for the run; return what stands there."""
    return _change(store, number, machine=machine)


def tell_leaving(store: ObjectStore, number: int, until: float) -> StoredNode:
    """Write down when a node is gone at the latest; an earlier word stays."""
    return _change(store, number, until=until)


def tell_others_leaving(
    store: ObjectStore, nodes: Iterable[StoredNode], machine: str, now: float
) -> list[StoredNode]:
    """Write down that all but the home `machine` are gone soon, and return these nodes.

    For who takes the run over: nobody else has it any more, so no other node may serve it.
    """
    return [
        each
        if each.node.until is not None or each.machine == machine
        else tell_leaving(store, each.node.number, now + GONE_WITHIN_S)
        for each in nodes
    ]


def tell_limits(store: ObjectStore, number: int, limits: Limits, at: float) -> StoredNode:
    """Write down what the run is allowed, for who adopts it from here on."""
    return _change(store, number, limits=limits_to_json(limits), at=at)


def _change(
    store: ObjectStore,
    number: int,
    *,
    machine: str | None = None,
    until: float | None = None,
    limits: dict[str, Any] | None = None,
    at: float = 0.0,
) -> StoredNode:
    key = keys.controller_node(number)
    for _ in range(_TRIES):
        found = store.head(key)
        if found is None:
            raise NotFound(f"{key} is not in {store.url}")
        old = new = _stored(get_small(store, key), key)
        if machine is not None:
            new = replace(new, machine=machine)
        if until is not None and (old.node.until is None or until < old.node.until):
            new = replace(new, node=replace(old.node, until=until))
        if limits is not None:
            new = replace(new, limits=limits, limits_at=at)
        if new == old:
            return old
        try:
            store.put(key, _written(new), if_match=found.etag)
        except AlreadyExists:  # somebody changed it at the same moment
            continue
        return new
    raise EnvironmentFailure(f"{key} in {store.url} is changed by others again and again.")


def _written(stored: StoredNode) -> bytes:
    body = {"schema": SCHEMA, **node_data(stored.node), "machine": stored.machine}
    if stored.limits is not None:
        body |= {"limits": stored.limits, "limits_at": stored.limits_at}
    return json.dumps(body, sort_keys=True).encode()


def _stored(raw: bytes, key: str) -> StoredNode:
    body = parse_object(raw, key)
    if integer(body, "schema") != SCHEMA:
        raise Refused(f"{key} was written by another version of spotguard")
    price = body.get("price_usd_per_h")
    node = ControllerNode(
        number=needed(keys.parse_controller_node(key), "number"),
        cluster=text(body, "cluster") or "",
        place=needed(text(body, "place"), "place"),
        price_usd_per_h=None if price is None else needed(amount(body, "price_usd_per_h"), "price"),
        since=needed(seconds(body, "since"), "since"),
        until=None if body.get("until") is None else needed(seconds(body, "until"), "until"),
    )
    limits = body.get("limits")
    return StoredNode(
        node=node,
        machine=text(body, "machine") or "",
        limits=None if limits is None else read_limits(an_object(limits, "its limits")),
        limits_at=0.0 if limits is None else needed(seconds(body, "limits_at"), "limits_at"),
    )
