"""A node for the controller of one run: where it is had, for how much, and its SkyPilot task."""

from __future__ import annotations

import base64
import json
import os
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from spotguard.errors import SpecError, SpotguardError
from spotguard.events.states import Market
from spotguard.launch.skypilot.launcher import end_anywhere
from spotguard.launch.skypilot.prices import Place, survey
from spotguard.launch.skypilot.sdk import ClusterPhase, JobPhase
from spotguard.launch.taskyaml import CLUSTER_TAG, RUN_TAG, Machine, infra_of
from spotguard.launch.wheel import build_wheel
from spotguard.spec.home_folder import spotguard_home
from spotguard.spec.infra import split_places
from spotguard.spec.templates import load_controller_node

if TYPE_CHECKING:
    from collections.abc import Callable

    from spotguard.control.journal.nodes.controller_node import ControllerNode
    from spotguard.control.run_folder import RunFolder
    from spotguard.launch.base import Offer
    from spotguard.launch.skypilot.sdk import Sdk
    from spotguard.launch.skypilot.strays import Strays
    from spotguard.spec.model import JobSpec

LOCAL, VM = "local", "vm"
NOT_YET = ("kubernetes", "slurm")
WHERE = (LOCAL, VM, *NOT_YET)
"""Where a controller may be said to live; of some nobody has seen it work."""
_CLOUD = "aws"
_CPUS, _MEMORY_GB = "2+", "4+"
"""SkyPilot's own server takes most of it."""
_PLACE = "~/.spotguard/controller"
_PRIVATE = "private.json"
_WHEELS = "~/.spotguard/wheels"


def check_where(where: str) -> None:
    """Let pass where a controller can live.

    Raises:
        SpecError: there is no such word, or nobody has seen it work.
    """
    if where in NOT_YET:
        raise SpecError(
            "controller",
            f"given {where!r}, where spotguard does not launch its controller by itself yet",
            hint="host it there yourself: infra/controller has the manifest; or --controller vm",
        )
    if where not in WHERE:
        raise SpecError("controller", f"given {where!r}; allowed: {LOCAL}, {VM}")


def check_job(spec: JobSpec) -> None:
    """Let pass a job whose controller can live on a node of its own.

    Raises:
        SpecError: its nodes, or its store, are out of that node's reach.
    """
    places = split_places(spec.infra, spec.on_demand_infra)
    elsewhere = [place for place in places if place.partition("/")[0] != _CLOUD]
    if elsewhere:
        out = ",".join(elsewhere)
        raise SpecError(
            "controller",
            f"a controller in a {VM} needs a job on {_CLOUD}: of clusters on {out} it "
            "could not say whether they live",
            hint=f"leave it here: --controller {LOCAL}",
        )
    if "://" not in spec.store or spec.store.startswith("file://"):
        raise SpecError(
            "store", f"given {spec.store!r}, a folder of this machine, which no other one reaches"
        )


def cheapest(spec: JobSpec) -> Offer:
    """Return the cheapest place for it, among those of the job; takes some seconds.

    Raises:
        SpecError: there is none.
        EnvironmentFailure: SkyPilot's prices can be neither read nor fetched.
    """
    check_job(spec)
    places = tuple(map(Place.parse, spec.infra.split(",")))
    found = survey(places, Machine(cpus=_CPUS, memory=_MEMORY_GB), market=Market.ON_DEMAND)
    bought = [offer for offer in found.offers if offer.market is Market.ON_DEMAND]
    if not bought:
        raise SpecError("controller", f"no small node is offered on demand in {spec.infra}")
    return bought[0]


def node_name(run_id: str, number: int) -> str:
    """Return the name of its cluster; no attempt's is like it."""
    return f"{run_id}-c{number}"


def node_task(
    spec: JobSpec, node: ControllerNode, offer: Offer, *, run_id: str, place: str, private: Path
) -> dict[str, Any]:
    """Return SkyPilot's task for a node of the run at `place` (`STORE/RUN_ID`).

    Folders of the job are carried to where they are here, so that what is launched there is what
    would be launched here. `private` is a file of the run's secrets.
    """
    wheel = build_wheel(spotguard_home() / "wheels")
    task = load_controller_node()
    task["name"] = node.cluster
    task["resources"] = {
        **task["resources"],
        "infra": infra_of(offer),
        "use_spot": False,
        "instance_type": offer.instance_type,
        "labels": {CLUSTER_TAG: node.cluster, RUN_TAG: run_id},
    }
    task["envs"] = {
        "CONTROLLER_RUN": place,
        "CONTROLLER_NUMBER": str(node.number),
        "CONTROLLER_WHEEL": wheel.parent.name,
        "CONTROLLER_REQUIREMENTS": base64.b64encode(_requirements().encode()).decode(),
    }
    folders = [spec.workdir, *(s for s in spec.node.file_mounts.values() if "://" not in s)]
    task["file_mounts"] = {
        **{folder: folder for folder in folders},
        f"{_WHEELS}/{wheel.parent.name}/{wheel.name}": str(wheel),
        f"{_PLACE}/{_PRIVATE}": str(private),
    }
    config = Path.home() / ".sky" / "config.yaml"
    if config.exists():
        task["file_mounts"][f"{_PLACE}/sky.yaml"] = str(config)
    return task


