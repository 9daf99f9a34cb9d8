"""The clouds' words that a node will be taken, each by its own protocol.

- AWS: EC2 IMDSv2, `spot/instance-action` (two minutes before) and the rebalance recommendation.
  https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html
- GCP: `instance/preempted`, long poll. https://cloud.google.com/compute/docs/instances/preemptible
- Azure: Scheduled Events, can be withdrawn.
  https://learn.microsoft.com/azure/virtual-machines/linux/scheduled-events
- A file, for schedulers and tests.

No proxy is ever used: the endpoints are link-local.
"""

from __future__ import annotations

import contextlib
import http.client
import time
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from spotguard.errors import UsageError
from spotguard.events import untrusted
from spotguard.runtime.process import clock

_TIMEOUT_S = 2.0
_SAME_CLOCK_S = 3.0
"""A `Date` is whole seconds, and an answer takes a moment: less than this is no difference."""


@dataclass(frozen=True, kw_only=True)
class Notice:
    """A word that this node will be taken."""

    source: str
    action: str
    deadline_at: float | None
    """Epoch seconds at which the node may be gone; None if the cloud did not say."""
    advisory: bool = False
    """True if it is only a recommendation: the node may live on for hours."""


class NoticeSource(Protocol):
    """Something that can be asked whether this node will be taken."""

    name: str
    poll_s: float
    """Seconds to wait between two questions."""

    def check(self) -> Notice | None:
        """Return the notice in force, or None. Blocks up to some seconds.

        Raises:
            OSError, http.client.HTTPException, ValueError: no usable answer this time.
        """
        ...


class _Http:
    """One request at a time to a metadata endpoint, without proxies or redirects."""

    def __init__(self, endpoint: str) -> None:
        self._host = urlsplit(endpoint).netloc

    def __call__(
        self,
        method: str,
        path: str,
        headers: dict[str, str],
        *,
        body: str | None = None,
        timeout_s: float = _TIMEOUT_S,
    ) -> tuple[int, str, dict[str, str]]:
        connection = http.client.HTTPConnection(self._host, timeout=timeout_s)
        try:
            connection.request(method, path, body=body, headers=headers)
            answer = connection.getresponse()
            text = answer.read(1 << 20).decode("utf-8", "replace")
            return answer.status, text, {k.lower(): v for k, v in answer.getheaders()}
        finally:
            connection.close()


def _in_run_time(told_at: float, date: str | None) -> float:
    """Return the run's time for an instant that a service told, whose `Date` says what it meant."""
    try:
        their_now = parsedate_to_datetime(date or "").timestamp()
    except (ValueError, OverflowError, TypeError):
        their_now = None
    return _by_clock(told_at, their_now)


def _by_clock(told_at: float, their_now: float | None) -> float:
    """Return the run's time for an instant by another clock, which says what time it is now.

    The machine's own clock is more exact, unless it is another one.
    """
    if their_now is None or abs(time.time() - their_now) <= _SAME_CLOCK_S:
        return clock.of_machine(told_at)
    return clock.now() + told_at - their_now


class AwsNotices:
    """EC2's instance metadata service, version 2 (session tokens)."""

    name = "aws"
    poll_s = 0.5  # the vendor asks for at least every 5 s; two small answers a second cost nothing
    _TOKEN_TTL_S = 21600

    def __init__(self, endpoint: str = "http://169.254.169.254") -> None:
        self._http = _Http(endpoint)
        self._token = ""

    def check(self) -> Notice | None:
        """Return the interruption, else a rebalance recommendation, else None."""
        status, text, headers = self._get("spot/instance-action")
        if status == 200:
            body = untrusted.parse_object(text, "the notice")
            action = untrusted.needed(untrusted.text(body, "action"), "action")
            deadline_at = _in_run_time(_instant(body, "time"), headers.get("date"))
            return Notice(source=self.name, action=action, deadline_at=deadline_at)
        status, _, _ = self._get("events/recommendations/rebalance")
        if status == 200:
            return Notice(source=self.name, action="rebalance", deadline_at=None, advisory=True)
        return None

    def _get(self, path: str) -> tuple[int, str, dict[str, str]]:
        answer = self._ask(path) if self._token else None
        if answer is None or answer[0] == 401:  # no token yet, or it ran out
            self._token = self._new_token()
            answer = self._ask(path)
        if answer[0] not in (200, 404):
            raise http.client.HTTPException(f"{path}: HTTP {answer[0]}")
        return answer

    def _ask(self, path: str) -> tuple[int, str, dict[str, str]]:
        headers = {"X-aws-ec2-metadata-token": self._token}
        return self._http("GET", f"/latest/meta-data/{path}", headers)

    def _new_token(self) -> str:
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(self._TOKEN_TTL_S)}
        status, text, _ = self._http("PUT", "/latest/api/token", headers, body="")
        if status != 200:
            raise http.client.HTTPException(f"token: HTTP {status}")
        return text


class GcpNotices:
    """Compute Engine's metadata server; a long poll answers the moment the value changes."""

    name = "gcp"
    poll_s = 0.05  # the long poll does the waiting; this is for a server that does not hold it
    grace_s = 30.0
    _HOLD_S = 20

    def __init__(self, endpoint: str = "http://169.254.169.254") -> None:
        self._http = _Http(endpoint)
        self._etag: str | None = None

    def check(self) -> Notice | None:
        """Return the preemption or None; blocks up to 20 s for a change."""
        wait = (
            f"?wait_for_change=true&timeout_sec={self._HOLD_S}&last_etag={self._etag}"
            if self._etag
            else ""
        )
        status, text, headers = self._http(
            "GET",
            f"/computeMetadata/v1/instance/preempted{wait}",
            {"Metadata-Flavor": "Google"},
            timeout_s=self._HOLD_S + 5 if wait else _TIMEOUT_S,
        )
        if status != 200:
            raise http.client.HTTPException(f"instance/preempted: HTTP {status}")
        self._etag = headers.get("etag")
        if text.strip().upper() != "TRUE":
            return None
        return Notice(source=self.name, action="preempted", deadline_at=clock.now() + self.grace_s)


