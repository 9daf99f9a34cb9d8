"""The `Bucket` protocol: what one cloud's object storage can do, one request a call.

A bucket knows its vendor and nothing else: it makes one request, without a retry and without a
thread, and translates what went wrong. `remote.RemoteStore` makes a store of it: parts in
parallel, retries within a deadline, checks of keys. So each vendor's file stays small, and what
is hard exists once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spotguard.storage.base import ObjectInfo


@dataclass(frozen=True, kw_only=True)
class Precondition:
    """When a write may take effect. The server decides, at the moment of the write."""

    if_absent: bool = False
    if_match: str | None = None

    def __bool__(self) -> bool:
        return self.if_absent or self.if_match is not None


ALWAYS = Precondition()


@dataclass(frozen=True, kw_only=True)
class PartRules:
    """What the service allows of a write in parts."""

    min_bytes: int
    """Of every part but the last."""
    max_bytes: int
    max_parts: int


@dataclass(frozen=True)
class Page:
    """A part of a listing."""

    objects: Sequence[ObjectInfo]
    """Sorted by key."""
    folders: Sequence[str]
    """Only if they were asked for: common prefixes, each with its trailing `/`."""
    next_token: str | None
    """What gets the next page; None at the end."""


@dataclass(frozen=True, kw_only=True)
class Upload:
    """A write in parts that was begun and neither finished nor aborted."""

    key: str
    upload_id: str
    started_at: float | None
    """Seconds since the epoch, by the server; None if it does not say."""


class Bucket(Protocol):
    """One bucket or container, below one prefix. Safe to use from several threads at once.

    Keys are what `storage.keys` lets through. Every method makes one request, blocks until it is
    answered or timed out, and raises only `StoreError` and its children: `NotFound`,
    `AlreadyExists` (a condition was not met), `StoreUnavailable` (worth another try: 429, 5xx, a
    broken connection, a time-out, damaged bytes), and plain `StoreError` with a hint for what
    another try does not mend (no such bucket, no right, wrong region, expired credentials). No
    message holds a secret, nor a signed URL.
    """

    @property
    def url(self) -> str:
        """Where it is, in the form `open_store` takes; holds no secret."""
        ...

    @property
    def part_rules(self) -> PartRules:
        """What the service allows of a write in parts."""
        ...

    @property
    def heeds_conditions(self) -> bool | None:
        """Whether conditions of writes are kept; None if this kind of server has to be tried."""
        ...

    def put(
        self, key: str, body: Sequence[memoryview], *, condition: Precondition, writer: str
    ) -> str:
        """Store the views, one after the other, as one object; return its etag.

        The bytes go to the socket from where they are, with a checksum that the server proves.
        `writer` is kept with the object as metadata, see `writer_of`.
        """
        ...

    def begin(self, key: str, *, writer: str) -> str:
        """Begin a write in parts; return its id."""
        ...

    def put_part(self, key: str, upload_id: str, number: int, body: Sequence[memoryview]) -> str:
        """Store part `number` (from 1); return what `finish` needs to know of it.

        May be repeated with the same bytes.
        """
        ...

    def finish(
        self,
        key: str,
        upload_id: str,
        parts: Sequence[str],
        *,
        condition: Precondition,
        writer: str,
    ) -> str:
        """Make the parts, in this order, the object; return its etag.

        `NotFound` if there is no such upload (any more).
        """
        ...

    def abort(self, key: str, upload_id: str) -> None:
        """Give a write in parts up and free its bytes; nothing happens if there is none."""
        ...

    def uploads(self, prefix: str) -> Sequence[Upload]:
        """Return writes in parts below `prefix` that were begun and not ended."""
        ...

    def get(self, key: str, max_bytes: int | None = None) -> bytes:
        """Return the whole object, proven by its checksum where the server keeps one.

        `TooLarge` if it has more than `max_bytes`, after about as many were received at most.
        """
        ...

    def get_range(self, key: str, offset: int, into: Sequence[memoryview]) -> None:
        """Fill the views, one after the other, from byte `offset` on, from the socket itself.

        `NotFound` if there is no such object; plain `StoreError` if it ends before the last view
        is full; `StoreUnavailable` if only the answer does.
        """
        ...

    def head(self, key: str) -> ObjectInfo | None:
        """Return what a listing would say of `key`, or None."""
        ...

    def writer_of(self, key: str) -> str | None:
        """Return the `writer` that `key` was written by; None if there is no object or no word.

        So a writer whose answer was lost can find out whether it was itself that won.
        """
        ...

    def page(
        self, prefix: str, *, start_after: str = "", folders: bool = False, token: str | None = None
    ) -> Page:
        """Return a page of the objects whose key starts with `prefix`, sorted.

        `start_after` may be taken as a hint by a service that cannot begin there; the caller
        leaves out what comes before. With `folders`, what lies below the next `/` is told as a
        folder only.
        """
        ...

    def delete(self, key: str) -> None:
        """Remove the object; nothing happens if there is none."""
        ...

    def copy(self, source: str, target: str, *, condition: Precondition, writer: str) -> str:
        """Copy an object of at most `part_rules.max_bytes` on the server; return the new etag."""
        ...

    def archive(self, key: str) -> None:
        """Move the object to the service's coldest class; it is read again after hours only."""
        ...
