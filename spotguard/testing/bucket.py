"""A bucket in memory whose network fails on cue, for what `RemoteStore` promises.

bucket = MemoryBucket().fail("put_part", nth=3)
bucket = MemoryBucket().lose_answer("finish")
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from spotguard.errors import AlreadyExists, NotFound, StoreError, StoreUnavailable
from spotguard.shared.units import SystemClock
from spotguard.storage.base import ObjectInfo
from spotguard.storage.buffers import within
from spotguard.storage.remote.bucket import Page, PartRules, Precondition, Upload

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from spotguard.shared.units import Clock

Result = TypeVar("Result")

_RULES = PartRules(min_bytes=1, max_bytes=1 << 30, max_parts=10_000)


@dataclass(frozen=True)
class _Stored:
    content: bytes
    etag: str
    writer: str
    at: float


@dataclass
class _Parts:
    key: str
    writer: str
    at: float
    content: dict[int, bytes]


@dataclass
class _Fault:
    op: str
    nth: int
    times: int | None
    error: StoreError
    after: bool
    seen: int = 0

    def due(self, op: str) -> bool:
        """Count the call if it matches; return whether it is to be disturbed."""
        if self.op not in ("*", op):
            return False
        self.seen += 1
        return self.seen >= self.nth and (self.times is None or self.seen < self.nth + self.times)


class MemoryBucket:
    """A `Bucket` in this process's memory. Thread-safe."""

    def __init__(
        self,
        *,
        clock: Clock | None = None,
        page_size: int = 1000,
        part_rules: PartRules = _RULES,
        heeds_conditions: bool | None = True,
        ignores_conditions: bool = False,
    ) -> None:
        """`ignores_conditions` makes it a server that overwrites whatever it is asked."""
        self.part_rules = part_rules
        self.heeds_conditions = heeds_conditions
        self.ignores_conditions = ignores_conditions
        self.calls: Counter[str] = Counter()
        """How often each method was called, failed calls included."""
        self.objects: dict[str, _Stored] = {}
        self.parts: dict[str, _Parts] = {}
        """Writes in parts that were begun and neither finished nor aborted."""
        self.archived: set[str] = set()
        self._clock = clock or SystemClock()
        self._page_size = page_size
        self._faults: list[_Fault] = []
        self._numbers = itertools.count(1)
        self._lock = threading.RLock()

    def fail(
        self,
        op: str,
        *,
        nth: int = 1,
        times: int | None = 1,
        error: StoreError | None = None,
    ) -> MemoryBucket:
        """Raise `error` instead of `times` calls of `op` from the `nth` on (None: of all)."""
        problem = error or StoreUnavailable(f"scripted failure of {op}")
        self._faults.append(_Fault(op, nth, times, problem, after=False))
        return self

    def lose_answer(self, op: str, *, nth: int = 1, times: int | None = 1) -> MemoryBucket:
        """Let calls take effect, and fail all the same: the answer did not arrive."""
        problem = StoreUnavailable(f"scripted loss of the answer to {op}")
        self._faults.append(_Fault(op, nth, times, problem, after=True))
        return self

    @property
    def url(self) -> str:
        """A name for messages."""
        return f"memory-bucket://{id(self):x}"

    def put(
        self, key: str, body: Sequence[memoryview], *, condition: Precondition, writer: str
    ) -> str:
        """Store the views as one object; return its etag."""
        return self._call("put", lambda: self._store(key, b"".join(body), condition, writer))

    def begin(self, key: str, *, writer: str) -> str:
        """Begin a write in parts; return its id."""

        def effect() -> str:
            upload_id = f"upload-{next(self._numbers)}"
            self.parts[upload_id] = _Parts(key, writer, self._clock.now(), {})
            return upload_id

        return self._call("begin", effect)

    def put_part(self, key: str, upload_id: str, number: int, body: Sequence[memoryview]) -> str:
        """Store one part; return its number."""

        def effect() -> str:
            self._parts_of(upload_id).content[number] = b"".join(body)
            return str(number)

        return self._call("put_part", effect)

    def finish(
        self,
        key: str,
        upload_id: str,
        parts: Sequence[str],
        *,
        condition: Precondition,
        writer: str,
    ) -> str:
        """Make the parts the object; return its etag."""

        def effect() -> str:
            content = self._parts_of(upload_id).content
            whole = b"".join(content[int(part)] for part in parts)
            etag = self._store(key, whole, condition, writer)
            del self.parts[upload_id]
            return etag

        return self._call("finish", effect)

    def abort(self, key: str, upload_id: str) -> None:
        """Give a write in parts up."""
        self._call("abort", lambda: self.parts.pop(upload_id, None))

    def uploads(self, prefix: str) -> Sequence[Upload]:
        """Return the writes in parts that are under way."""

        def effect() -> list[Upload]:
            return [
                Upload(key=each.key, upload_id=upload_id, started_at=each.at)
                for upload_id, each in self.parts.items()
                if each.key.startswith(prefix)
            ]

        return self._call("uploads", effect)

    def get(self, key: str, max_bytes: int | None = None) -> bytes:
        """Return the whole object, unless it has more than `max_bytes`."""
        return self._call("get", lambda: within(key, max_bytes, self._readable(key).content))

    def get_range(self, key: str, offset: int, into: Sequence[memoryview]) -> None:
        """Fill the views from byte `offset` on."""

        def effect() -> None:
            rest = memoryview(self._readable(key).content)[offset:]
            if len(rest) < sum(map(len, into)):
                raise StoreError(f"{key} is too short")
            for view in into:
                view[:], rest = rest[: len(view)], rest[len(view) :]

        self._call("get_range", effect)

    def head(self, key: str) -> ObjectInfo | None:
        """Return what a listing would say of `key`, or None."""
        return self._call("head", lambda: self._info(key) if key in self.objects else None)

    def writer_of(self, key: str) -> str | None:
        """Return who wrote `key`."""

        def effect() -> str | None:
            return self.objects[key].writer if key in self.objects else None

        return self._call("writer_of", effect)

    def page(
        self, prefix: str, *, start_after: str = "", folders: bool = False, token: str | None = None
    ) -> Page:
        """Return a page of the matching objects, sorted."""
        return self._call("page", lambda: self._page(prefix, token or start_after, folders))

    def delete(self, key: str) -> None:
        """Remove the object; nothing happens if there is none."""

        def effect() -> None:
            self.objects.pop(key, None)
            self.archived.discard(key)

        self._call("delete", effect)

    def copy(self, source: str, target: str, *, condition: Precondition, writer: str) -> str:
        """Copy an object; return the new etag."""

        def effect() -> str:
            return self._store(target, self._found(source).content, condition, writer)

        return self._call("copy", effect)

    def archive(self, key: str) -> None:
        """Remember that the object was archived; until it is put again, it cannot be read."""
        self._call("archive", lambda: self.archived.add(self._info(key).key))

    def _page(self, prefix: str, after: str, folders: bool) -> Page:
        infos: list[ObjectInfo] = []
        below: list[str] = []
        for key in sorted(self.objects):
            if not key.startswith(prefix) or key <= after or (below and key.startswith(below[-1])):
                continue
            if len(infos) + len(below) == self._page_size:
                return Page(infos, below, max([info.key for info in infos[-1:]] + below[-1:]))
            inside, slash, _ = key[len(prefix) :].partition("/")
            if not folders or not slash:
                infos.append(self._info(key))
            elif not after.startswith(f"{prefix}{inside}/"):
                below.append(f"{prefix}{inside}/")
        return Page(infos, below, None)

    def _store(self, key: str, content: bytes, condition: Precondition, writer: str) -> str:
        found = self.objects.get(key)
        if not self.ignores_conditions:
            if condition.if_absent and found:
                raise AlreadyExists(f"{key} exists already")
            if condition.if_match is not None and (
                found is None or found.etag != condition.if_match
            ):
                raise AlreadyExists(f"{key} was changed by another writer")
        etag = str(next(self._numbers))
        self.archived.discard(key)
        self.objects[key] = _Stored(content, etag, writer, self._clock.now())
        return etag

    def _found(self, key: str) -> _Stored:
        if key not in self.objects:
            raise NotFound(f"there is no {key}")
        return self.objects[key]

    def _readable(self, key: str) -> _Stored:
        found = self._found(key)
        if key in self.archived:
            raise StoreError(f"{key} is archived")
        return found

    def _parts_of(self, upload_id: str) -> _Parts:
        if upload_id not in self.parts:
            raise NotFound(f"there is no {upload_id}")
        return self.parts[upload_id]

    def _info(self, key: str) -> ObjectInfo:
        found = self._found(key)
        return ObjectInfo(
            key,
            len(found.content),
            found.etag,
            modified_at=float(int(found.at)),
            archived=key in self.archived,
            readable=key not in self.archived,
        )

    def _call(self, op: str, effect: Callable[[], Result]) -> Result:
        with self._lock:
            self.calls[op] += 1
            due = [fault for fault in self._faults if fault.due(op)]
            for fault in due:
                if not fault.after:
                    raise fault.error
            result = effect()
            for fault in due:
                raise fault.error
            return result
