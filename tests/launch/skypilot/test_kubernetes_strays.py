"""Pods that another machine launched: seen and ended by their label."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from spotguard.errors import LauncherFailure
from spotguard.launch import taskyaml
from spotguard.launch.base import ClusterState, NodeEnd, Unreachable
from spotguard.launch.skypilot import kubernetes_strays
from spotguard.launch.skypilot.kubernetes_strays import KubernetesStrays, Pod
from spotguard.launch.skypilot.launcher import SkyPilotLauncher
from spotguard.launch.skypilot.prices import Place
from spotguard.launch.skypilot.strays import regions_of
from spotguard.launch.taskyaml import Machine
from spotguard.testing.clock import FakeClock
from spotguard.testing.launcher import FAKE_OFFER
from tests.launch.skypilot.fake_sdk import FakeSdk

NAME = "job-1-1"
WORKER = Pod(name=f"{NAME}-worker1", phase="Running", since=20.0, sky_name="job-1-1-abc")
HEAD = Pod(name=f"{NAME}-head", phase="Running", since=10.0, sky_name="job-1-1-abc")


@dataclass
class FakePods:
    """The pods of each context, by their label; notes what was deleted."""

    there: dict[str, list[Pod]] = field(default_factory=dict)
    deleted: list[tuple[str, str]] = field(default_factory=list)
    problem: Exception | None = None
    only: str = ""
    """The context that has the problem; empty: each of them."""

    def _ask(self, context: str) -> None:
        if self.problem and self.only in ("", context):
            raise self.problem

    def labelled(self, context: str, label: str) -> list[Pod]:
        """Return those of the one cluster that there is."""
        self._ask(context)
        return self.there.get(context, []) if label == f"spotguard-cluster={NAME}" else []

    def delete(self, context: str, label: str) -> None:
        """Note it."""
        self._ask(context)
        self.deleted.append((context, label))

    def delete_services(self, context: str, label: str) -> None:
        """Note it."""
        self.deleted.append((context, label))

    def strays(self, *contexts: str) -> KubernetesStrays:
        """Return what looks there."""
        return KubernetesStrays(lambda: contexts or ("ctx",), self)


@pytest.mark.parametrize(
    ("pods", "state", "ends"),
    [
        ([], ClusterState.ABSENT, []),
        ([replace(HEAD, phase="Succeeded")], ClusterState.GONE, []),
        ([replace(HEAD, phase="Pending"), replace(WORKER, phase="Pending")], "starting", []),
        ([WORKER, HEAD], ClusterState.UP, [NodeEnd.RUNNING, NodeEnd.RUNNING]),
        ([replace(WORKER, is_going=True), HEAD], "up", [NodeEnd.RUNNING, NodeEnd.LOST]),
        ([replace(HEAD, phase="Failed"), WORKER], "up", [NodeEnd.LOST, NodeEnd.RUNNING]),
        ([replace(HEAD, phase="Unknown")], "up", [NodeEnd.RUNNING]),
    ],
)
def test_a_cluster_is_what_its_pods_are(
    pods: list[Pod], state: ClusterState | str, ends: list[NodeEnd]
) -> None:
    """Only a pod that is over, or is going, is no node any more; the head is the first node."""
    seen = FakePods({"ctx": pods}).strays().look(NAME)
    assert seen.state is ClusterState(state)
    assert [node.end for node in seen.nodes] == ends
    if seen.state is ClusterState.UP:
        assert seen.up_at == min(pod.since for pod in pods if pod.since is not None)


def test_a_node_keeps_its_number_when_others_are_gone() -> None:
    """It is in the pod's name: the node that lives is never taken for the one that is lost."""
    last = replace(WORKER, name=f"{NAME}-worker10")
    pods = FakePods({"ctx": [last, replace(WORKER, name=f"{NAME}-worker2")]})
    nodes = pods.strays().look(NAME).nodes
    assert [node.index for node in nodes] == list(range(11))
    assert [node.index for node in nodes if node.end is NodeEnd.RUNNING] == [2, 10]
    assert {node.end for node in nodes} == {NodeEnd.RUNNING, NodeEnd.LOST}


def test_a_living_pod_counts_before_one_of_its_name_that_is_over() -> None:
    """SkyPilot may have begun the cluster in one context, and had it in the next."""
    over = replace(HEAD, phase="Failed")
    for there in ({"a": [over], "b": [HEAD]}, {"a": [HEAD], "b": [over]}):
        [node] = FakePods(there).strays("a", "b").look(NAME).nodes
        assert node.end is NodeEnd.RUNNING


def test_a_pod_without_a_number_says_nothing_of_the_nodes() -> None:
    """A guess might take a living node for lost."""
    with pytest.raises(Unreachable, match="which node"):
        FakePods({"ctx": [replace(HEAD, name="odd")]}).strays().look(NAME)


def test_its_end_takes_what_skypilot_made_for_it_too() -> None:
    """In the context where it is, and in no other; none is no problem."""
    pods = FakePods({"ctx": [HEAD, WORKER]})
    strays = pods.strays("other", "ctx")
    strays.down(NAME)
    assert pods.deleted == [
        ("ctx", f"spotguard-cluster={NAME}"),
        ("ctx", "skypilot-cluster-name=job-1-1-abc"),
    ]
    strays.down("job-2-1")
    assert len(pods.deleted) == 2


