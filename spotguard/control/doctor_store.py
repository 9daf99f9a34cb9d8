"""Trying a store: every promise that runs rely on, and its speed."""

from __future__ import annotations

import contextlib
import secrets
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spotguard.errors import AlreadyExists, NotFound, StoreError, StoreFull
from spotguard.storage import open_store
from spotguard.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from spotguard.storage.base import ObjectStore

SPEED_BYTES = 64_000_000
_SMALL_WRITES = 5


@dataclass(frozen=True, kw_only=True)
class StoreTrial:
    """What a store did. `problem` names the first promise that it broke."""

    url: str
    problem: str = ""
    latency_s: float = 0.0
    """Of a small durable write (median)."""
    write_bytes_per_s: float | None = None
    read_bytes_per_s: float | None = None
    no_speed: str = ""
    """Why the speed could not be measured."""


def try_store(url: str, *, speed_bytes: int = SPEED_BYTES) -> StoreTrial:
    """Return how the store at `url` behaves; what is written for it is deleted again.

    Raises:
        UsageError: it names no store that this version can open.
        StoreError: the store refuses what every run does.
    """
    return try_opened(open_store(url), speed_bytes=speed_bytes)


def try_opened(store: ObjectStore, *, speed_bytes: int = SPEED_BYTES) -> StoreTrial:
    """Return how `store` behaves."""
    prefix = f"doctor-{secrets.token_hex(6)}/"
    with _tidied(store, prefix):
        latency_s = statistics.median(_write_small(store, prefix, i) for i in range(_SMALL_WRITES))
        problem = _broken_promise(store, prefix)
        if problem:
            return StoreTrial(url=store.url, problem=f"{store.url}: {problem}")
        try:
            write_rate, read_rate = _speed(store, prefix, speed_bytes)
        except StoreFull as full:
            return StoreTrial(
                url=store.url,
                latency_s=latency_s,
                no_speed=f"no room to try {format_bytes(speed_bytes)}: {full.message}",
            )
    return StoreTrial(
        url=store.url,
        latency_s=latency_s,
        write_bytes_per_s=write_rate,
        read_bytes_per_s=read_rate,
    )


def _write_small(store: ObjectStore, prefix: str, number: int) -> float:
    began_at = time.perf_counter()
    store.put(f"{prefix}small/{number}", b"spotguard")
    return time.perf_counter() - began_at


def _broken_promise(store: ObjectStore, prefix: str) -> str:
    """Return the first promise that the store breaks, or nothing."""
    key = f"{prefix}small/0"
    if store.get(key) != b"spotguard":
        return "what was written reads back different"
    wanted = [f"{prefix}small/{i}" for i in range(_SMALL_WRITES)]
    if [found.key for found in store.list(prefix)] != wanted:
        return "a listing does not show what was just written"
    try:
        store.put(key, b"other", if_absent=True)
    except AlreadyExists:
        pass
    else:
        return "it overwrites where it must refuse (create-if-absent), so two writers could clash"
    store.delete(key)
    try:
        store.get(key)
    except NotFound:
        return ""
    return "what was deleted is still there"


def _speed(store: ObjectStore, prefix: str, size: int) -> tuple[float, float]:
    """Return bytes per second of a durable write, and of a read (likely from the cache)."""
    key = f"{prefix}large"
    data = bytearray(secrets.token_bytes(1_000_000) * max(1, size // 1_000_000))
    began_at = time.perf_counter()
    store.put(key, data)
    written_at = time.perf_counter()
    store.get_into(key, 0, memoryview(data))
    read_at = time.perf_counter()
    return len(data) / (written_at - began_at), len(data) / (read_at - written_at)


@contextlib.contextmanager
def _tidied(store: ObjectStore, prefix: str) -> Iterator[None]:
    try:
        yield
    finally:
        with contextlib.suppress(StoreError):  # the trial's own error says more
            for found in list(store.list(prefix)):
                store.delete(found.key)
