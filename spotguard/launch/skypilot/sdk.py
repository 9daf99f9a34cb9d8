"""What is asked of SkyPilot's public SDK, as plain data and errors of ours.

Calls go to SkyPilot's API server, which does the work in the background: a launch is a request
that outlives its caller. Importing `sky` takes two seconds, so it happens at the first call.
"""

from __future__ import annotations

import copy
import io
import logging
import re
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

from spotguard.errors import LauncherFailure, NoCapacity, SpotguardError
from spotguard.launch.base import LogGone, Unreachable
from spotguard.launch.skypilot.cloud_check import reason_in
from spotguard.launch.skypilot.cluster_list import our_clusters
from spotguard.launch.skypilot.ec2.ends import Ec2Ends
from spotguard.launch.skypilot.ec2.extras import Ec2Extras, Ec2Forgotten
from spotguard.launch.skypilot.free_nodes import free_pods
from spotguard.launch.skypilot.import_sky import load_sky, off_stdout
from spotguard.launch.skypilot.refusals import read_refusal
from spotguard.launch.skypilot.together import AskedTogether

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from spotguard.launch.skypilot.cluster_list import OurCluster
    from spotguard.launch.taskyaml import Machine

log = logging.getLogger(__name__)

_COLOUR = re.compile(rb"\x1b\[[0-9;]*m")
_MARK = re.compile(rb"\((?:setup|[\w-]+, rank=(\d+)|task)[^)]*\) ?")
_PROBLEM_CHARS = 600
_HISTORY_DAYS = 30


class ClusterPhase(str, Enum):
    """How far a launch is."""

    UNDER_WAY = "under way"
    DONE = "done"
    """The job was handed to the cluster."""
    NO_CAPACITY = "no capacity"
    """No place had the nodes."""
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True)
class LaunchFacts:
    """What became of the request to launch a cluster."""

    phase: ClusterPhase
    problem: str = ""
    lasting: bool = False
    """Nothing that a wait would mend: a right, an image, a quota, a network."""
    busy: bool = False
    """It is worth to ask again at once."""
    quota_full: bool = False
    """A quota of the account is full, maybe only for a moment."""
    nodes_ran: bool = False
    """Nodes may have run, and cost money, until the launch was given up."""
    broke_off: bool = False
    """Nodes were there, and were lost or out of reach before the job was handed to them."""
    finished_at: float | None = None
    """When it came to nothing, by SkyPilot's books: it ends what it started before it says so."""


@dataclass(frozen=True, kw_only=True)
class ClusterFacts:
    """A cluster that SkyPilot has in its books."""

    up: bool
    unhealthy: bool
    """It was up, and a node of it is gone or does not answer."""
    launched_at: float
    nodes: int
    detail: str = ""


class JobPhase(str, Enum):
    """How far the job on a cluster is."""

    STARTING = "starting"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    FAILED_SETUP = "failed setup"


class Sdk(Protocol):
    """All that the launcher asks of SkyPilot. Every call blocks, up to some seconds.

    Raises `Unreachable` if the API server does not answer, `NoCapacity`, and `LauncherFailure`
    for anything else.
    """

    def submit(self, task: dict[str, Any], cluster: str) -> None:
        """Ask for a new cluster and for the task on it; return once the request is taken."""
        ...

    def launch_of(self, cluster: str) -> LaunchFacts | None:
        """Return what became of the last request to launch `cluster`; None if there is none."""
        ...

    def is_going_down(self, cluster: str) -> bool:
        """Tell whether a request to end the cluster is under way."""
        ...

    def cluster(self, cluster: str, *, fresh: bool = True) -> ClusterFacts | None:
        """Ask the cloud how the cluster is; None if SkyPilot has none of this name.

        Without `fresh` return what SkyPilot last saw, which costs next to nothing.
        """
        ...

    def lost(self, cluster: str, *, starting: bool) -> str:
        """Return how the cloud itself says that a node of a cluster ended; empty if it does not.

        While it is `starting`, only what nobody has ordered counts. Milliseconds, where a cloud is
        asked.
        """
        ...

    def end_extra_nodes(self, cluster: str) -> str:
        """End nodes of a cluster that comes up which its cloud launched without SkyPilot's knowing.

        Returns what is wrong with it where that is too late; empty if nothing is.
        """
        ...

    def end_forgotten_nodes(self, cluster: str) -> None:
        """Have nodes ended that the cloud has of a cluster of which nothing is left, by SkyPilot.

        Returns at once: the cloud may list them late, and is asked for some minutes.
        """
        ...

    def ended_at(self, cluster: str) -> float | None:
        """Return when SkyPilot saw the last of a cluster that it had; None if it never had it."""
        ...

    def free_slurm_nodes(self, cluster: str, partition: str) -> int | None:
        """Return how many nodes of a partition are idle; None if some are only partly in use."""
        ...

    def free_kubernetes_nodes(self, context: str | None, machine: Machine) -> int | None:
        """Return how many pods that are such machines would find room; None if nobody can tell."""
        ...

    def job(self, cluster: str) -> JobPhase | None:
        """Return how far the cluster's job is; None if it has none yet."""
        ...

    def down(self, cluster: str) -> None:
        """Ask for the end of the cluster; return once the request is taken."""
        ...

    def log(self, cluster: str) -> bytes:
        """Return all that the job has printed, of all nodes, lines marked with their node.

        Raises `LogGone` for a cluster that does not exist, and `Unreachable` for one that comes
        up or is being taken down.
        """
        ...


