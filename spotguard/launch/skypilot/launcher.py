"""Clusters of any cloud, of Kubernetes and of Slurm, by SkyPilot.

SkyPilot takes seconds to say anything, so a thread of the launcher's own asks it again and again
about each cluster that matters, and `observe` returns the last answer at once. What the job
wrote to the run store is known long before SkyPilot knows that something is wrong.
"""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from spotguard.errors import LauncherFailure, SpotguardError
from spotguard.launch.base import (
    ClusterState,
    ClusterView,
    LogChunk,
    NodeEnd,
    NodeView,
    Unreachable,
)
from spotguard.launch.skypilot.ec2.bill import charged_node_s
from spotguard.launch.skypilot.free_nodes import FreeNodes
from spotguard.launch.skypilot.sdk import ClusterPhase, JobPhase, by_node
from spotguard.launch.skypilot.strays import end_anywhere
from spotguard.launch.taskyaml import Machine
from spotguard.shared.units import SystemClock, format_duration

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from spotguard.launch.base import LaunchRequest, Offer
    from spotguard.launch.skypilot.sdk import ClusterFacts, LaunchFacts, Sdk
    from spotguard.launch.skypilot.strays import Strays
    from spotguard.shared.units import Clock

log = logging.getLogger(__name__)

_LOOK_EVERY_S = 2.0
"""While something is about to change: a launch, an end."""
_GOING_DOWN_EVERY_S = 0.5
"""While a cluster is being taken down: only the API server is asked whether it is done."""
_GOING_DOWN_PATIENCE_S = 120.0
"""A request that takes longer hangs: then the cluster itself is asked again."""
_END_AGAIN_AFTER_S = 15.0
_WATCH_EVERY_S = 8.0
"""While the nodes are up and the job has fallen silent, or may have lost some of them."""
_SET_UP_EVERY_S = 20.0
_SET_UP_SHARE = 3.0
"""Before a job is first heard, looks rest so many times as long as they take, for they hold up its
set-up; but no longer than while it is heard. What ends it, its node tells the run store."""
_CALM_EVERY_S = 120.0
"""While the job is heard: what ends it writes to the run store first, its silence is followed by a
look at once, and each look takes seconds of a core, here and on the first node."""
_OVER_EVERY_S = 60.0
"""While nothing is left of a launch: it will not change, and a run may wait for hours after it."""
_ASK_CLOUD_EVERY_S = 4.0
_ANSWER_WITHIN_S = 60.0
"""SkyPilot needs up to 20 s for a look where it is busy; one that hangs must not look calm."""
_FIRST_ANSWER_S = 20.0
_NO_ANSWER_YET = "SkyPilot has not answered yet"
_LOG_FRESH_S = 5.0
_AWS, _SLURM, _KUBERNETES = "aws", "slurm", "kubernetes"
_OFFERS_FRESH_S = 300.0
_CAME_TO_NOTHING = {
    ClusterPhase.NO_CAPACITY: ClusterState.REFUSED,
    ClusterPhase.FAILED: ClusterState.FAILED,
}
_GONE_TWICE = 2
"""A cluster that SkyPilot has no word of must be missing so often before it counts as gone."""


