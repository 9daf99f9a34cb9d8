"""How places and machines are written: `aws/us-east-1`, `slurm/CLUSTER/PARTITION`, `A100:8`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from spotguard.spec.setting import duration, seconds_text, text

LOCAL = "local"
CLOUDS = ("aws", "gcp", "azure")
PLACES = (LOCAL, *CLOUDS, "kubernetes", "slurm")
NEVER, DEADLINE, FALLBACK = "never", "deadline", "fallback-after"

_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_CONTEXT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@/-]*")
_GPUS = re.compile(r"([A-Za-z][A-Za-z0-9._-]*)(?::([1-9][0-9]{0,2}))?")
_AT_LEAST = re.compile(r"([0-9]{1,5}(?:\.[0-9]{1,3})?)(\+?)")
_MACHINE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
# No blank, quote, '$' or control character: SkyPilot puts these into commands of shells.
_NODE_PATH = re.compile(r"(?:~/|/)[A-Za-z0-9._/+@,-]*[A-Za-z0-9._+@,-]/?")
_SOURCE = re.compile(
    r"(?:s3|gs|r2|cos|oci|nebius|cw)://[A-Za-z0-9][A-Za-z0-9._/+=,-]*"
    r"|https://[a-z0-9]+\.blob\.core\.windows\.net/[A-Za-z0-9][A-Za-z0-9._/+=,-]*"
    r"|/[^\x00-\x1f\x7f$`'\"\\]*"
)
_VOLUME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]*")


def split_places(*infras: str | None) -> list[str]:
    """Return the single places that these settings name; of one that is not given, none."""
    return [place for infra in infras if infra for place in infra.split(",")]


def places(raw: Any) -> str:
    """Return one or several places, best first: `gcp,aws/us-east-1`.

    Clouds can stand beside each other; the local machine, Kubernetes and Slurm stand alone with
    their like, because nodes and stores are prepared differently there.
    """
    parts = raw.split(",") if isinstance(raw, str) else raw
    if not isinstance(parts, (list, tuple)) or not parts:
        raise ValueError("no place")
    found = [_place(text(part)) for part in parts]
    kinds = {kind_of(spelt) for _, spelt in found}
    if len(kinds) > 1 or (LOCAL in kinds and len(found) > 1):
        raise ValueError("places of different kinds")
    if len({spelt for _, spelt in found}) < len(found):
        raise ValueError("a place is named twice")
    return ",".join(spelt for _, spelt in found)


def kind_of(infra: str) -> str:
    """Return of what kind places are, as `places` spells them: all clouds are of one kind."""
    first = infra.partition(",")[0].partition("/")[0]
    return "cloud" if first in CLOUDS else first


def _place(raw: str) -> tuple[str, str]:
    cloud, slash, below = raw.partition("/")
    cloud = {"k8s": "kubernetes"}.get(cloud.lower(), cloud.lower())
    if cloud not in PLACES or (slash and not below):
        raise ValueError("no such place")
    if not below:
        if cloud == "slurm":
            raise ValueError("which partition?")
        return cloud, cloud
    parts = [below] if cloud == "kubernetes" else below.split("/")
    most, least = {LOCAL: (0, 0), "kubernetes": (1, 0), "azure": (1, 0), "slurm": (2, 2)}.get(
        cloud, (2, 0)
    )
    pattern = _CONTEXT if cloud == "kubernetes" else _PART
    if not least <= len(parts) <= most or not all(map(pattern.fullmatch, parts)):
        raise ValueError("no such place")
    return cloud, f"{cloud}/{'/'.join(parts)}"


def gpu_name(raw: Any) -> str:
    """Return the GPUs of one node as `NAME:COUNT`; without a count it is one."""
    match = _GPUS.fullmatch(text(raw))
    if not match:
        raise ValueError("no GPU")
    return f"{match[1]}:{match[2] or 1}"


def gpu_names(raw: Any) -> str:
    """Return the GPUs of one node, any of several: `A100:8,H100:8`."""
    parts = raw.split(",") if isinstance(raw, str) else raw
    if not isinstance(parts, (list, tuple)) or not parts:
        raise ValueError("no GPU")
    found = [gpu_name(part) for part in parts]
    if len(set(found)) < len(found):
        raise ValueError("a GPU is named twice")
    return ",".join(found)


def gpu_alternatives(canonical: str | None) -> tuple[str, ...]:
    """Return each of them: `A100:8`; none where there are no GPUs."""
    return tuple(canonical.split(",")) if canonical else ()


def gpu_count(canonical: str | None) -> int:
    """Return how many GPUs a node has; of several alternatives, the first one."""
    first = next(iter(gpu_alternatives(canonical)), "")
    return int(first.rpartition(":")[2]) if first else 0


def at_least(raw: Any) -> str:
    """Return `4` or `4+` (that many or more) as SkyPilot takes it."""
    if isinstance(raw, bool):
        raise ValueError("not a number")
    match = _AT_LEAST.fullmatch(str(raw) if isinstance(raw, (int, float)) else text(raw))
    if not match or float(match[1]) <= 0:
        raise ValueError("not a number above 0")
    return match[0]


def machine_name(raw: Any) -> str:
    """Return the name of an instance type."""
    return _matching(_MACHINE, raw)


def image_name(raw: Any) -> str:
    """Return an image: `ami-…`, `projects/…`, `docker:ghcr.io/me/train:1`."""
    return _matching(_IMAGE, raw)


def mounts(raw: Any) -> dict[str, str]:
    """Return what nodes find where: `{"/data": "s3://bucket/data", "~/words": "/home/me/words"}`.

    A list of texts such as `/data=s3://bucket/data` is as good. What stands left is a place on the
    node, right of it a bucket or an absolute path of this machine (`setting_layers` made it one).
    """
    return _pairs(raw, _NODE_PATH, _SOURCE)


def volume_names(raw: Any) -> dict[str, str]:
    """Return SkyPilot's volumes by the place on a node: `{"/mnt/data": "my-volume"}`."""
    return _pairs(raw, _NODE_PATH, _VOLUME)


def _pairs(raw: Any, left: re.Pattern[str], right: re.Pattern[str]) -> dict[str, str]:
    items = [raw] if isinstance(raw, str) else raw
    if isinstance(items, (list, tuple)):
        parts = [text(item).partition("=") for item in items]
        if not all(equals for _, equals, _ in parts):
            raise ValueError("no '=' in it")
        items = {place.strip(): what.strip() for place, _, what in parts}
        if len(items) < len(parts):
            raise ValueError("a place is named twice")
    if not isinstance(items, Mapping):
        raise ValueError("not a table")
    found = {text(place): text(what) for place, what in items.items()}
    for place, what in found.items():
        if not left.fullmatch(place) or ".." in place.split("/") or not right.fullmatch(what):
            raise ValueError("not such a place, or nothing that can be there")
    return dict(sorted(found.items()))


def on_demand_rule(raw: Any) -> str:
    """Return when to buy on demand: `never`, `deadline`, or `fallback-after <seconds>s`."""
    words = text(raw).lower().replace("_", "-").split()
    if words in ([NEVER], [DEADLINE]):
        return words[0]
    if len(words) != 2 or words[0] != FALLBACK:
        raise ValueError("not a rule")
    return f"{FALLBACK} {seconds_text(duration(words[1]))}"


def _matching(pattern: re.Pattern[str], raw: Any) -> str:
    word = text(raw)
    if not pattern.fullmatch(word):
        raise ValueError("not such a name")
    return word