def by_node(log: bytes) -> dict[int, bytes]:
    """Return SkyPilot's one stream as each node's own: it marks lines `(worker1, rank=1, …)`.

    What belongs to no node (the set-up, SkyPilot's own words) counts as node 0's.
    """
    streams: dict[int, bytearray] = {}
    for line in _COLOUR.sub(b"", log).splitlines(keepends=True):
        mark = _MARK.match(line)
        node = int(mark[1]) if mark and mark[1] else 0
        streams.setdefault(node, bytearray()).extend(line[mark.end() :] if mark else line)
    return {node: bytes(stream) for node, stream in streams.items()}


class SkySdk:
    """SkyPilot itself."""

    def __init__(self) -> None:
        self._billed_from: dict[str, float] = {}
        self._on_aws: dict[str, tuple[str, int] | None] = {}
        """The region of a cluster, and how many nodes were asked for; None if it is elsewhere."""

    def submit(self, task: dict[str, Any], cluster: str) -> None:
        """Ask for a new cluster, which takes itself down when it is idle."""
        sky = load_sky()
        cloud, _, place = str(task["resources"].get("infra", "")).partition("/")
        self._note_place(cluster, cloud, place.partition("/")[0], task.get("num_nodes", 1))
        with _translated():
            made = sky.Task.from_yaml_config(copy.deepcopy(task))  # which takes it apart
            sky.launch(
                made, cluster_name=cluster, idle_minutes_to_autostop=_idle_minutes(task), down=True
            )

    def launch_of(self, cluster: str) -> LaunchFacts | None:
        """Look among the API server's requests."""
        launches = _requests(cluster, "launch")
        if not launches:
            return None
        last = max(launches, key=lambda each: each.created_at)
        if last.status in _UNDER_WAY:
            return LaunchFacts(phase=ClusterPhase.UNDER_WAY)
        if last.status == "SUCCEEDED":
            return LaunchFacts(phase=ClusterPhase.DONE)
        return self._why_failed(last.request_id, getattr(last, "finished_at", None))

    def is_going_down(self, cluster: str) -> bool:
        """Look among the API server's requests."""
        return any(each.status in _UNDER_WAY for each in _requests(cluster, "down"))

    def cluster(self, cluster: str, *, fresh: bool = True) -> ClusterFacts | None:
        """Let SkyPilot ask the cloud, or say what it last saw."""
        status = _LOOKS.about(cluster) if fresh else _statuses([cluster], fresh=False).get(cluster)
        if status is None:
            return None
        with _translated():
            # While nodes end themselves they are still there, and know how their job ended; before
            # its API version 29 SkyPilot called them up, too.
            is_up = str(getattr(status["status"], "name", "")) in ("UP", "AUTOSTOPPING")
            self._note_place(cluster, status.get("cloud"), status.get("region"), status["nodes"])
            return ClusterFacts(
                up=is_up,
                unhealthy=not is_up and status.get("init_kind") != "launching",
                launched_at=self._begin_of_bill(cluster) or float(status["launched_at"]),
                nodes=int(status["nodes"]),
                detail=_short(status.get("init_status_reason") or ""),
            )

    def lost(self, cluster: str, *, starting: bool) -> str:
        """Ask EC2; other clouds are not asked."""
        place = self._on_aws.get(cluster)
        return _ENDS.why(place[0], cluster, taken=starting) if place else ""

    def end_extra_nodes(self, cluster: str) -> str:
        """Ask EC2; other clouds are not asked."""
        place = self._place(cluster)
        return _EXTRAS.end(place[0], cluster, place[1]) if place else ""

    def end_forgotten_nodes(self, cluster: str) -> None:
        """Ask EC2; other clouds are not asked."""
        place = self._on_aws.get(cluster)
        if place:
            _FORGOTTEN.add(place[0], cluster)

    def _note_place(self, cluster: str, cloud: str | None, region: str | None, nodes: Any) -> None:
        if cloud and cloud.upper() != _AWS:
            self._on_aws[cluster] = None
        elif cloud and region:
            self._on_aws[cluster] = region, int(nodes)

    def _place(self, cluster: str) -> tuple[str, int] | None:
        """Return where it is on AWS; SkyPilot's books know it of one that another process began.

        Only of one that comes up: they have none that another machine launched.
        """
        if cluster not in self._on_aws:
            with suppress(SpotguardError):  # the next question will ask again
                status = _statuses([cluster], fresh=False).get(cluster) or {}
                self._note_place(
                    cluster, status.get("cloud"), status.get("region"), status.get("nodes", 1)
                )
        return self._on_aws.get(cluster)

    def ended_at(self, cluster: str) -> float | None:
        """Look among the clusters that SkyPilot has billed."""
        with _translated():
            bill = _bill(cluster)
            return None if bill is None else float(bill["launched_at"]) + float(bill["duration"])

    def free_slurm_nodes(self, cluster: str, partition: str) -> int | None:
        """Ask Slurm, by SkyPilot. Whether a job fits beside others on a node, nobody says."""
        sky = load_sky()
        with _translated():
            nodes = sky.get(sky.client.sdk.slurm_node_info(slurm_cluster_name=cluster))
            # Slurm marks its default partition with a star.
            mine = [
                node for node in nodes if partition in node["partition"].replace("*", "").split(",")
            ]
            idle = sum(node["node_state"] in _IDLE for node in mine)
            unknown = not mine or any(node["node_state"] == "mix" for node in mine)
            return None if unknown and not idle else idle

    def free_kubernetes_nodes(self, context: str | None, machine: Machine) -> int | None:
        """Ask Kubernetes, by SkyPilot, for what its nodes have left.

        Where none is free, an autoscaler may still make some, and without a context SkyPilot may
        have others to try: nobody can tell then.
        """
        sky = load_sky()
        with _translated():
            found = sky.get(sky.client.sdk.kubernetes_node_info(context=context))
            grows = sky.skypilot_config.get_effective_region_config(
                cloud="kubernetes", region=context, keys=("autoscaler",), default_value=None
            )
            free = free_pods(found.node_info_dict.values(), machine)
            return None if not free and (grows or context is None) else free

    def job(self, cluster: str) -> JobPhase | None:
        """Ask the cluster itself."""
        sky = load_sky()
        try:
            with _translated():
                phases = sky.get(sky.job_status(cluster))
                status = next(iter(phases.values()), None)
                return None if status is None else _JOB_PHASES.get(status.value, JobPhase.FAILED)
        except LauncherFailure as problem:
            # Not up any more, which its own state will say; or SkyPilot cannot reach it, and for
            # minutes still calls it up.
            raise Unreachable(f"the cluster does not answer: {problem.message}") from problem

    def down(self, cluster: str) -> None:
        """Ask SkyPilot to terminate it; one that is gone already is no problem."""
        sky = load_sky()
        with _translated():
            sky.down(cluster)

    def log(self, cluster: str) -> bytes:
        """Fetch what SkyPilot has of the job's output."""
        sky = load_sky()
        output, exceptions = io.StringIO(), sky.exceptions
        try:
            with _translated():
                sky.tail_logs(cluster, job_id=None, follow=False, output_stream=output)
        except LauncherFailure as problem:
            if isinstance(problem.__cause__, exceptions.ClusterDoesNotExist):
                raise LogGone(problem.message) from problem
            # The order to take a cluster down cancels what is asked of it.
            if isinstance(
                problem.__cause__, (exceptions.ClusterNotUpError, exceptions.RequestCancelled)
            ):
                raise Unreachable(problem.message) from problem
            raise
        return output.getvalue().encode()

    def refusal(self, infra: str) -> str:
        """Return what SkyPilot has against a place before it launches there; empty if nothing.

        It looks whether there is such a context, cluster or partition; not whether nodes are free.
        """
        sky = load_sky()
        try:
            with _translated():
                task, dag = sky.Task(run="true"), sky.Dag()
                task.set_resources(sky.Resources(infra=infra))
                dag.add(task)
                sky.client.sdk.validate(dag)
        except LauncherFailure as problem:
            if not isinstance(problem.__cause__, ValueError):
                raise
            return _plain(str(problem.__cause__))
        return ""

    def enabled_clouds(self) -> list[str]:
        """Return the clouds on which SkyPilot would start nodes, as it last found out."""
        sky = load_sky()
        with _translated():
            return [str(cloud) for cloud in sky.get(sky.client.sdk.enabled_clouds())]

    def why_disabled(self, cloud: str) -> str:
        """Have SkyPilot check a cloud's credentials; return its reason, empty if they are good."""
        sky, output = load_sky(), io.StringIO()
        with _translated():
            request = sky.client.sdk.check((cloud,), verbose=False)
            found = sky.stream_and_get(request, output_stream=output)
        is_able = any(
            name.lower() == cloud and "compute" in able
            for clouds in found.values()
            for name, able in clouds.items()
        )
        return "" if is_able else reason_in(output.getvalue())

    def ours(self, names: Sequence[str] | None = None, *, fresh: bool = False) -> list[OurCluster]:
        """Return spotguard's clusters of this user, as SkyPilot last saw them.

        Args:
            names: of these clusters only.
            fresh: ask the clouds anew, which takes seconds: what is gone is left out then.
        """
        sky = load_sky()
        mode = sky.StatusRefreshMode.FORCE if fresh else sky.StatusRefreshMode.NONE
        with _translated():
            asked = None if names is None else list(names)
            living = sky.get(sky.status(cluster_names=asked, refresh=mode))
            bills = sky.get(sky.cost_report(days=_HISTORY_DAYS)) if living else []
            return our_clusters(living, bills)

    def end(self, cluster: str) -> None:
        """Have a cluster terminated; return when SkyPilot says that it is."""
        sky = load_sky()
        with _translated():
            sky.get(sky.down(cluster))

    def _begin_of_bill(self, cluster: str) -> float | None:
        """Return when SkyPilot asked for the nodes: `launched_at` of its status moves later."""
        if cluster not in self._billed_from:
            bill = _bill(cluster)
            if bill is None:
                return None
            self._billed_from[cluster] = float(bill["launched_at"])
        return self._billed_from[cluster]

    def _why_failed(self, request_id: str, finished_at: float | None = None) -> LaunchFacts:
        sky = load_sky()
        try:
            with _translated():
                sky.get(request_id)
        except Unreachable as problem:
            if isinstance(problem.__cause__, sky.exceptions.RequestInterruptedError):
                return _broken_off("SkyPilot's server was stopped meanwhile")
            if isinstance(problem.__cause__, sky.exceptions.ClusterStatusFetchingError):
                return _broken_off(problem.message)  # the launch met with it, not this question
            raise
        except (NoCapacity, LauncherFailure) as problem:
            cause = problem.__cause__
            cancelled = isinstance(cause, sky.exceptions.RequestCancelled)
            if cancelled or "BrokenProcessPool" in problem.message:  # its program was killed
                return _broken_off(problem.message)
            history = [] if cause is None else [*getattr(cause, "failover_history", ()), cause]
            refusal = read_refusal(history, _plain_lines(self._printed(request_id)))
            asks_again = isinstance(problem, NoCapacity) or refusal.busy or refusal.quota_full
            return LaunchFacts(
                phase=ClusterPhase.NO_CAPACITY if asks_again else ClusterPhase.FAILED,
                problem=refusal.words or problem.message,
                lasting=refusal.lasting,
                busy=refusal.busy,
                quota_full=refusal.quota_full,
                nodes_ran=refusal.nodes_ran,
                broke_off=refusal.broke_off and not asks_again,
                finished_at=finished_at,
            )
        return LaunchFacts(phase=ClusterPhase.DONE)

    def _printed(self, request_id: str) -> str:
        """Return what the API server noted down of a request that is over; empty if it forgot."""
        sky, output = load_sky(), io.StringIO()
        try:
            with _translated():
                sky.stream_and_get(request_id, follow=False, output_stream=output)
        except LauncherFailure as problem:
            log.info("no log of request %s: %s", request_id, problem)
        return output.getvalue()