class SkyPilotLauncher:
    """A `Launcher` on SkyPilot's public SDK."""

    name = "skypilot"

    def __init__(
        self,
        sdk: Sdk,
        *,
        offers: Callable[[], list[Offer]],
        task: Callable[[LaunchRequest], dict[str, Any]],
        machine: Callable[[], Machine] = Machine,
        strays: Strays | None = None,
        clock: Clock | None = None,
        in_background: bool = True,
    ) -> None:
        """`task` makes the YAML of an attempt, `offers` the places to try, best first.

        `machine` is what a node must be, by which free ones are counted where nodes are pods.
        `strays` knows clusters that another machine launched, before this one adopted the run.
        Without `in_background` each `observe` asks SkyPilot itself: for tests, and for commands
        that look once.
        """
        self._sdk = sdk
        self._offers = offers
        self._task = task
        self._machine = machine
        self._strays = strays
        self._clock = clock or SystemClock()
        self._in_background = in_background
        self._watches: dict[str, _Watch] = {}
        self._free: dict[tuple[str | None, ...], FreeNodes] = {}
        self._known: tuple[float, list[Offer]] | None = None
        self._log: tuple[str, float, dict[int, bytes] | LauncherFailure] | None = None

    def offers(self) -> list[Offer]:
        """Return the places that could be asked now, best first; looked up every five minutes."""
        now = self._clock.monotonic()
        if self._known is None or now - self._known[0] > _OFFERS_FRESH_S:
            self._known = (now, self._offers())
        return self._known[1]

    def launch(self, request: LaunchRequest) -> None:
        """Ask SkyPilot for the cluster; whether the nodes are to be had, `observe` says later."""
        if not request.is_new:
            view = self._look(request.cluster)
            if view.state is ClusterState.UNREACHABLE:
                raise Unreachable(view.detail)
            if view.state is not ClusterState.ABSENT:
                return
        self._sdk.submit(self._task(request), request.cluster)
        self._refresh(request.cluster, ClusterView(state=ClusterState.STARTING))

    def observe(self, cluster: str, *, heard: bool = False) -> ClusterView:
        """Return what SkyPilot last said; the first time it is asked, which takes seconds.

        If it takes longer than 20 s, it counts as unreachable until it answers: the job's own word
        must not wait for it. It is asked at once when a job that was `heard` falls silent.
        """
        if not self._in_background:
            return self._look(cluster)
        if cluster not in self._watches or self._watches[cluster].has_died:
            self._refresh(cluster, None)
            self._watches[cluster].answered.wait(_FIRST_ANSWER_S)
        watch = self._watches[cluster]
        watch.wanted_at = self._clock.monotonic()
        watch.hear(heard)
        return watch.answer()

    def free_nodes(self, offer: Offer) -> int | None:
        """Return what Slurm or Kubernetes last said of a place, which is asked beside.

        Clouds do not say. 0 until there is an answer, and while there is none.
        """
        place = (offer.infra, offer.region, offer.zone, offer.gpus)
        question = self._question_for(offer)
        if question is None:
            return None
        if place not in self._free:
            self._free[place] = FreeNodes(question, "/".join(filter(None, place)), self._clock)
        return self._free[place].count(in_background=self._in_background)

    def charged_node_s(self, cluster: str, offer: Offer, nodes: int) -> float | None:
        """Ask EC2, which charges each node for itself; other clouds are not asked."""
        if offer.infra != _AWS or offer.region is None:
            return None
        return charged_node_s(offer.region, cluster, nodes)

    def _question_for(self, offer: Offer) -> Callable[[], int | None] | None:
        """Return what to ask about an offer; of a choice of GPUs, nodes with the offer's own."""
        if offer.infra == _SLURM and offer.region is not None and offer.zone is not None:
            if offer.gpus:  # Slurm counts the nodes of a partition, whatever GPU is in them
                return None
            return partial(self._sdk.free_slurm_nodes, offer.region, offer.zone)
        if offer.infra == _KUBERNETES:
            return lambda: self._sdk.free_kubernetes_nodes(
                offer.region, replace(self._machine(), gpus=offer.gpus or self._machine().gpus)
            )
        return None

    def down(self, cluster: str) -> None:
        """Ask for the end of all nodes; those of a launch under way too."""
        end_anywhere(self._sdk, cluster, self._strays)
        if cluster in self._watches:
            self._watches[cluster].goes_down()

    def read_log(self, cluster: str, node: int, offset: int) -> LogChunk:
        """Return what a node printed, as long as its cluster lives."""
        now = self._clock.monotonic()
        if self._log is None or self._log[0] != cluster or now - self._log[1] > _LOG_FRESH_S:
            self._log = (cluster, now, self._fetch_log(cluster))
        printed = self._log[2]
        if isinstance(printed, LauncherFailure):
            raise printed
        return LogChunk(node=node, offset=offset, data=printed.get(node, b"")[offset:])

    def _fetch_log(self, cluster: str) -> dict[int, bytes] | LauncherFailure:
        try:
            return by_node(self._sdk.log(cluster))
        except LauncherFailure as problem:  # which takes as long to be told, and is kept as long
            return problem

    def close(self) -> None:
        """Stop asking; what runs goes on."""
        for watch in self._watches.values():
            watch.stop()
        self._watches.clear()

    def _look(self, cluster: str) -> ClusterView:
        return look(self._sdk, cluster, self._clock, strays=self._strays)

    def _refresh(self, cluster: str, view: ClusterView | None) -> None:
        for known, watch in list(self._watches.items()):
            # One that is being taken down is looked at until it is gone, others as long as wanted.
            if known == cluster or not (watch.is_wanted or watch.is_going_down):
                watch.stop()
                del self._watches[known]
        self._watches[cluster] = _Watch(self._sdk, cluster, view, self._clock, self._strays)
        if self._in_background:
            self._watches[cluster].start()


