"""The rendezvous of several ranks in one process, whose delays and losses you script."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass
class FakeRendezvous:
    """What all ranks said, and a `Coordinator` for each of them.

        words = FakeRendezvous(patience_s=0.05)
        first, second = words.rank(0), words.rank(1)  # each a Coordinator
        words.mute(1)  # what the second rank says never arrives
        words.lose(0)  # the first rank loses contact

    Thread-safe.
    """

    patience_s: float | None = None
    """The longest a `get` really waits, whatever it was given; None: as long as it was given."""
    words: dict[str, str] = field(default_factory=dict)
    """Everything that was said so far."""
    before: Callable[[int, str, str], None] | None = None
    """Called as `before(rank, operation, key)` ahead of each one: to delay it, or to raise."""
    _said: threading.Condition = field(default_factory=threading.Condition, init=False)
    _lost: set[int] = field(default_factory=set, init=False)
    _mute: set[int] = field(default_factory=set, init=False)

    def rank(self, rank: int) -> FakeCoordinator:
        """Return the coordinator of `rank`."""
        return FakeCoordinator(self, rank)

    def lose(self, *ranks: int) -> FakeRendezvous:
        """From now on every call of these ranks raises ConnectionError."""
        with self._said:
            self._lost.update(ranks)
            self._said.notify_all()
        return self

    def mute(self, *ranks: int) -> FakeRendezvous:
        """From now on nobody hears what these ranks say; they themselves notice nothing."""
        with self._said:
            self._mute.update(ranks)
        return self

    def _begin(self, rank: int, operation: str, key: str) -> None:
        if self.before is not None:
            self.before(rank, operation, key)
        self._check(rank)

    def _check(self, rank: int) -> None:
        if rank in self._lost:
            raise ConnectionError(f"rank {rank} has lost contact (scripted)")

    def _say(self, rank: int, key: str, value: str) -> None:
        if rank not in self._mute:
            self.words[key] = value
            self._said.notify_all()


@dataclass(frozen=True)
class FakeCoordinator:
    """One rank's `spotguard.runtime.distributed.rendezvous.Coordinator`; serves all its threads."""

    _words: FakeRendezvous
    _rank: int

    def connect(self) -> FakeCoordinator:
        """Return a connection for another thread: itself."""
        self._words._begin(self._rank, "connect", "")
        return self

    def set(self, key: str, value: str) -> None:
        """Say `value` under `key`."""
        self._words._begin(self._rank, "set", key)
        with self._words._said:
            self._words._say(self._rank, key, value)

    def hurry(self, patience_s: float) -> None:
        """Do nothing: what is lost here is lost at once."""

    def close(self, timeout_s: float) -> None:
        """Do nothing: the words stay, for the other ranks."""

    def first(self, key: str, value: str) -> str:
        """Say `value` under `key` unless somebody was first; return what stands there."""
        self._words._begin(self._rank, "first", key)
        with self._words._said:
            if key not in self._words.words:
                self._words._say(self._rank, key, value)
            return self._words.words.get(key, value)

    def get(self, key: str, timeout_s: float) -> str | None:
        """Return what stands under `key`, waiting for it up to `timeout_s`."""
        words = self._words
        words._begin(self._rank, "get", key)
        if words.patience_s is not None:
            timeout_s = min(timeout_s, words.patience_s)
        with words._said:
            words._said.wait_for(
                lambda: key in words.words or self._rank in words._lost, max(timeout_s, 0.0)
            )
            words._check(self._rank)
            return words.words.get(key)

    def peek(self, key: str) -> str | None:
        """Return what stands under `key` now, or None."""
        self._words._begin(self._rank, "peek", key)
        return self._words.words.get(key)
