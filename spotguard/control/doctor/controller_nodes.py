"""Whether anybody wants a node that a run's controller has for itself.

The run's store has each of them from before it was asked for, who serves on it, and when it was
told to go. A node that the store does not know, that stays though it was told to go, or whose
controller is silent, costs money for nothing. One that was asked for a moment ago has time.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

from spotguard.control.controller.one_run import run_store
from spotguard.control.doctor.orphan_report import ClusterFate, Judgement
from spotguard.control.journal.stored.controller_nodes import read_nodes, tell_leaving
from spotguard.control.supervisor.lease import read_holder
from spotguard.errors import SpotguardError
from spotguard.events import keys
from spotguard.events.untrusted import Refused
from spotguard.shared.units import format_duration
from spotguard.storage.deadline import give_up_after
from spotguard.storage.urls import is_folder

if TYPE_CHECKING:
    from spotguard.control.journal.stored.controller_nodes import StoredNode
    from spotguard.control.supervisor.lease import Holder
    from spotguard.launch.skypilot.cluster_list import OurCluster

_GONE_AFTER_S: Final = 1800.0
"""Between a move, a rest, or a controller's last sign of life, and the node's own end."""
_SET_UP_S: Final = 3600.0
"""A node may take so long from being asked for until a controller serves on it."""


def judge_node(cluster: OurCluster, now: float, *, patience_s: float) -> Judgement:
    """Return whether the run still needs the node; its store may take `patience_s` to say it."""
    try:
        with give_up_after(patience_s):
            store = run_store(cluster.store, cluster.run_id)
            nodes = read_nodes(store)
            found = read_holder(store)
            is_known = store.head(keys.RUN) is not None
    except (SpotguardError, Refused) as problem:
        return _unsure(f"its run's store cannot be asked: {problem}")
    stored = next((each for each in nodes if each.node.cluster == cluster.name), None)
    if stored is not None:
        return _by_store(cluster, stored, found[0] if found else None, now)
    if not is_known and is_folder(cluster.store):
        return _unsure(f"its run's store, {cluster.store}, is not on this machine")
    return _orphan("its run's store does not know this node of the controller's")


def tell_gone(cluster: OurCluster, now: float) -> None:
    """Let the run's store know that it costs no more, so that the run pays no longer for it."""
    assert cluster.controller is not None
    with contextlib.suppress(SpotguardError, Refused):  # it is gone, whoever hears of it
        tell_leaving(run_store(cluster.store, cluster.run_id), cluster.controller, now)


def _by_store(
    cluster: OurCluster, stored: StoredNode, holder: Holder | None, now: float
) -> Judgement:
    until = stored.node.until
    if until is not None:
        if now - until < _GONE_AFTER_S:
            return _wanted("it was told to go, and is about to")
        return _orphan(f"it was told to go, and should be gone for {format_duration(now - until)}")
    if now - cluster.since < _SET_UP_S:
        return _wanted("a controller is on its way to it")
    if holder is None or holder.is_foreign(stored.machine):
        whose = "" if holder is None else f"; the run had {holder.words(now)}"
        return _orphan(f"no controller serves on it{whose}")
    if holder.lives(now) or now - holder.renewed_at < _GONE_AFTER_S:
        return _wanted(holder.words(now))
    return _orphan(f"it had {holder.words(now)}", adoptable=not holder.released)


def _wanted(why: str) -> Judgement:
    return Judgement(fate=ClusterFate.WANTED, why=why)


def _unsure(why: str) -> Judgement:
    return Judgement(fate=ClusterFate.UNSURE, why=why)


def _orphan(why: str, *, adoptable: bool = False) -> Judgement:
    return Judgement(
        fate=ClusterFate.ORPHAN, why=f"a node for its run's controller: {why}", adoptable=adoptable
    )