class _Watch(threading.Thread):
    """Looks at one cluster until it is gone. A daemon: SkyPilot's calls cannot be broken off."""

    def __init__(
        self,
        sdk: Sdk,
        cluster: str,
        view: ClusterView | None,
        clock: Clock,
        strays: Strays | None = None,
    ) -> None:
        """Without a view, nothing is known yet: it looks at once."""
        context = copy_context()  # which has the run's log
        super().__init__(
            target=context.run, args=(self._look_on,), name="spotguard-sky", daemon=True
        )
        self.cluster = cluster
        self.view = view or ClusterView(state=ClusterState.UNREACHABLE, detail=_NO_ANSWER_YET)
        self.answered = threading.Event()
        if view is not None:
            self.answered.set()
        self.wanted_at = clock.monotonic()
        """When somebody last asked for what it sees."""
        self._took_s = 0.0
        self._missing = 0
        """Looks in a row that found no such cluster."""
        self._sdk = sdk
        self._strays = strays
        self._clock = clock
        self._stopped = threading.Event()
        self._wake = threading.Event()
        self._down_at: float | None = None
        """When somebody asked for the end of the cluster."""
        self._down_under_way = False
        self._heard = self._was_heard = False
        self._lost = ""
        self._lost_early = ""
        """How the cloud says that a node ended, now and while SkyPilot set the nodes up."""
        self._in_vain = False
        """It was no end of a node: the cloud had launched too many."""
        self._due_at = clock.monotonic() + (0.0 if view is None else self._pause_s())
        """From when on the next look is waited for."""

    def answer(self) -> ClusterView:
        """Return what was seen last, unless a look that is due since then was not answered."""
        late_s = self._clock.monotonic() - self._due_at
        if late_s < _ANSWER_WITHIN_S or self.view.state is ClusterState.GONE:
            return self.view
        words = f"SkyPilot has not answered for {format_duration(late_s)}"
        return ClusterView(state=ClusterState.UNREACHABLE, detail=words)

    def hear(self, heard: bool) -> None:
        """Look seldom as long as the job is heard and whole, and at once when it falls silent."""
        fell_silent, self._heard = self._heard and not heard, heard
        self._was_heard |= heard
        if fell_silent:
            self._due_at = min(self._due_at, self._clock.monotonic())
            self._wake.set()

    def goes_down(self) -> None:
        """Look for the end of the cluster from here on, which somebody has asked for."""
        self._down_at = self._clock.monotonic()
        self._due_at = min(self._due_at, self._down_at)
        self._wake.set()

    @property
    def is_wanted(self) -> bool:
        """True if somebody has asked a moment ago for what it sees."""
        return self._clock.monotonic() - self.wanted_at < _ANSWER_WITHIN_S

    def _is_over(self) -> bool:
        """Tell whether nothing is left of a launch that came to nothing, or was never made.

        Nodes whose end was asked for just now may have been on their way.
        """
        down_at = self._down_at
        if down_at is not None and self._clock.monotonic() - down_at < _GOING_DOWN_PATIENCE_S:
            return False
        if self.view.state is ClusterState.ABSENT:
            return self._missing >= _GONE_TWICE
        return self.view.state in _CAME_TO_NOTHING.values()

    def _note_nothing(self, view: ClusterView) -> None:
        """Have nodes ended that the cloud still has of a launch that came to nothing just now."""
        nothing = _CAME_TO_NOTHING.values()
        if view.state in nothing and self.view.state not in nothing:
            self._sdk.end_forgotten_nodes(self.cluster)

    @property
    def is_going_down(self) -> bool:
        """True once somebody has asked for the end of the cluster, until it is seen gone."""
        is_gone = self.view.state is ClusterState.GONE or self._is_over()
        return self._down_at is not None and not is_gone

    @property
    def has_died(self) -> bool:
        """True if it looks no more, though the cluster was not seen gone.

        An error ended it, or nothing was left of a launch, and nobody asked for that any more.
        """
        over = self._stopped.is_set() or self.view.state is ClusterState.GONE
        return self.ident is not None and not self.is_alive() and not over

    def stop(self) -> None:
        """Look no more."""
        self._stopped.set()
        self._wake.set()

    def _look_on(self) -> None:
        while not self._stopped.is_set() and self.view.state is not ClusterState.GONE:
            if self.answered.is_set() or self._down_under_way:
                self._rest()
            if self._is_over() and not self.is_wanted:
                return
            self._wake.clear()
            self._down_under_way = self._is_being_taken_down()
            if not self._down_under_way:
                began_at = self._clock.monotonic()
                view = self._look()
                self._took_s = self._clock.monotonic() - began_at
                self._missing = self._missing + 1 if view.state is ClusterState.ABSENT else 0
                # A request that was taken a moment ago may not be in the books yet.
                if not self.answered.is_set() or not 0 < self._missing < _GONE_TWICE:
                    self._note_nothing(view)
                    self.view = view
                    self.answered.set()
                self._end_it_again(view)
            self._due_at = self._clock.monotonic() + self._pause_s()

    def _end_it_again(self, view: ClusterView) -> None:
        """Ask for it again: SkyPilot refuses it of a queued launch, and a teardown may fail."""
        now, lives = self._clock.monotonic(), view.state in (ClusterState.STARTING, ClusterState.UP)
        if self._down_at is not None and lives and now - self._down_at >= _END_AGAIN_AFTER_S:
            log.info("%s still lives: its end is asked for once more", self.cluster)
            self._down_at = now
            with suppress(SpotguardError):  # the next look will say what is wrong
                self._sdk.down(self.cluster)

    def _look(self) -> ClusterView:
        """Look; unless the cloud tells of an end meanwhile, which then is what is seen.

        SkyPilot asks a node that has just died, too, and waits for it for half a minute.
        """
        if self._lost or self.view.state is not ClusterState.UP or self._lost_early:
            return self._look_once(self._lost or self._lost_early)
        seen: list[ClusterView] = []
        looking = threading.Thread(
            target=copy_context().run,
            args=(lambda: seen.append(self._look_once("")),),
            name="spotguard-look",
            daemon=True,
        )
        looking.start()
        looking.join(_ASK_CLOUD_EVERY_S)
        while looking.is_alive():
            if lost := self._said_lost():
                return self._look_once(lost)
            looking.join(_ASK_CLOUD_EVERY_S)
        if not seen:
            raise RuntimeError(f"a look at {self.cluster} ended by an error, told by its thread")
        return seen[0]

    def _look_once(self, lost: str) -> ClusterView:
        view = look(
            self._sdk,
            self.cluster,
            self._clock,
            was_starting=self.view.state is ClusterState.STARTING,
            strays=self._strays,
            lost=lost,
        )
        return replace(view, in_vain=True) if lost and self._in_vain else view

    def _rest(self) -> None:
        """Rest until it is time to look, somebody asks for it, or the cloud tells of an end."""
        left_s, self._lost = self._due_at - self._clock.monotonic(), ""
        while left_s > 0.0 and not self._wake.wait(min(left_s, _ASK_CLOUD_EVERY_S)):
            left_s -= _ASK_CLOUD_EVERY_S
            self._lost = self._said_lost()
            if self._lost:
                return

    def _said_lost(self) -> str:
        """Ask for nodes that ended by something else than our own order.

        SkyPilot waits ten minutes for a spot machine that goes in its set-up.
        """
        starting = self.view.state is ClusterState.STARTING
        lives = starting or self.view.state is ClusterState.UP
        if not lives or self.view.job_over or self._down_at is not None:
            return ""
        extra = self._sdk.end_extra_nodes(self.cluster) if starting else ""
        lost = extra or self._sdk.lost(self.cluster, starting=starting)
        self._lost_early, self._in_vain = lost if starting else "", bool(extra)
        return lost

    def _is_being_taken_down(self) -> bool:
        """Tell whether it is too early to look: a look would wait for the cluster's own lock."""
        if self._down_at is None:
            return False
        if self._clock.monotonic() - self._down_at > _GOING_DOWN_PATIENCE_S:
            return False
        try:
            return self._sdk.is_going_down(self.cluster)
        except SpotguardError:
            return False  # the look will say what is wrong

    def _pause_s(self) -> float:
        if self._down_under_way:
            return _GOING_DOWN_EVERY_S
        if self._is_over():
            return _OVER_EVERY_S
        calm = self.view.state is ClusterState.UP and not self.view.job_over
        if not calm or self._down_at is not None:
            return _LOOK_EVERY_S
        if self._heard and not self.view.some_lost:
            return _CALM_EVERY_S
        if self._was_heard:
            return _WATCH_EVERY_S
        return min(max(_SET_UP_EVERY_S, _SET_UP_SHARE * self._took_s), _CALM_EVERY_S)


