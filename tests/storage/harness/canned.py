"""A web server on loopback whose answers are laid down beforehand."""

from __future__ import annotations

import http.server
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ssl
    from collections.abc import Mapping
    from types import TracebackType


@dataclass(frozen=True)
class Reply:
    """An answer."""

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    closes: bool = False
    """The connection ends after it, without a word of it before."""


@dataclass(frozen=True)
class Heard:
    """A request; of its body only the length, for it may be large."""

    method: str
    target: str
    headers: Mapping[str, str]
    size_bytes: int


class Canned:
    """Gives one reply after the other, then the last one again and again. Thread-safe."""

    def __init__(self, *replies: Reply, tls: ssl.SSLContext | None = None) -> None:
        self.replies = deque(replies or [Reply()])
        self.heard: list[Heard] = []
        self.connections = 0
        """How many were opened."""
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.canned = self
        self._scheme = "https" if tls else "http"
        if tls:
            self._server.socket = tls.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))

    def __enter__(self) -> Canned:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def endpoint(self) -> str:
        """Where it listens."""
        return f"{self._scheme}://127.0.0.1:{self._server.server_address[1]}"

    def next_reply(self) -> Reply:
        """Return what is to be said now."""
        return self.replies.popleft() if len(self.replies) > 1 else self.replies[0]


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    canned: Canned


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def setup(self) -> None:
        """Count the connection."""
        super().setup()
        self.server.canned.connections += 1

    def log_message(self, format: str, *args: object) -> None:
        """Keep quiet."""

    def _serve(self) -> None:
        canned = self.server.canned
        headers = {name.lower(): value for name, value in self.headers.items()}
        size_bytes = rest = int(headers.get("content-length", 0))
        scratch = memoryview(bytearray(1 << 16))
        while rest:
            count = self.rfile.readinto(scratch[:rest])
            if not count:  # the client has gone
                self.close_connection = True
                return
            rest -= count
        canned.heard.append(Heard(self.command, self.path, headers, size_bytes))
        reply = canned.next_reply()
        self.send_response_only(reply.status)
        for name, value in reply.headers.items():
            self.send_header(name, value)
        if "Content-Length" not in reply.headers:
            self.send_header("Content-Length", str(len(reply.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(reply.body)
        self.close_connection = self.close_connection or reply.closes

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve
