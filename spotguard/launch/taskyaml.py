"""One attempt as a SkyPilot task: a template, merged as data with what is asked for. Pure.

Nothing of the user's becomes part of a script. Paths, arguments, requirements and commands go to
the node in variables (arguments and commands in base64), which SkyPilot quotes; the scripts are
the template's own.
"""

from __future__ import annotations

import base64
import os
import posixpath
import re
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spotguard.errors import SpecError
from spotguard.events import env
from spotguard.events.masking import secrets_in
from spotguard.events.states import Market

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from spotguard.launch.base import LaunchRequest, Offer

BUYS_SPOT = frozenset({"aws", "gcp", "azure"})
"""Where SkyPilot takes `use_spot`; elsewhere the place itself is the market."""
SHARED_DISK = frozenset({"slurm"})
"""Where a folder of this machine may be one of the nodes' too."""
_TAGGED = frozenset({"aws", "kubernetes"})
"""Where nodes are asked for by their tags later. Other clouds have other rules for tags."""
CLUSTER_TAG, RUN_TAG = "spotguard-cluster", "spotguard-run"
"""What each instance is tagged with: by the first EC2 is asked for what a cluster cost, by the
second a bill is split into runs."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_KEYS = frozenset({env.KEY, env.CACHE_KEY})
_SHOWN = env.JOB_VARIABLES - _KEYS
_RESERVED = re.compile(r"(?!SKYPILOT_DOCKER_)(?:SKYPILOT|SKY|JOB|SPOTGUARD)_")
_EXTRAS = {"s3": "[aws]", "gs": "[gcp]", "az": "[azure]"}
_PLACE_KEYS = ("infra", "use_spot", "instance_type", "accelerators", "any_of", "ordered")
_FIRST_PORT, _PORTS = 20_000, 10_000
"""Below those that Linux gives to outgoing connections."""
_WHEELS = "~/.spotguard/wheels"
TAKEN = ("~/.spotguard", "~/.sky", "~/sky_workdir", "~/skypilot-runtime", "~/.ssh")
"""On a node; what else is there is the image's, and the user's to know."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What each node shall be, and what is to be installed on it."""

    gpus: str | None = None
    """`A100:8`; where an offer says it, too, the offer's counts."""
    instance_type: str | None = None
    cpus: str | None = None
    """`8`, or `8+`: at least so many."""
    memory: str | None = None
    """In GiB, like `cpus`."""
    disk_gb: int | None = None
    image: str | None = None
    setup: tuple[str, ...] = ()
    """Shell commands of the user's, run before packages are installed."""
    file_mounts: Mapping[str, str] = field(default_factory=dict)
    """Buckets, and absolute paths of this machine, by their place on the nodes."""
    volumes: Mapping[str, str] = field(default_factory=dict)
    """Names of SkyPilot's volumes, by their place on the nodes."""
    requirements: tuple[str, ...] = ()
    """As pip takes them."""
    requirements_file: str | None = None
    """Absolute path, below the workdir; instead of `requirements`."""
    python: str | None = None
    """Such as `>=3.11`."""


def task_yaml(
    request: LaunchRequest,
    machine: Machine,
    template: Mapping[str, Any],
    *,
    offers: Sequence[Offer] = (),
    wheel: Path | None = None,
) -> dict[str, Any]:
    """Return the task for `request`, ready for `sky.Task.from_yaml_config` or a YAML file.

    Args:
        request: the attempt.
        machine: what its nodes are.
        template: a whole SkyPilot task (`spec.templates.load_template`).
        offers: the places to try, in this order; the request's own unless given.
        wheel: spotguard for the nodes (`wheel.build_wheel`); without it they ask PyPI.

    Raises:
        SpecError: something cannot be carried to the nodes; names the setting.
    """
    places = tuple(offers) or (request.offer,)
    _check_store(request, places)
    task = dict(template)  # its tables are replaced below, never changed
    task["name"] = _task_name(request.cluster)
    task["num_nodes"] = request.nodes
    task["workdir"] = _workdir(request.workdir)
    task["resources"] = _resources(task.get("resources", {}), machine, places, request)
    task["envs"] = {**task.get("envs", {}), **_variables(request, machine, wheel)}
    task.update(_secrets(request.env))
    if secrets_in(request.args):  # SkyPilot shows what is in `envs`
        task.setdefault("secrets", {})["JOB_ARGS"] = task["envs"].pop("JOB_ARGS")
    mounts = {**task.get("file_mounts", {}), **_file_mounts(machine)}
    if wheel is not None:
        mounts[f"{_WHEELS}/{wheel.parent.name}/{wheel.name}"] = str(wheel)
    if mounts:
        task["file_mounts"] = mounts
    if machine.volumes:
        task["volumes"] = {**task.get("volumes", {}), **_free(machine, "volumes", machine.volumes)}
    return task


