"""What the vendors' clients are given: the caller's memory as a body, a client for each process.

Both are built on `requests`, which sends whatever is sized and iterable piece by piece, from where
it is, and hands on what arrives in pieces too.
"""

from __future__ import annotations

import io
import logging
import os
import socket
import ssl
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from spotguard.errors import StoreError, StoreUnavailable
from spotguard.storage.buffers import cut, within

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

Client = TypeVar("Client")

_PIECE_BYTES = 256 << 10
"""What has to move within a time-out; before each the deadline is looked at."""


class Outgoing:
    """Views as a request's body: sized, and the same each time it is gone through."""

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._views = views

    def __len__(self) -> int:
        return sum(map(len, self._views))

    def __iter__(self) -> Iterator[memoryview]:
        for piece, _ in cut(self._views, _PIECE_BYTES):
            yield piece


class Incoming:
    """Views as a file that an answer is written to, from the first view's first byte on."""

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._rest = [view for view in reversed(views) if view]
        self.missing_bytes = sum(map(len, views))

    def write(self, content: bytes) -> int:
        """Put `content` where the last write ended; ValueError if there is no room left."""
        if len(content) > self.missing_bytes:
            raise ValueError("more bytes arrived than were asked for")
        new = memoryview(content)
        while new:
            view = self._rest.pop()
            count = min(len(view), len(new))
            view[:count] = new[:count]
            new = new[count:]
            if count < len(view):
                self._rest.append(view[count:])
        self.missing_bytes -= len(content)
        return len(content)


class Gathered(io.BytesIO):
    """An answer as it comes in; more of it than `max_bytes` is `TooLarge`, and ends the request."""

    def __init__(self, key: str, max_bytes: int | None) -> None:
        super().__init__()
        self._key, self._max_bytes = key, max_bytes

    def write(self, content: Any) -> int:
        """Take a piece, if there is room for it."""
        within(self._key, self._max_bytes, b"", self.tell() + len(content))
        return super().write(content)


class PerProcess(Generic[Client]):
    """A client that is made at its first use, and anew in a forked child: sockets have one user."""

    def __init__(self, make: Callable[[], Client]) -> None:
        self._make = make
        self._made: dict[int, Client] = {}

    def __call__(self) -> Client:
        """Return this process's client."""
        pid = os.getpid()
        # No lock, which a fork could leave locked: of two made at once, one is dropped.
        return self._made[pid] if pid in self._made else self._made.setdefault(pid, self._make())

    def pop(self) -> Client | None:
        """Return this process's client if there is one; the next use makes another."""
        return self._made.pop(os.getpid(), None)


def be_quiet(name: str, level: int) -> None:
    """Let a logger tell only what is of `level`, unless the user wants it otherwise."""
    log = logging.getLogger(name)
    if log.level == logging.NOTSET:
        log.setLevel(level)


def broken(problem: BaseException, host: str) -> StoreError:
    """Return what it means that there was no answer, or half a one.

    The clients' own words are left out: they quote whole URLs, signatures included.
    """
    causes = list(_causes(problem))
    for cause in causes:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return StoreError(
                f"{host} shows a certificate that is not trusted: {cause.verify_message}",
                hint="behind a proxy that reads TLS, set REQUESTS_CA_BUNDLE to its certificate",
            )
        if isinstance(cause, socket.gaierror):
            return StoreUnavailable(
                f"the name {host} is not known: {cause.strerror}",
                hint="is the account or endpoint spelled right, and the network up?",
            )
    if any("Timeout" in type(cause).__name__ for cause in causes):
        return StoreUnavailable(f"{host} did not answer in time")
    numbers = (cause.errno for cause in causes if isinstance(cause, OSError) and cause.errno)
    number = next(numbers, None)
    word = os.strerror(number) if number else type(causes[-1]).__name__
    return StoreUnavailable(f"the connection to {host} broke: {word}")


def _causes(problem: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and what it came from, as azure.core and urllib3 keep it."""
    while problem is not None:
        yield problem
        kept = (getattr(problem, "inner_exception", None), getattr(problem, "reason", None))
        inner = (each for each in kept if isinstance(each, BaseException))
        problem = next(inner, None) or problem.__cause__ or problem.__context__
