"""An HTTP server that answers as a test tells it, and remembers what it was asked."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@dataclass(frozen=True)
class Request:
    """What arrived."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass(frozen=True)
class Reply:
    """What goes back; `claimed` is the length it promises, if that shall be another."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    claimed: int | None = None
    endless: bool = False
    """The body comes again and again, until the client has enough."""
    hang: threading.Event | None = None
    """Nothing is answered before it is set."""


@dataclass
class Scripted:
    """A running server."""

    endpoint: str
    requests: list[Request]
    """In the order they came."""


@contextlib.contextmanager
def scripted_server(reply: Callable[[Request], Reply]) -> Iterator[Scripted]:
    """Run a server on loopback that answers each request by `reply`."""
    requests: list[Request] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            length = int(self.headers.get("content-length", 0))
            headers = {name.lower(): value for name, value in self.headers.items()}
            request = Request(self.command, self.path, headers, self.rfile.read(length))
            requests.append(request)
            _send(self, reply(request))

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = answer

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        server.block_on_close = False  # a kept connection is only closed by its client
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield Scripted(f"http://127.0.0.1:{server.server_port}", requests)
        finally:
            server.shutdown()
            thread.join()


def _send(handler: BaseHTTPRequestHandler, reply: Reply) -> None:
    if reply.hang is not None:
        reply.hang.wait(30)
    with contextlib.suppress(OSError):  # a client may have gone, as it was meant to
        handler.send_response(reply.status)
        for name, value in reply.headers.items():
            handler.send_header(name, value)
        length = len(reply.body) if reply.claimed is None else reply.claimed
        handler.send_header("content-length", str(length))
        handler.end_headers()
        if handler.command != "HEAD":
            handler.wfile.write(reply.body)
            while reply.endless:
                handler.wfile.write(reply.body)
    handler.close_connection = handler.close_connection or reply.claimed is not None
