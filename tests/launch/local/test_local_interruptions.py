from __future__ import annotations

import json
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest

from spotguard.errors import NoCapacity
from spotguard.launch.base import ClusterState, NodeEnd
from spotguard.launch.local.interruption_timing import (
    Fate,
    fate_of,
    kill_fate,
    leak_guard_fate,
    notice_fate,
    release_fate,
    term_fate,
)
from spotguard.launch.local.interruptions import How
from tests.launch.local.local_lab import Lab, wait_for, wait_until_gone

pytestmark = pytest.mark.slow

GCP = "/computeMetadata/v1/instance/preempted"


def schedule(fate: Fate) -> tuple[float | None, tuple[float, ...], float]:
    """Return when the notice says, when SIGTERM comes and when SIGKILL does."""
    return fate.announced_at, fate.term_at, fate.kill_at


@pytest.mark.parametrize(
    ("cloud", "expected"),
    [
        ("aws", (120.0, (120.0,), 122.0)),
        ("gcp", (30.0, (1.0,), 30.0)),
        ("azure", (30.0, (30.0,), 32.0)),
        ("none", (30.0, (1.0,), 30.0)),
    ],
)
def test_each_cloud_has_its_own_times(
    cloud: str, expected: tuple[float, tuple[float, ...], float]
) -> None:
    """At the speed of reality, notice, SIGTERM and SIGKILL come as on the real cloud."""
    assert schedule(notice_fate(cloud, 1.0, 0.0)) == expected


@pytest.mark.parametrize("cloud", ["aws", "gcp", "azure", "none"])
@pytest.mark.parametrize("speed_up", [0.5, 1.0, 7.0, 60.0, 1e9])
def test_order_and_least_warning_hold_at_any_speed(cloud: str, speed_up: float) -> None:
    """However fast: the notice is true, leaves at least 1.5 s, and SIGTERM precedes SIGKILL."""
    announced_at, term_at, kill_at = schedule(notice_fate(cloud, speed_up, 0.0))

    assert announced_at is not None
    assert 1.5 <= announced_at <= kill_at
    assert 0 < term_at[0] < kill_at


def test_unannounced_ends() -> None:
    """SIGTERM comes twice within a second and leaves 2 s at least; a kill leaves nothing."""
    assert schedule(term_fate(1.0, 10.0)) == (None, (10.0, 10.3), 40.0)
    assert schedule(term_fate(1e9, 10.0)) == (None, (10.0, 10.3), 12.0)
    assert schedule(kill_fate(10.0)) == (None, (), 10.0)
    assert schedule(release_fate(10.0)) == (None, (10.0,), 12.0)
    assert schedule(leak_guard_fate(10.0, 3600.0)) == (None, (10.0,), 12.0)
    assert schedule(leak_guard_fate(10.0, 3600.0, late_s=1.5)) == (None, (10.0,), 10.5)
    assert schedule(leak_guard_fate(10.0, 3600.0, late_s=60.0)) == (None, (10.0,), 10.0)
    assert fate_of(How.RECLAIM_ALL, "aws", 1.0, 0.0) == fate_of(How.NOTICE, "aws", 1.0, 0.0)


def test_an_acknowledged_event_starts_at_once() -> None:
    """Azure's StartRequests moves the deadline and what follows to now, once."""
    hastened = notice_fate("azure", 1.0, 0.0).hastened(4.0)

    assert schedule(hastened) == (4.0, (4.0,), 6.0)
    assert hastened.hastened(5.0) == hastened


