from __future__ import annotations

import http.client
import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from spotguard.testing import FakeClock, FakeMetadata

if TYPE_CHECKING:
    from collections.abc import Mapping
    from email.message import Message

GCP_PREEMPTED = "/computeMetadata/v1/instance/preempted"
GCP = {"Metadata-Flavor": "Google"}
AZURE_EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
AZURE = {"Metadata": "true"}
AWS_ACTION = "/latest/meta-data/spot/instance-action"
AWS_REBALANCE = "/latest/meta-data/events/recommendations/rebalance"


@dataclass(frozen=True)
class Answer:
    """What came back."""

    status: int
    body: str
    headers: Message

    @property
    def json(self) -> Any:
        """The body, read as JSON."""
        return json.loads(self.body)


def ask(
    service: FakeMetadata,
    path: str,
    headers: Mapping[str, str] | None = None,
    *,
    method: str = "GET",
    body: str | None = None,
    patience_s: float | None = None,
) -> Answer:
    """Ask the service over a real connection; wait for its answer, or give up after a while.

    How long a good answer takes says how busy the machine is, so nearly all tests just wait.
    """
    address = service.url.removeprefix("http://")
    connection = http.client.HTTPConnection(address, timeout=patience_s)
    try:
        connection.request(method, path, body=body, headers=dict(headers or {}))
        response = connection.getresponse()
        return Answer(response.status, response.read().decode(), response.headers)
    finally:
        connection.close()


def wait_until_asked(service: FakeMetadata, times: int) -> None:
    """Return once so many requests have arrived."""
    while len(service.requests) < times:
        time.sleep(0.001)


def aws_token(service: FakeMetadata, ttl_s: int = 60) -> dict[str, str]:
    """Return the header with a fresh token."""
    headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(ttl_s)}
    answer = ask(service, "/latest/api/token", headers, method="PUT")
    assert answer.status == 200
    return {"X-aws-ec2-metadata-token": answer.body}


def start_request(event_id: str) -> str:
    """Return the body that acknowledges an Azure event."""
    return json.dumps({"StartRequests": [{"EventId": event_id}]})


def test_aws_needs_a_token() -> None:
    """IMDSv2: without a token, with a wrong one or with an expired one the answer is 401."""
    clock = FakeClock()
    with FakeMetadata("aws", clock=clock) as service:
        service.notice()
        token = aws_token(service, ttl_s=10)

        assert ask(service, AWS_ACTION).status == 401
        assert ask(service, AWS_ACTION, {"X-aws-ec2-metadata-token": "x"}).status == 401
        assert ask(service, AWS_ACTION, token).status == 200
        clock.advance(10)
        assert ask(service, AWS_ACTION, token).status == 401


@pytest.mark.parametrize("ttl", ["", "0", "21601", "-1", "1.5"])
def test_aws_refuses_a_bad_token_lifetime(ttl: str) -> None:
    """A token is asked for with 1 to 21600 seconds, else 400."""
    with FakeMetadata("aws") as service:
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": ttl}

        assert ask(service, "/latest/api/token", headers, method="PUT").status == 400


def test_aws_token_is_put_and_not_proxied() -> None:
    """A token is never given to a GET, nor through a proxy."""
    with FakeMetadata("aws") as service:
        proxied = {"X-aws-ec2-metadata-token-ttl-seconds": "60", "X-Forwarded-For": "10.0.0.1"}

        assert ask(service, "/latest/api/token").status == 405
        assert ask(service, "/latest/api/token", proxied, method="PUT").status == 403


def test_aws_action_is_404_until_the_notice() -> None:
    """instance-action appears with the notice and names its time; withdrawn, it is 404 again."""
    with FakeMetadata("aws") as service:
        token = aws_token(service)
        before = ask(service, AWS_ACTION, token)
        service.notice_at(1_700_000_000.0)
        during = ask(service, AWS_ACTION, token)
        service.withdraw()

        assert before.status == 404
        assert during.json == {"action": "terminate", "time": "2023-11-14T22:13:20Z"}
        assert ask(service, AWS_ACTION, token).status == 404


