"""SkyPilot's books: which of its clusters are spotguard's, whose run they serve, what they cost.

SkyPilot keeps the task that made a cluster, and ours names the run, its store and the price in
its variables. So a cluster tells whose it is without any file of this machine. A run's controller
may have a node of its own, whose task names the run and the node's number.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spotguard.events import env, keys
from spotguard.events.untrusted import Refused, amount, parse_object, text
from spotguard.storage.urls import split_last

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_NUMBER = re.compile(r"[1-9][0-9]{0,5}")
_OURS = env.JOB_VARIABLES | {env.CONTROLLER_RUN, env.CONTROLLER_NUMBER}


@dataclass(frozen=True, kw_only=True)
class OurCluster:
    """A cluster of spotguard's that SkyPilot has in its books. None is unknown, never zero."""

    name: str
    run_id: str
    store: str
    """URL of the store; the run lives below it."""
    place: str
    """As a user writes it: `aws/us-east-1/us-east-1a`."""
    instance_type: str | None
    market: str | None
    nodes: int
    since: float
    """Epoch seconds from which its nodes cost."""
    price_usd_per_h: float | None
    """Of one node, when it was launched."""
    sky_usd: float | None
    """What SkyPilot says that it has cost, at the prices of its catalogue."""
    status: str
    """SkyPilot's own word: `UP`, `INIT`, `STOPPED`."""
    controller: int | None = None
    """The number in its run of a node that is the controller's own; None: the run trains on it."""


def our_clusters(living: Iterable[Any], bills: Iterable[Mapping[str, Any]]) -> list[OurCluster]:
    """Return spotguard's clusters among `sky.status()`, with what `sky.cost_report()` says of them.

    A cluster counts as ours only if the task that made it says so and names this very cluster.
    """
    billed = {bill["name"]: bill for bill in bills}
    found = (_read(status, billed.get(status["name"], {})) for status in living)
    return [cluster for cluster in found if cluster is not None]


def _read(status: Any, bill: Mapping[str, Any]) -> OurCluster | None:
    name = status["name"]
    told = _variables(status.get("last_creation_yaml"))
    store, run_id, controller = _whose(told, name)
    if not keys.RUN_ID_PATTERN.fullmatch(run_id):
        return None
    claim = _claim(told)
    begun = bill.get("launched_at") or status["launched_at"]
    return OurCluster(
        name=name,
        run_id=run_id,
        store=store,
        place=_place(claim, status),
        instance_type=text(claim, "instance_type"),
        market=text(claim, "market"),
        nodes=int(status["nodes"]),
        since=max(float(begun), amount(claim, "intended_at") or 0.0),
        price_usd_per_h=amount(claim, "price_usd_per_h"),
        sky_usd=amount(bill, "total_cost") or None,  # SkyPilot takes unknown for zero
        status=status["status"].value,
        controller=controller,
    )


def _whose(told: Mapping[str, str], name: str) -> tuple[str, str, int | None]:
    """Return the store and the run of the cluster of that name, and which controller's node it is.

    The run is empty where the task does not name this very cluster: somebody made a copy of it.
    """
    if told.get(env.CLUSTER) == name:
        return told.get(env.STORE, ""), told.get(env.RUN_ID, ""), None
    store, run_id = split_last(told.get(env.CONTROLLER_RUN, ""))
    number = told.get(env.CONTROLLER_NUMBER, "")
    if not _NUMBER.fullmatch(number) or name != controller_cluster(run_id, int(number)):
        return "", "", None
    return store, run_id, int(number)


def controller_cluster(run_id: str, number: int) -> str:
    """Return the name of a cluster that a run's controller has for itself.

    No attempt's cluster has a name like it.
    """
    return f"{run_id}-c{number}"


def _variables(task: str | None) -> dict[str, str]:
    """Return spotguard's variables in a task, and nothing else of it: the rest is the user's."""
    if not task or not any(name in task for name in (env.CLUSTER, env.CONTROLLER_RUN)):
        return {}
    import yaml

    try:
        variables = yaml.safe_load(task)["envs"]
        return {k: str(v) for k, v in variables.items() if k in _OURS}
    except (yaml.YAMLError, TypeError, KeyError, AttributeError):
        return {}


def _claim(told: Mapping[str, str]) -> dict[str, Any]:
    try:
        return parse_object(told.get(env.CLAIM, ""), "the claim")
    except Refused:
        return {}


def _place(claim: dict[str, Any], status: Any) -> str:
    parts = [text(claim, name) for name in ("infra", "region", "zone")]
    if parts[0] is None:
        parts = [(status.get("cloud") or "unknown").lower(), status.get("region")]
    return "/".join(part for part in parts if part)
