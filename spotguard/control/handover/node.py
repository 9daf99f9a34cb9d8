"""A node for the controller of one run: where it is had, for how much, and its SkyPilot task."""

from __future__ import annotations

import base64
import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from typing import TYPE_CHECKING, Any, Protocol

from spotguard.control.handover.not_in_store import Private
from spotguard.errors import SpecError, SpotguardError
from spotguard.events import env
from spotguard.events.states import Market
from spotguard.launch.base import NOTHING_LEFT
from spotguard.launch.skypilot.launcher import look
from spotguard.launch.skypilot.prices import Place, survey
from spotguard.launch.skypilot.sdk import ClusterPhase, JobPhase
from spotguard.launch.skypilot.strays import end_anywhere
from spotguard.launch.taskyaml import CLUSTER_TAG, RUN_TAG, Machine, infra_of
from spotguard.launch.wheel import build_wheel
from spotguard.shared.paths import home_folder
from spotguard.shared.units import SystemClock, format_usd
from spotguard.spec.home_folder import spotguard_home
from spotguard.spec.infra import split_places
from spotguard.spec.model.own_template import is_own_template, local_sources
from spotguard.spec.templates import load_controller_node

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from spotguard.control.journal.nodes.controller_node import ControllerNode
    from spotguard.control.journal.record import Limits
    from spotguard.control.run_folder import RunFolder
    from spotguard.launch.base import Offer
    from spotguard.launch.skypilot.sdk import Sdk
    from spotguard.launch.skypilot.strays import Strays
    from spotguard.spec.model import JobSpec
    from spotguard.spec.model.phases import PhaseSpec

LOCAL, VM, SLURM, KUBERNETES = "local", "vm", "slurm", "kubernetes"
_INFRA = {VM: "aws", SLURM: "slurm", KUBERNETES: "kubernetes"}
"""Where a job's nodes must be for its controller to live there."""
_MACHINE = Machine(cpus="2+", memory="4+")
"""SkyPilot's own server takes most of it."""
_STORE_EXTRAS = {"s3": "aws", "gs": "gcp", "az": "azure"}
_PLACE = "~/.spotguard/controller"
_PRIVATE = "private.json"
_FOLDERS = f"{_PLACE}/folders"
_WHEELS = "~/.spotguard/wheels"
_BEHIND_LINKS = "~/.sky/file_mounts"
"""Where SkyPilot puts what is to lie outside the home; it links to it from there."""


def check_where(where: str) -> None:
    """Let pass where a controller can live.

    Raises:
        SpecError: there is no such word.
    """
    if where != LOCAL and where not in _INFRA:
        raise SpecError("controller", f"given {where!r}; allowed: {', '.join((LOCAL, *_INFRA))}")


def check_job(spec: JobSpec, where: str) -> None:
    """Let pass a job whose controller can live on a node of its own of that kind.

    Raises:
        SpecError: its nodes, its store, or files of its template are out of that node's reach.
    """
    if where == SLURM:
        _check_template(spec.template)
    if spec.phases:
        check_phases(where)
    infra = _INFRA[where]
    places = split_places(spec.infra, spec.on_demand_infra)
    elsewhere = [place for place in places if place.partition("/")[0] != infra]
    if elsewhere:
        fits = [kind for kind, each in _INFRA.items() if places[0].partition("/")[0] == each]
        raise SpecError(
            "controller",
            f"given {where!r}, but it needs a job on {infra} alone: of clusters on "
            f"{','.join(elsewhere)} it could not say whether they live",
            hint=f"leave it here: --controller {LOCAL}"
            + "".join(f"; or --controller {kind}" for kind in fits if kind != where),
        )
    if where != VM:
        _check_one_cluster(places, where)
    if where != SLURM and ("://" not in spec.store or spec.store.startswith("file://")):
        raise SpecError(
            "store", f"given {spec.store!r}, a folder of this machine, which no other one reaches"
        )


def check_phases(where: str) -> None:
    """Let pass where a job in phases can be controlled.

    Raises:
        SpecError: on Slurm the job's folders lie elsewhere than here, and each phase is written
            down for other machines as it is on the node.
    """
    if where == SLURM:
        raise SpecError(
            "controller",
            f"given {SLURM!r}, where a job in phases cannot be controlled",
            hint=f"leave it here: --controller {LOCAL}",
        )


def _check_template(template: str) -> None:
    """Let pass a template whose files are where it says on a node where nobody is root, too."""
    sources = local_sources(template) if is_own_template(template) else []
    if sources:
        raise SpecError(
            "controller",
            f"given {SLURM!r}, but {template} has file_mounts from {sources[0]}, and there it "
            "would lie elsewhere",
            hint=f"name it by --file-mount, or leave the controller here: --controller {LOCAL}",
        )


