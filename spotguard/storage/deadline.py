"""A deadline for whatever the store is asked for, so that no retry outlives the grace."""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, NamedTuple

from spotguard.shared.units import SystemClock

if TYPE_CHECKING:
    from collections.abc import Iterator

    from spotguard.shared.units import Clock

_LEAST_TIMEOUT_S = 0.05


class _Deadline(NamedTuple):
    at: float
    clock: Clock


_deadline: ContextVar[_Deadline | None] = ContextVar("spotguard_store_deadline", default=None)


@contextmanager
def give_up_after(seconds: float, clock: Clock | None = None) -> Iterator[None]:
    """Let no request and no retry of the calls inside last longer; an earlier deadline stays."""
    clock = clock or SystemClock()
    outer = remaining_s()
    if outer is not None:
        seconds = min(seconds, outer)
    token = _deadline.set(_Deadline(clock.monotonic() + seconds, clock))
    try:
        yield
    finally:
        _deadline.reset(token)


def remaining_s() -> float | None:
    """Return the seconds until the caller's deadline, negative after it; None without one."""
    deadline = _deadline.get()
    return None if deadline is None else deadline.at - deadline.clock.monotonic()


def timeout_s(usual_s: float) -> float:
    """Return how long a request may take: as usual, but never past the deadline."""
    left_s = remaining_s()
    return usual_s if left_s is None else max(min(usual_s, left_s), _LEAST_TIMEOUT_S)


def time_left_s(usual_s: float) -> float:
    """Return how long to wait for the next bytes; TimeoutError if the deadline has passed."""
    left_s = remaining_s()
    if left_s is not None and left_s <= 0:
        raise TimeoutError
    return timeout_s(usual_s)
