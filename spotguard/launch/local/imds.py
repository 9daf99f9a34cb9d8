"""What three clouds' metadata services answer, request by request, without any network.

AWS    IMDSv2 only: PUT /latest/api/token, then GET with the token, else 401. instance-action is
       404 until the notice, then {"action", "time"}, in whole seconds.
GCP    every GET needs Metadata-Flavor: Google, else 403. wait_for_change, last_etag and
       timeout_sec block as in the real service.
Azure  every request needs Metadata: true and api-version, else 400. Preempt events are
       Scheduled, then Started; StartRequests acknowledges one; one can be withdrawn.

The clouds' own pages: AWS "Spot Instance interruption notices", Google "Preemptible VM
instances" and "Query VM metadata", Azure "Scheduled Events for Linux VMs".
"""

from __future__ import annotations

import hashlib
import json
import math
import secrets
import threading
import time
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from email.message import Message

    from spotguard.shared.units import Clock

_AWS_TTL = "X-aws-ec2-metadata-token-ttl-seconds"
_AWS_TOKEN = "X-aws-ec2-metadata-token"
_AWS_MAX_TTL_S = 21_600
_AZURE_EVENT_VERSIONS: Final = (
    "2017-11-01",
    "2019-01-01",
    "2019-04-01",
    "2019-08-01",
    "2020-07-01",
)


@dataclass(frozen=True, kw_only=True)
class Request:
    """One HTTP request, already read."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Message
    """Looked up whatever the case."""
    body: bytes


@dataclass(frozen=True, kw_only=True)
class Reply:
    """One HTTP answer."""

    status: int
    body: str = ""
    content_type: str = "text/plain"
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(kw_only=True)
class NodeFacts:
    """What the service knows of its node. Guarded by `changed`, which every change notifies."""

    name: str
    clock: Clock
    deadline_at: float | None = None
    """When the announced interruption comes, epoch seconds; None without notice."""
    rebalance_at: float | None = None
    notices: int = 0
    """How many notices there have been; each is an event of its own."""
    incarnation: int = 1
    """Azure: grows with each change of the list of events."""
    acknowledged_at: float | None = None
    """Azure: when a StartRequests named the present event."""
    tokens: dict[str, float] = field(default_factory=dict)
    """AWS: token and when it expires, on the monotonic clock."""
    closing: bool = False
    changed: threading.Condition = field(default_factory=threading.Condition)


def answer_aws(request: Request, facts: NodeFacts) -> Reply:
    """Return what AWS IMDSv2 answers."""
    if request.path == "/latest/api/token":
        return _aws_token(request, facts)
    if request.method not in ("GET", "HEAD"):
        return _aws_failure(405, "Not Allowed")
    expires_at = facts.tokens.get(request.headers.get(_AWS_TOKEN, ""), -math.inf)
    left_s = expires_at - facts.clock.monotonic()
    if left_s <= 0:
        return _aws_failure(401, "Unauthorized")
    body = _aws_values(facts).get(request.path.removeprefix("/latest/meta-data/"))
    if body is None:
        return _aws_failure(404, "Not Found")
    return Reply(status=200, body=body, headers={_AWS_TTL: str(int(left_s))})


def _aws_token(request: Request, facts: NodeFacts) -> Reply:
    if request.method != "PUT":
        return _aws_failure(405, "Not Allowed")
    if "X-Forwarded-For" in request.headers:  # a proxy: the real service refuses it too
        return _aws_failure(403, "Forbidden")
    ttl = request.headers.get(_AWS_TTL, "")
    if not ttl.isdigit() or not 1 <= int(ttl) <= _AWS_MAX_TTL_S:
        return _aws_failure(400, "Bad Request")
    token = secrets.token_urlsafe(40) + "=="
    facts.tokens[token] = facts.clock.monotonic() + int(ttl)
    return Reply(status=200, body=token, headers={_AWS_TTL: ttl})


def _aws_failure(status: int, title: str) -> Reply:
    body = f"<html><head><title>{status} - {title}</title></head></html>\n"
    return Reply(status=status, body=body, content_type="text/html")


def _aws_values(facts: NodeFacts) -> dict[str, str]:
    values = {
        "instance-id": f"i-{hashlib.sha256(facts.name.encode()).hexdigest()[:17]}",
        "instance-life-cycle": "spot",
        "instance-type": "p3.2xlarge",
        "placement/availability-zone": "us-east-1a",
        "placement/region": "us-east-1",
    }
    if facts.rebalance_at is not None:
        notice = {"noticeTime": _iso_seconds(facts.rebalance_at)}
        values["events/recommendations/rebalance"] = json.dumps(notice)
    if facts.deadline_at is not None:
        time_of_end = _iso_seconds(facts.deadline_at)
        action = {"action": "terminate", "time": time_of_end}
        values["spot/instance-action"] = json.dumps(action)
        values["spot/termination-time"] = time_of_end
    return values


def answer_gcp(request: Request, facts: NodeFacts) -> Reply:
    """Return what Google's metadata server answers; `wait_for_change` blocks.

    Call it with `facts.changed` held; waiting releases it.
    """
    if request.headers.get("Metadata-Flavor") != "Google" or "X-Forwarded-For" in request.headers:
        return _gcp_reply(403, "Missing Metadata-Flavor:Google header.", "text/html")
    if request.method not in ("GET", "HEAD"):
        return _gcp_reply(405, "Method Not Allowed", "text/html")
    key = request.path.removeprefix("/computeMetadata/v1/")
    if key not in _gcp_values(facts):
        return _gcp_reply(404, "Error 404 (Not Found)!!1", "text/html")
    if request.query.get("wait_for_change", "").lower() == "true":
        try:
            timeout_s = float(request.query.get("timeout_sec") or "inf")
        except ValueError:
            return _gcp_reply(400, "Bad timeout_sec", "text/html")
        _gcp_wait(key, request.query.get("last_etag"), timeout_s, facts)
        if facts.closing:
            return _gcp_reply(503, "Service Unavailable", "text/html")
    value = _gcp_values(facts)[key]
    return _gcp_reply(200, value, "application/text", etag=_gcp_etag(value))


def _gcp_wait(key: str, last_etag: str | None, timeout_s: float, facts: NodeFacts) -> None:
    seen = last_etag or _gcp_etag(_gcp_values(facts)[key])
    facts.changed.wait_for(
        lambda: facts.closing or _gcp_etag(_gcp_values(facts)[key]) != seen,
        None if math.isinf(timeout_s) else timeout_s,
    )


def _gcp_values(facts: NodeFacts) -> dict[str, str]:
    return {
        "instance/preempted": "FALSE" if facts.deadline_at is None else "TRUE",
        "instance/maintenance-event": "NONE",
        "instance/name": facts.name,
        "instance/zone": "projects/123456789012/zones/us-central1-a",
        "instance/machine-type": "projects/123456789012/machineTypes/a3-highgpu-1g",
        "instance/scheduling/preemptible": "TRUE",
    }


def _gcp_etag(value: str) -> str:
    return hashlib.sha256(value.encode()).hexdigest()[:16]


def _gcp_reply(status: int, body: str, content_type: str, *, etag: str | None = None) -> Reply:
    headers = {"Metadata-Flavor": "Google"}
    if etag is not None:
        headers["ETag"] = etag
    return Reply(status=status, body=body, content_type=content_type, headers=headers)


def answer_azure(request: Request, facts: NodeFacts) -> Reply:
    """Return what Azure's instance metadata service answers."""
    if request.headers.get("Metadata", "").lower() != "true" or (
        "X-Forwarded-For" in request.headers
    ):
        return _azure_failure("Required metadata header not specified")
    version = request.query.get("api-version")
    if not version:
        return _azure_failure("api-version was not specified in the request")
    if request.path == "/metadata/scheduledevents":
        if version not in _AZURE_EVENT_VERSIONS:
            return _azure_failure("Invalid api-version")
        if request.method == "POST":
            return _azure_start(request, facts)
        return _json_reply(200, _azure_document(facts))
    if request.path == "/metadata/instance":
        compute = {"name": facts.name, "location": "eastus", "priority": "Spot"}
        return _json_reply(200, {"compute": compute})
    return _json_reply(404, {"error": "Not found"})