def secrets_hidden(task: Mapping[str, Any]) -> dict[str, Any]:
    """Return the task as it may be shown."""
    shown = dict(task)
    if "secrets" in shown:
        shown["secrets"] = dict.fromkeys(shown["secrets"], "***")
    return shown


def as_text(task: Mapping[str, Any]) -> str:
    """Return the task as YAML that a person can read: scripts as they are, keys in their order."""
    import yaml

    class Dumper(yaml.SafeDumper):
        pass

    def text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
        style = "|" if "\n" in value else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    Dumper.add_representer(str, text)
    return str(yaml.dump(dict(task), Dumper=Dumper, sort_keys=False, width=100, allow_unicode=True))


def infra_of(offer: Offer) -> str:
    """Return a place as SkyPilot writes it: `aws/us-east-1/us-east-1a`."""
    return "/".join(part for part in (offer.infra, offer.region, offer.zone) if part)


# ---------------------------------------------------------------- resources


def _resources(
    template: Mapping[str, Any],
    machine: Machine,
    places: Sequence[Offer],
    request: LaunchRequest,
) -> dict[str, Any]:
    common = {key: value for key, value in template.items() if key not in _PLACE_KEYS}
    wanted = {
        "cpus": machine.cpus,
        "memory": machine.memory,
        "disk_size": machine.disk_gb,
        "image_id": machine.image,
    }
    if machine.gpus:  # the template's CPUs are for nodes that have nothing else
        common.pop("cpus", None)
    common |= {key: value for key, value in wanted.items() if value is not None}
    tags = {**(common.get("labels") or {}), CLUSTER_TAG: request.cluster, RUN_TAG: request.run_id}
    candidates = [_candidate(offer, machine, tags) for offer in places]
    if all("instance_type" in candidate for candidate in candidates):
        common = {key: value for key, value in common.items() if key not in ("cpus", "memory")}
    if len(candidates) == 1:
        return {**common, **candidates[0]}
    return {**common, "ordered": candidates}


def _candidate(offer: Offer, machine: Machine, tags: Mapping[str, str]) -> dict[str, Any]:
    candidate: dict[str, Any] = {"infra": infra_of(offer)}
    if offer.infra in _TAGGED:
        candidate["labels"] = dict(tags)
    if offer.infra in BUYS_SPOT:
        candidate["use_spot"] = offer.market is Market.SPOT
        if offer.instance_type:
            candidate["instance_type"] = offer.instance_type
    if offer.gpus or machine.gpus:
        candidate["accelerators"] = offer.gpus or machine.gpus
    return candidate


# ---------------------------------------------------------------- variables


def rendezvous_port(cluster: str) -> int:
    """Return the port at which the ranks of a cluster meet: on Slurm, two may share a machine."""
    return _FIRST_PORT + zlib.crc32(cluster.encode()) % _PORTS


def _variables(request: LaunchRequest, machine: Machine, wheel: Path | None) -> dict[str, str]:
    lifetime_s = request.max_lifetime_s
    requirements = () if machine.requirements_file else machine.requirements
    return {
        **{k: v for k, v in request.env.items() if k in _SHOWN},
        env.CLUSTER: request.cluster,
        "JOB_SCRIPT": seen_from_workdir("script", request.script, request.workdir),
        "JOB_ARGS": _packed(request.args, "\0"),
        "JOB_NPROC_PER_NODE": str(request.nproc_per_node),
        "JOB_PORT": str(rendezvous_port(request.cluster)),
        "JOB_LIFETIME_S": "0" if lifetime_s is None else str(max(1, int(lifetime_s))),
        "JOB_SETUP": _packed(machine.setup, "\n"),
        "JOB_REQUIREMENTS": _packed(requirements, "\n"),
        "JOB_REQUIREMENTS_FILE": _requirements_file(machine, request.workdir),
        "JOB_PYTHON": machine.python or "",
        "JOB_WHEEL": "" if wheel is None else wheel.parent.name,
        "JOB_EXTRAS": _EXTRAS.get(request.env.get(env.STORE, "").partition("://")[0].lower(), ""),
    }