@pytest.mark.parametrize("problem", [Unreachable("no route"), LauncherFailure("403")])
def test_who_does_not_answer_says_nothing_of_the_cluster(problem: Exception) -> None:
    """Else a second cluster would be launched beside a living one. Nor does who is not asked."""
    pods = FakePods({"ctx": [HEAD]}, problem=problem)
    for act in (pods.strays().look, pods.strays().down):
        with pytest.raises(type(problem)):
            act(NAME)
    with pytest.raises(Unreachable, match="which context"):
        KubernetesStrays(list, pods).look(NAME)


@pytest.mark.parametrize("problem", [Unreachable("no route"), LauncherFailure("403")])
@pytest.mark.parametrize("order", [("away", "ctx"), ("ctx", "away")])
def test_one_context_without_an_answer_hides_no_pods_of_another(
    problem: Exception, order: tuple[str, str]
) -> None:
    """They are seen, and ended; that one may have more of them is said all the same."""
    pods = FakePods({"ctx": [HEAD, WORKER]}, problem=problem, only="away")
    assert pods.strays(*order).look(NAME).state is ClusterState.UP
    with pytest.raises(type(problem)):
        pods.strays(*order).down(NAME)
    assert ("ctx", f"spotguard-cluster={NAME}") in pods.deleted
    pods.there["ctx"] = [replace(HEAD, phase="Succeeded")]
    with pytest.raises(type(problem)):  # it may live there
        pods.strays(*order).look(NAME)


class RefusesItsEnd(FakePods):
    """Lets pods be listed, and deletes none of the context that it names."""

    def labelled(self, context: str, label: str) -> list[Pod]:
        """Return them from each context."""
        return self.there.get(context, [])


def test_one_context_that_refuses_the_end_keeps_no_pods_of_another() -> None:
    """Each is asked, and the refusal is told."""
    refused = LauncherFailure("403")
    pods = RefusesItsEnd({"a": [HEAD], "b": [WORKER]}, problem=refused, only="a")
    with pytest.raises(LauncherFailure, match="403"):
        pods.strays("a", "b").down(NAME)
    assert ("b", f"spotguard-cluster={NAME}") in pods.deleted


def test_an_adopted_run_keeps_its_pods() -> None:
    """SkyPilot here knows no such cluster: the launcher sees it all the same."""
    launcher = SkyPilotLauncher(
        FakeSdk(),
        offers=lambda: [FAKE_OFFER],
        task=lambda _: {},
        strays=FakePods({"ctx": [HEAD, WORKER]}).strays(),
        clock=FakeClock(),
        in_background=False,
    )
    seen = launcher.observe(NAME)
    assert seen.state is ClusterState.UP
    assert len(seen.nodes) == 2


def test_contexts_are_those_that_are_named() -> None:
    """A place without one may be anywhere."""
    places = [Place.parse(each) for each in ("kubernetes/a/b", "kubernetes", "aws/us-east-1")]
    assert regions_of("kubernetes", places) == ["a/b"]


def test_its_client_waits_so_long_and_no_longer() -> None:
    """It takes a pair or a whole number of seconds, and ignores one float without a word."""
    rest = pytest.importorskip("kubernetes.client.rest")
    asked: list[Any] = []

    class Pool:
        def request(self, *_: Any, timeout: Any, **more: Any) -> Any:
            asked.append(timeout)
            return SimpleNamespace(status=200, reason="OK", data=b"{}")

    client = rest.RESTClientObject.__new__(rest.RESTClientObject)
    client.pool_manager = Pool()
    client.request("GET", "https://here", _request_timeout=kubernetes_strays._WITHIN)
    (timeout,) = asked
    assert (timeout.connect_timeout, timeout.read_timeout) == kubernetes_strays._WITHIN


def test_jobs_pods_have_the_label_by_which_they_are_looked_for() -> None:
    """SkyPilot gives `labels` of a task's resources to its pods."""
    offer = replace(FAKE_OFFER, infra="kubernetes", region="ctx", zone=None)
    candidate = taskyaml._candidate(offer, Machine(), {taskyaml.CLUSTER_TAG: NAME})
    ((name, value),) = candidate["labels"].items()
    assert kubernetes_strays._label(NAME) == f"{name}={value}"


@pytest.mark.slow
def test_skypilot_has_the_calls_by_which_it_is_asked() -> None:
    """Its client is not ours: what is used of it is there, and takes what it is given."""
    client = pytest.importorskip("kubernetes.client")
    pytest.importorskip("sky")  # whose first import warns of what it uses
    from sky.adaptors import kubernetes
    from sky.provision import constants
    from sky.provision.kubernetes import utils

    assert constants.TAG_SKYPILOT_CLUSTER_NAME == kubernetes_strays._SKY_TAG
    assert kubernetes.IN_CLUSTER_CONTEXT_NAME_ENV_VAR == "SKYPILOT_IN_CLUSTER_CONTEXT_NAME"
    inspect.signature(utils.get_kube_config_context_namespace).bind("ctx")
    for name in ("list", "delete_collection"):
        assert hasattr(client.CoreV1Api, f"{name}_namespaced_pod")
    assert hasattr(client.CoreV1Api, "delete_collection_namespaced_service")