def write_private(folder: RunFolder, spec: JobSpec) -> Path:
    """Write what is secret of a job into a file that only this user may read; return its path."""
    path = folder.path / _PRIVATE
    path.unlink(missing_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(handle, "w") as file:
        json.dump({"env": dict(spec.env), "notify": list(spec.notify)}, file)
    return path


def remove_private(folder: RunFolder) -> None:
    """Remove what `write_private` wrote, if it is there."""
    (folder.path / _PRIVATE).unlink(missing_ok=True)


def read_private(path: Path) -> tuple[dict[str, str], list[str]]:
    """Return the job's variables, and whom it tells, as `write_private` wrote them."""
    body = json.loads(path.read_text())
    return body["env"], body["notify"]


def _requirements() -> str:
    """Return what a controller needs beside SkyPilot: all but torch, and what S3 needs."""
    from packaging.requirements import Requirement

    wanted = []
    for line in metadata.requires("spotguard") or []:
        each = Requirement(line)
        is_needed = each.marker is None or "extra" not in str(each.marker)
        for_store = each.marker is not None and each.marker.evaluate({"extra": _CLOUD})
        if (is_needed or for_store) and each.name != "torch":
            plain = str(each.marker) if each.marker is not None else ""
            marker = f"; {plain}" if plain and "extra" not in plain else ""
            wanted.append(f"{each.name}{each.specifier}{marker}\n")
    return "".join(wanted)


# ---------------------------------------------------------------- SkyPilot


@dataclass(frozen=True, kw_only=True)
class NodeState:
    """How a node of the controller's is, as SkyPilot says."""

    there: bool
    """It is, or may be."""
    problem: str = ""
    """Why it will not serve; empty as long as it may."""


class Host(Protocol):
    """Where controllers' nodes are had. Every call blocks, up to some seconds."""

    def submit(self, task: dict[str, Any], cluster: str) -> None:
        """Ask for a node; asked for again, nothing changes."""
        ...

    def state(self, cluster: str) -> NodeState:
        """Return how it is."""
        ...

    def down(self, node: ControllerNode) -> None:
        """Ask for its end."""
        ...


class SkyHost:
    """SkyPilot; and EC2 itself for the end of a node that another machine had asked for."""

    def __init__(self, sdk: Sdk, strays: Callable[[str], Strays]) -> None:
        """`strays` looks for such nodes in one place."""
        self._sdk = sdk
        self._strays = strays

    def submit(self, task: dict[str, Any], cluster: str) -> None:
        """Ask for a cluster of one node, unless it was asked for before and has not failed."""
        if not self.state(cluster).there:
            self._sdk.submit(task, cluster)

    def state(self, cluster: str) -> NodeState:
        """Ask what became of the launch, then of the cluster."""
        try:
            launch = self._sdk.launch_of(cluster)
            if launch is not None and launch.phase is ClusterPhase.UNDER_WAY:
                return NodeState(there=True)
            facts = self._sdk.cluster(cluster, fresh=False)
            job = self._sdk.job(cluster) if facts is not None and facts.up else None
        except SpotguardError:
            return NodeState(there=True)  # nobody can say it
        failed = launch is not None and launch.phase is not ClusterPhase.DONE
        if launch is not None and failed:
            return NodeState(there=facts is not None, problem=launch.problem or "it was refused")
        if facts is None:
            return NodeState(there=False, problem="it is not there")
        if job in (JobPhase.FAILED_SETUP, JobPhase.FAILED):
            return NodeState(there=True, problem="its set-up failed; `sky logs` says why")
        return NodeState(there=True)

    def down(self, node: ControllerNode) -> None:
        """Terminate it."""
        end_anywhere(self._sdk, node.cluster, self._strays(node.place))


def sky_host() -> SkyHost:
    """Return this machine's SkyPilot."""
    from spotguard.launch.skypilot.sdk import SkySdk
    from spotguard.launch.skypilot.strays import Ec2Strays

    def strays(place: str) -> Strays:
        region = Place.parse(place).region
        return Ec2Strays(lambda: [region] if region else [])

    return SkyHost(SkySdk(), strays)
