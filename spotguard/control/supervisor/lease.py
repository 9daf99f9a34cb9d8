"""One controller for a run, also when two machines want to be it: a lease in the run store.

On one machine a lock on the run's folder decides, and is free the moment its owner dies. Between
machines there is only the store: the controller writes who it is, and again before that is old.
Once nothing was written for a while, another machine may adopt the run. At most one write of two
wins (if-match), and who finds that it lost does nothing more: also a day later, though nobody
controls the run by then. What happened elsewhere is not in its journal: it would pay for it twice.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from contextvars import copy_context
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from spotguard.errors import AlreadyExists, NotFound, StoreError, UsageError
from spotguard.events import keys
from spotguard.events.checksummed import check_bytes, with_checksum
from spotguard.events.untrusted import (
    Refused,
    an_object,
    instant,
    integer,
    needed,
    parse_object,
    text,
)
from spotguard.shared.units import format_duration, to_iso
from spotguard.storage.deadline import give_up_after
from spotguard.storage.patterns.clock_comparison import store_now
from spotguard.storage.small_objects import get_small

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from spotguard.shared.units import Clock
    from spotguard.storage.base import ObjectStore

RENEW_S = 20.0
VALID_S = 90.0
"""A lease that was not renewed for so long may be taken over: four renewals were missed."""
_LOOK_S = 5.0
"""How often it is looked whether it is time to renew it."""
_PUT_WITHIN_S = 20.0
"""How long a renewal may take: the store's own retries would last as long as the lease is valid."""
_TWIN_PATIENCE_S = 10.0
"""How long a controller may take to end that has let go of its lock, or whose home has moved."""
_TWIN_POLL_S = 0.2
_SAFE_S = VALID_S - RENEW_S
"""Who could not renew it for so long acts no more."""


@dataclass(frozen=True, kw_only=True)
class Holder:
    """Who holds a run."""

    machine: str
    """Made once for each `SPOTGUARD_HOME`: its own lock tells apart who shares it."""
    host: str
    pid: int
    renewed_at: float
    released: bool = False
    """It came to an end by itself; the run stays with its machine."""
    damaged: bool = False
    """Its word cannot be read: only the store knows when it was given."""
    stored_at: float | None = None
    """When its word was given, by the store's clock; None if it does not say."""
    told: dict[str, Any] | None = None
    """How the run stood by then, as it was written and not checked; None if it does not say."""

    def lives(self, now: float) -> bool:
        """Return whether it may still act."""
        return not self.released and self._age_s(now) < VALID_S

    def _age_s(self, now: float) -> float:
        """Return how old its word is; one from the future is of a machine whose clock is ahead."""
        if self.renewed_at > now + VALID_S and self.stored_at is not None:
            return now - self.stored_at
        return now - self.renewed_at

    def is_foreign(self, machine: str) -> bool:
        """Return whether it is, or may be, another machine than `machine`."""
        return self.damaged or self.machine != machine

    def is_twin(self, now: float) -> bool:
        """Return whether it is, or may be, a living controller beside this process.

        For who holds the lock of its own folder: then it is of another copy of the same home.
        """
        if self.pid == os.getpid() or not self.lives(now):
            return False
        return self.host != socket.gethostname() or _is_controller(self.pid)

    def words(self, now: float) -> str:
        """Return who it is and how fresh its word is, for people."""
        age = format_duration(max(0.0, self._age_s(now)))
        if self.damaged:
            return f"a controller whose lease is damaged, and was stored {age} ago"
        return f"a controller on {self.host} (process {self.pid}), which showed itself {age} ago"


