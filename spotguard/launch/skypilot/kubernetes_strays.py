"""Clusters on Kubernetes that another machine's SkyPilot launched: asked for, and ended, there.

Each of our pods has its cluster's name as a label. Kubernetes is asked with SkyPilot's own client,
which finds its way by the kubeconfig, and inside of a pod by that pod's service account.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from spotguard.errors import LauncherFailure
from spotguard.launch.base import ClusterState, ClusterView, NodeEnd, NodeView, Unreachable
from spotguard.launch.skypilot.import_sky import load_sky, off_stdout
from spotguard.launch.taskyaml import CLUSTER_TAG

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


_KUBERNETES = "kubernetes"
_WITHIN = (10.0, 10.0)
"""Seconds to connect and to be answered; its client ignores a float alone."""
_NUMBER = re.compile(r"-(?:head|worker(\d+))$")
"""How SkyPilot's name of a pod ends: the head is node 0, worker N is node N."""
_SKY_TAG = "skypilot-cluster-name"
"""SkyPilot's label of all that belongs to a cluster: its services, too."""
_OVER = ("Succeeded", "Failed")
"""Phases of a pod that has no room on a node any more; what is none of these may cost."""
_REFUSED = (401, 403)


@dataclass(frozen=True, kw_only=True)
class Pod:
    """What Kubernetes says of a pod."""

    name: str
    phase: str
    """Kubernetes' own word: `Pending`, `Running`, `Succeeded`, `Failed`, `Unknown`."""
    is_going: bool = False
    """Its end was asked for, by whomever."""
    since: float | None = None
    """Epoch seconds at which it was made."""
    sky_name: str = ""
    """What SkyPilot calls its cluster there."""


class Pods(Protocol):
    """The pods of contexts. Every call blocks, up to some seconds.

    It raises `Unreachable` if nobody answers, and `LauncherFailure` if it is refused.
    """

    def labelled(self, context: str, label: str) -> list[Pod]:
        """Return the pods with a label, `NAME=VALUE`."""
        ...

    def delete(self, context: str, label: str) -> None:
        """Ask for the end of all pods with a label; none is no problem."""
        ...

    def delete_services(self, context: str, label: str) -> None:
        """Ask for the end of all services with a label; none is no problem."""
        ...


class KubernetesStrays:
    """Kubernetes' own list of pods, by the label of the cluster. Safe to use from any thread."""

    def __init__(self, contexts: Callable[[], Iterable[str]], pods: Pods | None = None) -> None:
        """`contexts` says where nodes of the run may be."""
        self._contexts = contexts
        self._pods: Pods = pods or _SkyPods()

    def look(self, cluster: str) -> ClusterView:
        """Ask each context: one that does not answer hides no cluster that lives in another."""
        found, failures = self._find(cluster)
        pods = [pod for _, pod in found]
        living = [pod for pod in pods if pod.phase not in _OVER]
        if failures and not living:
            raise failures[0]
        if not pods:
            return ClusterView(state=ClusterState.ABSENT)
        if not living:
            return ClusterView(state=ClusterState.GONE)
        if all(pod.phase == "Pending" and not pod.is_going for pod in living):
            return ClusterView(state=ClusterState.STARTING)
        begun = [pod.since for pod in pods if pod.since is not None]
        return ClusterView(
            state=ClusterState.UP,
            nodes=_nodes(pods),
            up_at=min(begun, default=None),
            detail="launched by another machine",
        )

    def down(self, cluster: str) -> None:
        """Delete its pods, and what SkyPilot made for them, also where another context refuses."""
        found, failures = self._find(cluster)
        for context in dict.fromkeys(context for context, _ in found):
            names = {pod.sky_name: None for where, pod in found if where == context}
            try:
                self._pods.delete(context, _label(cluster))
                for name in filter(None, names):
                    self._pods.delete_services(context, f"{_SKY_TAG}={name}")
            except LauncherFailure as problem:
                failures.append(problem)
        if failures:
            raise failures[0]

    def _find(self, cluster: str) -> tuple[list[tuple[str, Pod]], list[LauncherFailure]]:
        """Return its pods and their contexts; and who does not say it."""
        contexts = list(self._contexts())
        if not contexts:  # not absent: nobody was asked
            raise Unreachable(f"Nobody knows in which context of Kubernetes {cluster} would be.")
        found: list[tuple[str, Pod]] = []
        failures: list[LauncherFailure] = []
        for context in contexts:
            try:
                pods = self._pods.labelled(context, _label(cluster))
            except LauncherFailure as problem:
                failures.append(problem)
            else:
                found += [(context, pod) for pod in pods]
        return found, failures