@pytest.mark.parametrize("cloud", ["aws", "gcp", "azure", "none"])
def test_notice_then_sigterm_then_sigkill(lab: Lab, cloud: str) -> None:
    """A node can see its notice, is told by SIGTERM, and is killed no earlier than announced."""
    launcher = lab.launcher("node=0@step=3:notice", metadata=cloud)
    launcher.launch(lab.request())
    wait_for(lambda: lab.notes("start"), "the job's start")
    variables = lab.notes("start")[0].body["env"]
    began_at = time.time()
    if cloud == "gcp":
        url = variables["SPOTGUARD_METADATA"].partition("=")[2]
        wait_for(lambda: gcp_preempted(url) == "TRUE", "the notice")
        assert not lab.notes("term") or lab.notes("term")[0].at <= time.time()
    if cloud == "none":
        wait_for(lambda: Path(variables["SPOTGUARD_NOTICE_FILE"]).exists(), "the notice file")
    view = wait_until_gone(launcher)

    terms = lab.notes("term")
    assert len(terms) == 1
    assert view.gone_at is not None
    assert terms[0].at < view.gone_at
    assert view.gone_at - began_at >= 1.4
    assert view.nodes[0].end is NodeEnd.LOST
    assert view.nodes[0].exit_code is None
    assert view.nodes[0].detail.startswith("taken by the cloud ")
    assert view.nodes[0].detail.endswith(" s after its notice")


def gcp_preempted(url: str) -> str:
    """Ask Google's metadata server, as the job would."""
    request = urllib.request.Request(f"{url}{GCP}", headers={"Metadata-Flavor": "Google"})
    with urllib.request.urlopen(request, timeout=5) as response:
        return str(response.read().decode())


def test_azure_takes_a_node_that_says_it_is_ready(lab: Lab) -> None:
    """After StartRequests the node is not left for the rest of the 30 s."""
    launcher = lab.launcher("node=0@step=3:notice", metadata="azure", speed_up=1.0)
    launcher.launch(lab.request(on_term="leave"))
    wait_for(lambda: lab.notes("start"), "the job's start")
    source = lab.notes("start")[0].body["env"]["SPOTGUARD_METADATA"]
    url = source.partition("=")[2] + "/metadata/scheduledevents?api-version=2020-07-01"
    wait_for(lambda: azure(url)["Events"], "the event")
    (event,) = azure(url)["Events"]
    azure(url, {"StartRequests": [{"EventId": event["EventId"]}]})

    node = wait_until_gone(launcher).nodes[0]

    assert (node.end, node.exit_code) == (NodeEnd.EXITED, 75)
    assert len(lab.notes("term")) == 1


def azure(url: str, body: object = None) -> Any:
    """Ask Azure's metadata service, as the job would."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers={"Metadata": "true"})
    with urllib.request.urlopen(request, timeout=5) as response:
        return json.loads(response.read() or b"null")


def test_who_leaves_after_the_notice_is_seen_leaving(lab: Lab) -> None:
    """A job that exits by itself under notice has its own exit code, not the cloud's verdict."""
    launcher = lab.launcher("node=0@step=3:notice", metadata="gcp")
    launcher.launch(lab.request(on_term="leave"))

    node = wait_until_gone(launcher).nodes[0]

    assert (node.end, node.exit_code) == (NodeEnd.EXITED, 75)
    assert node.detail.startswith("left after the notice")


def test_term_comes_twice_and_unannounced(lab: Lab) -> None:
    """`term` is SIGTERM twice within a second and SIGKILL after the grace, with no notice."""
    launcher = lab.launcher("node=0@step=3:term", metadata="none")
    launcher.launch(lab.request())

    view = wait_until_gone(launcher)

    terms = [note.at for note in lab.notes("term")]
    notice_file = lab.notes("start")[0].body["env"]["SPOTGUARD_NOTICE_FILE"]
    assert len(terms) == 2
    assert terms[1] - terms[0] < 1
    assert view.gone_at is not None
    assert view.gone_at - terms[0] >= 1.9
    assert not Path(notice_file).exists()
    assert "after SIGTERM, which came without a notice" in view.nodes[0].detail


