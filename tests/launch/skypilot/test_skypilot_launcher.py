from __future__ import annotations

import inspect
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from spotguard.errors import LauncherFailure
from spotguard.launch.base import (
    ClusterState,
    ClusterView,
    LaunchRequest,
    LogGone,
    NodeEnd,
    Unreachable,
)
from spotguard.launch.skypilot import launcher as launcher_module
from spotguard.launch.skypilot import sdk as sdk_module
from spotguard.launch.skypilot.launcher import SkyPilotLauncher, look
from spotguard.launch.skypilot.sdk import ClusterPhase, JobPhase, LaunchFacts, by_node
from spotguard.launch.taskyaml import Machine
from spotguard.testing.clock import FakeClock
from spotguard.testing.launcher import FAKE_OFFER
from tests.launch.skypilot.fake_sdk import FakeSdk, unhealthy, up

if TYPE_CHECKING:
    from collections.abc import Callable

NAME = "job-1-1"
REQUEST = LaunchRequest(
    cluster=NAME,
    run_id="job-1",
    attempt=1,
    nodes=2,
    nproc_per_node=1,
    script="/job.py",
    args=(),
    workdir="/",
    env={},
    offer=FAKE_OFFER,
    max_lifetime_s=None,
)
UNDER_WAY = LaunchFacts(phase=ClusterPhase.UNDER_WAY)
DONE = LaunchFacts(phase=ClusterPhase.DONE)
UP = ClusterView(state=ClusterState.UP)
REFUSED = LaunchFacts(phase=ClusterPhase.NO_CAPACITY, problem="spot: none left")
FAILED = LaunchFacts(phase=ClusterPhase.FAILED, problem="no such image")


class Killed(BaseException):
    """The controller dies here."""


def launcher(sdk: FakeSdk, clock: FakeClock | None = None, **more: Any) -> SkyPilotLauncher:
    """Return a launcher that asks the fake itself, whenever it is asked."""
    given: dict[str, Any] = {"offers": lambda: [FAKE_OFFER], "in_background": False, **more}
    return SkyPilotLauncher(
        sdk, task=lambda request: {"nodes": request.nodes}, clock=clock or FakeClock(), **given
    )


def seen(sdk: FakeSdk) -> ClusterView:
    """Return what the launcher says of the cluster."""
    return launcher(sdk, FakeClock(now=500.0)).observe(NAME)


# ---------------------------------------------------------------- launching


def test_a_launch_is_handed_over_once_however_often_it_is_asked_for() -> None:
    """While it is under way, once it is up, and after its end, the name starts nothing again."""
    sdk = FakeSdk()
    launcher(sdk).launch(REQUEST)
    launcher(sdk).launch(REQUEST)
    sdk.comes_up(NAME)
    launcher(sdk).launch(REQUEST)
    del sdk.clusters[NAME]
    sdk.ends[NAME] = 400.0
    launcher(sdk).launch(REQUEST)
    assert sdk.submitted == [(NAME, {"nodes": 2})]


def test_what_skypilot_forgot_but_billed_is_not_launched_again() -> None:
    """Its requests are kept for a while only; its list of costs still knows the name."""
    sdk = FakeSdk(ends={NAME: 400.0})
    launcher(sdk).launch(REQUEST)
    assert sdk.submitted == []


def test_for_a_cluster_that_is_surely_new_nobody_looks() -> None:
    """A look costs seconds, in which nothing trains."""
    sdk = FakeSdk()
    launcher(sdk).launch(replace(REQUEST, is_new=True))
    assert sdk.asked == ["submit"]


@pytest.mark.parametrize("moment", ["before_submit", "after_submit"])
def test_killed_around_the_hand_over_it_is_launched_exactly_once(moment: str) -> None:
    """The next controller asks SkyPilot what there is, and launches only what is not."""

    def die() -> None:
        raise Killed

    sdk = FakeSdk()
    setattr(sdk, moment, die)
    with pytest.raises(Killed):
        launcher(sdk).launch(REQUEST)
    setattr(sdk, moment, None)

    following = launcher(sdk)
    if following.observe(NAME).state is ClusterState.ABSENT:
        following.launch(REQUEST)
    assert [name for name, _ in sdk.submitted] == [NAME]
    assert following.observe(NAME).state is ClusterState.STARTING


def test_nothing_is_handed_over_to_a_skypilot_that_does_not_answer() -> None:
    """Whether the cluster exists is unknown: that is told, and never taken for a launch."""
    sdk = FakeSdk(away=True)
    with pytest.raises(Unreachable, match="does not answer"):
        launcher(sdk).launch(REQUEST)
    assert sdk.submitted == []


# ---------------------------------------------------------------- states

STATES: dict[str, tuple[FakeSdk, ClusterState, NodeEnd | None]] = {
    "never heard of it": (FakeSdk(), ClusterState.ABSENT, None),
    "the launch is under way": (
        FakeSdk(launches={NAME: UNDER_WAY}),
        ClusterState.STARTING,
        None,
    ),
    "under way, nodes are there": (
        FakeSdk(launches={NAME: UNDER_WAY}, clusters={NAME: up()}),
        ClusterState.STARTING,
        None,
    ),
    "no capacity, nothing left": (
        FakeSdk(launches={NAME: REFUSED}),
        ClusterState.REFUSED,
        None,
    ),
    "no capacity, something left": (
        FakeSdk(launches={NAME: REFUSED}, clusters={NAME: unhealthy()}),
        ClusterState.UP,
        NodeEnd.LOST,
    ),
    "failed, nothing left": (FakeSdk(launches={NAME: FAILED}), ClusterState.FAILED, None),
    "its launch is forgotten, something left": (
        FakeSdk(clusters={NAME: replace(up(), up=False)}),
        ClusterState.UP,
        NodeEnd.LOST,
    ),
    "failed, something left": (
        FakeSdk(launches={NAME: FAILED}, clusters={NAME: up()}),
        ClusterState.UP,
        NodeEnd.LOST,
    ),
    "up, the job is not there yet": (
        FakeSdk(launches={NAME: DONE}, clusters={NAME: up()}),
        ClusterState.UP,
        NodeEnd.RUNNING,
    ),
    "up, setting up": (
        FakeSdk(launches={NAME: DONE}, clusters={NAME: up()}, jobs={NAME: JobPhase.STARTING}),
        ClusterState.UP,
        NodeEnd.RUNNING,
    ),
    "up, running": (
        FakeSdk(launches={NAME: DONE}, clusters={NAME: up()}, jobs={NAME: JobPhase.RUNNING}),
        ClusterState.UP,
        NodeEnd.RUNNING,
    ),
    "up, running, the launch is forgotten": (
        FakeSdk(clusters={NAME: up()}, jobs={NAME: JobPhase.RUNNING}),
        ClusterState.UP,
        NodeEnd.RUNNING,
    ),
    "up, done": (
        FakeSdk(launches={NAME: DONE}, clusters={NAME: up()}, jobs={NAME: JobPhase.SUCCEEDED}),
        ClusterState.UP,
        NodeEnd.EXITED,
    ),
    "up, the set-up failed": (
        FakeSdk(launches={NAME: DONE}, clusters={NAME: up()}, jobs={NAME: JobPhase.FAILED_SETUP}),
        ClusterState.UP,
        NodeEnd.EXITED,
    ),
    "up, the job failed": (
        FakeSdk(launches={NAME: DONE}, clusters={NAME: up()}, jobs={NAME: JobPhase.FAILED}),
        ClusterState.UP,
        NodeEnd.OVER,
    ),
    "a node is gone": (
        FakeSdk(launches={NAME: DONE}, clusters={NAME: unhealthy()}, jobs={NAME: JobPhase.RUNNING}),
        ClusterState.UP,
        NodeEnd.LOST,
    ),
    "gone, billed": (
        FakeSdk(launches={NAME: DONE}, ends={NAME: 400.0}),
        ClusterState.GONE,
        None,
    ),
    "gone, no bill": (FakeSdk(launches={NAME: DONE}), ClusterState.GONE, None),
    "gone, only the bill is left": (FakeSdk(ends={NAME: 400.0}), ClusterState.GONE, None),
    "nobody answers": (
        FakeSdk(launches={NAME: DONE}, clusters={NAME: up()}, away=True),
        ClusterState.UNREACHABLE,
        None,
    ),
    "it answers nonsense": (FakeSdk(broken="KeyError: 'x'"), ClusterState.UNREACHABLE, None),
}