def _check_one_cluster(places: Sequence[str], where: str) -> None:
    """Let pass places on one cluster, from within which the controller acts."""
    clusters = {Place.parse(place).region for place in places}
    if len(clusters) == 1 and (where == SLURM or None not in clusters):
        return
    what, name = (
        ("one Slurm cluster", "partitions of one: --infra slurm/CLUSTER/PARTITION")
        if where == SLURM
        else ("one Kubernetes context that is named", "it: --infra kubernetes/CONTEXT")
    )
    raise SpecError(
        "controller",
        f"given {where!r}, which needs a job on {what}: from a node of one, no other is reached",
        hint=f"name {name}",
    )


def where_for(spec: JobSpec) -> str:
    """Return on what kind of node a job's controller can live, by where the job is."""
    first = split_places(spec.infra, None)[0].partition("/")[0]
    return next((where for where, infra in _INFRA.items() if infra == first), VM)


def cheapest(spec: JobSpec) -> Offer:
    """Return the cheapest place for it, among those of the job; takes some seconds.

    On Slurm and Kubernetes the place of the on-demand market, if the job names one.

    Raises:
        SpecError: there is none.
        EnvironmentFailure: SkyPilot's prices can be neither read nor fetched.
    """
    where = where_for(spec)
    check_job(spec, where)
    named = (where != VM and spec.on_demand_infra) or spec.infra
    places = tuple(map(Place.parse, named.split(",")))
    found = survey(places, _MACHINE, market=Market.ON_DEMAND)
    bought = [offer for offer in found.offers if offer.market is Market.ON_DEMAND]
    if not bought:
        raise SpecError("controller", f"no small node is offered on demand in {spec.infra}")
    if where == SLURM and bought[0].price_usd_per_h is None:  # SkyPilot's configuration has none
        return replace(bought[0], price_usd_per_h=0.0, on_demand_usd_per_h=0.0)
    return bought[0]


def check_price(offer: Offer, limits: Limits | JobSpec) -> None:
    """Let pass a node whose price is known, or one for a run that needs to know none.

    Raises:
        SpecError: the run's budget could not be kept.
    """
    known = offer.price_usd_per_h is not None
    if known or limits.budget_usd is None or limits.allow_unknown_price:
        return
    raise SpecError(
        "controller",
        f"the price of its node in {infra_of(offer)} is unknown, so the budget of "
        f"{format_usd(limits.budget_usd)} could not be kept",
        hint=f"leave it here with --controller {LOCAL}, give SkyPilot the price in its "
        "configuration, or start anyway with --allow-unknown-price",
    )


