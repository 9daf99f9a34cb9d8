"""botocore's requests on our own connections: it signs them, the bytes do not pass through it."""

from __future__ import annotations

import contextlib
import io
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from spotguard.storage.http.connections import Connections

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from botocore.awsrequest import AWSPreparedRequest, AWSResponse

    from spotguard.storage.http.connections import Answer


class Body(io.RawIOBase):
    """Views, as botocore wants to see a body: it looks at the length only."""

    def __init__(self, views: Sequence[memoryview]) -> None:
        super().__init__()
        self.views = views

    def __len__(self) -> int:
        return sum(map(len, self.views))

    def seekable(self) -> bool:
        """Return True: a redirected request is sent again, which always begins at the start."""
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        """Return the start, the only place there is."""
        return 0

    def tell(self) -> int:
        """Return the start."""
        return 0


class _Raw:
    """An answer's body, as botocore reads it from urllib3."""

    def __init__(self, body: bytes) -> None:
        self._file = io.BytesIO(body)
        self.read = self._file.read
        self.close = self._file.close

    def stream(self) -> Iterator[bytes]:
        yield self._file.read()


@dataclass
class Noted:
    """A request as it was signed, and what came back."""

    url: str = ""
    headers: dict[str, str] = field(default_factory=dict, repr=False)
    body: bytes = field(default=b"", repr=False)


class Wire:
    """What sends botocore's signed requests and receives the answers. Thread-safe."""

    def __init__(self, ca_bundle: Callable[[], str | None]) -> None:
        """`ca_bundle` says, once there is something to send, which certificates are trusted."""
        self._ca_bundle = ca_bundle
        self._connections: dict[str, Connections] = {}
        self._here = threading.local()

    @contextlib.contextmanager
    def receiving(self, into: Sequence[memoryview]) -> Iterator[Callable[[], int]]:
        """Let this thread's next answer go into the views; what is yielded tells how much came."""
        self._here.into, self._here.received = into, 0
        try:
            yield lambda: self._here.received
        finally:
            self._here.into = ()

    @contextlib.contextmanager
    def taking(self, most_bytes: int | None) -> Iterator[None]:
        """Let this thread's next answers be cut one byte behind so many."""
        self._here.most_bytes = most_bytes
        try:
            yield
        finally:
            self._here.most_bytes = None

    @contextlib.contextmanager
    def noting(self) -> Iterator[Noted]:
        """Note this thread's last request meanwhile, to be sent `again`: one without a body."""
        self._here.noted = noted = Noted()
        try:
            yield noted
        finally:
            self._here.noted = None

    def again(self, noted: Noted) -> Answer:
        """Send such a request as it is, as long as its signature counts; return its answer."""
        return self._ask("GET", noted.url, noted.headers)

    def __call__(self, request: AWSPreparedRequest, **_: object) -> AWSResponse:
        """Send a request; return its answer."""
        from botocore.awsrequest import AWSResponse, HeadersDict

        sent = {name: _text(value) for name, value in request.headers.items() if _is_sent(name)}
        answer = self._ask(request.method, request.url, sent, body=_views(request.body))
        self._here.received = answer.filled_bytes
        noted = getattr(self._here, "noted", None)
        if noted is not None:
            noted.url, noted.headers, noted.body = request.url, sent, answer.body
        headers: Any = HeadersDict(answer.headers)
        return AWSResponse(request.url, answer.status, headers, _Raw(answer.body))

    def _ask(
        self, method: str, url: str, headers: dict[str, str], body: Sequence[memoryview] = ()
    ) -> Answer:
        parts = urlsplit(url)
        server = f"{parts.scheme}://{parts.netloc}"
        if server not in self._connections:
            fresh = Connections(server, ca_bundle=self._ca_bundle())
            self._connections.setdefault(server, fresh)
        return self._connections[server].ask(
            method,
            url.removeprefix(server) or "/",
            headers,
            body=body,
            into=getattr(self._here, "into", ()),
            most_bytes=getattr(self._here, "most_bytes", None),
        )


def _is_sent(name: str) -> bool:
    # The host and the length are added by who sends; waiting for a `100 Continue` is a round trip.
    return name.lower() not in ("host", "content-length", "transfer-encoding", "expect")


def _text(value: str | bytes) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else value


def _views(body: object) -> Sequence[memoryview]:
    if isinstance(body, Body):
        return body.views
    if isinstance(body, str):
        body = body.encode()
    if isinstance(body, (bytes, bytearray)):
        return [memoryview(body)] if body else []
    assert body is None, f"botocore sends a {type(body).__name__}"
    return []