@pytest.mark.parametrize("name", STATES)
def test_each_word_of_skypilots_has_one_meaning(name: str) -> None:
    """The whole table of what is made of its answers."""
    sdk, state, end = STATES[name]
    view = seen(sdk)
    assert view.state is state
    assert {node.end for node in view.nodes} == ({end} if end else set())
    assert len(view.nodes) == (2 if end else 0)


def test_what_is_told_besides_the_state() -> None:
    """When it began and ceased to cost, how the job left, and in whose words."""
    assert seen(STATES["up, running"][0]).up_at == 50.0
    assert seen(STATES["failed, something left"][0]).up_at == 50.0
    assert seen(STATES["gone, billed"][0]).gone_at == 400.0
    assert seen(STATES["gone, no bill"][0]).gone_at is None
    assert seen(FakeSdk(ends={NAME: 900.0})).gone_at == 500.0, "never in the future"
    assert [node.exit_code for node in seen(STATES["up, done"][0]).nodes] == [0, 0]
    assert [node.exit_code for node in seen(STATES["up, the set-up failed"][0]).nodes] == [1, 1]
    assert seen(STATES["no capacity, nothing left"][0]).detail == "spot: none left"
    assert seen(STATES["failed, nothing left"][0]).detail == "no such image"
    lost = seen(FakeSdk(launches={NAME: DONE}, clusters={NAME: unhealthy(detail="node 1 died")}))
    assert {node.detail for node in lost.nodes} == {"node 1 died"}
    assert lost.some_lost, "of two nodes nobody says which"
    alone = seen(FakeSdk(launches={NAME: DONE}, clusters={NAME: unhealthy(nodes=1)}))
    assert not alone.some_lost
    assert not seen(STATES["up, done"][0]).some_lost
    assert "does not answer" in seen(STATES["nobody answers"][0]).detail


def lost_while_it_starts(sdk: FakeSdk) -> list[ClusterView]:
    """Return what a watch sees in four looks at a launch of which a node ends during the first."""
    starting = ClusterView(state=ClusterState.STARTING)
    watch = launcher_module._Watch(sdk, NAME, starting, FakeClock(now=500.0))
    watch._wake, views = Passing(), list[ClusterView]()
    sdk.launches[NAME] = LaunchFacts(phase=ClusterPhase.UNDER_WAY)

    def look() -> None:
        views.append(watch.view)
        sdk.said_lost[NAME] = "EC2 says that i-1 is terminated: Server.SpotInstanceTermination"
        if len(views) == 4:
            watch.stop()

    sdk.before_look = look
    watch.run()
    return [*views, watch.view]


def test_a_node_that_ec2_takes_in_its_set_up_is_not_waited_for() -> None:
    """SkyPilot tries to reach it for ten minutes. What was said once holds until the end."""
    views = lost_while_it_starts(FakeSdk(taken={NAME}))
    assert [view.state for view in views[:2]] == [ClusterState.STARTING] * 2
    lost = {(view.state, node.end) for view in views[2:] for node in view.nodes}
    assert lost == {(ClusterState.UP, NodeEnd.LOST)}
    assert len(views[3].nodes) == 1


def test_a_node_that_skypilot_ends_as_it_goes_on_is_not_lost() -> None:
    """The launch is still under way, in the next place."""
    views = lost_while_it_starts(FakeSdk())
    assert {view.state for view in views} == {ClusterState.STARTING}


