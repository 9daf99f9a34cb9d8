"""Stores for tests: one in memory, and one that fails, tears, stalls and crashes on cue."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from spotguard.errors import AlreadyExists, NotFound, StoreError, StoreFull, StoreUnavailable
from spotguard.storage.base import ObjectInfo, Reads
from spotguard.storage.buffers import targets_of, views_of, within
from spotguard.storage.keys import check_folder, check_key, check_prefix

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from spotguard.shared.units import Clock
    from spotguard.storage.base import Content, ObjectStore, Target

Result = TypeVar("Result")
Problem: TypeAlias = BaseException | type[BaseException]

MUTATING = frozenset({"put", "copy", "delete"})
"""The operations that `crash_at` counts."""


class MemoryStore:
    """An `ObjectStore` in this process's memory: exact, thread-safe, gone with the process."""

    def __init__(self) -> None:
        self._objects: dict[str, tuple[bytes, str]] = {}
        self._etags = itertools.count(1)
        self._lock = threading.Lock()
        self.archived: set[str] = set()
        """Keys of what was moved to the archive."""

    @property
    def url(self) -> str:
        """A name for messages; `open_store` cannot open it, for nothing is left to open."""
        return f"memory://{id(self):x}"

    def best_reads(self, key: str) -> Reads:
        """As of a folder."""
        return Reads(threads=4, size_bytes=4 << 20)

    def put(
        self,
        key: str,
        data: Content,
        *,
        if_absent: bool = False,
        if_match: str | None = None,
    ) -> str:
        """Store a copy of `data`; return its etag."""
        check_key(key)
        content = b"".join(views_of(data))
        with self._lock:
            found = self._objects.get(key)
            if if_absent and found:
                raise AlreadyExists(f"{key} exists already")
            if if_match is not None and (found is None or found[1] != if_match):
                raise AlreadyExists(f"{key} was changed by another writer")
            etag = str(next(self._etags))
            self._objects[key] = (content, etag)
            self.archived.discard(key)
            return etag

    def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        """Return the whole object, unless it has more than `max_bytes`."""
        if self._found(key).archived:
            raise StoreError(f"{key} is archived")
        return within(key, max_bytes, self._objects[key][0])

    def get_into(self, key: str, offset: int, into: Target) -> None:
        """Fill `into` with the object's bytes from `offset`."""
        data = memoryview(self.get(key))[offset:]
        for view in targets_of(into):
            if len(data) < len(view):
                raise StoreError(f"{key} ends before byte {offset + len(view)}")
            view[:], data = data[: len(view)], data[len(view) :]

    def head(self, key: str) -> ObjectInfo | None:
        """Return what a listing would say of `key`, or None."""
        return self._info(key) if check_key(key) in self._objects else None

    def list(self, prefix: str = "", *, start_after: str = "") -> Iterator[ObjectInfo]:
        """Yield the matching objects, sorted, as they were when the iteration began."""
        check_prefix(prefix)
        return self._list(prefix, start_after)

    def list_folders(self, prefix: str) -> Sequence[str]:
        """Return, sorted, the prefixes one level below `prefix`."""
        check_folder(prefix)
        with self._lock:
            below = [key[len(prefix) :] for key in self._objects if key.startswith(prefix)]
        return sorted({f"{prefix}{key.split('/')[0]}/" for key in below if "/" in key})

    def delete(self, key: str) -> None:
        """Remove the object; nothing happens if there is none."""
        with self._lock:
            self._objects.pop(check_key(key), None)
            self.archived.discard(key)

    def copy(self, source: str, target: str, *, if_absent: bool = False) -> str:
        """Make `target` an object with the bytes of `source`; return its etag."""
        return self.put(target, self.get(source), if_absent=if_absent)

    def archive(self, key: str) -> None:
        """Remember that the object was archived; until it is put again, it cannot be read."""
        self.archived.add(self._found(key).key)

    def warm(self) -> None:
        """Do nothing."""

    def clean_up(self, prefix: str = "", *, older_than_s: float) -> int:
        """Return 0: nothing is ever broken off half-way."""
        return 0

    def _list(self, prefix: str, start_after: str) -> Iterator[ObjectInfo]:
        with self._lock:
            found = [
                self._info(key)
                for key in sorted(self._objects)
                if key.startswith(prefix) and key > start_after
            ]
        yield from found

    def _found(self, key: str) -> ObjectInfo:
        found = self.head(key)
        if found is None:
            raise NotFound(f"there is no {key}")
        return found

    def _info(self, key: str) -> ObjectInfo:
        content, etag = self._objects[key]
        archived = key in self.archived
        return ObjectInfo(key, len(content), etag, archived=archived, readable=not archived)


