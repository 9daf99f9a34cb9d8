"""`FakeLauncher`: a cloud that exists only in memory, on a clock of yours."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from spotguard.errors import LauncherFailure, NoCapacity
from spotguard.events.states import Market
from spotguard.launch.base import (
    ClusterState,
    ClusterView,
    LaunchRequest,
    LogChunk,
    LogGone,
    NodeEnd,
    NodeView,
    Offer,
    Unreachable,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from spotguard.shared.units import Clock

FAKE_OFFER = Offer(
    infra="fake",
    region="here",
    zone="here-a",
    instance_type="thought",
    market=Market.SPOT,
    price_usd_per_h=1.0,
    on_demand_usd_per_h=3.0,
)


class PlayedJob(Protocol):
    """What runs on a fake cluster, such as `spotguard.testing.job.FakeJob`."""

    def play(self, cluster: FakeCluster, now: float) -> None:
        """Live until `now`; end nodes by `FakeCluster.end`."""
        ...


@dataclass(frozen=True, kw_only=True)
class _Late:
    """A launch that will be taken, and come to nothing."""

    after_s: float
    view: ClusterView


@dataclass(frozen=True, kw_only=True)
class _NeverCame:
    """A launch that was taken, and comes to nothing."""

    request: LaunchRequest
    started_at: float
    known_at: float
    view: ClusterView


@dataclass
class FakeCluster:
    """One cluster, and what its launcher knows of it."""

    request: LaunchRequest
    started_at: float
    teardown_s: float
    """Seconds from the end of the last node's job until nothing is billed any more."""
    down_at: float | None = None
    """When its end was asked for, or its leak guard struck."""
    ends: dict[int, NodeView] = field(default_factory=dict)
    last_end_at: float = 0.0

    @property
    def name(self) -> str:
        """The cluster's name."""
        return self.request.cluster

    @property
    def gone_at(self) -> float | None:
        """When its last node is or will be gone; None while that is open."""
        if len(self.ends) < self.request.nodes:
            return None
        return self.last_end_at + self.teardown_s

    def end(
        self, node: int, at: float, how: NodeEnd, *, exit_code: int | None = None, detail: str = ""
    ) -> None:
        """End one node's part of the job, unless it has ended."""
        if node not in self.ends:
            self.ends[node] = NodeView(index=node, end=how, exit_code=exit_code, detail=detail)
            self.last_end_at = max(self.last_end_at, at)

    def end_all(
        self, at: float, how: NodeEnd, *, exit_code: int | None = None, detail: str = ""
    ) -> None:
        """End all nodes that have not ended."""
        for node in range(self.request.nodes):
            self.end(node, at, how, exit_code=exit_code, detail=detail)