@pytest.mark.parametrize(
    ("infra", "asked"),
    [("aws/us-east-1/us-east-1a", ["us-east-1"]), ("aws", []), ("gcp/us-central1", []), (None, [])],
)
def test_ec2_is_asked_of_a_launch_whose_region_is_known(
    infra: str | None, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SkyPilot's books have the region once the cluster is up; that is too late."""
    sky = pytest.importorskip("sky")
    monkeypatch.setattr(sky.Task, "from_yaml_config", lambda task: task)
    monkeypatch.setattr(sky, "launch", lambda *args, **settings: None)
    regions = list[str]()

    def why(region: str, cluster: str, *, taken: bool) -> str:
        regions.append(region)
        return "gone" if taken else ""

    monkeypatch.setattr(sdk_module._ENDS, "why", why)
    monkeypatch.setattr(sdk_module, "_statuses", lambda names, fresh: {})
    resources: dict[str, Any] = {"autostop": {"idle_minutes": 5}}
    extras = list[tuple[str, str, int]]()

    def end(*words: Any) -> str:
        extras.append(words)
        return ""

    monkeypatch.setattr(sdk_module._EXTRAS, "end", end)
    resources |= {"infra": infra} if infra else {}
    sdk = sdk_module.SkySdk()
    sdk.submit({"num_nodes": 3, "resources": resources}, NAME)
    assert sdk.lost(NAME, starting=True) == ("gone" if asked else "")
    assert regions == asked
    sdk.end_extra_nodes(NAME)
    assert extras == [(region, NAME, 3) for region in asked]


@pytest.mark.parametrize(
    ("cloud", "asked"), [("AWS", [("us-west-2", NAME, 2)]), ("GCP", []), (None, [])]
)
def test_skypilots_books_tell_where_a_launch_is_that_another_process_began(
    cloud: str | None, asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A controller that starts anew while its nodes come up. Until they do, it asks again."""
    status = {"cloud": cloud, "region": "us-west-2", "nodes": 2}
    books = list[dict[str, Any]]([{}, {NAME: status}, {NAME: status}])
    monkeypatch.setattr(sdk_module, "_statuses", lambda names, fresh: books.pop(0))
    extras = list[Any]()
    monkeypatch.setattr(sdk_module._EXTRAS, "end", lambda *words: extras.append(words))
    monkeypatch.setattr(sdk_module._ENDS, "why", lambda *words, taken: "")
    sdk = sdk_module.SkySdk()
    for _ in range(2):
        sdk.end_extra_nodes(NAME)
        assert sdk.lost(NAME, starting=False) == "", "it asks for none that SkyPilot has not"
    assert extras == asked
    sdk.end_extra_nodes(NAME)
    assert extras == asked * 2
    assert len(books) == (1 if cloud else 0), "what is known is not asked again"


def watch_of(sdk: FakeSdk, state: ClusterState, clock: FakeClock) -> Any:
    """Return a watch that has last seen a cluster so, and has not begun."""
    watch = launcher_module._Watch(sdk, NAME, ClusterView(state=state), clock)
    watch._wake = Passing()
    return watch


def test_nodes_too_many_are_looked_for_until_the_launch_is_done() -> None:
    """Later the job may be on any of them."""
    sdk = FakeSdk()
    watch = watch_of(sdk, ClusterState.STARTING, FakeClock(now=500.0))
    assert watch._said_lost() == ""
    assert sdk.asked_for_extra == [NAME]
    watch.view = ClusterView(state=ClusterState.UP)
    assert watch._said_lost() == ""
    assert sdk.asked_for_extra == [NAME]


def test_a_node_too_many_that_is_found_too_late_spoils_the_cluster_for_good() -> None:
    """But its place has taken nothing from the run."""
    sdk = FakeSdk(launches={NAME: UNDER_WAY}, extra="EC2 launched i-1 once more")
    watch = watch_of(sdk, ClusterState.STARTING, FakeClock(now=500.0))
    for _ in range(2):
        watch._lost = watch._said_lost()
        watch.view = watch._look()
        assert watch.view.state is ClusterState.UP
        assert watch.view.in_vain
        assert [node.end for node in watch.view.nodes] == [NodeEnd.LOST]


def test_a_launch_that_met_a_full_quota_and_left_something_was_in_vain() -> None:
    """What is left has to be taken down; the place has taken nothing."""
    met = replace(REFUSED, quota_full=True)
    assert seen(FakeSdk(launches={NAME: met}, clusters={NAME: unhealthy()})).in_vain
    assert not seen(FakeSdk(launches={NAME: REFUSED}, clusters={NAME: unhealthy()})).in_vain


def test_forgotten_nodes_are_looked_for_once_a_launch_came_to_nothing() -> None:
    """EC2 may list them late, and SkyPilot says that nothing is left."""
    sdk = FakeSdk()
    watch = watch_of(sdk, ClusterState.STARTING, FakeClock(now=500.0))
    states = [UNDER_WAY, REFUSED, REFUSED]

    def look() -> None:
        sdk.launches[NAME] = states.pop(0)
        if not states:
            watch.stop()

    sdk.before_look = look
    watch.run()
    assert sdk.asked_for_forgotten == [NAME], "not again at the next look"


@pytest.mark.parametrize(
    ("status", "up", "unhealthy"),
    [("UP", True, False), ("AUTOSTOPPING", True, False), ("INIT", False, True)],
)
def test_nodes_that_end_themselves_are_not_lost(
    status: str, up: bool, unhealthy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They know how their job ended: a set-up that failed is no loss, and is not tried again."""
    sky = pytest.importorskip("sky")
    answer = {"status": sky.ClusterStatus[status], "nodes": 1, "launched_at": 5, "init_kind": None}
    monkeypatch.setattr(sdk_module._LOOKS, "about", lambda name: answer)
    monkeypatch.setattr(sdk_module.SkySdk, "_begin_of_bill", lambda self, cluster: 5.0)
    facts = sdk_module.SkySdk().cluster(NAME)
    assert facts is not None
    assert (facts.up, facts.unhealthy) == (up, unhealthy)


def test_a_spot_machine_that_goes_in_its_set_up_is_a_lost_node() -> None:
    """The next attempt follows, as after any other loss: a failed launch would end the run."""
    view = seen(FakeSdk(launches={NAME: replace(FAILED, broke_off=True)}))
    assert view.state is ClusterState.GONE
    assert view.some_lost, "SkyPilot does not say which"
    assert [(node.end, node.detail) for node in view.nodes] == [
        (NodeEnd.LOST, "lost in its set-up: no such image")
    ]


def test_a_job_that_nobody_can_tell_of_is_not_over() -> None:
    """A failed question about the job is no verdict, as long as the cluster is well."""
    assert not seen(STATES["up, the job is not there yet"][0]).job_over


# ---------------------------------------------------------------- in the background


def history(sdk: FakeSdk, *changes: Any) -> list[ClusterState]:
    """Let a watch look until its cluster is gone; each change happens before one look."""
    views: list[ClusterState] = []
    watch = launcher_module._Watch(
        sdk, NAME, ClusterView(state=ClusterState.STARTING), FakeClock(now=500.0)
    )
    left = list(changes)

    def next_change() -> None:
        views.append(watch.view.state)
        watch.goes_down()  # looks again without waiting
        if left:
            left.pop(0)()
        else:
            watch.stop()

    sdk.before_look = next_change
    watch.goes_down()
    watch.run()
    return [*views, watch.view.state]


def test_the_watch_follows_a_cluster_to_its_end_and_stops() -> None:
    """Its last view is that the cluster is gone; it asks no more after that."""
    sdk = FakeSdk(launches={NAME: UNDER_WAY})

    def goes() -> None:
        sdk.clusters.clear()
        sdk.ends[NAME] = 400.0

    states = history(sdk, lambda: None, lambda: sdk.comes_up(NAME), goes, lambda: None)
    assert states == [
        ClusterState.STARTING,
        ClusterState.STARTING,
        ClusterState.UP,
        ClusterState.GONE,
    ]


def test_while_a_cluster_is_taken_down_nobody_looks_at_it() -> None:
    """The look would wait for the cluster's lock; its end is seen once the request is done."""
    sdk = FakeSdk(launches={NAME: DONE}, ends={NAME: 400.0}, downs_under_way=3)
    watch = launcher_module._Watch(sdk, NAME, UP, FakeClock(now=500.0))
    watch._wake = Unhurried()
    watch.goes_down()
    watch.run()
    assert watch.view.state is ClusterState.GONE
    assert sdk.asked == ["is_going_down"] * 4 + ["launch_of", "cluster", "ended_at"]


def test_an_end_that_came_to_nothing_is_asked_for_again() -> None:
    """SkyPilot knows no cluster yet whose launch waits for its turn; then nodes come, and cost."""
    sdk, clock = FakeSdk(launches={NAME: UNDER_WAY}), FakeClock(now=500.0)
    watch = launcher_module._Watch(sdk, NAME, ClusterView(state=ClusterState.STARTING), clock)
    watch._wake = Unhurried()
    looks = 0

    def time_passes() -> None:
        nonlocal looks
        looks += 1
        assert looks < 50, "nobody asked again"
        clock.advance(6.0)
        if looks == 2:
            sdk.comes_up(NAME)
        if len(sdk.downed) == 2:
            sdk.clusters.clear()
            sdk.ends[NAME] = 400.0

    sdk.before_look = time_passes
    watch.goes_down()
    watch.run()
    assert watch.view.state is ClusterState.GONE
    assert sdk.downed == [NAME] * 2
    assert looks >= 6, "each time it had a quarter of a minute"


def test_the_first_look_at_a_new_cluster_is_a_cheap_one() -> None:
    """SkyPilot saw it a moment ago; from the next look on, the cloud and the job are asked."""
    sdk = FakeSdk(launches={NAME: UNDER_WAY})
    asked: list[list[str]] = []

    def noted() -> None:
        asked.append(sdk.asked[:])
        sdk.asked.clear()

    def comes_up() -> None:
        noted()
        sdk.comes_up(NAME)

    states = history(sdk, noted, comes_up, noted, noted)
    assert states[2:] == [ClusterState.UP] * 4
    assert asked[2] == ["launch_of", "books", "is_going_down"]
    assert asked[3] == ["launch_of", "cluster", "job", "is_going_down"]


def test_a_job_that_is_heard_is_looked_at_seldom() -> None:
    """Each look costs seconds of a core; when it falls silent the next comes at once."""
    sdk, waits = FakeSdk(), list[float | None]()
    sdk.comes_up(NAME)
    watch = launcher_module._Watch(sdk, NAME, UP, FakeClock(now=500.0))

    class Noted(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.append(watch._pause_s() if not self.is_set() else 0.0)
            acts[len(waits) - 1]()
            return True

    acts = [
        lambda: watch.hear(True),
        lambda: watch.hear(False),
        lambda: None,
        lambda: watch.hear(False),
        watch.stop,
    ]
    watch._wake = Noted()
    watch.run()
    calm, seldom = launcher_module._WATCH_EVERY_S, launcher_module._CALM_EVERY_S
    assert waits == [launcher_module._SET_UP_EVERY_S, seldom, calm, calm, calm]


def test_looks_do_not_hold_up_the_set_up_of_a_job() -> None:
    """Where a look takes 10 s of a busy node's cores, every 8 s would leave few for the job."""
    sdk, clock = FakeSdk(), FakeClock(now=500.0)
    sdk.comes_up(NAME)
    watch = launcher_module._Watch(sdk, NAME, UP, clock)
    watch._wake = Passing()

    def slow_and_last() -> None:
        clock.advance(10.0)
        watch.stop()

    sdk.before_look = slow_and_last
    watch.run()
    assert watch._pause_s() == 30.0
    watch.hear(True)
    watch.hear(False)
    assert watch._pause_s() == launcher_module._WATCH_EVERY_S


def test_a_job_that_is_heard_but_may_have_lost_nodes_is_looked_at_often() -> None:
    """SkyPilot may be mistaken, and its next look says so: the last one must not stand for long."""
    watch = launcher_module._Watch(FakeSdk(), NAME, replace(UP, some_lost=True), FakeClock())
    watch.hear(True)
    assert watch._pause_s() == launcher_module._WATCH_EVERY_S


def calm_watch(clock: FakeClock) -> launcher_module._Watch:
    """Return one whose job is heard, and that has just looked."""
    watch = launcher_module._Watch(FakeSdk(), NAME, UP, clock)
    watch.hear(True)
    watch._due_at = clock.monotonic() + watch._pause_s()
    return watch


def test_rest_is_no_silence_of_skypilot() -> None:
    """Only a look that is due and not answered is."""
    clock = FakeClock()
    watch = calm_watch(clock)
    clock.advance(launcher_module._CALM_EVERY_S + launcher_module._ANSWER_WITHIN_S - 1.0)
    assert watch.answer() is UP
    clock.advance(2.0)
    assert watch.answer().state is ClusterState.UNREACHABLE


def test_a_look_is_due_at_once_when_the_job_falls_silent() -> None:
    """What was seen before holds for as long as an answer may take, and not for all the rest."""
    clock = FakeClock()
    watch = calm_watch(clock)
    clock.advance(20.0)
    watch.hear(False)
    clock.advance(launcher_module._ANSWER_WITHIN_S - 1.0)
    assert watch.answer() is UP
    clock.advance(2.0)
    assert watch.answer().state is ClusterState.UNREACHABLE


class Passing(threading.Event):
    """Time passes at once: whoever waits has waited."""

    def __init__(self) -> None:
        super().__init__()
        self.waited_s = 0.0

    def wait(self, timeout: float | None = None) -> bool:
        """Return at once."""
        self.waited_s += timeout or 0.0
        return self.is_set()


def test_a_node_that_the_cloud_says_is_gone_counts_as_lost_though_its_job_was_heard() -> None:
    """EC2's word comes in seconds; SkyPilot's look would cost more of them, and say the same."""
    sdk, watch_wakes = FakeSdk(), Passing()
    sdk.comes_up(NAME)
    watch = launcher_module._Watch(sdk, NAME, UP, FakeClock(now=500.0))
    watch._wake = watch_wakes
    watch.hear(True)
    said = "EC2 says that i-1 is terminated: Server.InternalError"

    sdk.before_look = watch.stop
    sdk.said_lost[NAME] = said
    watch.run()

    assert watch_wakes.waited_s == launcher_module._ASK_CLOUD_EVERY_S
    assert sdk.asked == ["launch_of", "books"]
    assert watch.view.some_lost
    assert {(node.end, node.detail) for node in watch.view.nodes} == {(NodeEnd.LOST, said)}


def test_a_look_that_hangs_on_a_dead_node_does_not_hide_what_the_cloud_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SkyPilot asks the node itself, and waits for it for half a minute; EC2 knows better."""
    monkeypatch.setattr(launcher_module, "_ASK_CLOUD_EVERY_S", 0.01)
    hangs = threading.Event()

    class Hanging(FakeSdk):
        def job(self, cluster: str) -> JobPhase | None:
            self.said_lost[NAME] = "EC2 says that i-1 is terminated: Server.InternalError"
            watch.stop()
            hangs.wait(30.0)
            return super().job(cluster)

    sdk = Hanging()
    sdk.comes_up(NAME)
    watch = launcher_module._Watch(sdk, NAME, UP, FakeClock(now=500.0))
    watch._wake = Unhurried()
    try:
        watch.run()
        assert watch.view.some_lost
        assert {node.end for node in watch.view.nodes} == {NodeEnd.LOST}
    finally:
        hangs.set()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_breaks_a_look_ends_the_watch_and_is_told() -> None:
    """A watch that has died is begun anew; one that says nothing for ever would not be."""
    sdk = FakeSdk()
    sdk.comes_up(NAME)

    def breaks() -> None:
        raise TimeoutError("not one of SkyPilot's")

    sdk.before_look = breaks
    watch = launcher_module._Watch(sdk, NAME, UP, FakeClock(now=500.0))
    watch._wake = Unhurried()
    with pytest.raises(RuntimeError, match="ended by an error"):
        watch.run()


@pytest.mark.parametrize("over", ["by our own order", "its job has ended"])
def test_nodes_that_end_as_they_should_are_not_lost(over: str) -> None:
    """Only an end that nobody asked for is news."""
    sdk = FakeSdk()
    sdk.comes_up(NAME)
    sdk.said_lost[NAME] = "EC2 says that i-1 is shutting-down: Client.UserInitiatedShutdown"
    watch = launcher_module._Watch(sdk, NAME, UP, FakeClock(now=500.0))
    watch._wake = Passing()
    if over == "its job has ended":
        sdk.jobs[NAME] = JobPhase.SUCCEEDED
        watch.view = look(sdk, NAME, FakeClock(now=500.0))
    else:
        watch.goes_down()
        watch._wake.clear()
    sdk.asked.clear()
    sdk.before_look = watch.stop
    watch.run()

    assert "cluster" in sdk.asked
    assert NodeEnd.LOST not in {node.end for node in watch.view.nodes}


def test_a_job_that_falls_silent_is_looked_at_at_once() -> None:
    """Its node may have vanished; one that stays silent is looked at every few seconds."""
    watch = launcher_module._Watch(FakeSdk(), NAME, UP, FakeClock(now=500.0))
    watch.hear(False)
    assert not watch._wake.is_set()
    watch.hear(True)
    assert not watch._wake.is_set()
    watch.hear(False)
    assert watch._wake.is_set()


def test_a_request_that_hangs_hides_the_cluster_for_two_minutes_at_most() -> None:
    """Its nodes may have gone by themselves: then it is asked all the same."""
    clock = FakeClock(now=500.0)
    sdk = FakeSdk(launches={NAME: DONE}, ends={NAME: 400.0}, downs_under_way=10**6)
    watch = launcher_module._Watch(sdk, NAME, UP, clock)
    watch._wake = Unhurried(lambda: clock.advance(1.0))
    watch.goes_down()
    watch.run()
    assert watch.view.state is ClusterState.GONE
    assert sdk.asked.count("is_going_down") == 121


def test_a_cluster_that_goes_is_looked_at_beside_the_next_one() -> None:
    """The next launch ends no watch that somebody waits for; one that nobody wants is ended."""
    clock = FakeClock()
    subject = launcher(FakeSdk(), clock)
    first, second, third = (
        replace(REQUEST, cluster=name, is_new=True) for name in ("one", "two", "three")
    )
    subject.launch(first)
    subject.down("one")
    subject.launch(second)
    going = subject._watches["one"]
    clock.advance(100.0)
    subject.launch(third)
    assert sorted(subject._watches) == ["one", "three"]
    assert not going._stopped.is_set()
    going.view = ClusterView(state=ClusterState.GONE)
    clock.advance(100.0)
    subject.launch(second)
    assert sorted(subject._watches) == ["two"]
    subject.close()
    assert subject._watches == {}
    assert going._stopped.is_set()


def test_two_clusters_that_are_wanted_are_looked_at_beside_each_other() -> None:
    """The next nodes may be asked for while the ones before still train."""
    clock = FakeClock()
    subject = launcher(FakeSdk(), clock, in_background=True)
    subject.launch(replace(REQUEST, cluster="one", is_new=True))
    clock.advance(50.0)
    subject.observe("one")
    clock.advance(50.0)
    subject.launch(replace(REQUEST, cluster="two", is_new=True))
    assert sorted(subject._watches) == ["one", "two"]
    subject.close()


class Unhurried(threading.Event):
    """Never lets anybody wait."""

    def __init__(self, waits: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self._waits = waits

    def wait(self, timeout: float | None = None) -> bool:
        """Return at once."""
        self._waits()
        return timeout is not None


def test_a_request_taken_a_moment_ago_may_not_be_in_the_books_yet() -> None:
    """Once missing says nothing; twice in a row does."""
    sdk = FakeSdk()
    states = history(sdk, lambda: None, lambda: None, lambda: None)
    assert states[:2] == [ClusterState.STARTING] * 2
    assert states[2] is ClusterState.ABSENT
    sdk = FakeSdk(launches={NAME: UNDER_WAY})
    states = history(
        sdk,
        sdk.launches.clear,
        lambda: sdk.launches.update({NAME: UNDER_WAY}),
        sdk.launches.clear,
        lambda: sdk.launches.update({NAME: UNDER_WAY}),
    )
    assert ClusterState.ABSENT not in states


def test_an_observer_never_waits_for_skypilot() -> None:
    """After the launch the last answer is given at once; a new launcher asks a first time."""
    sdk = FakeSdk()
    subject = launcher(sdk, in_background=True)
    try:
        subject.launch(REQUEST)
        asked = len(sdk.asked)
        assert subject.observe(NAME).state is ClusterState.STARTING
        assert len(sdk.asked) == asked
    finally:
        subject.close()
    sdk.comes_up(NAME)
    following = launcher(sdk, in_background=True)
    try:
        assert following.observe(NAME).state is ClusterState.UP
    finally:
        following.close()


class Ticking(threading.Event):
    """Lets the clock pass while somebody waits; others act then."""

    def __init__(self, clock: FakeClock, then: Callable[[], None]) -> None:
        super().__init__()
        self._clock, self._then = clock, then

    def wait(self, timeout: float | None = None) -> bool:
        """Return at once, later."""
        if not self.is_set():
            self._clock.advance(timeout or 0.0)
            self._then()
        return self.is_set()


def looks_at(
    launches: dict[str, LaunchFacts], *, for_s: float = 600.0, wanted: bool, downs: bool = False
) -> tuple[launcher_module._Watch, list[float]]:
    """Let a watch look on for some minutes after a launch; return it, and when it looked."""
    clock, at = FakeClock(now=500.0), list[float]()
    sdk = FakeSdk(launches=dict(launches))
    watch = launcher_module._Watch(sdk, NAME, ClusterView(state=ClusterState.STARTING), clock)

    def asked_for() -> None:
        if wanted:
            watch.wanted_at = clock.monotonic()

    def looked() -> None:
        at.append(clock.now() - 500.0)
        if at[-1] >= for_s:
            watch.stop()

    watch._wake = Ticking(clock, asked_for)
    if downs:
        watch.goes_down()
    sdk.before_look = looked
    watch.run()
    return watch, at


@pytest.mark.parametrize("launches", [{NAME: REFUSED}, {NAME: FAILED}, {}], ids=repr)
def test_a_launch_that_came_to_nothing_is_hardly_looked_at_any_more(
    launches: dict[str, LaunchFacts],
) -> None:
    """A run may wait for a day after it, and each look takes seconds of a core."""
    watch, at = looks_at(launches, wanted=False)
    assert len(at) == (1 if launches else 2), "whoever wants to know it again begins anew"
    assert not watch._stopped.is_set()
    _, at = looks_at(launches, wanted=True)
    assert 8 <= len(at) <= 12


def test_a_first_look_that_finds_nothing_is_repeated_soon() -> None:
    """A request that was taken a moment ago may not be in the books yet."""
    clock, sdk, at = FakeClock(now=500.0), FakeSdk(), list[float]()
    watch = launcher_module._Watch(sdk, NAME, None, clock)
    watch._wake = Ticking(clock, lambda: None)

    def looked() -> None:
        at.append(clock.now() - 500.0)
        if len(at) == 2:
            sdk.launches[NAME] = UNDER_WAY
            watch.stop()

    sdk.before_look = looked
    watch.run()
    assert at == [0.0, launcher_module._LOOK_EVERY_S]
    assert watch.view.state is ClusterState.STARTING


def test_a_launch_under_way_is_looked_at_closely_whoever_wants_it() -> None:
    """It is about to change, and may cost money."""
    _, at = looks_at({NAME: UNDER_WAY}, wanted=False)
    assert len(at) == 300


def test_nodes_that_are_told_to_go_may_have_been_on_their_way() -> None:
    """What SkyPilot says of a launch in that moment is not the last word."""
    watch, at = looks_at({NAME: FAILED}, wanted=False, downs=True)
    assert len([each for each in at if each < 120.0]) >= 55
    assert at[-1] <= 125.0
    assert not watch.is_going_down


def test_who_asks_again_for_a_launch_that_came_to_nothing_is_answered() -> None:
    """The thread that had looked for it has ended meanwhile."""
    clock = FakeClock()
    subject = launcher(FakeSdk(launches={NAME: REFUSED}), clock, in_background=True)
    try:
        assert subject.observe(NAME).state is ClusterState.REFUSED
        before = subject._watches[NAME]
        clock.advance(1000.0)
        before._wake.set()  # it need not be waited for
        before.join(60.0)
        assert not before.is_alive()
        assert subject.observe(NAME).state is ClusterState.REFUSED
        assert subject._watches[NAME] is not before
    finally:
        subject.close()


def test_a_first_answer_that_does_not_come_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A controller that starts while SkyPilot hangs reads on what the job writes."""
    monkeypatch.setattr(launcher_module, "_FIRST_ANSWER_S", 0.01)
    may_answer = threading.Event()

    class Slow(FakeSdk):
        def cluster(self, *given: Any, **named: Any) -> Any:
            assert may_answer.wait(60.0)
            return super().cluster(*given, **named)

    sdk = Slow()
    sdk.comes_up(NAME)
    subject = launcher(sdk, in_background=True)
    try:
        view = subject.observe(NAME)
        assert (view.state, view.detail) == (
            ClusterState.UNREACHABLE,
            "SkyPilot has not answered yet",
        )
        may_answer.set()
        assert subject._watches[NAME].answered.wait(60.0)
        assert subject.observe(NAME).state is ClusterState.UP
    finally:
        may_answer.set()
        subject.close()


def test_an_old_answer_is_no_answer() -> None:
    """A SkyPilot that hangs for minutes, or a watch that died, is not taken for a calm cluster."""
    sdk, clock = FakeSdk(), FakeClock()
    sdk.comes_up(NAME)
    subject = launcher(sdk, clock, in_background=True)
    try:
        assert subject.observe(NAME).state is ClusterState.UP
        clock.advance(launcher_module._ANSWER_WITHIN_S + launcher_module._SET_UP_EVERY_S + 1.0)
        view = subject.observe(NAME)
        assert view.state is ClusterState.UNREACHABLE
        assert "has not answered for" in view.detail
    finally:
        subject.close()


# ---------------------------------------------------------------- the rest


def test_places_are_looked_up_every_five_minutes() -> None:
    """The catalogue is not read at each tick of the controller."""
    clock, times = FakeClock(), []

    def survey() -> list[Any]:
        times.append(clock.monotonic())
        return [FAKE_OFFER]

    subject = launcher(FakeSdk(), clock, offers=survey)
    for _ in range(301):
        assert subject.offers() == [FAKE_OFFER]
        clock.advance(1.0)
    subject.offers()
    assert len(times) == 2


def test_slurm_says_how_many_nodes_are_free_and_clouds_do_not() -> None:
    """Asked every half minute; who does not answer has none, since he would not launch either."""
    sdk, clock = FakeSdk(free=2), FakeClock()
    subject = launcher(sdk, clock)
    slurm = replace(FAKE_OFFER, infra="slurm", region="lab", zone="spot")
    assert [subject.free_nodes(slurm) for _ in range(10)] == [2] * 10
    assert sdk.asked == ["free lab/spot"]
    clock.advance(31.0)
    sdk.away = True
    assert subject.free_nodes(slurm) == 0
    clock.advance(31.0)
    sdk.away, sdk.broken = False, "Slurm's scontrol is not allowed"
    assert subject.free_nodes(slurm) is None, "only a launch can tell"
    for cloud in ("aws", "gcp", "azure"):
        assert subject.free_nodes(replace(FAKE_OFFER, infra=cloud)) is None


def test_kubernetes_says_how_many_pods_of_the_jobs_kind_find_room() -> None:
    """Each place is asked for itself, also when several are asked in turn."""
    sdk, clock = FakeSdk(free=2), FakeClock()
    subject = launcher(sdk, clock, machine=lambda: Machine(gpus="L4:1"))
    here = replace(FAKE_OFFER, infra="kubernetes", region="ctx", zone=None)
    there = replace(here, region=None)
    assert [subject.free_nodes(place) for place in (here, there, here, there)] == [2] * 4
    assert sdk.asked == ["free ctx L4:1", "free None L4:1"]


def test_a_choice_of_gpus_is_asked_for_each() -> None:
    """Idle nodes of one kind say nothing of the other, whose nodes would be asked for."""
    sdk = FakeSdk(free=2)
    subject = launcher(sdk, FakeClock(), machine=lambda: Machine(gpus="A100:8"))
    here = replace(FAKE_OFFER, infra="kubernetes", region="ctx", zone=None, gpus="A100:8")
    for offer in (here, replace(here, gpus="L4:8")):
        assert subject.free_nodes(offer) == 2
    assert sdk.asked == ["free ctx A100:8", "free ctx L4:8"]
    slurm = replace(FAKE_OFFER, infra="slurm", region="lab", zone="spot", gpus="L4:8")
    assert subject.free_nodes(slurm) is None, "a partition's nodes are counted whatever is in them"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_watch_that_an_error_ended_is_begun_anew() -> None:
    """Else nobody would see the cluster's end, and its meter would go on."""
    sdk = FakeSdk()
    subject = launcher(sdk, in_background=True)
    try:
        subject.launch(REQUEST)
        dead = subject._watches[NAME]
        dead._sdk = None  # type: ignore[assignment]
        dead._wake.set()
        dead.join(60.0)
        subject.observe(NAME)
        assert subject._watches[NAME] is not dead
        assert subject._watches[NAME].is_alive()
    finally:
        subject.close()


def test_free_nodes_are_asked_for_beside() -> None:
    """SkyPilot takes seconds, in which the controller has other things to do."""
    asked = threading.Event()
    may_answer = threading.Event()

    class Slow(FakeSdk):
        def free_slurm_nodes(self, cluster: str, partition: str) -> int | None:
            asked.set()
            assert may_answer.wait(60.0)
            return 2

    subject = launcher(Slow(), in_background=True)
    slurm = replace(FAKE_OFFER, infra="slurm", region="lab", zone="spot")
    assert subject.free_nodes(slurm) == 0, "nothing is given up before there is an answer"
    assert asked.wait(60.0)
    may_answer.set()
    for thread in threading.enumerate():
        if thread.name == "spotguard-free":
            thread.join(60.0)
    assert subject.free_nodes(slurm) == 2


@pytest.mark.parametrize(
    ("states", "free"),
    [
        (("idle", "alloc"), 1),
        (("alloc", "down*", "idle*", "drain"), 0),
        (("idle", "idle~", "mix"), 2),
        (("mix", "alloc"), None),
        ((), None),
    ],
)
def test_idle_nodes_are_told_by_slurms_words(
    states: tuple[str, ...], free: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the partition; one that is partly in use may or may not take a job more."""
    sky = pytest.importorskip("sky")
    from sky.client import sdk as client

    nodes = [{"node_state": state, "partition": "other,spot*"} for state in states]
    nodes.append({"node_state": "idle", "partition": "other"})
    inspect.signature(client.slurm_node_info).bind(slurm_cluster_name="lab")
    monkeypatch.setattr(client, "slurm_node_info", lambda slurm_cluster_name: nodes)
    monkeypatch.setattr(sky, "get", lambda request: request)
    assert sdk_module.SkySdk().free_slurm_nodes("lab", "spot") == free


@pytest.mark.parametrize(
    ("context", "autoscaler", "cpu_free", "free"),
    [
        ("ctx", None, 9.0, 2),
        ("ctx", None, 1.0, 0),
        ("ctx", "karpenter", 1.0, None),
        ("ctx", "karpenter", 9.0, 2),
        (None, None, 1.0, None),
        (None, None, 9.0, 2),
    ],
)
def test_kubernetes_is_asked_by_skypilot(
    context: str | None,
    autoscaler: str | None,
    cpu_free: float,
    free: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """None free is no word where an autoscaler may make some, or another context has some."""
    sky = pytest.importorskip("sky")
    from sky import models, skypilot_config
    from sky.client import sdk as client

    node = models.KubernetesNodeInfo(
        name="n", accelerator_type=None, total={}, free={}, cpu_free=cpu_free, memory_free_gb=64.0
    )
    found = models.KubernetesNodesInfo(node_info_dict={"n": node}, hint="")
    inspect.signature(client.kubernetes_node_info).bind(context=context)
    inspect.signature(skypilot_config.get_effective_region_config).bind(
        cloud="kubernetes", region=context, keys=("autoscaler",), default_value=None
    )
    monkeypatch.setattr(client, "kubernetes_node_info", lambda context: found)
    monkeypatch.setattr(skypilot_config, "get_effective_region_config", lambda **_: autoscaler)
    monkeypatch.setattr(sky, "get", lambda request: request)
    machine = Machine(cpus="4+")
    assert sdk_module.SkySdk().free_kubernetes_nodes(context, machine) == free


def test_down_is_asked_for_and_may_fail() -> None:
    """The order goes to SkyPilot; that it does not answer is for the caller to know."""
    sdk = FakeSdk()
    launcher(sdk).down(NAME)
    assert sdk.downed == [NAME]
    sdk.away = True
    with pytest.raises(Unreachable):
        launcher(sdk).down(NAME)


LOG = (
    b"\x1b[36m(setup pid=12)\x1b[0m installing\n"
    b"(job, rank=0, pid=20) step 1\n"
    b"(worker1, rank=1, pid=21, ip=10.0.0.2) step 1 of node 1\n"
    b"(head, rank=0, pid=20) step 2\n"
    b"Shared connection closed.\n"
    b"(worker1, rank=1, pid=21, ip=10.0.0.2) (not, a mark) end"
)


def test_one_stream_becomes_each_nodes_own() -> None:
    """Marks and colours are taken off; what belongs to nobody counts as node 0's."""
    streams = by_node(LOG)
    assert streams == {
        0: b"installing\nstep 1\nstep 2\nShared connection closed.\n",
        1: b"step 1 of node 1\n(not, a mark) end",
    }
    assert by_node(b"") == {}


@pytest.mark.parametrize("left", [False, True])
def test_what_no_wait_will_mend_is_said_of_a_refusal(left: bool) -> None:
    """Also where something of the cluster is left, and has to be taken down."""
    quota = LaunchFacts(phase=ClusterPhase.NO_CAPACITY, problem="quota", lasting=True)
    sdk = FakeSdk(launches={NAME: quota}, clusters={NAME: unhealthy()} if left else {})
    view = seen(sdk)
    assert view.state is (ClusterState.UP if left else ClusterState.REFUSED)
    assert (view.lasting, view.detail) == (True, "quota")


@pytest.mark.parametrize("left", [False, True])
def test_a_full_quota_is_told_apart_and_lost_nodes_are_followed_by_others(left: bool) -> None:
    """What is left of the cluster may be all that fills it: it goes, and the run goes on."""
    launch = LaunchFacts(phase=ClusterPhase.NO_CAPACITY, lasting=True, quota_full=True)
    view = seen(FakeSdk(launches={NAME: launch}, clusters={NAME: unhealthy()} if left else {}))
    assert view.state is (ClusterState.UP if left else ClusterState.REFUSED)
    assert (view.lasting, view.quota_full) == ((False, False) if left else (True, True))


def test_logs_are_read_from_an_offset_and_fetched_seldom() -> None:
    """Reading on costs nothing; the whole of it comes anew every few seconds."""
    sdk, clock = FakeSdk(printed=LOG), FakeClock()
    sdk.comes_up(NAME)
    subject = launcher(sdk, clock)
    assert subject.read_log(NAME, 1, 0).data == b"step 1 of node 1\n(not, a mark) end"
    assert subject.read_log(NAME, 1, 17).data == b"(not, a mark) end"
    assert subject.read_log(NAME, 7, 0).data == b""
    assert sdk.asked.count("log") == 1
    clock.advance(6.0)
    subject.read_log(NAME, 0, 0)
    assert sdk.asked.count("log") == 2


REFUSAL = """\x1b[91mFailed to provision all possible launchable resources. Relax the task's \
resource requirements: 3x Slurm(cpus=1+)
To keep retrying until the cluster is up, use the `--retry-until-up` flag.
Reasons for provision failures (for details, please check the log above):
Provision failures (tried 1 infra):
  \x1b[0m✗ Slurm (spotlab) — (cpus=1, mem=1, ...)
    Failed to acquire resources in spot for {Slurm(cpus=1+)}."""


def test_a_refusal_is_told_in_few_words() -> None:
    """Of SkyPilot's long word only what each place said is kept; a short one stays."""
    assert sdk_module._why_refused(REFUSAL) == (
        "Slurm (spotlab) — (cpus=1, mem=1, ...) "
        "Failed to acquire resources in spot for {Slurm(cpus=1+)}."
    )
    assert sdk_module._why_refused("no spot nodes") == "no spot nodes"
    assert len(sdk_module._why_refused("x" * 5000)) <= 600
    assert sdk_module._why_refused("many words " * 200 + REFUSAL).startswith("Slurm (spotlab)")


# ---------------------------------------------------------------- SkyPilot itself

CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "launch": (("task",), {"cluster_name": "c", "idle_minutes_to_autostop": 5, "down": True}),
    "api_status": ((), {"all_status": True, "cluster_name": "c"}),
    "status": ((), {"cluster_names": ["c"], "refresh": None}),
    "get": (("request",), {}),
    "cost_report": ((), {"days": 30}),
    "job_status": (("c",), {}),
    "down": (("c",), {}),
    "stream_and_get": (("request",), {"follow": False, "output_stream": None}),
    "tail_logs": (("c",), {"job_id": None, "follow": False, "output_stream": None}),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_installed_skypilot_takes_our_calls(name: str) -> None:
    """The public SDK has each function that is used, with the arguments that it is given."""
    sky = pytest.importorskip("sky")
    arguments, named = CALLS[name]
    inspect.signature(getattr(sky, name)).bind(*arguments, **named)


def test_the_installed_skypilot_has_our_words() -> None:
    """The states, errors and fields by which its answers are told apart are there."""
    sky = pytest.importorskip("sky")
    from sky.schemas.api import responses
    from sky.server.requests import payloads
    from sky.server.requests.requests import RequestStatus

    words = {status.value for status in sky.JobStatus}
    assert set(sdk_module._JOB_PHASES) <= words
    assert words - set(sdk_module._JOB_PHASES) <= {
        *("FAILED", "FAILED_DRIVER", "CANCELLED"),
    }, "a new word would count as a failure: look at it"
    assert {"PENDING", "RUNNING", "SUCCEEDED"} <= {status.value for status in RequestStatus}
    assert {"status", "launched_at", "nodes", "name"} <= set(responses.StatusResponse.model_fields)
    assert {"request_id", "name", "status", "created_at"} <= set(
        payloads.RequestPayload.model_fields
    )
    for error in (
        *("ApiServerConnectionError", "ServerTemporarilyUnavailableError"),
        *("ClusterStatusFetchingError", "RequestInterruptedError", "ResourcesUnavailableError"),
    ):
        assert issubclass(getattr(sky.exceptions, error), Exception)
    assert sky.StatusRefreshMode.FORCE
    assert sky.ClusterStatus.UP


def test_errors_of_skypilots_become_ours() -> None:
    """Whatever its server raises again here has one of three meanings."""
    sky = pytest.importorskip("sky")
    from spotguard.errors import NoCapacity

    for problem, ours in (
        (sky.exceptions.ResourcesUnavailableError(REFUSAL), NoCapacity),
        (sky.exceptions.RequestInterruptedError("x"), Unreachable),
        (KeyError("x"), LauncherFailure),
        (ConnectionError("x"), LauncherFailure),
    ):
        with pytest.raises(ours) as caught, sdk_module._translated():
            raise problem
        assert caught.value.__cause__ is problem


@pytest.mark.parametrize("case", ["gone", "not up", "cancelled", "broken"])
def test_the_fakes_log_raises_what_skypilots_does(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that what is played without SkyPilot is what happens with it."""
    sky = pytest.importorskip("sky")
    raised, fake = {
        "gone": (sky.exceptions.ClusterDoesNotExist("does not exist"), FakeSdk()),
        "not up": (
            sky.exceptions.ClusterNotUpError("is not up"),
            FakeSdk(clusters={NAME: unhealthy()}),
        ),
        "cancelled": (
            sky.exceptions.RequestCancelled("is cancelled by another process"),
            FakeSdk(clusters={NAME: up()}, downs_under_way=1),
        ),
        "broken": (ValueError("boom"), FakeSdk(broken="boom")),
    }[case]

    def tail_logs(*arguments: object, **named: object) -> int:
        raise raised

    monkeypatch.setattr(sky, "tail_logs", tail_logs)
    with pytest.raises(LauncherFailure) as real:
        sdk_module.SkySdk().log(NAME)
    with pytest.raises(LauncherFailure) as played:
        fake.log(NAME)
    assert type(real.value) is type(played.value)


def test_a_log_that_is_gone_is_asked_for_as_seldom_as_one_that_is_there() -> None:
    """Who follows asks five times a second, and SkyPilot takes a second to say so."""
    sdk, clock = FakeSdk(), FakeClock()
    subject = launcher(sdk, clock)
    for _ in range(10):
        with pytest.raises(LogGone):
            subject.read_log(NAME, 0, 0)
    assert sdk.asked.count("log") == 1


def test_looking_survives_any_problem_of_ours() -> None:
    """A look tells of a problem, it never raises one: the watch must not die of it."""
    for sdk in (FakeSdk(away=True), FakeSdk(broken="boom")):
        view = look(sdk, NAME, FakeClock())
        assert view.state is ClusterState.UNREACHABLE
        assert view.detail


@pytest.mark.slow
@pytest.mark.parametrize("answer", [{"status": None}, {}, None, 7, [[]]], ids=repr)
def test_looking_survives_an_answer_without_sense(
    answer: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What SkyPilot answers is read as carefully as it is asked: the watch must not die of it."""
    sky = pytest.importorskip("sky")
    monkeypatch.setattr(sky, "get", lambda request: [answer])
    for question in ("api_status", "status", "cost_report", "job_status"):
        monkeypatch.setattr(sky, question, lambda *_, **__: [])
    view = look(sdk_module.SkySdk(), NAME, FakeClock())
    assert (view.state, bool(view.detail)) == (ClusterState.UNREACHABLE, True)
    for ask in ("ended_at", "job"):
        with pytest.raises(LauncherFailure):
            getattr(sdk_module.SkySdk(), ask)(NAME)


def test_a_launch_that_came_to_nothing_may_have_cost_money_until_skypilot_closed_its_bill() -> None:
    """A controller that was away for an hour must not charge that hour."""
    ran = replace(REFUSED, nodes_ran=True, busy=True)
    sdk, clock = FakeSdk(launches={NAME: ran}, ends={NAME: 400.0}), FakeClock(now=1000.0)
    view = launcher(sdk, clock).observe(NAME)
    assert (view.state, view.nodes_ran, view.busy) == (ClusterState.REFUSED, True, True)
    assert view.gone_at == 400.0
    never = launcher(FakeSdk(launches={NAME: REFUSED}, ends={NAME: 400.0}), clock).observe(NAME)
    assert (never.nodes_ran, never.gone_at) == (False, None)
