"""For how long EC2 charges the instances of a cluster, by its own list of them.

SkyPilot knows a cluster as a whole, from before its nodes were asked for until the look that found
the last of them gone. EC2 charges each instance from its launch until its own end, and keeps what
is gone in its list for about an hour.
"""

from __future__ import annotations

import logging
import re
from datetime import datetime
from typing import TYPE_CHECKING, Any

from spotguard.launch.skypilot.ec2.calls import can_ask, client_of, instances_of, unanswered

if TYPE_CHECKING:
    from collections.abc import Iterable

log = logging.getLogger(__name__)

_ASK_WITHIN_S = 4.0
_TRIES = 2
_LEAST_S = 60.0
"""EC2 charges Linux by the second, and each instance at least so long."""
_OVER = ("shutting-down", "terminated")
_AT = re.compile(r"\((\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) (?:GMT|UTC)\)")
"""In what EC2 says of an end that was asked for: `User initiated (2026-01-31 12:00:00 GMT)`."""
_SPOT_OVER = "instance-terminated"
"""How the status of a spot request begins whose instance is gone, whoever ended it."""


def charged_node_s(region: str, cluster: str, nodes: int) -> float | None:
    """Return for how many seconds all instances of a cluster that is gone are charged, added up.

    Blocks for some seconds at most. None is unknown: EC2 cannot be asked or refuses, an instance
    still lives, EC2 does not say when one ended, or it lists fewer than the cluster had `nodes`.
    """
    if not can_ask():
        return None
    try:
        client = client_of(region, within_s=_ASK_WITHIN_S, tries=_TRIES)
        instances = instances_of(client, [cluster])
        ends = _ends(client, instances)
        # Of nodes that ended hours apart EC2 has forgotten the first ones, which were paid as well.
        return None if len(instances) < nodes else _added_up(instances, ends)
    except unanswered() as problem:
        log.info("EC2 does not say what it charges for %s: %s", cluster, problem)
    except (AttributeError, KeyError, TypeError, ValueError) as problem:
        log.warning("EC2 describes %s in another form than expected: %r", cluster, problem)
    return None


def _added_up(instances: list[Any], ends: dict[str, float]) -> float | None:
    total_s = 0.0
    for each in instances:
        lasted_s = ends.get(each["InstanceId"], -1.0) - each["LaunchTime"].timestamp()
        if each["State"]["Name"] not in _OVER or lasted_s < 0.0:
            return None
        total_s += max(_LEAST_S, lasted_s)
    return total_s


def _ends(client: Any, instances: Iterable[Any]) -> dict[str, float]:
    """Return when each instance ended, as far as EC2 says so (epoch seconds).

    Of a spot instance that EC2 itself took, or that shut itself down, the spot request tells it.
    """
    ends, untold = {}, []
    for each in instances:
        said = _AT.search(each.get("StateTransitionReason") or "")
        if said is not None:
            ends[each["InstanceId"]] = datetime.fromisoformat(f"{said[1]}+00:00").timestamp()
        elif each.get("InstanceLifecycle") == "spot":
            untold.append(each["InstanceId"])
    if untold:
        found = client.describe_spot_instance_requests(
            Filters=[{"Name": "instance-id", "Values": untold}]
        )
        for request in found["SpotInstanceRequests"]:
            status = request.get("Status", {})
            if str(status.get("Code", "")).startswith(_SPOT_OVER):
                ends[request["InstanceId"]] = status["UpdateTime"].timestamp()
    return ends
