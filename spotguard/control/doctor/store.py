"""Trying a store: every right and promise that runs rely on, its speed, and its clock."""

from __future__ import annotations

import contextlib
import secrets
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spotguard.control.doctor.store_trial import UNSAFE, StoreTrial, TrialFinding
from spotguard.errors import AlreadyExists, NotFound, StoreError, StoreFull, StoreUnavailable
from spotguard.shared.units import SystemClock, format_bytes
from spotguard.storage import open_store
from spotguard.storage.deadline import give_up_after

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from spotguard.shared.units import Clock
    from spotguard.storage.base import ObjectStore

    Tell = Callable[[str], None]
    """Told what is done now."""

SPEED_BYTES = 256_000_000
"""Written and read at most to find the speed; less where this would take long."""
FIRST_BYTES = 16_000_000
"""Enough to be written in parts to any bucket."""

_WORD = b"spotguard"
_SMALL_WRITES = 5
_BLOCK_BYTES = 4_000_000
_SPEED_S = 4.0
_RIGHTS_WITHIN_S = 60.0
_SPEED_WITHIN_S = 120.0
_TIDIED_WITHIN_S = 30.0
_PARTS = "write in parts"
_TOO_SLOW = f"writing {format_bytes(FIRST_BYTES)} must not take minutes; look at the network"
_NO_PLACE = "look whether there is such a bucket, container or folder, and whose it is"


def try_store(
    url: str, *, speed_bytes: int | None = None, tell: Tell = lambda doing: None
) -> StoreTrial:
    """Return how the store at `url` behaves; what is written for it is deleted again.

    Raises:
        UsageError: it names no store that this version can open.
        StoreUnavailable: it cannot be reached, so nothing can be said of it.
    """
    return try_opened(open_store(url), speed_bytes=speed_bytes, tell=tell)


def try_opened(
    store: ObjectStore,
    *,
    speed_bytes: int | None = None,
    tell: Tell = lambda doing: None,
    clock: Clock | None = None,
) -> StoreTrial:
    """Return how `store` behaves."""
    trial = _Trial(store, tell, clock or SystemClock())
    with trial.tidied():
        with give_up_after(_RIGHTS_WITHIN_S):
            trial.rights()
        with give_up_after(_SPEED_WITHIN_S):
            trial.speed(speed_bytes or SPEED_BYTES)
        with give_up_after(_RIGHTS_WITHIN_S):
            trial.delete()
    return trial.found


