"""Clusters that another machine's SkyPilot launched: asked for, and ended, at the cloud itself.

SkyPilot knows a cluster only where it was launched. Who adopts a run from another machine has no
such books, so it would take living nodes for gone. On AWS each of our instances has its cluster's
name as a tag: that is enough to see the nodes and to end them. Slurm is asked in `slurm_strays`,
Kubernetes in `kubernetes_strays`, other clouds are not.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from spotguard.errors import LauncherFailure, SpotguardError
from spotguard.launch.base import ClusterState, ClusterView, NodeEnd, NodeView, Unreachable
from spotguard.launch.skypilot.ec2.calls import (
    client_of,
    instances_of,
    is_known,
    unanswered,
    was_ordered,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from spotguard.launch.base import Offer
    from spotguard.launch.skypilot.prices import Place
    from spotguard.launch.skypilot.sdk import Sdk

log = logging.getLogger(__name__)

_ASK_WITHIN_S = 10.0
_TRIES = 3
_UP = ("pending", "running")
_GONE = ("terminated",)


def regions_of(infra: str, places: Iterable[Offer | Place]) -> list[str]:
    """Return the regions in which these are: of AWS, clusters of Slurm, contexts of Kubernetes."""
    found = (place.region for place in places if place.infra == infra and place.region)
    return list(dict.fromkeys(found))


class Strays(Protocol):
    """Where clusters are looked for that SkyPilot does not know. Methods block for seconds."""

    def look(self, cluster: str) -> ClusterView:
        """Return how a cluster is; `ABSENT` if there is none.

        Raises:
            Unreachable: nobody can say it.
        """
        ...

    def down(self, cluster: str) -> None:
        """Ask for the end of all nodes of a cluster; none is no problem.

        Raises:
            LauncherFailure: it is refused.
        """
        ...


def end_anywhere(sdk: Sdk, cluster: str, strays: Strays | None) -> None:
    """Ask for the end of a cluster's nodes, also where they live and SkyPilot does not know it."""
    sdk.down(cluster)
    if strays is not None and not _is_known(sdk, cluster):
        strays.down(cluster)


def _is_known(sdk: Sdk, cluster: str) -> bool:
    """Return whether SkyPilot has, or had, a cluster or a request for it; True in doubt."""
    try:
        return sdk.launch_of(cluster) is not None or sdk.ended_at(cluster) is not None
    except SpotguardError:
        return True


class Everywhere:
    """Several lists as one, for a job that may be in several places."""

    def __init__(self, lists: Sequence[Strays]) -> None:
        self._lists = lists

    def look(self, cluster: str) -> ClusterView:
        """Return how a cluster is where it lives, or else where it is known to be gone.

        All are asked: one that does not answer hides no cluster that lives elsewhere.
        """
        views: list[ClusterView] = []
        failures: list[LauncherFailure] = []
        for each in self._lists:
            try:
                views.append(each.look(cluster))
            except LauncherFailure as problem:
                failures.append(problem)
        known = [view for view in views if view.state is not ClusterState.ABSENT]
        living = [view for view in known if view.state is not ClusterState.GONE]
        if failures and not living:
            raise failures[0]
        return [*living, *known, ClusterView(state=ClusterState.ABSENT)][0]

    def down(self, cluster: str) -> None:
        """Ask for its end in each of them, also where another one refuses it."""
        failures: list[LauncherFailure] = []
        for each in self._lists:
            try:
                each.down(cluster)
            except LauncherFailure as problem:
                failures.append(problem)
        if failures:
            raise failures[0]


@dataclass(frozen=True, kw_only=True)
class _Found:
    region: str
    instances: tuple[dict[str, Any], ...]

    @property
    def living(self) -> list[str]:
        return [each["InstanceId"] for each in self.instances if each["State"]["Name"] not in _GONE]

    @property
    def nodes(self) -> list[dict[str, Any]]:
        """All but those that SkyPilot did not know, and that were ended for that."""
        return [
            each
            for each in self.instances
            if each["State"]["Name"] in _UP or is_known(each) or not was_ordered(each)
        ] or list(self.instances)


class Ec2Strays:
    """EC2's own list of instances, by the tag of the cluster. Safe to use from any thread."""

    def __init__(self, regions: Callable[[], Iterable[str]]) -> None:
        """`regions` says where nodes of the run may be; it is asked once, at the first look."""
        self._regions = regions
        self._clients: dict[str, Any] = {}
        self._making = threading.Lock()

    def look(self, cluster: str) -> ClusterView:
        """Ask each region; a cluster is in one of them."""
        found = self._find(cluster)
        if found is None:
            return ClusterView(state=ClusterState.ABSENT)
        if not found.living:
            return ClusterView(state=ClusterState.GONE)
        begun = [each["LaunchTime"].timestamp() for each in found.nodes]
        return ClusterView(
            state=ClusterState.UP,
            nodes=tuple(
                NodeView(
                    index=index,
                    end=NodeEnd.RUNNING if each["State"]["Name"] in _UP else NodeEnd.LOST,
                    detail="" if each["State"]["Name"] in _UP else "EC2 says that it is gone",
                )
                for index, each in enumerate(found.nodes)
            ),
            up_at=min(begun),
            detail="launched by another machine",
        )

    def down(self, cluster: str) -> None:
        """Terminate its instances."""
        found = self._find(cluster)
        if found is None or not found.living:
            return
        try:
            self._client(found.region).terminate_instances(InstanceIds=found.living)
        except unanswered() as problem:
            raise LauncherFailure(
                f"EC2 does not end {cluster}, which another machine launched: {problem}"
            ) from problem

    def _find(self, cluster: str) -> _Found | None:
        gone = None
        try:
            regions = self._known_regions()
            if not regions:  # not absent: nobody was asked
                raise Unreachable(f"Nobody knows in which region of AWS {cluster} would be.")
            for region in regions:
                listed = instances_of(self._client(region), [cluster])
                listed.sort(key=lambda each: (each["LaunchTime"], each["InstanceId"]))
                found = _Found(region=region, instances=tuple(listed))
                if found.living:
                    return found
                gone = found if listed else gone
        except unanswered() as problem:
            raise Unreachable(f"EC2 does not say whether {cluster} lives: {problem}") from problem
        return gone

    def _known_regions(self) -> tuple[str, ...]:
        with self._making:
            if not self._clients:
                self._clients = dict.fromkeys(self._regions())
            return tuple(self._clients)

    def _client(self, region: str) -> Any:
        with self._making:
            if self._clients.get(region) is None:
                self._clients[region] = client_of(region, within_s=_ASK_WITHIN_S, tries=_TRIES)
            return self._clients[region]