_JOB_PHASES = {
    "INIT": JobPhase.STARTING,
    "PENDING": JobPhase.STARTING,
    "SETTING_UP": JobPhase.STARTING,
    "RUNNING": JobPhase.RUNNING,
    "SUCCEEDED": JobPhase.SUCCEEDED,
    "FAILED_SETUP": JobPhase.FAILED_SETUP,
}
"""SkyPilot's words for a job; all others are ways to fail."""


def _statuses(clusters: Sequence[str], *, fresh: bool = True) -> dict[str, Any]:
    """Return what SkyPilot has of each cluster; those that it does not have are left out."""
    sky = load_sky()
    mode = sky.StatusRefreshMode.FORCE if fresh else sky.StatusRefreshMode.NONE
    with _translated():
        found = sky.get(sky.status(cluster_names=list(clusters), refresh=mode))
        if len(clusters) == 1:
            return {clusters[0]: found[0]} if found else {}
        return {status["name"]: status for status in found}


_LOOKS: AskedTogether[Any] = AskedTogether(_statuses)
"""All runs of this process look at their clusters by it."""
_ENDS = Ec2Ends()
_EXTRAS = Ec2Extras()
_FORGOTTEN = Ec2Forgotten(_EXTRAS)
_AWS = "AWS"
"""SkyPilot's name of the cloud."""
_IDLE = ("idle", "idle~")
"""Slurm's words for a node that a job can have at once, or after it was powered up."""
_UNDER_WAY = ("PENDING", "WAITING", "RUNNING")