def _azure_event_id(facts: NodeFacts) -> str:
    return str(uuid.uuid5(uuid.NAMESPACE_DNS, f"{facts.name}/{facts.notices}")).upper()


def _azure_start(request: Request, facts: NodeFacts) -> Reply:
    try:
        wanted = [start["EventId"] for start in json.loads(request.body)["StartRequests"]]
    except (ValueError, KeyError, TypeError):
        return _azure_failure("Malformed StartRequests")
    if facts.deadline_at is None or wanted != [_azure_event_id(facts)]:
        return _azure_failure("Unknown EventId")
    if facts.acknowledged_at is None:
        facts.acknowledged_at = facts.clock.now()
        facts.changed.notify_all()
    return Reply(status=200)


def _azure_document(facts: NodeFacts) -> dict[str, Any]:
    if facts.deadline_at is None:
        return {"DocumentIncarnation": facts.incarnation, "Events": []}
    started = facts.acknowledged_at is not None or facts.clock.now() >= facts.deadline_at
    event = {
        "EventId": _azure_event_id(facts),
        "EventStatus": "Started" if started else "Scheduled",
        "EventType": "Preempt",
        "ResourceType": "VirtualMachine",
        "Resources": [facts.name],
        "NotBefore": "" if started else _http_date(facts.deadline_at),
        "Description": "",
        "EventSource": "Platform",
        "DurationInSeconds": -1,
    }
    # Becoming Started is a change of the document too.
    return {"DocumentIncarnation": facts.incarnation + started, "Events": [event]}


def _azure_failure(problem: str) -> Reply:
    return _json_reply(400, {"error": f"Bad request. {problem}"})


def _json_reply(status: int, value: object) -> Reply:
    return Reply(
        status=status, body=json.dumps(value), content_type="application/json; charset=utf-8"
    )


def _iso_seconds(at: float) -> str:
    # Cut, not rounded: a deadline must never be announced later than it comes.
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(math.floor(at)))


def _http_date(at: float) -> str:
    return time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(math.floor(at)))


PROTOCOLS: Final[Mapping[str, Callable[[Request, NodeFacts], Reply]]] = {
    "aws": answer_aws,
    "azure": answer_azure,
    "gcp": answer_gcp,
}
"""Cloud to the function that answers for it."""
