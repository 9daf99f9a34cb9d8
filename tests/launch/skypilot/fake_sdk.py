"""A SkyPilot in memory: what it says is set by the test, what it was asked is kept."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from spotguard.errors import LauncherFailure
from spotguard.launch.base import LogGone, Unreachable
from spotguard.launch.skypilot.sdk import ClusterFacts, ClusterPhase, JobPhase, LaunchFacts

if TYPE_CHECKING:
    from collections.abc import Callable

    from spotguard.launch.taskyaml import Machine


@dataclass
class FakeSdk:
    """Implements `Sdk`. A submitted launch is under way until the test says otherwise."""

    launches: dict[str, LaunchFacts] = field(default_factory=dict)
    clusters: dict[str, ClusterFacts] = field(default_factory=dict)
    ends: dict[str, float] = field(default_factory=dict)
    said_lost: dict[str, str] = field(default_factory=dict)
    """How the cloud says that a node of a cluster ended."""
    taken: set[str] = field(default_factory=set)
    """Clusters whose lost node the cloud itself has ended."""
    jobs: dict[str, JobPhase] = field(default_factory=dict)
    printed: bytes = b""
    submitted: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    downed: list[str] = field(default_factory=list)
    downs_under_way: int = 0
    """How often it will be said that a cluster is still being taken down."""
    extra: str = ""
    """What is wrong where a node too many was found too late."""
    asked_for_extra: list[str] = field(default_factory=list)
    """Clusters of which nodes too many were looked for."""
    asked_for_forgotten: list[str] = field(default_factory=list)
    """Clusters of which nodes were looked for that SkyPilot does not know."""
    asked: list[str] = field(default_factory=list)
    """The name of each call, in order."""
    away: bool = False
    """SkyPilot's API server does not answer."""
    free: int | None = None
    """Idle nodes of each Slurm partition, and free pods of each Kubernetes context."""
    broken: str = ""
    """What SkyPilot raises at each call."""
    before_submit: Callable[[], None] | None = None
    after_submit: Callable[[], None] | None = None
    before_look: Callable[[], None] | None = None
    """Called when a look at a cluster begins."""

    def comes_up(self, cluster: str, *, nodes: int = 2, job: JobPhase = JobPhase.RUNNING) -> None:
        """Let the launch be done, and the job be on its nodes."""
        self.launches[cluster] = LaunchFacts(phase=ClusterPhase.DONE)
        self.clusters[cluster] = up(nodes)
        self.jobs[cluster] = job

    def submit(self, task: dict[str, Any], cluster: str) -> None:
        """Take a launch."""
        self._ask("submit")
        if self.before_submit is not None:
            self.before_submit()
        self.submitted.append((cluster, task))
        self.launches[cluster] = LaunchFacts(phase=ClusterPhase.UNDER_WAY)
        if self.after_submit is not None:
            self.after_submit()

    def launch_of(self, cluster: str) -> LaunchFacts | None:
        """Return what the test set."""
        if self.before_look is not None:
            self.before_look()
        self._ask("launch_of")
        return self.launches.get(cluster)

    def is_going_down(self, cluster: str) -> bool:
        """Return True as often as the test set."""
        self._ask("is_going_down")
        self.downs_under_way -= 1
        return self.downs_under_way >= 0

    def cluster(self, cluster: str, *, fresh: bool = True) -> ClusterFacts | None:
        """Return what the test set."""
        self._ask("cluster" if fresh else "books")
        return self.clusters.get(cluster)

    def lost(self, cluster: str, *, starting: bool) -> str:
        """Return what the test set; not noted as a call, for SkyPilot is not asked."""
        counts = cluster in self.taken or not starting
        return self.said_lost.get(cluster, "") if counts else ""

    def end_extra_nodes(self, cluster: str) -> str:
        """Return what the test set; not noted as a call, for SkyPilot is not asked."""
        self.asked_for_extra.append(cluster)
        return self.extra

    def end_forgotten_nodes(self, cluster: str) -> None:
        """Note it; not as a call, for SkyPilot is not asked."""
        self.asked_for_forgotten.append(cluster)

    def ended_at(self, cluster: str) -> float | None:
        """Return what the test set."""
        self._ask("ended_at")
        return self.ends.get(cluster)

    def free_slurm_nodes(self, cluster: str, partition: str) -> int | None:
        """Return what the test set."""
        self._ask(f"free {cluster}/{partition}")
        return self.free

    def free_kubernetes_nodes(self, context: str | None, machine: Machine) -> int | None:
        """Return what the test set."""
        self._ask(f"free {context} {machine.gpus}")
        return self.free

    def job(self, cluster: str) -> JobPhase | None:
        """Return what the test set."""
        self._ask("job")
        return self.jobs.get(cluster)

    def down(self, cluster: str) -> None:
        """Take the order."""
        self._ask("down")
        self.downed.append(cluster)

    def log(self, cluster: str) -> bytes:
        """Return what the test set, or raise what SkyPilot raises for such a cluster."""
        self._ask("log")
        known = self.clusters.get(cluster)
        if known is None:
            raise LogGone(f"SkyPilot: Cluster {cluster!r} does not exist.")
        if not known.up:
            raise Unreachable(f"SkyPilot: Cluster {cluster!r} is not up.")
        if self.downs_under_way > 0:
            raise Unreachable("SkyPilot: Current 'sky.logs' request is cancelled.")
        return self.printed

    def _ask(self, call: str) -> None:
        self.asked.append(call)
        if self.away:
            raise Unreachable("SkyPilot does not answer: connection refused")
        if self.broken:
            raise LauncherFailure(f"SkyPilot: {self.broken}")


def up(nodes: int = 2, *, launched_at: float = 50.0) -> ClusterFacts:
    """Return a healthy cluster."""
    return ClusterFacts(up=True, unhealthy=False, launched_at=launched_at, nodes=nodes)


def unhealthy(nodes: int = 2, detail: str = "") -> ClusterFacts:
    """Return a cluster of which a node is gone."""
    return ClusterFacts(up=False, unhealthy=True, launched_at=50.0, nodes=nodes, detail=detail)