@pytest.mark.parametrize("cloud", ["aws", "azure"])
def test_whole_seconds_are_never_announced_late(cloud: str) -> None:
    """Where the protocol has whole seconds only, the announced one is not after the deadline."""
    clock = FakeClock(now=1_699_999_000.0)
    with FakeMetadata(cloud, clock=clock) as service:
        service.notice_at(1_700_000_000.999)

        if cloud == "aws":
            assert "22:13:20Z" in ask(service, AWS_ACTION, aws_token(service)).body
        else:
            event = ask(service, AZURE_EVENTS, AZURE).json["Events"][0]
            assert event["NotBefore"] == "Tue, 14 Nov 2023 22:13:20 GMT"


def test_aws_rebalance_comes_without_a_notice() -> None:
    """A rebalance recommendation is its own word: no interruption is announced by it."""
    with FakeMetadata("aws") as service:
        token = aws_token(service)
        before = ask(service, AWS_REBALANCE, token).status
        service.rebalance()

        assert before == 404
        assert "noticeTime" in ask(service, AWS_REBALANCE, token).json
        assert ask(service, AWS_ACTION, token).status == 404


def test_gcp_needs_its_header() -> None:
    """Without `Metadata-Flavor: Google` the answer is 403; every good answer carries it too."""
    with FakeMetadata("gcp") as service:
        good = ask(service, GCP_PREEMPTED, GCP)

        assert ask(service, GCP_PREEMPTED).status == 403
        assert (good.status, good.body, good.headers["Metadata-Flavor"]) == (200, "FALSE", "Google")


def test_gcp_long_poll_wakes_on_the_notice() -> None:
    """`wait_for_change` answers not before the value is another than that of `last_etag`."""
    with FakeMetadata("gcp") as service:
        etag = ask(service, GCP_PREEMPTED, GCP).headers["ETag"]
        path = f"{GCP_PREEMPTED}?wait_for_change=true&last_etag={etag}"
        with ThreadPoolExecutor(1) as pool:
            polling = pool.submit(ask, service, path, GCP)
            wait_until_asked(service, 2)
            too_early = polling.done()
            service.notice()
            answer = polling.result()

        assert not too_early
        assert answer.body == "TRUE"
        assert answer.headers["ETag"] != etag


def test_gcp_long_poll_times_out_with_the_old_value() -> None:
    """After `timeout_sec` without a change the answer is what it was."""
    with FakeMetadata("gcp") as service:
        answer = ask(service, f"{GCP_PREEMPTED}?wait_for_change=true&timeout_sec=0.05", GCP)

        assert (answer.status, answer.body) == (200, "FALSE")


def test_gcp_long_poll_misses_no_earlier_change() -> None:
    """A change between two polls is told at once, thanks to `last_etag`."""
    with FakeMetadata("gcp") as service:
        etag = ask(service, GCP_PREEMPTED, GCP).headers["ETag"]
        service.notice()

        path = f"{GCP_PREEMPTED}?wait_for_change=true&last_etag={etag}"
        assert ask(service, path, GCP).body == "TRUE"


def test_closing_ends_a_long_poll() -> None:
    """A service that goes away leaves nobody waiting."""
    with ThreadPoolExecutor(1) as pool:
        with FakeMetadata("gcp") as service:
            polling = pool.submit(ask, service, f"{GCP_PREEMPTED}?wait_for_change=true", GCP)
            wait_until_asked(service, 1)
        problem = polling.exception()

    assert isinstance(problem, (http.client.HTTPException, OSError)) or (
        problem is None and polling.result().status == 503
    )


@pytest.mark.parametrize(
    ("path", "headers"),
    [(AZURE_EVENTS, {}), ("/metadata/scheduledevents", AZURE), (AZURE_EVENTS + "x", AZURE)],
    ids=["no header", "no version", "unknown version"],
)
def test_azure_needs_header_and_version(path: str, headers: dict[str, str]) -> None:
    """Without `Metadata: true` or a known api-version the answer is 400."""
    with FakeMetadata("azure") as service:
        assert ask(service, path, headers).status == 400