def look(
    sdk: Sdk,
    cluster: str,
    clock: Clock,
    *,
    was_starting: bool = False,
    strays: Strays | None = None,
    lost: str = "",
) -> ClusterView:
    """Return how a cluster is, by all that SkyPilot can say. Never raises for one out of reach.

    One that SkyPilot does not know may be another machine's: `strays` are asked. One of which the
    cloud itself says that a node is `lost`, and how, is not looked at once more by SkyPilot.

    A cluster that `was_starting` at the last look and is up now was seen by SkyPilot just then:
    the nodes, the job and this machine have better things to do than to answer once more.
    """
    try:
        view = _look(sdk, cluster, clock, was_starting=was_starting, lost=lost)
        if view.state is ClusterState.ABSENT and strays is not None:
            return strays.look(cluster)
        return view
    except SpotguardError as problem:
        if not isinstance(problem, Unreachable):
            log.warning("%s: %s", cluster, problem)
        return ClusterView(state=ClusterState.UNREACHABLE, detail=problem.message)


def _look(sdk: Sdk, cluster: str, clock: Clock, *, was_starting: bool, lost: str) -> ClusterView:
    launch = sdk.launch_of(cluster)
    if launch is not None and launch.phase is ClusterPhase.UNDER_WAY:
        if not lost:
            return ClusterView(state=ClusterState.STARTING)
        return _lost_in_its_set_up(ClusterView(state=ClusterState.UP), lost)
    just_up = was_starting and launch is not None and launch.phase is ClusterPhase.DONE
    facts = sdk.cluster(cluster, fresh=not (just_up or lost))
    if facts is not None and lost:
        facts = replace(facts, up=False, unhealthy=True, detail=lost)
    if facts is None:
        if launch is not None and launch.broke_off:
            gone = _gone(sdk, cluster, known=True, clock=clock)
            return _lost_in_its_set_up(gone, launch.problem)
        if launch is not None and launch.phase in _CAME_TO_NOTHING:
            return _came_to_nothing(sdk, cluster, launch, clock)
        return _gone(sdk, cluster, known=launch is not None, clock=clock)
    if launch is not None and launch.phase in _CAME_TO_NOTHING:
        # Something of it may be left, and cost money: it has to be taken down.
        return ClusterView(
            state=ClusterState.UP,
            nodes=_all_nodes(facts, NodeEnd.LOST, f"the launch failed: {launch.problem}"),
            up_at=facts.launched_at,
            detail=launch.problem,
            lasting=launch.lasting and not launch.quota_full,  # its own nodes may have filled it
            in_vain=launch.quota_full,
        )
    if launch is None and not (facts.up or facts.unhealthy):
        # It will not come up: the request is not in the books of a server that began anew.
        detail = "its launch was broken off, and SkyPilot has forgotten it"
        return ClusterView(
            state=ClusterState.UP,
            nodes=_all_nodes(facts, NodeEnd.LOST, detail),
            up_at=facts.launched_at,
            detail=detail,
        )
    return ClusterView(
        state=ClusterState.UP,
        nodes=_all_nodes(facts, NodeEnd.RUNNING, "") if just_up else _nodes(sdk, cluster, facts),
        up_at=facts.launched_at,
        detail=facts.detail,
        some_lost=facts.unhealthy and facts.nodes > 1,
    )