class FakeLauncher:
    """Implements `spotguard.launch.base.Launcher`; nothing runs, `job` plays what would.

    Script it: set `capacity`, `outage_until` or `teardown_s`, call `fail_launch`, `refuse_late`,
    `fail_late` or `fail_down`.
    Ask it afterwards: `started`, `living`, `billed_usd`.
    """

    name = "fake"

    def __init__(
        self,
        clock: Clock,
        job: PlayedJob,
        *,
        offers: Sequence[Offer] = (FAKE_OFFER,),
        capacity: int | Callable[[float], int] = 1024,
        teardown_s: float = 2.0,
    ) -> None:
        """`capacity` is how many nodes are to be had, or a function of the time that says so."""
        self.places = list(offers)
        self.capacity = capacity
        self.teardown_s = teardown_s
        self.books = True
        """Whether it is known of a launch that came to nothing when it did."""
        self.tells_free = False
        """Whether `free_nodes` says how many there are; most clouds do not."""
        self.outage_until = 0.0
        """Until then (epoch seconds) `observe` cannot say anything."""
        self.started: list[str] = []
        """Each start of a cluster, in order. A name in here twice is what must never happen."""
        self.refused: list[int] = []
        """The node counts for which there was no capacity, in order."""
        self.logs: dict[int, bytes] = {}
        """What each node of any cluster printed."""
        self.clusters: dict[str, FakeCluster] = {}
        self._clock = clock
        self._job = job
        self._launch_problems: list[LauncherFailure] = []
        self._late: list[_Late] = []
        self._never_come: dict[str, _NeverCame] = {}
        self._down_problems: list[LauncherFailure] = []

    # ------------------------------------------------------------ scripting

    def fail_launch(self, problem: str, *, times: int = 1) -> FakeLauncher:
        """Let the next launches fail for another reason than capacity; nothing is started."""
        self._launch_problems += [LauncherFailure(problem)] * times
        return self

    def refuse_late(
        self,
        problem: str,
        *,
        after_s: float = 3.0,
        times: int = 1,
        lasting: bool = False,
        nodes_ran: bool = False,
        quota_full: bool = False,
    ) -> FakeLauncher:
        """Let the next launches be taken, and turn out to have no capacity some seconds later.

        `lasting`: it is a right, an image, a quota or a network that is missing. `nodes_ran`: they
        did from the launch on, and this cloud bills them. `quota_full`: the quota is there, and
        used up.
        """
        view = ClusterView(
            state=ClusterState.REFUSED,
            detail=problem,
            lasting=lasting or quota_full,
            nodes_ran=nodes_ran,
            quota_full=quota_full,
        )
        self._late += [_Late(after_s=after_s, view=view)] * times
        return self

    def fail_late(
        self, problem: str, *, after_s: float = 3.0, times: int = 1, nodes_ran: bool = False
    ) -> FakeLauncher:
        """Let the next launches be taken, and fail for another reason some seconds later."""
        view = ClusterView(state=ClusterState.FAILED, detail=problem, nodes_ran=nodes_ran)
        self._late += [_Late(after_s=after_s, view=view)] * times
        return self

    def lose_in_set_up(
        self, problem: str, *, after_s: float = 60.0, times: int = 1
    ) -> FakeLauncher:
        """Let the nodes of the next launches run, and be taken before the job is handed to them."""
        lost = NodeView(index=0, end=NodeEnd.LOST, detail=problem)
        view = ClusterView(
            state=ClusterState.GONE, nodes=(lost,), some_lost=True, detail=problem, nodes_ran=True
        )
        self._late += [_Late(after_s=after_s, view=view)] * times
        return self

    def fail_down(self, problem: str, *, times: int = 1) -> FakeLauncher:
        """Let the next calls of `down` fail."""
        self._down_problems += [LauncherFailure(problem)] * times
        return self

    # ------------------------------------------------------------ asking

    def living(self) -> list[str]:
        """Return the clusters that still cost money."""
        return [name for name in self.clusters if self._state(name) is not ClusterState.GONE]

    def billed_usd(self) -> float:
        """Return what all clusters cost, by this cloud's own books; unknown prices count 0."""
        total = 0.0
        for cluster in self.clusters.values():
            until = cluster.gone_at
            until = self._clock.now() if until is None else min(until, self._clock.now())
            price = cluster.request.offer.price_usd_per_h or 0.0
            total += cluster.request.nodes * price * (until - cluster.started_at) / 3600.0
        for lost in self._never_come.values():
            if lost.view.nodes_ran:
                price = lost.request.offer.price_usd_per_h or 0.0
                until = min(lost.known_at, self._clock.now())
                total += lost.request.nodes * price * (until - lost.started_at) / 3600.0
        return total

    # ------------------------------------------------------------ the protocol

    def offers(self) -> list[Offer]:
        """Return the scripted places."""
        return list(self.places)

    def launch(self, request: LaunchRequest) -> None:
        """Start the cluster, unless one of its name exists or existed."""
        if self._clock.now() < self.outage_until:
            raise Unreachable("scripted outage")
        if request.cluster in self.clusters or request.cluster in self._never_come:
            assert not request.is_new, f"{request.cluster} was asked for before"
            return
        if self._launch_problems:
            raise self._launch_problems.pop(0)
        now = self._clock.now()
        if self._late:
            late = self._late.pop(0)
            self.started.append(request.cluster)
            self._never_come[request.cluster] = _NeverCame(
                request=request, started_at=now, known_at=now + late.after_s, view=late.view
            )
            return
        capacity = self.capacity(now) if callable(self.capacity) else self.capacity
        if request.nodes > capacity:
            self.refused.append(request.nodes)
            raise NoCapacity(f"there are {capacity} nodes now, {request.nodes} were asked for")
        self.started.append(request.cluster)
        self.clusters[request.cluster] = FakeCluster(
            request=request, started_at=now, teardown_s=self.teardown_s
        )

    def free_nodes(self, offer: Offer) -> int | None:
        """Return what is left of the capacity, if this cloud `tells_free` nodes."""
        if not self.tells_free:
            return None
        now = self._clock.now()
        capacity = self.capacity(now) if callable(self.capacity) else self.capacity
        return max(0, capacity - sum(self.clusters[name].request.nodes for name in self.living()))

    def observe(self, cluster: str, *, heard: bool = False) -> ClusterView:
        """Return what is known now; the job lives up to this moment first."""
        state = self._state(cluster)  # its job lives on, whoever can be asked
        if self._clock.now() < self.outage_until:
            return ClusterView(state=ClusterState.UNREACHABLE, detail="scripted outage")
        if cluster not in self.clusters:
            lost = self._never_come.get(cluster)
            if lost is None or state is not lost.view.state:
                return ClusterView(state=state)
            # As in SkyPilot's books, which name the instant at which a request was over.
            return replace(lost.view, gone_at=lost.known_at if self.books else None)
        known = self.clusters[cluster]
        nodes = tuple(
            known.ends.get(index, NodeView(index=index, end=NodeEnd.RUNNING))
            for index in range(known.request.nodes)
        )
        gone = state is ClusterState.GONE
        return ClusterView(state=state, nodes=nodes, gone_at=known.gone_at if gone else None)

    def down(self, cluster: str) -> None:
        """End all nodes; they are gone `teardown_s` later."""
        if self._down_problems:
            raise self._down_problems.pop(0)
        self._state(cluster)
        lost = self._never_come.get(cluster)
        if lost is not None:
            known_at = min(lost.known_at, self._clock.now())
            self._never_come[cluster] = replace(lost, known_at=known_at)
        known = self.clusters.get(cluster)
        if known is not None:
            self._take_down(known, self._clock.now(), "taken down")

    def close(self) -> None:
        """Nothing is held."""

    def read_log(self, cluster: str, node: int, offset: int) -> LogChunk:
        """Return what is left of the node's scripted output; a cloud keeps none of it."""
        if self._state(cluster) is not ClusterState.UP:
            raise LogGone(f"Cluster {cluster!r} does not exist.")
        return LogChunk(node=node, offset=offset, data=self.logs.get(node, b"")[offset:])

    # ------------------------------------------------------------ parts

    def _state(self, name: str) -> ClusterState:
        """Let the cluster live up to now; return its state."""
        cluster = self.clusters.get(name)
        now = self._clock.now()
        if cluster is None:
            lost = self._never_come.get(name)
            if lost is None:
                return ClusterState.ABSENT
            return lost.view.state if now >= lost.known_at else ClusterState.STARTING
        lifetime_s = cluster.request.max_lifetime_s
        guard_at = None if lifetime_s is None else cluster.started_at + lifetime_s
        if cluster.down_at is None:
            self._job.play(cluster, now if guard_at is None else min(now, guard_at))
            if guard_at is not None and now >= guard_at and cluster.gone_at is None:
                self._take_down(cluster, guard_at, "leak guard")
        gone_at = cluster.gone_at
        return ClusterState.GONE if gone_at is not None and now >= gone_at else ClusterState.UP

    def _take_down(self, cluster: FakeCluster, at: float, detail: str) -> None:
        if cluster.down_at is None:
            cluster.down_at = at
            cluster.end_all(at, NodeEnd.LOST, detail=detail)
