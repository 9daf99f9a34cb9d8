"""A proxy between a client and a server, that does with chosen requests what networks do.

    with FaultProxy(server.port) as proxy:
        proxy.on(lose_answer(), method="PUT", path="manifest", nth=2)

Everything else goes through as it is. A fault is a function of the `Exchange` it befalls; the ones
below are those that stores have been seen to meet.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import http.server
import socket
import struct
import threading
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeAlias, cast

from crc32c import crc32c

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable
    from io import BufferedReader
    from types import TracebackType

_LINGER_NOT = struct.pack("ii", 1, 0)
_PIECE_BYTES = 16 << 10
_NOT_PASSED_ON = {"connection", "content-length", "keep-alive", "transfer-encoding"}


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What the server said, or what is said in its place."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    length: str = "0"
    """Of what a HEAD asked about: it has no body."""


class Exchange:
    """A request on its way, and the answer to it."""

    def __init__(self, handler: _Handler) -> None:
        self._handler = handler
        self.method = handler.command
        self.target = handler.path
        self.headers = {name.lower(): value for name, value in handler.headers.items()}
        self.size_bytes = int(self.headers.get("content-length", 0))

    def receive(self, share: float = 1.0) -> bytes:
        """Return the body, or only its beginning: the rest is never read."""
        return self._handler.rfile.read(int(self.size_bytes * share))

    def forward(self, body: bytes) -> Answer:
        """Ask the server, and return what it says."""
        upstream = http.client.HTTPConnection("127.0.0.1", self._handler.server.upstream_port)
        with contextlib.closing(upstream):
            upstream.putrequest(self.method, self.target, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                upstream.putheader(name, value)
            upstream.endheaders(body)
            said = upstream.getresponse()
            headers = {
                name: value
                for name, value in said.getheaders()
                if name.lower() not in _NOT_PASSED_ON
            }
            length = said.getheader("content-length", "0")
            return Answer(status=said.status, headers=headers, body=said.read(), length=length)

    def answer(
        self, answer: Answer, *, claim: int | None = None, pace_bytes_per_s: float | None = None
    ) -> None:
        """Send an answer; `claim` is the length it says that it has, if that is another."""
        length = len(answer.body) if claim is None else claim
        self._handler.send_response_only(answer.status)
        for name, value in answer.headers.items():
            self._handler.send_header(name, value)
        if answer.status != http.HTTPStatus.NO_CONTENT:
            told = answer.length if self.method == "HEAD" else str(length)
            self._handler.send_header("Content-Length", told)
        self._handler.end_headers()
        if self.method == "HEAD":
            return
        for at in range(0, len(answer.body), _PIECE_BYTES):
            piece = answer.body[at : at + _PIECE_BYTES]
            self._handler.wfile.write(piece)
            if pace_bytes_per_s is not None:
                time.sleep(len(piece) / pace_bytes_per_s)

    def dribble(self, answer: Answer, *, bytes_per_s: float) -> None:
        """Send an answer byte by byte, until the test is over."""
        head = f"HTTP/1.1 {answer.status} x\r\nContent-Length: {len(answer.body)}\r\n"
        fields = "".join(f"{name}: {value}\r\n" for name, value in answer.headers.items())
        for byte in f"{head}{fields}\r\n".encode() + answer.body:
            self._handler.wfile.write(bytes([byte]))
            if self._handler.server.over.wait(1 / bytes_per_s):
                return

    def pass_on(self) -> None:
        """Do what a proxy without faults does."""
        self.answer(self.forward(self.receive()))

    def hang_up(self) -> None:
        """End the connection, as if all were well."""
        self._handler.close_connection = True

    def reset(self) -> None:
        """Break the connection off: what is under way on it is lost."""
        self._handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NOT)
        self.hang_up()

    def wait(self) -> None:
        """Stand still until the test is over."""
        self._handler.server.over.wait(60)


Fault: TypeAlias = "Callable[[Exchange], None]"


def refuse(status: int, body: bytes = b"", **headers: str) -> Fault:
    """Answer for the server, which never hears of it."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}

    def act(exchange: Exchange) -> None:
        exchange.receive()
        exchange.answer(Answer(status=status, headers=named, body=body))

    return act