def test_kill_takes_every_process_and_no_other_node(lab: Lab) -> None:
    """`kill` also takes children in sessions of their own, and leaves the other node alone."""
    launcher = lab.launcher("node=1@step=30:kill")
    launcher.launch(lab.request(nodes=2, children=2))
    wait_for(
        lambda: launcher.observe("c1").nodes[1].end is NodeEnd.LOST, "node 1 killed", timeout_s=20
    )
    view = launcher.observe("c1")
    alive = {
        node: [psutil.pid_exists(note.body["child"]) for note in lab.notes("child", node=node)]
        for node in (0, 1)
    }

    assert view.state is ClusterState.UP
    assert not view.job_over
    assert view.nodes[1].detail == "killed without notice"
    assert view.nodes[0].end is NodeEnd.RUNNING
    assert alive[0] == [True] * 4
    assert [
        psutil.pid_exists(n.body["child"]) and is_alive(n.body["child"])
        for n in lab.notes("child", node=1)
    ] == [False] * 4
    assert not lab.notes("term")


def is_alive(pid: int) -> bool:
    """Return whether the process still runs; one that nobody has reaped does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_an_interruption_fires_once_in_a_run(lab: Lab) -> None:
    """The next cluster passes the same step unharmed."""
    launcher = lab.launcher("node=0@step=3:kill")
    launcher.launch(lab.request("c1", steps=20))
    first = wait_until_gone(launcher, "c1")
    launcher.launch(lab.request("c2", steps=20))
    second = wait_until_gone(launcher, "c2")

    assert first.nodes[0].end is NodeEnd.LOST
    assert (second.nodes[0].end, second.nodes[0].exit_code) == (NodeEnd.EXITED, 0)
    assert second.last_step == 20


def test_reclaim_all_takes_all(lab: Lab) -> None:
    """All nodes get the notice when the most advanced one has come to the step."""
    launcher = lab.launcher("@step=3:reclaim-all", metadata="gcp")
    launcher.launch(lab.request(nodes=2, on_term="leave"))

    view = wait_until_gone(launcher)

    assert [node.exit_code for node in view.nodes] == [75, 75]
    assert all(node.detail.startswith("left after the notice") for node in view.nodes)


def test_lost_capacity_takes_the_surplus_and_makes_the_next_launch_smaller(lab: Lab) -> None:
    """When one node is left to be had, the other gets the notice, and two cannot be launched."""
    launcher = lab.launcher("capacity=1@step=3", metadata="gcp")
    launcher.launch(lab.request(nodes=2, on_term="leave"))
    wait_for(lambda: launcher.observe("c1").nodes[1].end is NodeEnd.EXITED, "node 1 left")
    first = launcher.observe("c1")

    assert first.nodes[0].end is NodeEnd.RUNNING
    with pytest.raises(NoCapacity, match="this machine has 1 node now, 2 were asked"):
        launcher.launch(lab.request("c2", nodes=2))
    launcher.launch(lab.request("c1", nodes=2))  # it exists: asking again needs no capacity
    assert launcher.observe("c2").state is ClusterState.ABSENT
    launcher.launch(lab.request("c2", nodes=1, steps=1))
    assert wait_until_gone(launcher, "c2").nodes[0].exit_code == 0


def test_on_demand_nodes_are_not_reclaimed_for_capacity(lab: Lab) -> None:
    """Lack of spot capacity and random interruptions leave on-demand nodes alone."""
    launcher = lab.launcher("capacity=0@t=0s", mtbf_s=0.001)
    launcher.launch(lab.request(steps=10, offer=launcher.offers()[1]))

    assert wait_until_gone(launcher).nodes[0].exit_code == 0


def test_random_interruptions_come(lab: Lab) -> None:
    """With a mean time between them of some milliseconds, a spot node does not live long."""
    launcher = lab.launcher(mtbf_s=0.01)
    launcher.launch(lab.request())

    assert wait_until_gone(launcher).nodes[0].end is NodeEnd.LOST
