"""Instances that EC2 launched though SkyPilot does not know it: found by EC2's list, and ended.

SkyPilot tries `RunInstances` up to five times, each time as a new order. Where EC2 did what it was
asked, but its answer was an error or was lost, the cluster has more instances than were asked for.
They would be set up with the others, and paid, until the cluster ends. EC2's calls also agree after
a while only: SkyPilot may end a launch that failed before EC2 lists what it has launched.
"""

from __future__ import annotations

import logging
import threading
import time
from contextvars import Context, copy_context
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spotguard.launch.skypilot.ec2.calls import cluster_of, instances_of, is_known, unanswered
from spotguard.launch.skypilot.ec2.poll import ASK_EVERY_S, Ec2Poll
from spotguard.shared.units import Clock, SystemClock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from datetime import datetime

log = logging.getLogger(__name__)

LISTED_WITHIN_S = 180.0
"""So long EC2 is asked for instances of a launch of which SkyPilot says that nothing is left."""
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
        self._poll = Ec2Poll(_living, clock, client, keeps=False)
        self._ended: set[str] = set()
        self._refused: set[str] = set()

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
        try:
            self._poll.client(region).terminate_instances(InstanceIds=ids)
        except unanswered() as problem:
            if not self._refused.issuperset(ids):
                log.warning("EC2 does not end %s of %s: %s", words, cluster, problem)
            self._refused |= set(ids)
        else:
            log.warning("ended %s of %s: SkyPilot did not know of it", words, cluster)
            self._ended |= set(ids)


class Ec2Forgotten:
    """Looks for nodes of launches that came to nothing, for some minutes each. Thread-safe."""

    def __init__(
        self,
        extras: Ec2Extras,
        clock: Clock | None = None,
        rest: Callable[[float], None] = time.sleep,
    ) -> None:
        """`rest` lets time pass between two looks."""
        self._extras = extras
        self._clock = clock or SystemClock()
        self._rest = rest
        self._wanted: dict[tuple[str, str], tuple[float, Context]] = {}
        """Until when each is looked for, and who wants it: whose log is to tell of it."""
        self._looking: threading.Thread | None = None
        self._lock = threading.Lock()

    def add(self, region: str, cluster: str) -> None:
        """Look for it from now on; returns at once."""
        with self._lock:
            until = self._clock.monotonic() + LISTED_WITHIN_S
            self._wanted.setdefault((region, cluster), (until, copy_context()))
            if self._looking is None:
                self._looking = threading.Thread(
                    target=self.look_on, name="spotguard-forgotten", daemon=True
                )
                self._looking.start()

    def look_on(self) -> None:
        """Look until there is nothing to look for."""
        while wanted := self._now_wanted():
            for (region, cluster), (_, context) in wanted.items():
                context.run(self._extras.end_all, region, cluster)
            self._rest(ASK_EVERY_S)

    def _now_wanted(self) -> dict[tuple[str, str], tuple[float, Context]]:
        with self._lock:
            now = self._clock.monotonic()
            self._wanted = {each: by for each, by in self._wanted.items() if by[0] > now}
            if not self._wanted:
                self._looking = None
            return dict(self._wanted)


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
