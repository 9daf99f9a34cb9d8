"""A store that never keeps its caller waiting for long, and knows since when it is away.

For the controller, which has nodes to end whether or not their store answers.
"""

from __future__ import annotations

import threading
from concurrent.futures import TimeoutError as StillRunning
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, TypeVar, cast

from spotguard.errors import AlreadyExists, NotFound, StoreError, StoreUnavailable, TooLarge
from spotguard.shared.units import SystemClock, format_duration
from spotguard.storage.deadline import give_up_after
from spotguard.storage.remote.thread_pool import Crew
from spotguard.storage.urls import folder_at

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from spotguard.errors import EnvironmentFailure
    from spotguard.shared.units import Clock
    from spotguard.storage.base import Content, ObjectInfo, ObjectStore, Reads, Target

Result = TypeVar("Result")

WITHIN_S = 10.0
"""For one call: a store that works answers in a second."""
_SLOW_S = 1.0
"""A failed call that took longer is not repeated at once."""
_SPARE_S = 2.0
"""In a folder of a dead server the kernel hangs, where no timeout reaches: then only a thread."""
_THREADS = 4
_LISTED_AT_ONCE = 256
_ANSWERS = (AlreadyExists, NotFound, TooLarge)
"""Errors by which the store has answered."""


@dataclass(frozen=True, kw_only=True)
class Silence:
    """A source does not answer."""

    since: float
    """When it was first asked in vain, by the monotonic clock."""
    problem: str
    """What came of the newest try, as a sentence."""


class BoundedStore:
    """`store`, whose calls end within seconds: by its answer, or by `StoreUnavailable`.

    Thread-safe. After a slow failure the next calls fail at once, for as long as that one took: who
    makes ten calls in a row waits for one of them.
    """

    def __init__(
        self, store: ObjectStore, *, within_s: float = WITHIN_S, clock: Clock | None = None
    ) -> None:
        self._store = store
        self._within_s = within_s
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._problem: StoreError | None = None
        self._spared_until = float("-inf")
        self._crew = None if folder_at(store.url) is None else Crew(_THREADS, "spotguard-bounded")
        self.silence: Silence | None = None
        """Since when the store does not answer; None while it does."""

    @property
    def url(self) -> str:
        """The store's own."""
        return self._store.url

    def best_reads(self, key: str) -> Reads:
        """Return what the store says."""
        return self._store.best_reads(key)

    def put(
        self, key: str, data: Content, *, if_absent: bool = False, if_match: str | None = None
    ) -> str:
        """Store `data`; return its etag."""
        return self._made(
            lambda: self._store.put(key, data, if_absent=if_absent, if_match=if_match)
        )

    def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        """Return the whole object; `NotFound` if there is none."""
        return self._made(lambda: self._store.get(key, max_bytes=max_bytes))

    def get_into(self, key: str, offset: int, into: Target) -> None:
        """Fill `into` with the object's bytes from `offset`."""
        self._made(lambda: self._store.get_into(key, offset, into))

    def head(self, key: str) -> ObjectInfo | None:
        """Return what a listing would say of `key`, or None."""
        return self._made(lambda: self._store.head(key))

    def list(self, prefix: str = "", *, start_after: str = "") -> Iterator[ObjectInfo]:
        """Yield the matching objects, sorted, as many at a time as a request brings or so."""
        found = self._made(lambda: iter(self._store.list(prefix, start_after=start_after)))
        while some := self._made(lambda: list(islice(found, _LISTED_AT_ONCE))):
            yield from some

    def list_folders(self, prefix: str) -> Sequence[str]:
        """Return, sorted, the prefixes one level below `prefix`."""
        return self._made(lambda: self._store.list_folders(prefix))

    def delete(self, key: str) -> None:
        """Remove the object; nothing happens if there is none."""
        self._made(lambda: self._store.delete(key))

    def copy(self, source: str, target: str, *, if_absent: bool = False) -> str:
        """Make `target` an object with the bytes of `source`; return its etag."""
        return self._made(lambda: self._store.copy(source, target, if_absent=if_absent))

    def archive(self, key: str) -> None:
        """Move the object to where keeping it is cheap."""
        self._made(lambda: self._store.archive(key))

    def warm(self) -> None:
        """Do beforehand what makes the first use slow."""
        self._store.warm()

    def clean_up(self, prefix: str = "", *, older_than_s: float) -> int:
        """Free what writes below the prefix left that broke off so long ago."""
        return self._made(lambda: self._store.clean_up(prefix, older_than_s=older_than_s))

    def _made(self, call: Callable[[], Result]) -> Result:
        """Return what the call returns, in time; take note of whether the store answered."""
        began = self._clock.monotonic()
        with self._lock:
            if self._problem is not None and began < self._spared_until:
                raise StoreUnavailable(self._problem.message, hint=self._problem.hint)
        try:
            with give_up_after(self._within_s, self._clock):
                result = self._called(call)
        except _ANSWERS:
            self._note(None, began)
            raise
        except StoreError as problem:
            self._note(problem, began)
            raise
        self._note(None, began)
        return result

    def _called(self, call: Callable[[], Result]) -> Result:
        if self._crew is None:
            return call()
        made = self._crew.submit(call)
        try:
            return made.result(self._within_s + _SPARE_S)
        except StillRunning:
            made.cancel()
            raise StoreUnavailable(
                f"{self.url} has given no answer for {format_duration(self._within_s)}",
                hint="is the server of that folder away?",
            ) from None

    def _note(self, problem: StoreError | None, began: float) -> None:
        with self._lock:
            self._problem = problem
            if problem is None:
                self.silence = None
                return
            now = self._clock.monotonic()
            took_s = now - began
            if took_s >= _SLOW_S:
                self._spared_until = now + min(took_s, self._within_s)
            since = began if self.silence is None else self.silence.since
            self.silence = Silence(since=since, problem=problem.message)


@dataclass(frozen=True)
class _Nowhere:
    url: str


class AwayStore(BoundedStore):
    """In the place of a store that could not even be opened: no call of it is answered."""

    def __init__(self, url: str, problem: EnvironmentFailure) -> None:
        self.problem = problem
        super().__init__(cast("ObjectStore", _Nowhere(url)))

    def _called(self, call: Callable[[], Result]) -> Result:
        raise StoreUnavailable(self.problem.message, hint=self.problem.hint)
