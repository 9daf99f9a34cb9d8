"""A few words between the ranks, outside of the collectives: a small key-value rendezvous.

Under torchrun it is the TCP store that torchrun already runs; alone it is a dict. Each thread
that talks has a connection of its own, because a TCPStore client serves one caller at a time.
"""

from __future__ import annotations

import contextlib
import os
import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

if TYPE_CHECKING:
    from collections.abc import Iterator


class Coordinator(Protocol):
    """Words between ranks. Lost contact is `ConnectionError`; a word not said in time is None."""

    def connect(self) -> Coordinator:
        """Return a connection for another thread."""
        ...

    def set(self, key: str, value: str) -> None:
        """Say `value` under `key`."""
        ...

    def first(self, key: str, value: str) -> str:
        """Say `value` under `key` unless somebody was first; return what stands there."""
        ...

    def get(self, key: str, timeout_s: float) -> str | None:
        """Return what stands under `key`, waiting for it up to `timeout_s`."""
        ...

    def peek(self, key: str) -> str | None:
        """Return what stands under `key` now, or None."""
        ...


class Alone:
    """The coordinator of a single process."""

    def __init__(self) -> None:
        self._words: dict[str, str] = {}
        self._said = threading.Condition()

    def connect(self) -> Alone:
        """Return itself: a dict serves all threads."""
        return self

    def set(self, key: str, value: str) -> None:
        """Say `value` under `key`."""
        with self._said:
            self._words[key] = value
            self._said.notify_all()

    def first(self, key: str, value: str) -> str:
        """Say `value` unless something stands there; return what stands there."""
        with self._said:
            self._said.notify_all()
            return self._words.setdefault(key, value)

    def get(self, key: str, timeout_s: float) -> str | None:
        """Return the word, waiting for it up to `timeout_s`."""
        with self._said:
            self._said.wait_for(lambda: key in self._words, timeout_s)
            return self._words.get(key)

    def peek(self, key: str) -> str | None:
        """Return the word that stands there now, or None."""
        return self._words.get(key)


class Rendezvous:
    """The coordinator of several ranks: a client of the job's TCP store."""

    def __init__(self, host: str, port: int, prefix: str) -> None:
        self._address = (host, port, prefix)
        try:
            client = TCPStore(
                host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=30)
            )
        except RuntimeError as problem:
            raise ConnectionError(f"rendezvous at {host}:{port}: {problem}") from problem
        self._store = PrefixStore(prefix, client)

    @classmethod
    def from_environment(cls) -> Rendezvous:
        """Return a client of the store that torchrun named in MASTER_ADDR and MASTER_PORT."""
        # A restart inside one torchrun must not hear the words of the round before.
        round_ = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return cls(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), f"spotguard/{round_}")

    def connect(self) -> Rendezvous:
        """Return another client of the same store."""
        return Rendezvous(*self._address)

    def set(self, key: str, value: str) -> None:
        """Say `value` under `key`."""
        with _translated():
            self._store.set(key, value)

    def first(self, key: str, value: str) -> str:
        """Say `value` unless something stands there; return what stands there."""
        with _translated():
            return bytes(self._store.compare_set(key, "", value)).decode()

    def get(self, key: str, timeout_s: float) -> str | None:
        """Return the word, waiting for it up to `timeout_s`."""
        with _translated():
            try:
                self._store.wait([key], timedelta(seconds=max(timeout_s, 0.001)))
            except dist.DistStoreError:  # not said in time
                return None
            return bytes(self._store.get(key)).decode()

    def peek(self, key: str) -> str | None:
        """Return the word that stands there now, or None."""
        with _translated():
            return bytes(self._store.get(key)).decode() if self._store.check([key]) else None


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except (dist.DistError, RuntimeError) as problem:
        raise ConnectionError(f"the rendezvous store is gone: {problem}") from problem