class AzureNotices:
    """Azure's Scheduled Events: `Preempt` for this machine, until it is withdrawn.

    Machines of one scale set or availability set hear of each other's, too.
    """

    name = "azure"
    poll_s = 1.0
    _PATH = "/metadata/scheduledevents?api-version=2020-07-01"
    _INSTANCE = "/metadata/instance?api-version=2021-02-01"

    def __init__(self, endpoint: str = "http://169.254.169.254") -> None:
        self._http = _Http(endpoint)
        self._started_at: dict[str, float] = {}
        self._names: frozenset[str] = frozenset()

    def check(self) -> Notice | None:
        """Return the eviction in force, or None."""
        status, text, headers = self._http("GET", self._PATH, {"Metadata": "true"})
        if status != 200:
            raise http.client.HTTPException(f"scheduledevents: HTTP {status}")
        body = untrusted.parse_object(text, "the notice")
        deadlines = [
            self._deadline(event, headers.get("date"))
            for event in untrusted.objects(body, "Events")
            if event.get("EventType") == "Preempt" and self._is_ours(event)
        ]
        if not deadlines:
            return None
        return Notice(source=self.name, action="preempt", deadline_at=min(deadlines))

    def _is_ours(self, event: dict[str, Any]) -> bool:
        """Return False only if the event names other machines, and this one's name is known."""
        named = event.get("Resources")
        if not isinstance(named, list) or not all(isinstance(each, str) for each in named):
            return True
        mine = self._own_names()
        return not named or not mine or not mine.isdisjoint(map(_short, named))

    def _own_names(self) -> frozenset[str]:
        """Return by what names this machine may be called; none if that cannot be read now."""
        if not self._names:
            with contextlib.suppress(OSError, http.client.HTTPException, untrusted.Refused):
                status, text, _ = self._http("GET", self._INSTANCE, {"Metadata": "true"})
                compute = untrusted.parse_object(text, "the instance").get("compute")
                told: Any = compute if status == 200 and isinstance(compute, dict) else {}
                profile = told.get("osProfile")
                computer = profile.get("computerName") if isinstance(profile, dict) else None
                names = (told.get("name"), told.get("resourceId"), told.get("vmId"), computer)
                self._names = frozenset(_short(n) for n in names if isinstance(n, str) and n)
        return self._names

    def _deadline(self, event: dict[str, Any], date: str | None) -> float:
        if event.get("NotBefore"):
            not_before = untrusted.needed(untrusted.text(event, "NotBefore"), "NotBefore")
            try:
                told_at = parsedate_to_datetime(not_before).timestamp()
            except (OverflowError, TypeError) as problem:  # a year or a zone that cannot be
                raise untrusted.Refused(f"NotBefore makes no sense: {problem}") from problem
            return _in_run_time(told_at, date)
        # Already started: it has no time any more, and none is left to give.
        return self._started_at.setdefault(untrusted.text(event, "EventId") or "", clock.now())


def _short(name: str) -> str:
    """Return the last part of a resource's id, in which Azure does not tell cases apart."""
    return name.rpartition("/")[2].lower()


class FileNotices:
    """A file whose appearing is the notice; it may hold `{"deadline_at": ISO 8601}`."""

    name = "file"
    poll_s = 0.5

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._was_missing = False
        self._seen: tuple[str, float, Notice] | None = None

    def check(self) -> Notice | None:
        """Return the notice while the file exists."""
        try:
            text = self._path.read_text()
            modified_at = self._path.stat().st_mtime
        except FileNotFoundError:
            self._was_missing, self._seen = True, None
            return None
        if self._seen is None or self._seen[:2] != (text, modified_at):
            # Only what was written since the last look tells what time it is for its writer.
            is_new = self._was_missing or self._seen is not None
            self._seen = text, modified_at, self._read(text, modified_at if is_new else None)
            self._was_missing = False
        return self._seen[2]

    def _read(self, text: str, written_at: float | None) -> Notice:
        body = untrusted.parse_object(text, "the notice") if text.strip() else {}
        told_at = _instant(body, "deadline_at") if body.get("deadline_at") else None
        deadline_at = None if told_at is None else _by_clock(told_at, written_at)
        return Notice(source=self.name, action="file", deadline_at=deadline_at)


def _instant(body: dict[str, Any], name: str) -> float:
    return untrusted.needed(untrusted.instant(body, name), name)


_CLOUDS: dict[str, type[AwsNotices] | type[GcpNotices] | type[AzureNotices]] = {
    "aws": AwsNotices,
    "gcp": GcpNotices,
    "azure": AzureNotices,
}


def promised_grace_s(setting: str) -> float | None:
    """Return the seconds that the cloud of `SPOTGUARD_METADATA` promises between notice and end."""
    return {"aws": 120.0, "gcp": 30.0, "azure": 30.0}.get(setting.partition("=")[0])


def notice_source(setting: str) -> NoticeSource | None:
    """Return the source that `SPOTGUARD_METADATA` names: `aws`, `gcp=http://host:port`, `none`.

    Raises:
        UsageError: no such protocol.
    """
    name, _, endpoint = setting.partition("=")
    if name in ("", "none"):
        return None
    if name not in _CLOUDS:
        raise UsageError(
            f"SPOTGUARD_METADATA: given {name!r}, allowed are aws, gcp, azure and none"
        )
    return _CLOUDS[name](endpoint) if endpoint else _CLOUDS[name]()