class _Trial:
    """One trial, below a prefix of its own."""

    def __init__(self, store: ObjectStore, tell: Tell, clock: Clock) -> None:
        self.found = StoreTrial(url=store.url)
        self._store = store
        self._tell = tell
        self._clock = clock
        self._prefix = f"doctor-{secrets.token_hex(6)}/"
        self._small = [f"{self._prefix}small/{i}" for i in range(_SMALL_WRITES)]
        self._once = f"{self._prefix}once"
        self._large = f"{self._prefix}large"

    def rights(self) -> None:
        """Find out what may be done, and whether it does what it should."""
        if self._try("write", self._write):
            self._try("conditional write", self._conditions)
        self._try("list", self._list)
        self._try("read", self._read)

    def speed(self, most_bytes: int) -> None:
        """Find the speed both ways, and whether parts are put together right."""
        if not self.found.rights["write"]:
            return
        try:
            self._try(_PARTS, lambda: self._speed(most_bytes))
        except StoreUnavailable as gone:  # small objects went through: too slow, or a bad line
            self.found.rights[_PARTS] = False
            self.found.findings.append(
                TrialFinding(right=_PARTS, detail=gone.message, hint=gone.hint or _TOO_SLOW)
            )

    def delete(self) -> None:
        """Find out whether objects can be deleted, and stay so."""
        self._try("delete", self._delete)

    @contextlib.contextmanager
    def tidied(self) -> Iterator[None]:
        """Leave nothing behind, whatever happens; say so where that cannot be done."""
        try:
            yield
        finally:
            with give_up_after(_TIDIED_WITHIN_S):
                self._tidy()

    def _tidy(self) -> None:
        # By name, not from a listing: there may be no right to list.
        for key in [*self._small, self._once, self._large]:
            try:
                self._store.delete(key)
            except StoreUnavailable:
                return  # each would be waited for
            except StoreError:
                continue

    def _try(self, right: str, act: Callable[[], str]) -> bool:
        """Note a right that is missing or a promise that is broken; return whether all is well.

        That the store cannot be reached is passed on: there is nothing more to find out.
        """
        self._tell(f"trying {self._store.url}: {right}")
        hint = UNSAFE
        try:
            problem = act()
        except StoreUnavailable:
            raise
        except StoreError as refused:
            problem, hint = refused.message, refused.hint or _NO_PLACE
        self.found.rights[right] = not problem
        if problem:
            self.found.findings.append(TrialFinding(right=right, detail=problem, hint=hint))
        return not problem

    def _write(self) -> str:
        self._store.warm()
        times = []
        for key in self._small:
            began_at = time.perf_counter()
            self._store.put(key, _WORD)
            times.append(time.perf_counter() - began_at)
        self.found.latency_s = statistics.median(times)
        return ""

    def _conditions(self) -> str:
        first = self._store.put(self._once, _WORD, if_absent=True)
        if not self._is_refused(if_absent=True):
            return (
                "it overwrites where it must refuse (create-if-absent), so two writers could clash"
            )
        self._store.put(self._once, b"second", if_match=first)
        if not self._is_refused(if_match=first):
            return "it overwrites what another writer changed (if-match), so two could clash"
        return ""

    def _is_refused(self, *, if_absent: bool = False, if_match: str | None = None) -> bool:
        try:
            self._store.put(self._once, b"other", if_absent=if_absent, if_match=if_match)
        except AlreadyExists:
            return True
        return False

    def _list(self) -> str:
        wanted = self._small if self.found.rights["write"] else []
        found = [info.key for info in self._store.list(f"{self._prefix}small/")]
        return "" if found == wanted else "a listing does not show what was just written"

    def _read(self) -> str:
        if not self.found.rights["write"]:
            self._store.head(self._small[0])  # that it is not there is an answer, too
            return ""
        if self._store.get(self._small[0], max_bytes=len(_WORD)) != _WORD:
            return "what was written reads back different"
        self._look_at_clock()
        return ""

    def _look_at_clock(self) -> None:
        """Compare clocks: the store stamped the object, to the second, between two looks at ours.

        What is within that uncertainty is no skew.
        """
        before = self._clock.now()
        self._store.put(self._small[0], _WORD)
        after = self._clock.now()
        info = self._store.head(self._small[0])
        if info is None or info.modified_at is None:
            return
        least, most = info.modified_at - after, info.modified_at + 1.0 - before
        self.found.clock_skew_s = least if least > 0 else min(most, 0.0)

    def _speed(self, most_bytes: int) -> str:
        block = secrets.token_bytes(min(_BLOCK_BYTES, most_bytes))
        size = min(FIRST_BYTES, most_bytes)
        try:
            rate = self._write_rate(block, size)
            more = min(int(rate * _SPEED_S), most_bytes)
            if more > size:  # a first write is slow: lines and threads are not warm yet
                size = more
                rate = self._write_rate(block, size)
        except StoreFull as full:
            self.found.no_speed = f"no room to try {format_bytes(size)}: {full.message}"
            return ""
        self.found.write_bytes_per_s = rate
        return self._read_all(block, size)

    def _write_rate(self, block: bytes, size: int) -> float:
        self._tell(f"trying {self._store.url}: writing {format_bytes(size)}")
        began_at = time.perf_counter()
        self._store.put(self._large, _Repeated(block, size))
        return size / (time.perf_counter() - began_at)

    def _read_all(self, block: bytes, size: int) -> str:
        """Find the speed of reading (likely from a cache); return what is wrong with the bytes."""
        self._tell(f"trying {self._store.url}: reading {format_bytes(size)}")
        into = memoryview(bytearray(size))
        began_at = time.perf_counter()
        self._store.get_into(self._large, 0, into)
        self.found.read_bytes_per_s = size / (time.perf_counter() - began_at)
        at = 0
        for piece in _Repeated(block, size):
            if into[at : at + len(piece)] != piece:
                return "what was written in parts reads back different"
            at += len(piece)
        return ""

    def _delete(self) -> str:
        for key in [*self._small, self._once, self._large]:
            self._store.delete(key)
        if not (self.found.rights["write"] and self.found.rights["read"]):
            return ""
        try:
            self._store.get(self._small[0], max_bytes=len(_WORD))
        except NotFound:
            return ""
        return f"what was deleted is still there; remove {self._store.url}/{self._prefix} by hand"


@dataclass(frozen=True)
class _Repeated:
    """A stream of one block again and again, so that its size needs no memory."""

    block: bytes
    size_bytes: int

    def __iter__(self) -> Iterator[memoryview]:
        """Yield the blocks, the last one cut."""
        for at in range(0, self.size_bytes, len(self.block)):
            yield memoryview(self.block)[: self.size_bytes - at]
