"""HTTP as large objects need it: from the caller's memory to the socket and back, no copy between.

The vendors' own clients join bodies, read them twice, or copy what arrives two or three times, and
each retries by rules of its own. A bucket makes one plain request a call, so this is all it needs:
connections that stay open, one for each thread that asks at the same time, and time-outs that end
at the caller's deadline.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import http.client
import io
import os
import select
import socket
import ssl
import traceback
import urllib.request
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, unquote, urlsplit

from spotguard.errors import StoreError, StoreUnavailable
from spotguard.storage.buffers import cut
from spotguard.storage.deadline import time_left_s
from spotguard.storage.http.connect import dial

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

CONNECT_S = 10.0
SILENCE_S = 60.0
"""How long nothing may move; servers of all three clouds answer or give up sooner."""
_PIECE_BYTES = 4 << 20
"""Between two pieces the deadline is looked at; a line of 70 KB/s moves one within the time-out."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What the server said."""

    status: int
    headers: Mapping[str, str]
    """Names in lower case."""
    body: bytes = field(default=b"", repr=False)
    """Empty where the bytes went into the caller's memory."""
    filled_bytes: int = 0
    """How many bytes went into the caller's memory."""


_PAGE_BYTES = 512


class Connections:
    """Open connections to the server at `base_url` (scheme and host). Thread- and fork-safe."""

    def __init__(self, base_url: str, *, ca_bundle: str | None = None) -> None:
        """Open nothing yet.

        Args:
            base_url: the scheme and host.
            ca_bundle: a file of the certificates to trust; without it, what the environment names
                for all programs, else certifi's.
        """
        self._ca_bundle = ca_bundle
        self._server = urlsplit(base_url)
        self._idle: deque[http.client.HTTPConnection] = deque()
        self._pid = os.getpid()

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections that are idle; the next request opens a new one."""
        try:  # at the interpreter's end, when modules are gone already: without their help
            while True:
                self._idle.pop().close()
        except IndexError:
            return

    @property
    def host(self) -> str:
        """Which server it is, for messages."""
        return self._server.netloc.rpartition("@")[2]

    def ask(
        self,
        method: str,
        target: str,
        headers: Mapping[str, str],
        *,
        body: Sequence[memoryview] = (),
        into: Sequence[memoryview] = (),
        most_bytes: int | None = None,
    ) -> Answer:
        """Make one request and return its answer, whatever its status.

        The views of `body` are sent one after the other. If the answer is a range its bytes go
        into those of `into`, as far as they reach. Of an answer with more than `most_bytes` no
        more than one further byte is taken.

        Raises:
            StoreUnavailable: no answer came, or none before the caller's deadline, or a web page
                came in its place.
            StoreError: the server cannot prove that it is the one asked for, or a header holds what
                HTTP cannot send.
        """
        self._check(headers)
        try:
            with contextlib.ExitStack() as stack:
                connection = self._taken()
                stack.callback(connection.close)
                answer, reusable = _exchange(
                    connection, method, target, headers, body, into, most_bytes
                )
                if reusable:
                    stack.pop_all()
                    self._idle.append(connection)
                if _is_of_another(answer):
                    raise StoreUnavailable(
                        f"{self.host} answers with a web page (HTTP {answer.status}), and not as a "
                        "store: a sign-in page, a proxy or a firewall is in between",
                        hint="sign in to this network in a browser, look at HTTPS_PROXY, and "
                        "whether the endpoint is the store's own and not its console",
                    )
                return answer
        except (OSError, http.client.HTTPException) as problem:
            # Python 3.10 leaves a proxy's refusal half read, and its connection open.
            traceback.clear_frames(problem.__traceback__)
            raise self._broken(problem) from problem

    def _check(self, headers: Mapping[str, str]) -> None:
        """Refuse what http.client would refuse: its error repeats the value, which is a secret."""
        for name, value in headers.items():
            if not (value.isascii() and value.isprintable()):
                raise StoreError(
                    f"the header {name} for {self.host} holds a line break, or what is no ASCII",
                    hint="look at AWS_ACCESS_KEY_ID and AWS_SESSION_TOKEN, above all at their ends",
                )

    def _taken(self) -> http.client.HTTPConnection:
        """Return an open connection: one that is idle and alive, or a new one."""
        if self._pid != os.getpid():  # a forked child must not talk on its parent's connections
            self._pid = os.getpid()
            self.close()
        with contextlib.suppress(IndexError):
            while True:
                connection = self._idle.pop()
                if _is_alive(connection):
                    return connection
                connection.close()
        connection = _connection_to(self._server, self._ca_bundle)
        connection.timeout = time_left_s(CONNECT_S)
        connection.connect()
        return connection

    def _broken(self, problem: Exception) -> StoreError:
        if isinstance(problem, ssl.SSLCertVerificationError):
            return StoreError(
                f"{self.host} shows a certificate that is not trusted: {problem.verify_message}",
                hint="behind a proxy that looks into TLS, set SSL_CERT_FILE to its certificate",
            )
        if isinstance(problem, socket.gaierror):
            return StoreUnavailable(
                f"the name {self.host} is not known: {problem.strerror}",
                hint="is the account or endpoint spelled right, and the network up?",
            )
        if isinstance(problem, TimeoutError):
            return StoreUnavailable(f"{self.host} did not answer in time")
        # Neither class nor errno says what was sent, as some messages of http.client do.
        number = problem.errno if isinstance(problem, OSError) else None
        word = os.strerror(number) if number else type(problem).__name__
        return StoreUnavailable(f"the connection to {self.host} broke: {word}")


def _is_of_another(answer: Answer) -> bool:
    """Tell whether it is no store that answers: an empty listing would be made of such a page.

    Stores send on by 301 and 307 alone. Some name no type of their own, so the page itself counts;
    what is wrong with a server may be a page, too, and passes.
    """
    if answer.status in (302, 303):
        return True
    begins = answer.body[:_PAGE_BYTES].lstrip().lower()
    is_page = begins.startswith((b"<!doctype html", b"<html"))
    return is_page and answer.status < 500 and "html" in answer.headers.get("content-type", "")


def _exchange(
    connection: http.client.HTTPConnection,
    method: str,
    target: str,
    headers: Mapping[str, str],
    body: Sequence[memoryview],
    into: Sequence[memoryview],
    most_bytes: int | None,
) -> tuple[Answer, bool]:
    """Return the answer, and whether the connection can take another request."""
    connection.sock.settimeout(time_left_s(SILENCE_S))
    connection.putrequest(method, target, skip_accept_encoding=True)
    for name, value in headers.items():
        connection.putheader(name, value)
    if "Content-Length" not in headers and method in ("PUT", "POST"):
        connection.putheader("Content-Length", str(sum(map(len, body))))
    connection.endheaders()
    sent = _send(connection, body)
    response = connection.getresponse()
    said = {name.lower(): response.getheader(name, "") for name in response.headers}
    if into and _is_range(response.status, said):
        filled = _fill(connection, response, into)
        answer = Answer(status=response.status, headers=said, filled_bytes=filled)
    else:
        answer = Answer(status=response.status, headers=said, body=_body(response, most_bytes))
    return answer, sent and response.isclosed() and not response.will_close


def _body(response: http.client.HTTPResponse, most_bytes: int | None) -> bytes:
    """Return the answer's bytes; of one that is too large, one too many of them.

    `http.client` itself tells of one that broke off only where all of it is asked for.
    """
    if most_bytes is None:
        return response.read()
    content = response.read(most_bytes + 1)
    if response.length and len(content) <= most_bytes:
        raise http.client.IncompleteRead(content, response.length)
    return content


def _is_range(status: int, said: Mapping[str, str]) -> bool:
    """Return whether the range that was asked for comes; rclone calls it 200."""
    return status == http.client.PARTIAL_CONTENT or (
        status == http.client.OK and "content-range" in said
    )


def _send(connection: http.client.HTTPConnection, body: Sequence[memoryview]) -> bool:
    """Send the views; return False if the server stopped listening, for it may have said why."""
    try:
        for piece, _ in cut(body, _PIECE_BYTES):
            connection.sock.settimeout(time_left_s(SILENCE_S))
            connection.send(piece)
    except (BrokenPipeError, ConnectionResetError):
        return False
    return True


def _fill(
    connection: http.client.HTTPConnection,
    response: http.client.HTTPResponse,
    into: Sequence[memoryview],
) -> int:
    """Fill the views from the socket; return how many bytes there were."""
    filled = 0
    for piece, _ in cut(into, _PIECE_BYTES):
        rest = piece
        while rest:
            count = response.readinto(rest)
            if not count:
                return filled
            filled, rest = filled + count, rest[count:]
    return filled


class _Stream(io.RawIOBase):
    """What arrives at a socket. Each time before it waits, it looks at the deadline.

    A time-out alone would begin anew with every byte, and a slow line has no end.
    """

    def __init__(self, sock: socket.socket, raw: io.RawIOBase) -> None:
        super().__init__()
        self._sock, self._raw = sock, raw

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._sock.settimeout(time_left_s(SILENCE_S))
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


class TimedResponse(http.client.HTTPResponse):
    """An answer each wait for which ends at the caller's deadline, the one for its head too."""

    def __init__(self, sock: socket.socket, *args: Any, **options: Any) -> None:
        super().__init__(sock, *args, **options)
        self.fp = io.BufferedReader(_Stream(sock, self.fp.detach()))