def _packed(texts: Iterable[str], end: str) -> str:
    """Return texts in base64, each ended by `end`: letters, digits and `+/=` only."""
    joined = "".join(f"{text}{end}" for text in texts)
    return base64.b64encode(joined.encode("utf-8", "surrogateescape")).decode()


def _secrets(given: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Return the user's variables and the keys, as SkyPilot's secrets: it shows them nowhere."""
    secrets = {name: value for name, value in given.items() if name not in _SHOWN}
    for name, value in secrets.items():
        if name in _KEYS:
            continue
        if not _NAME.fullmatch(name) or _RESERVED.match(name):
            raise SpecError("env", f"given {name!r}, a name that is not free on the nodes")
        if "\0" in value:
            raise SpecError("env", f"the value of {name} holds a zero byte")
    return {"secrets": secrets} if secrets else {}


# ---------------------------------------------------------------- folders


def _file_mounts(machine: Machine) -> dict[str, str]:
    for place, source in machine.file_mounts.items():
        if "://" not in source and not Path(source).exists():
            raise SpecError("node.file_mounts", f"for {place}: there is no {source} here")
    return _free(machine, "file_mounts", machine.file_mounts)


def _free(machine: Machine, name: str, given: Mapping[str, str]) -> dict[str, str]:
    """Return what the user puts on the nodes, if it is in nobody's way."""
    others = machine.volumes if name == "file_mounts" else machine.file_mounts
    for place in given:
        plain = posixpath.normpath(place)
        if any(f"{plain}/".startswith(f"{taken}/") for taken in TAKEN):
            raise SpecError(f"node.{name}", f"given {place!r}, which is spotguard's or SkyPilot's")
        if plain in {posixpath.normpath(other) for other in others}:
            raise SpecError(
                f"node.{name}", f"given {place!r}, which is in both of file_mounts and volumes"
            )
    return dict(given)


def _task_name(cluster: str) -> str:
    return re.sub("-{3,}", "--", cluster)  # SkyPilot takes two at most


def _workdir(path: str) -> str:
    if "$" in path:
        raise SpecError(
            "workdir",
            f"given {path!r}, but SkyPilot would take what follows '$' for a variable",
            hint="rename the folder, or reach it by a symbolic link",
        )
    return path


def seen_from_workdir(setting: str, path: str, workdir: str) -> str:
    """Return the path of setting `setting` as seen from `workdir`, which is copied to the nodes.

    Raises:
        SpecError: it is not in that folder.
    """
    relative = os.path.relpath(path, workdir)
    if relative.startswith(os.pardir):
        raise SpecError(
            setting,
            f"{path} is not below {workdir}, the folder that is copied to the nodes",
            hint="start where both are below you, or set workdir to a folder above both",
        )
    return Path(relative).as_posix()


def _requirements_file(machine: Machine, workdir: str) -> str:
    if machine.requirements_file is None:
        return ""
    # With `./` in front it cannot be an option of pip's.
    return f"./{seen_from_workdir('node.requirements', machine.requirements_file, workdir)}"


def _check_store(request: LaunchRequest, places: Sequence[Offer]) -> None:
    store = request.env.get(env.STORE, "")
    far = [offer.infra for offer in places if offer.infra not in SHARED_DISK]
    if far and (not store or "://" not in store or store.startswith("file://")):
        raise SpecError(
            "store",
            f"given {store!r}, a folder of this machine, which nodes on {far[0]} cannot reach",
            hint="use a bucket: --store s3://BUCKET/PREFIX, gs://… or az://…",
        )