class Lease:
    """This process's hold on one run. Only `keep` may be called from two threads at once."""

    def __init__(
        self,
        store: ObjectStore,
        clock: Clock,
        machine: str,
        tell: Callable[[], dict[str, Any]] | None = None,
    ) -> None:
        """`tell` says how the run stands; it is called from the thread that renews the lease."""
        self.tell = tell
        self._store = store
        self._clock = clock
        self._machine = machine
        self._etag: str | None = None
        self._renewed = self._renewed_wall = float("-inf")
        self._writing = threading.Lock()
        self.lost_to = ""
        """Who took the run over, in words; empty as long as nobody did."""

    def take(self) -> None:
        """Become the run's controller, unless another machine has it or had it last: `lost_to`.

        Raises:
            UsageError: another controller of this machine took it at the same moment, or lives on
                in another copy of its home.
            StoreError: the store cannot be read or written.
        """
        found = self._without_twin()
        if found is not None and found[0].is_foreign(self._machine):
            self.lost_to = found[0].words(self._clock.now())
        else:
            self._begin(found)

    def adopt(self) -> None:
        """Bring the run to this machine, whoever had it last.

        Raises:
            UsageError: another machine's controller is alive; says which.
            StoreError: the store cannot be read or written.
        """
        found = self._without_twin()
        if found is not None:
            seen = aged_by_store(self._store, found[0], self._machine, self._clock.now())
            found = seen, found[1]
        check_dead(found, self._machine, self._clock.now())
        self._begin(found)

    def _without_twin(self) -> tuple[Holder, str] | None:
        """Return who has the run, once no controller of another copy of this home does."""
        give_up_at = self._clock.monotonic() + _TWIN_PATIENCE_S
        while True:
            found = read_holder(self._store)
            if found is None or found[0].is_foreign(self._machine):
                return found
            now = self._clock.now()
            if not aged_by_store(self._store, found[0], self._machine, now).is_twin(now):
                return found
            if self._clock.monotonic() >= give_up_at:
                raise UsageError(
                    f"The run is in the hands of {found[0].words(self._clock.now())}; it belongs "
                    "to another copy of this SPOTGUARD_HOME.",
                    hint=f"end it, or try again {format_duration(VALID_S)} after its end",
                )
            self._clock.sleep(_TWIN_POLL_S)

    def _begin(self, found: tuple[Holder, str] | None) -> None:
        try:
            self._write(None if found is None else found[1])
        except AlreadyExists:
            raise UsageError(
                "Another controller took the run at the same moment.",
                hint="look where it runs: try again, and its name is told",
            ) from None

    def keep(self) -> bool:
        """Renew the lease if it is time; return whether acts are safe now.

        They are not while the store has been out of reach for so long that another machine may
        have taken over, nor after one did (`lost_to`).
        """
        if self.lost_to:
            return False
        age_s = self._age_s()
        if age_s < RENEW_S:
            return True
        if not self._writing.acquire(blocking=False):  # the other thread is renewing it
            return age_s < _SAFE_S
        try:
            return self._renew()
        finally:
            self._writing.release()

    def _renew(self) -> bool:
        try:
            with give_up_after(_PUT_WITHIN_S, self._clock):  # it is tried again soon
                self._write(self._etag)
        except AlreadyExists:
            with give_up_after(_PUT_WITHIN_S, self._clock):
                self._look_who()
            return False
        except StoreError:
            pass
        return self._age_s() < _SAFE_S  # not as it was before: the store may have taken long

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Renew it from a thread of its own meanwhile: one call of SkyPilot's may take minutes."""
        over = threading.Event()

        def renew() -> None:
            while not over.wait(_LOOK_S):
                self.keep()

        thread = threading.Thread(
            target=copy_context().run, args=(renew,), name="spotguard-lease", daemon=True
        )
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _age_s(self) -> float:
        """Return the time since the last renewal: the monotonic clock stands still in a sleep."""
        wall_s = abs(self._clock.now() - self._renewed_wall)
        return max(self._clock.monotonic() - self._renewed, wall_s)

    def release(self) -> None:
        """Let the run go, so that any machine may adopt it at once; what fails now is old soon."""
        if self.lost_to or self._etag is None:
            return
        with contextlib.suppress(StoreError), give_up_after(_PUT_WITHIN_S, self._clock):
            self._write(self._etag, released=True)

    def hand_to(self, machine: str) -> None:
        """Let the run go to the home of that name, which may begin at once; no other one may.

        Raises:
            UsageError: another machine took the run at the same moment.
            StoreError: it cannot be written; who has the run then, the store tells.
        """
        try:
            self._write(self._etag, released=True, machine=machine)
        except AlreadyExists:
            raise UsageError("Another machine took the run at the same moment.") from None
        self.lost_to = "the machine that it was handed to"

    def _look_who(self) -> None:
        """After a lost write: was it another machine, or our own answer that was lost?"""
        try:
            found = read_holder(self._store)
        except StoreError:
            return  # it is looked at again
        if found is None or not found[0].is_foreign(self._machine):
            with contextlib.suppress(AlreadyExists, StoreError):  # then it is looked at again
                self._write(None if found is None else found[1])
            return
        self.lost_to = found[0].words(self._clock.now())

    def _write(self, etag: str | None, *, released: bool = False, machine: str = "") -> None:
        # Read before the store takes its time: others count the lease's age from then on, too.
        renewed, renewed_wall = self._clock.monotonic(), self._clock.now()
        body: dict[str, object] = {
            "machine": machine or self._machine,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "renewed_at": to_iso(renewed_wall),
            "released": released,
        }
        if self.tell is not None:  # so that a list of runs costs one request for each
            body["run"] = self.tell()
        raw = with_checksum(json.dumps(body, sort_keys=True).encode())
        self._etag = self._store.put(keys.LEASE, raw, if_absent=etag is None, if_match=etag)
        self._renewed, self._renewed_wall = renewed, renewed_wall