def node_task(
    spec: JobSpec,
    node: ControllerNode,
    offer: Offer,
    *,
    run_id: str,
    place: str,
    folders: Mapping[str, str],
    private: Path,
    sources: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return SkyPilot's task for a node of the run at `place` (`STORE/RUN_ID`).

    `folders` are those that `carried_folders` named, so that what is launched there is what would
    be launched here. `private` is a file of the run's secrets. `sources` says where this machine
    has what lies in the run's own copy of the code, and no more in the user's folder.
    """
    wheel = build_wheel(spotguard_home() / "wheels")
    task = load_controller_node()
    task["name"] = node.cluster
    where = where_for(spec)
    labels = {CLUSTER_TAG: node.cluster, RUN_TAG: run_id}
    task["resources"] |= _resources(offer, where, labels)
    task["envs"] = {
        env.CONTROLLER_RUN: place,
        env.CONTROLLER_NUMBER: str(node.number),
        "CONTROLLER_SLURM": (offer.region or "") if where == SLURM else "",
        "CONTROLLER_KUBERNETES": (offer.region or "") if where == KUBERNETES else "",
        "CONTROLLER_WHEEL": wheel.parent.name,
        "CONTROLLER_REQUIREMENTS": base64.b64encode(_requirements(spec.store).encode()).decode(),
    }
    task["file_mounts"] = {
        **{
            _mounted_at(there, folders.values()): (sources or {}).get(here, here)
            for here, there in folders.items()
        },
        f"{_WHEELS}/{wheel.parent.name}/{wheel.name}": str(wheel),
        f"{_PLACE}/{_PRIVATE}": str(private),
    }
    config = home_folder() / ".sky" / "config.yaml"
    if config.exists():
        task["file_mounts"][f"{_PLACE}/sky.yaml"] = str(config)
    return task


def _resources(offer: Offer, where: str, labels: dict[str, str]) -> dict[str, Any]:
    """Return what SkyPilot is asked for: a machine, an allocation or a pod."""
    infra = infra_of(offer)
    if where == VM:
        bought = {"use_spot": False, "instance_type": offer.instance_type}
        return {"infra": infra, **bought, "labels": labels}
    virtual = {"infra": infra, "cpus": _MACHINE.cpus}
    whole = {**virtual, "memory": _MACHINE.memory}
    if where == KUBERNETES:
        return {**whole, "labels": labels}
    # A Slurm that does not know its nodes' memory refuses to give so much of it.
    return {"ordered": [whole, virtual]}


def carried_folders(spec: JobSpec, phases: Sequence[PhaseSpec] = ()) -> dict[str, str]:
    """Return what of this machine each launch reads, and where it lies on the controller's node.

    In a VM and in a pod by the same path. On Slurm nobody is root: there it is below the user's
    home. `phases` are all of the job's, whose templates are read once the run comes there.

    Raises:
        SpecError: a template of the user's own cannot be read.
    """
    folders = [spec.workdir, *(x for x in spec.node.file_mounts.values() if "://" not in x)]
    for template in dict.fromkeys([spec.template, *(each.template or "" for each in phases)]):
        if is_own_template(template):
            folders += [template, *local_sources(template)]
    folders = list(dict.fromkeys(folders))
    if where_for(spec) == SLURM:
        return {folder: f"{_FOLDERS}/{index}" for index, folder in enumerate(folders)}
    return {folder: folder for folder in folders}


def _mounted_at(path: str, all_paths: Iterable[str]) -> str:
    """Return where SkyPilot is to put what shall lie at `path` on the node.

    Of what lies in another of them it could make no link, for through the other's link it is there
    already. It cannot be left out: of what git ignores, SkyPilot copies only what is named.
    """
    is_inside = any(path.startswith(f"{other}/") for other in all_paths)
    is_linked = path.startswith("/") and not path.startswith("/tmp/")
    return f"{_BEHIND_LINKS}{path}" if is_inside and is_linked else path


def write_private(folder: RunFolder, spec: JobSpec, folders: Mapping[str, str]) -> Path:
    """Write what is in no store of a job into a file that only this user may read.

    `folders` are those that `carried_folders` named. Returns its path.
    """
    path = folder.path / _PRIVATE
    path.unlink(missing_ok=True)
    kept = Private(env=dict(spec.env), notify=tuple(spec.notify), folders=folders)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(handle, "w") as file:
        json.dump(asdict(kept), file)
    return path


def remove_private(folder: RunFolder) -> None:
    """Remove what `write_private` wrote, if it is there."""
    (folder.path / _PRIVATE).unlink(missing_ok=True)


def _requirements(store: str) -> str:
    """Return what a controller needs beside SkyPilot: all but torch, and what its store needs."""
    from packaging.requirements import Requirement

    extra = _STORE_EXTRAS.get(store.partition("://")[0], "")
    wanted = []
    for line in metadata.requires("spotguard") or []:
        each = Requirement(line)
        is_needed = each.marker is None or "extra" not in str(each.marker)
        for_store = each.marker is not None and each.marker.evaluate({"extra": extra})
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

    def is_gone(self, node: ControllerNode) -> bool:
        """Tell whether nothing of it is left; False in doubt."""
        ...


class SkyHost:
    """SkyPilot; and EC2, Slurm or Kubernetes, for the end of a node that another machine had."""

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
                return NodeState(there=True, problem=self._sdk.end_extra_nodes(cluster))
            facts = self._sdk.cluster(cluster, fresh=False)
            job = self._sdk.job(cluster) if facts is not None and facts.up else None
        except SpotguardError:
            return NodeState(there=True)  # nobody can say it
        failed = launch is not None and launch.phase is not ClusterPhase.DONE
        if launch is not None and failed:
            self._sdk.end_forgotten_nodes(cluster)
            return NodeState(there=facts is not None, problem=launch.problem or "it was refused")
        if facts is None:
            return NodeState(there=False, problem="it is not there")
        if job in (JobPhase.FAILED_SETUP, JobPhase.FAILED):
            return NodeState(there=True, problem="its set-up failed; `sky logs` says why")
        return NodeState(there=True)

    def down(self, node: ControllerNode) -> None:
        """Terminate it, unless that is under way: orders would wait for each other."""
        with suppress(SpotguardError):  # the order will say what is wrong
            if self._sdk.is_going_down(node.cluster):
                return
        end_anywhere(self._sdk, node.cluster, self._strays(node.place))

    def is_gone(self, node: ControllerNode) -> bool:
        """Look for it, also where another machine's SkyPilot had it."""
        with suppress(SpotguardError):  # the look will say what is wrong
            if self._sdk.is_going_down(node.cluster):
                return False  # a look would wait for the cluster's own lock
        view = look(self._sdk, node.cluster, SystemClock(), strays=self._strays(node.place))
        return view.state in NOTHING_LEFT


def sky_host() -> SkyHost:
    """Return this machine's SkyPilot."""
    from spotguard.launch.skypilot.sdk import SkySdk

    return SkyHost(SkySdk(), _strays_at)


def _strays_at(place: str) -> Strays:
    from spotguard.launch.skypilot.kubernetes_strays import KubernetesStrays
    from spotguard.launch.skypilot.slurm_strays import SlurmStrays
    from spotguard.launch.skypilot.strays import Ec2Strays

    at = Place.parse(place)
    known = [at.region] if at.region else []
    if at.infra == _INFRA[KUBERNETES]:
        return KubernetesStrays(lambda: known)
    return SlurmStrays(lambda: known) if at.infra == _INFRA[SLURM] else Ec2Strays(lambda: known)
