"""Instances that EC2 launched though SkyPilot does not know it: found by EC2's list, and ended.

SkyPilot tries `RunInstances` up to five times, each time as a new order. Where EC2 did what it was
asked, but its answer was an error or was lost, the cluster has more instances than were asked for.
They would be set up with the others, and paid, until the cluster ends. EC2's calls also agree after
a while only: SkyPilot may end a launch that failed before EC2 lists what it has launched.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spotguard.launch.skypilot.ec2.calls import cluster_of, instances_of, is_known, unanswered
from spotguard.launch.skypilot.ec2.poll import Ec2Poll

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from datetime import datetime

    from spotguard.shared.units import Clock

log = logging.getLogger(__name__)

_PENDING = "pending"
_LIVING = (_PENDING, "running")


@dataclass(frozen=True)
class Living:
    """An instance that lives."""

    id: str
    launched_at: datetime
    is_known: bool
    """Whether SkyPilot knows it."""
    is_pending: bool = False


class Ec2Extras:
    """Ends what a cluster has too much. Thread-safe."""

    def __init__(
        self, clock: Clock | None = None, client: Callable[[str], Any] | None = None
    ) -> None:
        """`client` makes boto3's client for a region."""
        self._poll = Ec2Poll(_living, clock, client)
        self._ended: set[str] = set()

    def end(self, region: str, cluster: str, nodes: int) -> str:
        """End instances beyond the `nodes` of a cluster that comes up, unless it is too late.

        Once they run, SkyPilot may have them among its nodes, and would wait for them for ten
        minutes. Then nothing is ended, and what is wrong is returned: the whole cluster has to be
        ended. What EC2 refuses is tried again at the next call. Blocks for some seconds at most.
        """
        found = extras(self._poll.about(region, cluster) or (), nodes)
        late = [each.id for each in found if not each.is_pending and each.id not in self._ended]
        if late:
            return f"EC2 launched {', '.join(late)} once more than SkyPilot asked for"
        self._end(region, cluster, found)
        return ""

    def end_all(self, region: str, cluster: str) -> None:
        """End what lives of a cluster of which nothing is left, as SkyPilot says."""
        self._end(region, cluster, self._poll.about(region, cluster) or ())

    def _end(self, region: str, cluster: str, found: Iterable[Living]) -> None:
        ids = [each.id for each in found if each.id not in self._ended]
        if not ids:
            return
        words = ", ".join(ids)
        log.warning("EC2 launched %s for %s, and SkyPilot does not know it: ended", words, cluster)
        try:
            self._poll.client(region).terminate_instances(InstanceIds=ids)
        except unanswered() as problem:
            log.warning("EC2 does not end %s: %s", words, problem)
        else:
            self._ended |= set(ids)


def extras(living: Iterable[Living], nodes: int) -> list[Living]:
    """Return the instances that are too many.

    Only where SkyPilot knows all its `nodes`: before, it may be about to mark the others. What was
    launched after them belongs to its next try, in another zone.
    """
    known = [each for each in living if each.is_known]
    if len(known) < nodes:
        return []
    last = max(each.launched_at for each in known)
    return [each for each in living if not each.is_known and each.launched_at <= last]


def _living(client: Any, clusters: Sequence[str]) -> dict[str, list[Living]]:
    living: dict[str, list[Living]] = {}
    for each in instances_of(client, clusters, states=_LIVING):
        pending = each["State"]["Name"] == _PENDING
        mine = Living(each["InstanceId"], each["LaunchTime"], is_known(each), pending)
        living.setdefault(cluster_of(each), []).append(mine)
    return living