def _requests(cluster: str, kind: str) -> list[Any]:
    """Return the API server's requests of one kind about a cluster."""
    sky = load_sky()
    with _translated():
        requests = sky.api_status(all_status=True, cluster_name=cluster)
        return [each for each in requests if each.name.rpartition(".")[2] == kind]


@contextmanager
def _translated() -> Iterator[None]:
    """Turn what SkyPilot raises into an error of ours; what it prints goes to stderr.

    What it answers is read in here, too: an answer of another form than it should have is an error
    like others. A thread that watches a cluster would die of any that is not ours, and nobody would
    look any more.
    """
    import requests

    exceptions = load_sky().exceptions
    away = (
        exceptions.ApiServerConnectionError,
        exceptions.ServerTemporarilyUnavailableError,
        exceptions.ClusterStatusFetchingError,
        exceptions.RequestInterruptedError,
        requests.RequestException,
    )
    try:
        with off_stdout():
            yield
    except SpotguardError:  # of a question within a question
        raise
    except away as problem:
        raise Unreachable(f"SkyPilot does not answer: {_short(str(problem))}") from problem
    except exceptions.ResourcesUnavailableError as problem:
        raise NoCapacity(_why_refused(str(problem))) from problem
    except SystemExit as problem:  # the server's own, which must not become ours
        raise LauncherFailure("SkyPilot gave up; its log says why") from problem
    except Exception as problem:  # the server sends whatever it met, to be raised again here
        raise LauncherFailure(f"SkyPilot: {_short(str(problem))}") from problem


def _broken_off(problem: str) -> LaunchFacts:
    """Return what became of a launch that somebody, or something, ended."""
    return LaunchFacts(phase=ClusterPhase.FAILED, problem=problem, nodes_ran=True, broke_off=True)


def _bill(cluster: str) -> dict[str, Any] | None:
    """Return what SkyPilot's list of costs has of a cluster, living or gone."""
    sky = load_sky()
    with _translated():
        report: list[dict[str, Any]] = sky.get(sky.cost_report(days=_HISTORY_DAYS))
        return next((entry for entry in report if entry["name"] == cluster), None)


def _idle_minutes(task: dict[str, Any]) -> int:
    """Return after how many idle minutes the cluster takes itself down."""
    return int(task["resources"]["autostop"]["idle_minutes"])


def _why_refused(text: str) -> str:
    """Return what each place said, from SkyPilot's long word on a failed launch."""
    reasons = _plain(text).partition("Provision failures")[2].partition("✗")[2]
    return _short(reasons) or _short(text)


def _short(text: str) -> str:
    """Return the first lines of a vendor's message, without its colours."""
    return _plain(text)[:_PROBLEM_CHARS]


def _plain(text: str) -> str:
    return " ".join(_plain_lines(text).split())


def _plain_lines(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)