def reset_in_request(share: float = 0.5) -> Fault:
    """Break off while the body is being sent; the server never hears of it."""

    def act(exchange: Exchange) -> None:
        exchange.receive(share)
        exchange.reset()

    return act


def lose_answer() -> Fault:
    """Break off when the server has done it and before it can say so."""

    def act(exchange: Exchange) -> None:
        exchange.forward(exchange.receive())
        exchange.reset()

    return act


def reset_in_answer(share: float = 0.5) -> Fault:
    """Break off while the answer's body is being sent."""

    def act(exchange: Exchange) -> None:
        said = exchange.forward(exchange.receive())
        exchange.answer(_beginning(said, share), claim=len(said.body))
        exchange.reset()

    return act


def truncate(share: float = 0.5, *, lying: bool = False) -> Fault:
    """End the answer early, by a plain end of the connection.

    `lying` gives it the length of what is left of it, so that HTTP itself finds nothing wrong.
    """

    def act(exchange: Exchange) -> None:
        said = exchange.forward(exchange.receive())
        left = _beginning(said, share)
        exchange.answer(left, claim=len(left.body) if lying else len(said.body))
        exchange.hang_up()

    return act


def stall(*, after: bool = False) -> Fault:
    """Never answer; `after` the server has done it."""

    def act(exchange: Exchange) -> None:
        body = exchange.receive()
        if after:
            exchange.forward(body)
        exchange.wait()
        exchange.hang_up()

    return act


def twice() -> Fault:
    """Send the request two times, and pass on what is said to the second."""

    def act(exchange: Exchange) -> None:
        body = exchange.receive()
        exchange.forward(body)
        exchange.answer(exchange.forward(body))

    return act


def slow(bytes_per_s: float) -> Fault:
    """Let the answer trickle."""

    def act(exchange: Exchange) -> None:
        said = exchange.forward(exchange.receive())
        exchange.answer(said, pace_bytes_per_s=bytes_per_s)

    return act


def trickle(bytes_per_s: float) -> Fault:
    """Let an answer of any size come byte by byte, head and all."""

    def act(exchange: Exchange) -> None:
        said = exchange.forward(exchange.receive())
        exchange.dribble(said, bytes_per_s=bytes_per_s)

    return act


def damage_request() -> Fault:
    """Flip a bit of a body that has a checksum; the server proves it as S3 does.

    moto believes any, so the proxy looks at those of S3 in its place. Azurite does itself, but for
    lists of blocks, and the fake of Google's.
    """

    def act(exchange: Exchange) -> None:
        if "x-amz-checksum-crc32c" in exchange.headers:
            exchange.answer(_refused_by_s3(exchange))
        elif _is_proven(exchange):
            exchange.answer(exchange.forward(_flipped(exchange.receive())))
        else:
            exchange.pass_on()

    return act


def _is_proven(exchange: Exchange) -> bool:
    if "content-md5" in exchange.headers:
        return "comp=blocklist" not in exchange.target
    google = ("uploadType=multipart", "upload_id=")
    return any(word in exchange.target for word in google)


def _refused_by_s3(exchange: Exchange) -> Answer:
    found = crc32c(_flipped(exchange.receive())).to_bytes(4, "big")
    assert exchange.headers["x-amz-checksum-crc32c"] != base64.b64encode(found).decode()
    refused = b"<Error><Code>BadDigest</Code><Message>no</Message></Error>"
    return Answer(status=400, body=refused)