def _label(cluster: str) -> str:
    return f"{CLUSTER_TAG}={cluster}"


def _nodes(pods: Iterable[Pod]) -> tuple[NodeView, ...]:
    """Return the nodes by the numbers in their pods' names; a number without a pod is lost."""
    by_number: dict[int, Pod] = {}
    for pod in sorted(pods, key=lambda pod: pod.phase not in _OVER):  # a living one comes last
        ending = _NUMBER.search(pod.name)
        if ending is None:
            raise Unreachable(f"Nobody knows which node the pod {pod.name!r} is.")
        by_number[int(ending[1] or 0)] = pod
    return tuple(
        _node(index, by_number[index]) if index in by_number else _gone(index)
        for index in range(max(by_number) + 1)
    )


def _gone(index: int) -> NodeView:
    return NodeView(index=index, end=NodeEnd.LOST, detail="Kubernetes has its pod no more")


def _node(index: int, pod: Pod) -> NodeView:
    is_lost = pod.is_going or pod.phase in _OVER
    why = (
        "Kubernetes says that its pod ends" if pod.is_going else f"its pod has {pod.phase.lower()}"
    )
    return NodeView(
        index=index,
        end=NodeEnd.LOST if is_lost else NodeEnd.RUNNING,
        detail=why if is_lost else "",
    )


class _SkyPods:
    """Asked by SkyPilot's client."""

    def labelled(self, context: str, label: str) -> list[Pod]:
        """Return the pods with a label."""
        found = self._ask(context, "list_namespaced_pod", label)
        try:
            return [
                Pod(
                    name=each.metadata.name,
                    phase=each.status.phase or "Unknown",
                    is_going=each.metadata.deletion_timestamp is not None,
                    since=each.metadata.creation_timestamp.timestamp(),
                    sky_name=(each.metadata.labels or {}).get(_SKY_TAG, ""),
                )
                for each in found.items
            ]
        except (AttributeError, TypeError) as problem:
            raise Unreachable(
                f"Kubernetes in {context} describes pods in another form than expected: {problem!r}"
            ) from problem

    def delete(self, context: str, label: str) -> None:
        """Ask for the end of all pods with a label."""
        self._ask(context, "delete_collection_namespaced_pod", label)

    def delete_services(self, context: str, label: str) -> None:
        """Ask for the end of all services with a label."""
        self._ask(context, "delete_collection_namespaced_service", label)

    def _ask(self, context: str, what: str, label: str) -> Any:
        load_sky()
        try:
            with off_stdout():
                from kubernetes.client.exceptions import ApiException
                from kubernetes.config import ConfigException
                from sky import exceptions
                from sky.adaptors import kubernetes
                from sky.provision.kubernetes.utils import get_kube_config_context_namespace
                from urllib3.exceptions import HTTPError
                from yaml import YAMLError
        except ImportError as problem:
            raise Unreachable("SkyPilot is installed without its extra kubernetes.") from problem
        away = (
            *(ConfigException, HTTPError, OSError, ValueError, exceptions.KubeAPIUnreachableError),
            *(YAMLError, AttributeError, TypeError),  # of a kubeconfig that is just being written
        )
        try:
            asked = getattr(kubernetes.core_api(context), what)
            return asked(
                get_kube_config_context_namespace(context),
                label_selector=label,
                _request_timeout=_WITHIN,
            )
        except ApiException as problem:
            kind = LauncherFailure if problem.status in _REFUSED else Unreachable
            said = f"Kubernetes in {context} says {problem.status} {problem.reason}"
            raise kind(said) from problem
        except away as problem:
            raise Unreachable(f"Kubernetes in {context} does not answer: {problem}") from problem