def test_azure_event_is_scheduled_then_started() -> None:
    """A Preempt event names its NotBefore until it has come; each change has an incarnation."""
    clock = FakeClock()
    with FakeMetadata("azure", name="worker-3", clock=clock) as service:
        empty = ask(service, AZURE_EVENTS, AZURE).json
        service.notice(grace_s=30)
        scheduled = ask(service, AZURE_EVENTS, AZURE).json
        clock.advance(30)
        started = ask(service, AZURE_EVENTS, AZURE).json

        assert empty["Events"] == []
        event = scheduled["Events"][0]
        assert (event["EventType"], event["EventStatus"]) == ("Preempt", "Scheduled")
        assert event["Resources"] == ["worker-3"]
        assert event["NotBefore"].endswith("GMT")
        assert (started["Events"][0]["EventStatus"], started["Events"][0]["NotBefore"]) == (
            "Started",
            "",
        )
        numbers = [document["DocumentIncarnation"] for document in (empty, scheduled, started)]
        assert numbers == sorted(set(numbers))


def test_azure_notice_is_withdrawn() -> None:
    """A withdrawn event is gone from the list, in a newer document; the next has another id."""
    with FakeMetadata("azure") as service:
        service.notice()
        first = ask(service, AZURE_EVENTS, AZURE).json
        service.withdraw()
        without = ask(service, AZURE_EVENTS, AZURE).json
        service.notice()
        second = ask(service, AZURE_EVENTS, AZURE).json

        assert without["Events"] == []
        assert without["DocumentIncarnation"] > first["DocumentIncarnation"]
        assert second["Events"][0]["EventId"] != first["Events"][0]["EventId"]


def test_azure_event_is_acknowledged() -> None:
    """StartRequests with the event's id starts it at once; any other id is refused."""
    with FakeMetadata("azure") as service:
        service.notice()
        event_id = ask(service, AZURE_EVENTS, AZURE).json["Events"][0]["EventId"]
        wrong = ask(service, AZURE_EVENTS, AZURE, method="POST", body=start_request("other"))
        garbage = ask(service, AZURE_EVENTS, AZURE, method="POST", body="[")
        untouched = service.acknowledged_at
        right = ask(service, AZURE_EVENTS, AZURE, method="POST", body=start_request(event_id))

        assert (wrong.status, garbage.status, right.status) == (400, 400, 200)
        assert untouched is None
        assert service.acknowledged_at is not None
        events = ask(service, AZURE_EVENTS, AZURE).json["Events"]
        assert events[0]["EventStatus"] == "Started"


def test_faults_are_injected_in_order_and_end() -> None:
    """Faults hit the next requests one by one; then the service is itself again."""
    with FakeMetadata("gcp") as service:
        service.fail(503, times=2).fail("reset")

        assert [ask(service, GCP_PREEMPTED, GCP).status for _ in range(2)] == [503, 503]
        with pytest.raises(ConnectionError):
            ask(service, GCP_PREEMPTED, GCP)
        assert ask(service, GCP_PREEMPTED, GCP).status == 200


def test_a_stall_never_answers() -> None:
    """A stalled request gets no byte until the client gives up; others are served meanwhile."""
    with FakeMetadata("gcp") as service:
        service.fail("stall")

        with pytest.raises(TimeoutError):
            ask(service, GCP_PREEMPTED, GCP, patience_s=0.1)
        assert ask(service, GCP_PREEMPTED, GCP).status == 200


def test_requests_are_remembered() -> None:
    """Tests can assert what was asked, and how often."""
    with FakeMetadata("gcp") as service:
        ask(service, GCP_PREEMPTED, GCP)

        assert service.requests == [("GET", GCP_PREEMPTED)]


def test_unknown_cloud_is_refused() -> None:
    """A typo in the cloud's name fails at once and tells the names there are."""
    with pytest.raises(ValueError, match="aws, azure, gcp"):
        FakeMetadata("asw")


def test_closed_service_refuses_connections() -> None:
    """After the end nobody listens, as where there is no such service; closing twice is fine."""
    service = FakeMetadata("aws").start()
    service.close()
    service.close()

    with pytest.raises(ConnectionRefusedError):
        ask(service, AWS_ACTION)
