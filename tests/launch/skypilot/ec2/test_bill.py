from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING
from urllib.parse import parse_qs
from xml.sax.saxutils import escape

import pytest

from spotguard.launch.skypilot.ec2.bill import charged_node_s
from spotguard.launch.taskyaml import CLUSTER_TAG

if TYPE_CHECKING:
    from collections.abc import Iterator

BEGUN = "2026-01-31T12:00:00.000Z"
TOLD = "User initiated (2026-01-31 12:01:40 GMT)"
TAKEN = "Server.SpotInstanceTermination"


class Ec2:
    """What EC2 answers, in its own words; a call that is not set is refused."""

    def __init__(self) -> None:
        self.instances = ""
        self.requests: str | None = None
        self.asked: list[dict[str, list[str]]] = []

    def has(self, name: str, state: str, *, why: str = "", spot: bool = True) -> None:
        """Let it list one more instance, begun at noon."""
        lifecycle = "<instanceLifecycle>spot</instanceLifecycle>" if spot else ""
        self.instances += (
            f"<item><instancesSet><item><instanceId>{name}</instanceId>"
            f"<instanceState><code>48</code><name>{state}</name></instanceState>"
            f"<reason>{escape(why)}</reason><launchTime>{BEGUN}</launchTime>{lifecycle}"
            "</item></instancesSet></item>"
        )

    def took(self, name: str, at: str, *, code: str = "instance-terminated-no-capacity") -> None:
        """Let the spot request of an instance say that it ended."""
        self.requests = (self.requests or "") + (
            f"<item><instanceId>{name}</instanceId><status><code>{code}</code>"
            f"<updateTime>{at}</updateTime></status></item>"
        )

    def answer(self, form: dict[str, list[str]]) -> tuple[int, str]:
        """Answer one call."""
        self.asked.append(form)
        action = form["Action"][0]
        if action == "DescribeInstances":
            held = f"<reservationSet>{self.instances}</reservationSet>"
        elif self.requests is not None:
            held = f"<spotInstanceRequestSet>{self.requests}</spotInstanceRequestSet>"
        else:
            error = "<Code>UnauthorizedOperation</Code><Message>no</Message>"
            return 403, f"<Response><Errors><Error>{error}</Error></Errors></Response>"
        return 200, f"<{action}Response>{held}</{action}Response>"


@pytest.fixture
def ec2(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ec2]:
    """An EC2 on loopback, and credentials that it takes."""
    account = Ec2()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            form = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
            status, body = account.answer(form)
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for name, value in (
            ("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_address[1]}"),
            ("AWS_ACCESS_KEY_ID", "a"),
            ("AWS_SECRET_ACCESS_KEY", "b"),
            ("AWS_EC2_METADATA_DISABLED", "true"),
        ):
            monkeypatch.setenv(name, value)
        yield account
        server.shutdown()


def test_each_instance_counts_until_its_own_end(ec2: Ec2) -> None:
    """One that was taken first is not charged as long as those that lived on; a minute at least."""
    ec2.has("i-1", "terminated", why=TOLD)
    ec2.has("i-2", "shutting-down", why=TAKEN)
    ec2.took("i-2", "2026-01-31T12:00:50.000Z")
    assert charged_node_s("us-east-1", "job-1", 2) == 160.0
    listed, requests = ec2.asked
    assert listed["Filter.1.Name"] == [f"tag:{CLUSTER_TAG}"]
    assert listed["Filter.1.Value.1"] == ["job-1"]
    assert requests["Filter.1.Value.1"] == ["i-2"]


@pytest.mark.parametrize(
    ("state", "why", "spot", "code"),
    [
        ("running", "", True, None),
        ("terminated", TAKEN, False, None),
        ("terminated", TAKEN, True, None),
        ("terminated", TAKEN, True, "marked-for-termination"),
        ("terminated", "User initiated (2026-01-31 11:59:00 GMT)", True, None),
    ],
    ids=["lives", "on demand, untold", "denied", "only announced", "ended before it began"],
)
def test_what_ec2_does_not_say_is_unknown(
    ec2: Ec2, state: str, why: str, spot: bool, code: str | None
) -> None:
    """One instance without a known end: nothing is said of the cluster, and nothing raised."""
    ec2.has("i-1", "terminated", why=TOLD)
    ec2.has("i-2", state, why=why, spot=spot)
    if code is not None:
        ec2.took("i-2", "2026-01-31T12:00:50.000Z", code=code)
    assert charged_node_s("us-east-1", "job-1", 2) is None


def test_a_cluster_that_ec2_forgot_is_unknown_and_not_free(ec2: Ec2) -> None:
    """What is gone for an hour is in its list no more."""
    assert charged_node_s("us-east-1", "job-1", 2) is None


def test_nodes_that_ec2_has_forgotten_were_paid_as_well(ec2: Ec2) -> None:
    """Those that are listed still are not all that is charged."""
    ec2.has("i-1", "terminated", why=TOLD)
    assert charged_node_s("us-east-1", "job-1", 1) == 100.0
    assert charged_node_s("us-east-1", "job-1", 2) is None


def test_no_answer_is_unknown(ec2: Ec2, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody listens there."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    assert charged_node_s("us-east-1", "job-1", 2) is None