def _is_alive(connection: http.client.HTTPConnection) -> bool:
    """Return whether nothing has arrived: on an idle connection that can only be its end."""
    if connection.sock is None:
        return False
    poll = select.poll()
    poll.register(connection.sock, select.POLLIN)
    return not poll.poll(0)


def _connection_to(server: SplitResult, ca_bundle: str | None) -> http.client.HTTPConnection:
    connection = _unopened(server, ca_bundle)
    connection.response_class = TimedResponse
    connection._create_connection = dial  # type: ignore[attr-defined]  # no public way to choose it
    return connection


def _unopened(server: SplitResult, ca_bundle: str | None) -> http.client.HTTPConnection:
    host = server.hostname or ""
    if server.scheme == "http":
        return http.client.HTTPConnection(host, server.port)
    proxy = _proxy_for(host)
    if proxy is None:
        return http.client.HTTPSConnection(host, server.port, context=_trust(ca_bundle))
    trust = _trust(ca_bundle)
    connection = http.client.HTTPSConnection(proxy.hostname or "", proxy.port, context=trust)
    connection.set_tunnel(host, server.port or 443, headers=dict(_proxy_login(proxy)))
    return connection


def _proxy_for(host: str) -> SplitResult | None:
    url = urllib.request.getproxies().get("https")
    if not url or urllib.request.proxy_bypass(host):
        return None
    return urlsplit(url if "://" in url else f"http://{url}")


def _proxy_login(proxy: SplitResult) -> Iterator[tuple[str, str]]:
    if proxy.username:
        login = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}"
        yield "Proxy-Authorization", f"Basic {base64.b64encode(login.encode()).decode()}"


@functools.cache
def _trust(ca_bundle: str | None) -> ssl.SSLContext:
    """Return whom to trust: what `requests` trusts, for the token services are asked by it."""
    import certifi

    given = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
    chosen = ca_bundle or next(filter(None, map(os.environ.get, given)), None)
    try:
        return ssl.create_default_context(cafile=chosen or certifi.where())
    except OSError as problem:  # a file that is not there, or none of certificates
        raise StoreError(
            f"certificates to trust cannot be read from {chosen}: {problem.strerror or problem}",
            hint="AWS_CA_BUNDLE (or ca_bundle in ~/.aws/config), SSL_CERT_FILE, REQUESTS_CA_BUNDLE "
            "and CURL_CA_BUNDLE name a file in PEM form",
        ) from problem
