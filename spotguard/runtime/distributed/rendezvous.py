"""A few words between the ranks, outside of the collectives: a small key-value rendezvous.

It is the TCP store that whatever started the ranks keeps; alone it is a dict. Each thread
that talks has a connection of its own, because a TCPStore client serves one caller at a time.

A call to a store whose machine is frozen or cut off never returns, whatever timeout it was given
(torch 2.13). So a thread beside each connection makes its calls, and is given up with them.
"""

from __future__ import annotations

import os
import queue
import threading
import time
import weakref
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol, TypeVar

from torch._C._distributed_c10d import PrefixStore, TCPStore

from spotguard.events.message_seal import Lives, Seal

if TYPE_CHECKING:
    from collections.abc import Callable

_Answer = TypeVar("_Answer")
_Calls = queue.SimpleQueue["Callable[[], None] | None"]

_CONNECT_S = 30.0
_FIRST_CONNECT_S = 300.0
"""The store's process imports torch while the ranks do, on a cold disk perhaps for minutes."""
_FIRST_LOOK_S, _LAST_LOOK_S = 0.0005, 0.01
"""How long after each other a word is looked for that is not there yet."""
_PATIENCE_S = 30.0
"""Seconds that an answer may take where nobody hurries. On a network it takes a millisecond, but
torch's server looks up the name of each new client, all others waiting: 5 s without a DNS."""
_SLICE_S = 0.25


class LostContact(ConnectionError):
    """Another rank cannot be heard: not to be taken for an error of the script's own sockets."""


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

    def hurry(self, patience_s: float) -> None:
        """From here on, take it for lost contact when an answer takes longer than this."""
        ...

    def close(self, timeout_s: float) -> None:
        """End it and all connections that came of it; nothing may be said any more."""
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

    def hurry(self, patience_s: float) -> None:
        """Do nothing: answers take no time."""

    def close(self, timeout_s: float) -> None:
        """Do nothing: a dict needs no end."""


class Rendezvous:
    """The coordinator of several ranks: a client of the job's TCP store.

    What strangers write there is not heard: words are sealed.
    """

    def __init__(
        self,
        host: str,
        port: int,
        prefix: str,
        seal: Seal | None = None,
        *,
        beside: Rendezvous | None = None,
        connect_s: float = _CONNECT_S,
    ) -> None:
        """Connect, within `connect_s`; `beside` is the connection with which this one is closed."""
        self._address = (host, port, prefix, seal)
        self._seal = seal or Seal()
        self._patience_s = _PATIENCE_S
        self._unanswered: threading.Event | None = None
        """Set once the call is answered that was given up, if it ever is."""
        self._calls: _Calls = queue.SimpleQueue()
        weakref.finalize(self, self._calls.put, None)
        thread = threading.Thread(
            target=_make_calls, args=(self._calls,), name="spotguard-rendezvous", daemon=True
        )
        thread.start()
        self._threads: list[tuple[threading.Thread, _Calls]] = beside._threads if beside else []
        """Of all connections that are closed together."""
        self._threads.append((thread, self._calls))
        timeout = timedelta(seconds=connect_s)
        client = self._call(
            lambda: TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout),
            connect_s,
        )
        self._store = PrefixStore(prefix, client)

    @classmethod
    def from_environment(cls) -> Rendezvous:
        """Return a client of the store that is named in MASTER_ADDR and MASTER_PORT."""
        # A restart inside one torchrun must not hear the words of the round before.
        return cls(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            f"spotguard/{Lives.round()}",
            Seal.from_environment(),
            connect_s=_FIRST_CONNECT_S,
        )

    def connect(self) -> Rendezvous:
        """Return another client of the same store."""
        return Rendezvous(*self._address, beside=self)

    def set(self, key: str, value: str) -> None:
        """Say `value` under `key`."""
        store, sealed = self._store, self._seal.close(key, value)
        self._call(lambda: store.set(key, sealed))

    def first(self, key: str, value: str) -> str:
        """Say `value` under `key` unless somebody was first; return what stands there."""
        store, sealed = self._store, self._seal.close(key, value)
        word = self._opened(key, self._call(lambda: bytes(store.compare_set(key, "", sealed))))
        if word is None:
            raise LostContact(f"a stranger was first to say {key!r} in the rendezvous store")
        return word

    def get(self, key: str, timeout_s: float) -> str | None:
        """Return what stands under `key`, waiting for it up to `timeout_s`."""
        end = time.monotonic() + timeout_s
        pause_s = _FIRST_LOOK_S
        # Not `TCPStore.wait`: if its time is up in the moment in which the word comes, the client
        # takes the late answer for that of the next call, and waits for ever (torch 2.13).
        while (word := self.peek(key)) is None:
            left_s = end - time.monotonic()
            if left_s <= 0:
                return None
            time.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, _LAST_LOOK_S)
        return word

    def peek(self, key: str) -> str | None:
        """Return what stands under `key` now, or None."""
        store = self._store
        said = self._call(lambda: bytes(store.get(key)) if store.check([key]) else None)
        return None if said is None else self._opened(key, said)

    def _opened(self, key: str, said: bytes) -> str | None:
        return self._seal.open(key, said.decode(errors="replace"))

    def hurry(self, patience_s: float) -> None:
        """From here on, take it for lost contact when an answer takes longer than this."""
        self._patience_s = min(patience_s, self._patience_s)

    def close(self, timeout_s: float) -> None:
        """End it and all connections that came of it; blocks `timeout_s` at most."""
        for _, calls in self._threads:
            calls.put(None)
        end = time.monotonic() + timeout_s
        for thread, _ in self._threads:  # one may hang in a call to a store that is frozen
            thread.join(max(end - time.monotonic(), 0.0))

    def _call(self, call: Callable[[], _Answer], patience_s: float | None = None) -> _Answer:
        """Return the answer of the store, or its error; give it up when it is silent."""
        patience_s = self._patience_s if patience_s is None else patience_s
        answers: list[_Answer] = []
        problems: list[RuntimeError] = []
        done = threading.Event()

        def make() -> None:
            try:
                answers.append(call())
            except RuntimeError as problem:  # torch's errors of its stores are such
                problems.append(problem)
            finally:
                done.set()

        if self._unanswered is None or self._unanswered.is_set():
            self._calls.put(make)
            self._unanswered = None if _waited(done, patience_s) else done
        if self._unanswered is not None:
            raise LostContact("the rendezvous store does not answer")
        for problem in problems:
            raise LostContact(f"the rendezvous store is gone: {problem}") from problem
        return answers[0]


def _waited(done: threading.Event, patience_s: float) -> bool:
    """Return whether it is done in time; when this whole process stood still counts little."""
    while patience_s > 0:
        slice_s = min(patience_s, _SLICE_S)
        if done.wait(slice_s):
            return True
        patience_s -= slice_s
    return done.is_set()


def _make_calls(calls: _Calls) -> None:
    """Top of the thread beside a connection; it ends with it."""
    while (call := calls.get()) is not None:
        call()
