"""A cloud's metadata service on loopback that announces interruptions when told to."""

from __future__ import annotations

import http.server
import socket
import struct
import threading
import urllib.parse
from collections import deque
from typing import TYPE_CHECKING, Any, Literal

from spotguard.launch.local.imds import PROTOCOLS, NodeFacts, Reply, Request
from spotguard.shared.units import Clock, SystemClock

if TYPE_CHECKING:
    from types import TracebackType

GRACE_S = {"aws": 120.0, "azure": 30.0, "gcp": 30.0}
"""How long before the end each cloud gives its notice."""

Fault = int | Literal["stall", "reset"]


class FakeMetadata:
    """A metadata service speaking one cloud's wire protocol, for one node. Thread-safe.

        with FakeMetadata("aws") as cloud:
            cloud.notice(grace_s=5)
            ...                                      # whatever polls cloud.url sees it now

    Args:
        cloud: `aws` (IMDSv2), `gcp` or `azure` (Scheduled Events).
        name: The node's name, which Azure lists among an event's resources.
        clock: Where time comes from: deadlines use its wall clock, tokens its monotonic one.
    """

    def __init__(
        self, cloud: str = "aws", *, name: str = "node-0", clock: Clock | None = None
    ) -> None:
        if cloud not in PROTOCOLS:
            raise ValueError(f"cloud must be one of {', '.join(PROTOCOLS)}, not {cloud!r}")
        self.cloud = cloud
        self._facts = NodeFacts(name=name, clock=clock or SystemClock())
        self._faults: deque[Fault] = deque()
        self._requests: list[tuple[str, str]] = []
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.fake = self
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), name=f"metadata-{name}", daemon=True
        )
        self._started = False

    def __enter__(self) -> FakeMetadata:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def url(self) -> str:
        """`http://127.0.0.1:port`."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def requests(self) -> list[tuple[str, str]]:
        """Every request so far as (method, path with query), in order."""
        with self._facts.changed:
            return list(self._requests)

    @property
    def deadline_at(self) -> float | None:
        """When the announced interruption comes; None without notice."""
        return self._facts.deadline_at

    @property
    def acknowledged_at(self) -> float | None:
        """Azure: when the node said that the event may start at once; None before."""
        return self._facts.acknowledged_at

    def start(self) -> FakeMetadata:
        """Begin to answer."""
        self._started = True
        self._thread.start()
        return self

    def close(self) -> None:
        """Stop answering: waiting requests end, open connections are cut. Idempotent."""
        with self._facts.changed:
            self._facts.closing = True
            self._facts.changed.notify_all()
        if self._started:
            self._server.shutdown()
            self._thread.join()
            self._started = False
        self._server.cut_connections()
        self._server.server_close()

    def notice(self, grace_s: float | None = None) -> float:
        """Announce the interruption in `grace_s` (the cloud's own time); return its instant."""
        if grace_s is None:
            grace_s = GRACE_S[self.cloud]
        return self.notice_at(self._facts.clock.now() + grace_s)

    def notice_at(self, deadline_at: float) -> float:
        """Announce the interruption for `deadline_at` (epoch seconds) and return it.

        AWS and Azure tell whole seconds: they announce the second before, never a later one.
        """
        with self._facts.changed:
            if self._facts.rebalance_at is None:
                self._facts.rebalance_at = self._facts.clock.now()
            self._facts.notices += 1
            self._set_deadline(deadline_at)
        return deadline_at

    def withdraw(self) -> None:
        """Take back the notice and the rebalance recommendation."""
        with self._facts.changed:
            self._facts.rebalance_at = None
            self._set_deadline(None)

    def rebalance(self) -> None:
        """Publish AWS's rebalance recommendation: a notice may come, or never."""
        with self._facts.changed:
            self._facts.rebalance_at = self._facts.clock.now()
            self._facts.changed.notify_all()

    def fail(self, how: Fault, times: int = 1) -> FakeMetadata:
        """Let the next `times` requests fail.

        Args:
            how: An HTTP status to answer with, `"stall"` (accept, then never answer) or
                `"reset"` (cut the connection).
            times: How many requests.
        """
        with self._facts.changed:
            self._faults.extend([how] * times)
        return self

    def _set_deadline(self, deadline_at: float | None) -> None:
        facts = self._facts
        # An event that had become Started counted one more in the document already.
        facts.incarnation += 1 + (facts.deadline_at is not None)
        facts.deadline_at = deadline_at
        facts.acknowledged_at = None
        facts.changed.notify_all()

    def _answer(self, request: Request, target: str) -> Reply | Literal["stall", "reset"]:
        """Return the reply, or how to fail; blocks while the protocol waits for a change."""
        with self._facts.changed:
            self._requests.append((request.method, target))
            fault = self._faults.popleft() if self._faults else None
            if fault == "stall":
                self._facts.changed.wait_for(lambda: self._facts.closing)
            if isinstance(fault, int):
                return Reply(status=fault, body="fault injected by the test")
            return fault or PROTOCOLS[self.cloud](request, self._facts)


class _Server(http.server.ThreadingHTTPServer):
    """One thread for each connection; all of them end with the server."""

    daemon_threads = False  # joined by server_close
    request_queue_size = 64
    fake: FakeMetadata

    def __init__(self, *args: Any) -> None:
        self._connections: set[socket.socket] = set()
        self._lock = threading.Lock()
        super().__init__(*args)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Remember the connection, so that closing the server can cut it."""
        with self._lock:
            self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Forget the connection and close it."""
        with self._lock:
            self._connections.discard(request)
        super().shutdown_request(request)

    def cut_connections(self) -> None:
        """End idle keep-alive connections, which would otherwise hold their threads."""
        with self._lock:
            for connection in self._connections:
                try:
                    connection.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue  # the client was quicker

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a client that goes away in the middle is no news."""


class _Handler(http.server.BaseHTTPRequestHandler):
    """Reads a request, asks the fake, writes the answer in one piece."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1
    server: _Server

    def _handle(self) -> None:
        url = urllib.parse.urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        request = Request(
            method=self.command,
            path=url.path,
            query=dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True)),
            headers=self.headers,
            body=body,
        )
        reply = self.server.fake._answer(request, self.path)
        if isinstance(reply, Reply):
            self._write(reply)
        else:
            self._cut(abruptly=reply == "reset")

    do_GET = do_HEAD = do_PUT = do_POST = _handle

    def _write(self, reply: Reply) -> None:
        body = reply.body.encode()
        self.send_response(reply.status)
        self.send_header("Content-Type", reply.content_type)
        self.send_header("Content-Length", str(len(body)))
        for name, value in reply.headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _cut(self, *, abruptly: bool) -> None:
        self.close_connection = True
        if abruptly:  # a zero linger makes close send a reset instead of an orderly end
            linger = struct.pack("ii", 1, 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self.connection.close()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing; `FakeMetadata.requests` tells what was asked."""