def damage_answer() -> Fault:
    """Flip a bit of the body on its way back."""

    def act(exchange: Exchange) -> None:
        said = exchange.forward(exchange.receive())
        body = _flipped(said.body)
        exchange.answer(replace(said, body=body))

    return act


@dataclass
class _Rule:
    """Which requests a fault befalls: from the `nth` matching one on, `times` times."""

    fault: Fault
    method: str
    path: str
    nth: int
    times: int | None
    seen: int = 0

    def due(self, method: str, about: str) -> bool:
        """Count the request if it matches; return whether it is this one."""
        if self.method not in ("", method) or self.path not in about:
            return False
        self.seen += 1
        return self.seen >= self.nth and (self.times is None or self.seen < self.nth + self.times)


class FaultProxy:
    """A proxy on loopback for the server at `upstream_port`. Thread-safe."""

    def __init__(self, upstream_port: int, *, tls: ssl.SSLContext | None = None) -> None:
        self.heard: list[str] = []
        """Method and target of each request, in the order they came."""
        self.struck = 0
        """How many requests a fault befell."""
        self._rules: list[_Rule] = []
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.upstream_port = upstream_port
        self._scheme = "https" if tls else "http"
        if tls:
            self._server.socket = tls.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        self._server.proxy = self
        self._server.over = threading.Event()
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))

    def __enter__(self) -> FaultProxy:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.over.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._server.server_address[1])

    @property
    def upstream_port(self) -> int:
        """Where the server behind it listens."""
        return self._server.upstream_port

    @property
    def endpoint(self) -> str:
        """Where it listens, as a URL."""
        return f"{self._scheme}://127.0.0.1:{self.port}"

    def on(
        self,
        fault: Fault,
        *,
        method: str = "",
        path: str = "",
        nth: int = 1,
        times: int | None = 1,
    ) -> FaultProxy:
        """Let `fault` befall `times` matching requests from the `nth` on (None: all of them)."""
        with self._lock:
            self._rules.append(_Rule(fault, method, path, nth, times))
        return self

    def heal(self) -> FaultProxy:
        """Drop all faults; requests that hang go on hanging."""
        with self._lock:
            self._rules.clear()
        return self

    def fault_for(self, method: str, target: str, beginning: str) -> Fault:
        """Note the request; return what is to be done with it."""
        about = f"{target} {beginning}"
        with self._lock:
            self.heard.append(f"{method} {target}")
            due = [rule.fault for rule in self._rules if rule.due(method, about)]
            self.struck += bool(due)
        return due[0] if due else Exchange.pass_on


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # of 5, a client whose threads connect at once waits for seconds
    block_on_close = False
    upstream_port: int
    proxy: FaultProxy
    over: threading.Event

    def shutdown_request(self, request: socket.socket | tuple[bytes, socket.socket]) -> None:
        """Close without a word of it before, so that a reset is one."""
        self.close_request(request)


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def log_message(self, format: str, *args: object) -> None:
        """Keep quiet."""

    def _beginning(self) -> str:
        """Return how the body of a POST begins: there Google's client names the object."""
        size_bytes = int(self.headers.get("content-length", 0))
        if self.command != "POST" or not size_bytes:
            return ""
        begins = cast("BufferedReader", self.rfile).peek()
        return begins[:size_bytes].decode("latin-1")

    def _serve(self) -> None:
        try:
            fault = self.server.proxy.fault_for(self.command, self.path, self._beginning())
            fault(Exchange(self))
        except (OSError, http.client.HTTPException):  # one of the two sides has gone
            self.close_connection = True

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve


def _beginning(said: Answer, share: float) -> Answer:
    left = said.body[: int(len(said.body) * share)]
    return replace(said, body=left)


def _flipped(body: bytes) -> bytes:
    """Flip a bit in the middle; of several parts, at the end of the last one."""
    border = body.rfind(b"\r\n--") if body.startswith(b"--") else -1
    at = len(body) // 2 if border < 0 else border - 1
    return body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :] if body else body
