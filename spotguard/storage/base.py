"""The `ObjectStore` protocol: all that spotguard asks of a bucket or a folder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Buffer: TypeAlias = bytes | bytearray | memoryview


@dataclass(frozen=True)
class ObjectInfo:
    """What a listing tells of one object."""

    key: str
    size_bytes: int
    etag: str
    """Opaque; changes when the content changes."""
    modified_at: float | None = None
    """Seconds since the epoch, by the server's clock; None if it does not say."""
    archived: bool = False
    """In the service's coldest class."""
    readable: bool = True
    """False: it was archived where it has to be brought back first, which takes hours."""


class ObjectStream(Protocol):
    """Bytes that are made ready while they are written: a copy, a hash, or both at once.

    It may be gone through again, from the start, when a write is repeated.
    """

    @property
    def size_bytes(self) -> int:
        """How many bytes there are in all."""
        ...

    def __iter__(self) -> Iterator[Buffer]:
        """Yield the buffers in order; each stays as it is until the write returns."""
        ...


class Sink(Protocol):
    """Writable memory that is told when it is filled: for a hash while the bytes are at hand."""

    @property
    def views(self) -> list[memoryview]:
        """The memory, in order."""
        ...

    def filled(self, size_bytes: int) -> None:
        """Take note that so many of the first bytes are there, for good.

        Only a store that fills in order says so, as often as it likes and from the thread that
        asked; when `get_into` returns, all are there.
        """
        ...


Target: TypeAlias = "memoryview | list[memoryview] | Sink"
"""Where bytes that are got shall go: writable memory, or several pieces of it."""
Content: TypeAlias = "Buffer | list[Buffer] | tuple[Buffer, ...] | ObjectStream"
"""What can be put: one buffer, several in a row, or a stream of them."""


@dataclass(frozen=True, kw_only=True)
class Reads:
    """How an object is read fastest."""

    threads: int
    """Reads under way at the same time."""
    size_bytes: int
    """Of each read."""


class ObjectStore(Protocol):
    """A flat space of keys. Keys are str, not Path: `Path` mangles `gs://`.

    All methods block, are safe to call from several threads, and raise only
    `spotguard.errors.StoreError` and its children. Keys are relative, `/`-separated, without
    empty, `.` or `..` parts or control characters; anything else is a `UsageError`.
    """

    @property
    def url(self) -> str:
        """Where this store is, in the form `open_store` takes; holds no secret."""
        ...

    def best_reads(self, key: str) -> Reads:
        """Return how many reads of what size fill the way to the object, which need not exist."""
        ...

    def put(
        self,
        key: str,
        data: Content,
        *,
        if_absent: bool = False,
        if_match: str | None = None,
    ) -> str:
        """Store `data` (several buffers are joined) whole or not at all; return its etag.

        Durable on return. With `if_absent`, raises `AlreadyExists` if the key is taken; with
        `if_match`, if the object's etag is another. At most one of two racing writers wins.
        """
        ...

    def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        """Return the whole object, by one request; `NotFound` if there is none.

        `TooLarge` if it has more than `max_bytes`: then little more than these are transferred.
        None is for what this very process wrote; whatever others may have written has a limit
        (`storage.small_objects`).
        """
        ...

    def get_into(self, key: str, offset: int, into: Target) -> None:
        """Fill `into` with the object's bytes from `offset`, several views one after the other.

        `StoreError` if the object is too short.
        """
        ...

    def head(self, key: str) -> ObjectInfo | None:
        """Return what a listing would say of `key`, or None."""
        ...

    def list(self, prefix: str = "", *, start_after: str = "") -> Iterator[ObjectInfo]:
        """Yield the objects whose key starts with `prefix` and sorts after `start_after`, sorted.

        Lazy: taking the first few of a million is cheap.
        """
        ...

    def list_folders(self, prefix: str) -> Sequence[str]:
        """Return, sorted, the prefixes one level below `prefix` (which ends in `/` or is empty)."""
        ...

    def delete(self, key: str) -> None:
        """Remove the object; nothing happens if there is none."""
        ...

    def copy(self, source: str, target: str, *, if_absent: bool = False) -> str:
        """Make `target` an object with the bytes of `source`, as `put` would; return its etag.

        The bytes do not pass through this machine where the store can copy. For small objects.
        """
        ...

    def archive(self, key: str) -> None:
        """Move the object to where keeping it is cheap, and reading it takes hours.

        `UsageError` if this kind of store has no such place.
        """
        ...

    def warm(self) -> None:
        """Do beforehand what makes the first use slow: threads, connections, credentials.

        Never raises: whoever uses the store next hears what is wrong with it.
        """
        ...

    def clean_up(self, prefix: str = "", *, older_than_s: float) -> int:
        """Free what writes below `prefix` left that broke off so long ago; return how many."""
        ...