def _came_to_nothing(sdk: Sdk, cluster: str, launch: LaunchFacts, clock: Clock) -> ClusterView:
    """Return why nothing is left of a launch, and until when it may have cost money."""
    ended_at = sdk.ended_at(cluster) or launch.finished_at if launch.nodes_ran else None
    return ClusterView(
        state=_CAME_TO_NOTHING[launch.phase],
        detail=launch.problem,
        lasting=launch.lasting,
        busy=launch.busy,
        quota_full=launch.quota_full,
        nodes_ran=launch.nodes_ran,
        gone_at=None if ended_at is None else min(ended_at, clock.now()),
    )


def _lost_in_its_set_up(view: ClusterView, why: str) -> ClusterView:
    """Return it with a lost node, nobody says which: spot machines go in these minutes, too."""
    lost = NodeView(index=0, end=NodeEnd.LOST, detail=f"lost in its set-up: {why}")
    return replace(view, nodes=(lost,), some_lost=True, detail=why)


def _gone(sdk: Sdk, cluster: str, *, known: bool, clock: Clock) -> ClusterView:
    ended_at = sdk.ended_at(cluster)
    if ended_at is None:
        state = ClusterState.GONE if known else ClusterState.ABSENT
        return ClusterView(state=state)
    return ClusterView(state=ClusterState.GONE, gone_at=min(ended_at, clock.now()))


def _nodes(sdk: Sdk, cluster: str, facts: ClusterFacts) -> tuple[NodeView, ...]:
    if facts.unhealthy:
        return _all_nodes(facts, NodeEnd.LOST, facts.detail or "a node of the cluster is gone")
    match sdk.job(cluster):
        case JobPhase.SUCCEEDED:
            return _all_nodes(facts, NodeEnd.EXITED, "", exit_code=0)
        case JobPhase.FAILED_SETUP:
            return _all_nodes(facts, NodeEnd.EXITED, "its set-up failed", exit_code=1)
        case JobPhase.FAILED:
            # A node that was taken looks the same; what the nodes wrote themselves comes first.
            return _all_nodes(facts, NodeEnd.OVER, "SkyPilot says that the job failed")
        case _:
            return _all_nodes(facts, NodeEnd.RUNNING, "")


def _all_nodes(
    facts: ClusterFacts, end: NodeEnd, detail: str, *, exit_code: int | None = None
) -> tuple[NodeView, ...]:
    return tuple(
        NodeView(index=index, end=end, exit_code=exit_code, detail=detail)
        for index in range(facts.nodes)
    )
