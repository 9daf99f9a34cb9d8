"""A clock that moves only when told to."""

from __future__ import annotations

import threading


class FakeClock:
    """A `spotguard.shared.units.Clock` for tests: sleeping advances it at once. Thread-safe.

    `jump_wall` moves only the wall clock, as a time server or a resumed laptop does.
    """

    def __init__(self, now: float = 1_700_000_000.0, *, monotonic: float = 1_000.0) -> None:
        self._now = now
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self.slept: list[float] = []
        """Every `sleep` so far, in seconds, in order."""

    def now(self) -> float:
        """Return seconds since the epoch."""
        with self._lock:
            return self._now

    def monotonic(self) -> float:
        """Return seconds that never go back."""
        with self._lock:
            return self._monotonic

    def sleep(self, seconds: float) -> None:
        """Advance by `seconds` without blocking, and remember it in `slept`."""
        self.slept.append(seconds)
        self.advance(seconds)

    def advance(self, seconds: float) -> None:
        """Let `seconds` (zero or more) pass on both clocks."""
        if seconds < 0:
            raise ValueError(f"time does not run backwards: {seconds!r}; use jump_wall")
        with self._lock:
            self._now += seconds
            self._monotonic += seconds

    def jump_wall(self, seconds: float) -> None:
        """Move the wall clock by `seconds`, back too, and leave the monotonic one alone."""
        with self._lock:
            self._now += seconds
