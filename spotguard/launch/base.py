"""The `Launcher` protocol: all that the controller asks of a cloud.

A cluster is named by its attempt and never reused. Every call is idempotent by that name, so a
controller that died between asking and writing down the answer can simply ask again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from spotguard.errors import LauncherFailure

if TYPE_CHECKING:
    from spotguard.events.states import Market


class Unreachable(LauncherFailure):
    """Nobody who knows can be asked; says nothing about any cluster. Ask again."""


class LogGone(LauncherFailure):
    """There is no such cluster, or no more, and what its nodes printed went with it."""


@dataclass(frozen=True, kw_only=True)
class Offer:
    """One place where nodes can be had, and what each costs."""

    infra: str
    region: str | None
    zone: str | None
    instance_type: str | None
    market: Market
    price_usd_per_h: float | None
    """Of one node; None is unknown, never free."""
    on_demand_usd_per_h: float | None
    """What one such node costs on demand; None is unknown."""
    gpus: str | None = None
    """What each node has of them, `A100:8`, where the job asks for some."""


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """A place that was asked for and cannot be tried, and why."""

    place: str
    """As a user writes it: `aws/us-east-1`."""
    market: Market
    why: str


@dataclass(frozen=True, kw_only=True)
class Unchecked:
    """A place of which nobody could be asked whether there is such a one, and why."""

    place: str
    """As a user writes it: `slurm/lab/spot`."""
    why: str


@dataclass(frozen=True, kw_only=True)
class PriceSource:
    """Where prices come from, and how old they are."""

    infra: str
    source: str
    """In words: `SkyPilot's catalogue`."""
    read_at: float | None
    """When they were last fetched or written (epoch seconds); None is unknown."""


@dataclass(frozen=True, kw_only=True)
class Survey:
    """All that is known of where nodes can be had."""

    offers: tuple[Offer, ...]
    """Best first: the market's own, the cheapest first; without a price last."""
    skipped: tuple[Skipped, ...] = ()
    sources: tuple[PriceSource, ...] = ()
    unchecked: tuple[Unchecked, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LaunchRequest:
    """Everything needed to start one attempt's cluster and the job on it."""

    cluster: str
    run_id: str
    attempt: int
    nodes: int
    nproc_per_node: int
    script: str
    """Absolute path of the job's script."""
    args: tuple[str, ...]
    workdir: str
    """Absolute path in which the script runs."""
    env: dict[str, str]
    """`SPOTGUARD_*` and the user's variables, the same on all nodes; holds no secret."""
    offer: Offer
    max_lifetime_s: float | None
    """The leak guard: after this the cluster goes away even if the controller is dead."""
    is_new: bool = False
    """Nobody can have asked for this cluster before: there is no need to look for one."""


class ClusterState(str, Enum):
    """What is known of a cluster."""

    ABSENT = "absent"
    """No cluster of this name was ever started."""
    STARTING = "starting"
    UP = "up"
    GONE = "gone"
    """Positive evidence that no node of it is left and nothing is billed any more."""
    REFUSED = "refused"
    """The nodes were not to be had: nothing is left of it, and nothing is billed any more."""
    FAILED = "failed"
    """It could not be started for another reason: nothing is left of it."""
    UNREACHABLE = "unreachable"
    """It could not be asked; says nothing about life or death."""


NOTHING_LEFT = frozenset(
    {ClusterState.ABSENT, ClusterState.GONE, ClusterState.REFUSED, ClusterState.FAILED}
)
"""States in which no node costs money."""


class NodeEnd(str, Enum):
    """How a node's part of the job ended."""

    RUNNING = "running"
    EXITED = "exited"
    """The job's processes ended by themselves with `exit_code`."""
    LOST = "lost"
    """The node was taken: by the cloud, by a kill, or it vanished."""
    OVER = "over"
    """The job has ended on it, nobody says how: it was taken, or had to end with the others."""


@dataclass(frozen=True, kw_only=True)
class NodeView:
    """One node as the launcher sees it."""

    index: int
    end: NodeEnd
    exit_code: int | None = None
    detail: str = ""
    """In words, for a human: 'killed by the cloud at its deadline'."""


@dataclass(frozen=True, kw_only=True)
class ClusterView:
    """One look at a cluster."""

    state: ClusterState
    nodes: tuple[NodeView, ...] = ()
    up_at: float | None = None
    """When its nodes began to cost, if the launcher knows it better than when it was asked."""
    gone_at: float | None = None
    """When the last node was confirmed gone, if the launcher knows it better than 'now'."""
    lived_at: float | None = None
    """When whoever looks saw it live last; None if it never did."""
    last_step: int | None = None
    """Steps finished, if the launcher can see them; else the heartbeats must do."""
    detail: str = ""
    lasting: bool = False
    """Its launch came to nothing, as `detail` says, and no wait will mend that: a right, an image,
    a quota or a network is missing."""
    busy: bool = False
    """Its launch came to nothing, but not for want of nodes: it is worth to ask again at once."""
    quota_full: bool = False
    """Its launch came to nothing because a quota of the account is full, maybe only until nodes
    that have ended count no more."""
    nodes_ran: bool = False
    """Its launch came to nothing, and nodes of it may have run, and cost money, until it did."""
    some_lost: bool = False
    """`nodes` are all called lost because some are: the launcher cannot say which."""
    in_vain: bool = False
    """Nobody took the nodes that are called lost: the launch came to nothing though they ran."""

    @property
    def job_over(self) -> bool:
        """True when no node runs the job any more (the nodes may still cost money)."""
        return self.state is ClusterState.GONE or (
            bool(self.nodes) and all(node.end is not NodeEnd.RUNNING for node in self.nodes)
        )


@dataclass(frozen=True, kw_only=True)
class LogChunk:
    """Some bytes of one node's output."""

    node: int
    offset: int
    """Where `data` starts in that node's stream."""
    data: bytes = field(repr=False)


@runtime_checkable
class ChangesFiles(Protocol):
    """What a launcher can do beside, whose clusters' folders are on this machine."""

    def files_of(self, cluster: str) -> tuple[str, ...]:
        """Return the paths of files that change with what `observe` says; they need not exist."""
        ...


@runtime_checkable
class KnowsFreeNodes(Protocol):
    """What a launcher can do beside, where a place tells how much of it is in use."""

    def free_nodes(self, offer: Offer) -> int | None:
        """Return how many nodes are free in a place now, beside those in use. Does not block long.

        None is unknown, and only a launch can tell. As long as somebody could tell who does not
        answer, it is 0: nothing is given up for it.
        """
        ...


@runtime_checkable
class KnowsCharges(Protocol):
    """What a launcher can do beside, where a cloud tells for how long each node was charged."""

    def charged_node_s(self, cluster: str, offer: Offer, nodes: int) -> float | None:
        """Return the seconds that all nodes of a cluster that is gone were charged, added up.

        Blocks for some seconds at most. None: the cloud does not say, or no more.
        """
        ...


def charged_node_s(launcher: object, cluster: str, offer: Offer, nodes: int) -> float | None:
    """Ask for what is charged for a cluster that is gone, where the launcher can tell; else None.

    What was seen from outside is more: a cluster counts until its last node is gone.
    """
    if not isinstance(launcher, KnowsCharges):
        return None
    return launcher.charged_node_s(cluster, offer, nodes)


class Launcher(Protocol):
    """Starts and ends clusters. Methods block; none is called from two threads at once."""

    name: str

    def offers(self) -> list[Offer]:
        """Return the places that could be asked now, best first. No side effect."""
        ...

    def launch(self, request: LaunchRequest) -> None:
        """Start `request.cluster` and its job; return when it is accepted (not when it trains).

        Idempotent: if a cluster of that name exists or existed, nothing is started. Whether the
        nodes are to be had may be known at once, or be for `observe` to say later.

        Raises:
            NoCapacity: the nodes are not to be had; nothing was started, nothing is billed.
            Unreachable: whether it was accepted is unknown; to be asked again.
            LauncherFailure: anything else; whether nodes exist is for `observe` to say.
        """
        ...

    def observe(self, cluster: str, *, heard: bool = False) -> ClusterView:
        """Return what is known now. Never raises for a cluster that cannot be reached.

        `heard` says that its job gave a sign of life a moment ago: a launcher for which a look is
        dear may let more time pass between two of them.
        """
        ...

    def down(self, cluster: str) -> None:
        """Ask for the end of all nodes of `cluster`; `observe` says when they are gone."""
        ...

    def read_log(self, cluster: str, node: int, offset: int) -> LogChunk:
        """Return what node `node` printed from byte `offset` on (empty when there is no more).

        Raises:
            LogGone: the cluster does not exist, and what it printed is kept nowhere.
            LauncherFailure: it cannot be read now.
        """
        ...

    def close(self) -> None:
        """Look no more, and let threads go; clusters go on. May be called twice."""
        ...