def check_dead(found: tuple[Holder, str] | None, machine: str, now: float) -> Holder | None:
    """Return who had the run last, if it was another machine than `machine`.

    Raises:
        UsageError: its controller is alive; says which.
    """
    if found is None or not found[0].is_foreign(machine):
        return None
    if found[0].lives(now):
        raise UsageError(
            f"The run is in the hands of {found[0].words(now)}.",
            hint=f"stop it there, or try again {format_duration(VALID_S)} after its end",
        )
    return found[0]


def aged_by_store(store: ObjectStore, found: Holder, machine: str, now: float) -> Holder:
    """Return a holder whose word is as old as the store says, if `now` alone calls it dead.

    For who would act in its place: a clock of `machine` that is ahead would let it do so beside a
    living one. Takes three requests, but only then.

    Raises:
        StoreError: the store cannot be used.
    """
    is_of_here = found.machine == machine and found.host == socket.gethostname()
    if found.released or found.lives(now) or is_of_here or found.stored_at is None:
        return found
    theirs = store_now(store, keys.lease_clock(machine))
    if theirs is None:  # another process of this home removed it at once: in doubt it lives
        return replace(found, renewed_at=now)
    return replace(found, renewed_at=now - theirs + found.stored_at)


def read_aged_holder(store: ObjectStore, machine: str, now: float) -> tuple[Holder, str] | None:
    """Return what `read_holder` does, as old as the store says: for who would take the run over."""
    found = read_holder(store)
    return None if found is None else (aged_by_store(store, found[0], machine, now), found[1])


def check_ours(store: ObjectStore, machine: str, now: float) -> None:
    """Check that no other machine has the run, or had it last.

    Raises:
        UsageError: one has; says which.
    """
    other = check_dead(read_holder(store), machine, now)
    if other is not None:
        raise UsageError(
            f"Another machine had the run since: {other.words(now)}.",
            hint=f"bring it here: spotguard adopt {store.url.rstrip('/')}",
        )


def read_holder(store: ObjectStore) -> tuple[Holder, str] | None:
    """Return who holds a run and the etag of that word; None if nobody does."""
    found = store.head(keys.LEASE)
    if found is None:
        return None
    try:
        return replace(read_word(store), stored_at=found.modified_at), found.etag
    except NotFound:
        return None
    except Refused:  # somebody may hold the run by it: nobody may act until it is old
        at = found.modified_at
        unknown = Holder(machine="", host="unknown", pid=0, renewed_at=at or 0.0, damaged=True)
        return replace(unknown, stored_at=at), found.etag


def read_word(store: ObjectStore) -> Holder:
    """Return who holds a run, by one request.

    Raises:
        NotFound: nobody ever did.
        Refused: what is written makes no sense.
        StoreError: the store cannot be read.
    """
    raw = get_small(store, keys.LEASE)
    check_bytes(raw, "the lease")
    body = parse_object(raw, "the lease")
    return Holder(
        machine=needed(text(body, "machine") or None, "machine"),
        host=needed(text(body, "host"), "host"),
        pid=needed(integer(body, "pid"), "process"),
        renewed_at=needed(instant(body, "renewed_at"), "instant"),
        released=body.get("released") is True,
        told=None if body.get("run") is None else an_object(body["run"], "how the run stands"),
    )


def _is_controller(pid: int) -> bool:
    """Tell whether a process of this machine is some run's controller."""
    import psutil

    try:
        return "spotguard.control" in psutil.Process(pid).cmdline()
    except psutil.Error:
        return False