class SimulatedCrash(BaseException):
    """The process died here. Not an `Exception`, so that no handler of the code survives it."""


@dataclass
class _Rule:
    """What happens at which calls: from the `nth` matching one on, `times` times."""

    op: str
    key_contains: str
    nth: int
    times: int | None
    act: Callable[[str], None] = field(repr=False)
    tears: bool = False
    seen: int = 0

    def due(self, op: str, key: str) -> bool:
        """Count the call if it matches; return whether it is to be disturbed."""
        if self.op not in ("*", op) or self.key_contains not in key:
            return False
        self.seen += 1
        return self.seen >= self.nth and (self.times is None or self.seen < self.nth + self.times)


class FaultyStore:
    """The store `inner`, disturbed as scripted. Every scripting method returns the store itself.

        store = FaultyStore(MemoryStore()).fail("put", nth=3)
        store = FaultyStore(MemoryStore()).crash_at(7, after=True)

    Faults are scripted by operation (`put`, `get`, `get_into`, `head`, `list`, `list_folders`,
    `copy`, `archive`, `clean_up`, `delete`, or `*` for any), by which matching call, and by what
    the key contains.

    After a `SimulatedCrash` every further call crashes too: a dead process cannot tidy up. Look
    at `inner` for what it left behind.
    """

    def __init__(self, inner: ObjectStore) -> None:
        self.inner = inner
        self.calls: Counter[str] = Counter()
        """How often each operation was called, failed calls included."""
        self.mutations = 0
        """How many puts and deletes were called."""
        self._before: list[_Rule] = []
        self._after: list[_Rule] = []
        self._crash: tuple[int, bool] | None = None
        self._dead = False
        self._lock = threading.RLock()

    def fail(
        self,
        op: str,
        *,
        nth: int = 1,
        times: int | None = 1,
        error: Problem | None = None,
        key_contains: str = "",
    ) -> FaultyStore:
        """Raise `error` instead of `times` matching calls from the `nth` on (None: of all)."""
        problem = error or StoreUnavailable(f"scripted failure of {op}")

        def act(_key: str) -> None:
            raise problem

        return self.before(op, act, nth=nth, times=times, key_contains=key_contains)

    def tear(
        self, op: str = "put", *, nth: int = 1, times: int | None = 1, key_contains: str = ""
    ) -> FaultyStore:
        """Store half of the bytes, then raise `StoreUnavailable`: a server that is not atomic."""
        assert op == "put", "only a put can be torn"

        def act(key: str) -> None:
            raise StoreUnavailable(f"scripted tear of {key}")

        self._before.append(_Rule(op, key_contains, nth, times, act, tears=True))
        return self

    def full(self, *, nth: int = 1, key_contains: str = "") -> FaultyStore:
        """Refuse every matching put from the `nth` on with `StoreFull`, until `heal()`."""
        error = StoreFull("no room left (scripted)")
        return self.fail("put", nth=nth, times=None, error=error, key_contains=key_contains)

    def delay(
        self,
        op: str,
        seconds: float,
        *,
        clock: Clock,
        nth: int = 1,
        times: int | None = None,
        key_contains: str = "",
    ) -> FaultyStore:
        """Let `clock` sleep before each matching call; with a `FakeClock` nobody waits."""

        def act(_key: str) -> None:
            clock.sleep(seconds)

        return self.before(op, act, nth=nth, times=times, key_contains=key_contains)

    def before(
        self,
        op: str,
        act: Callable[[str], None],
        *,
        nth: int = 1,
        times: int | None = 1,
        key_contains: str = "",
    ) -> FaultyStore:
        """Call `act(key)` before a matching call takes effect: where another writer slips in."""
        self._before.append(_Rule(op, key_contains, nth, times, act))
        return self

    def after(
        self,
        op: str,
        act: Callable[[str], None],
        *,
        nth: int = 1,
        times: int | None = 1,
        key_contains: str = "",
    ) -> FaultyStore:
        """Call `act(key)` once a matching call took effect; if it raises, the answer is lost."""
        self._after.append(_Rule(op, key_contains, nth, times, act))
        return self

    def crash_at(self, n: int, *, after: bool = False) -> FaultyStore:
        """Die at the `n`-th put or delete (from 1), before or after it took effect."""
        self._crash = (n, after)
        return self

    def heal(self) -> FaultyStore:
        """Drop all scripted faults; the counts stay."""
        self._before.clear()
        self._after.clear()
        self._crash = None
        return self

    @property
    def url(self) -> str:
        """The inner store's."""
        return self.inner.url

    def best_reads(self, key: str) -> Reads:
        """Return what the inner store says."""
        return self.inner.best_reads(key)

    def put(
        self,
        key: str,
        data: Content,
        *,
        if_absent: bool = False,
        if_match: str | None = None,
    ) -> str:
        """Put, unless scripted otherwise."""

        def torn() -> None:
            content = b"".join(views_of(data))
            self.inner.put(key, content[: len(content) // 2])

        def whole() -> str:
            return self.inner.put(key, data, if_absent=if_absent, if_match=if_match)

        return self._call("put", key, whole, torn)

    def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        """Get, unless scripted otherwise."""
        return self._call("get", key, lambda: self.inner.get(key, max_bytes=max_bytes))

    def get_into(self, key: str, offset: int, into: Target) -> None:
        """Read a range, unless scripted otherwise."""
        self._call("get_into", key, lambda: self.inner.get_into(key, offset, into))

    def head(self, key: str) -> ObjectInfo | None:
        """Look, unless scripted otherwise."""
        return self._call("head", key, lambda: self.inner.head(key))

    def list(self, prefix: str = "", *, start_after: str = "") -> Iterator[ObjectInfo]:
        """List, unless scripted otherwise; faults strike when the listing is asked for."""
        return self._call("list", prefix, lambda: self.inner.list(prefix, start_after=start_after))

    def list_folders(self, prefix: str) -> Sequence[str]:
        """List folders, unless scripted otherwise."""
        return self._call("list_folders", prefix, lambda: self.inner.list_folders(prefix))

    def delete(self, key: str) -> None:
        """Delete, unless scripted otherwise."""
        self._call("delete", key, lambda: self.inner.delete(key))

    def copy(self, source: str, target: str, *, if_absent: bool = False) -> str:
        """Copy, unless scripted otherwise."""

        def effect() -> str:
            return self.inner.copy(source, target, if_absent=if_absent)

        return self._call("copy", target, effect)

    def archive(self, key: str) -> None:
        """Archive, unless scripted otherwise."""
        self._call("archive", key, lambda: self.inner.archive(key))

    def warm(self) -> None:
        """Do nothing, so that the first use is as slow as it is."""

    def clean_up(self, prefix: str = "", *, older_than_s: float) -> int:
        """Clean up, unless scripted otherwise."""

        def effect() -> int:
            return self.inner.clean_up(prefix, older_than_s=older_than_s)

        return self._call("clean_up", prefix, effect)

    def _call(
        self,
        op: str,
        key: str,
        effect: Callable[[], Result],
        tear: Callable[[], None] | None = None,
    ) -> Result:
        with self._lock:
            dies_after = self._count(op)
            before = [rule for rule in self._before if rule.due(op, key)]
            after = [rule for rule in self._after if rule.due(op, key)]
        for rule in before:
            if rule.tears and tear:
                tear()
            rule.act(key)
        result = effect()
        for rule in after:
            rule.act(key)
        if dies_after:
            self._die()
        return result

    def _count(self, op: str) -> bool:
        """Count the call; crash if the script says so; return whether it says 'after'."""
        if self._dead:
            raise SimulatedCrash("the process died before")
        self.calls[op] += 1
        self.mutations += op in MUTATING
        if op not in MUTATING or self._crash is None or self.mutations != self._crash[0]:
            return False
        if not self._crash[1]:
            self._die()
        return True

    def _die(self) -> None:
        self._dead = True
        raise SimulatedCrash(f"scripted crash at change {self.mutations}")
