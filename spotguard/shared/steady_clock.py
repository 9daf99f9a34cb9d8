"""A clock that no jump of the machine's own clock moves.

Money and deadlines are counted by it. The machine's clock is read once, when counting begins, or
once more soon after its boot; from there on the seconds are counted that really pass, a sleeping
laptop's too. Who keeps such a clock in a file goes on counting where another process of the same
machine began, so that a controller that is started again after a jump lives in the same time as the
one before.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger("spotguard")

CLOCK_FILE = "clock.json"
"""Its name in the folder of a run."""
_FRESH_S = 600.0
"""How long after its boot a machine may still learn what time it is."""
_STEP_S = 2.0
"""Time servers set clocks right by less than this every day."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def elapsed_s() -> float:
    """Return seconds that never jump; unlike Python's monotonic clock, they go on in a sleep."""
    # macOS has no such clock as Linux's, but there this one goes on in a sleep (clock_gettime(3)).
    clock = time.CLOCK_BOOTTIME if hasattr(time, "CLOCK_BOOTTIME") else time.CLOCK_MONOTONIC
    return time.clock_gettime(clock)


class SteadyClock:
    """A `units.Clock` whose `now` goes on evenly, whatever is done to the machine's."""

    def __init__(self, zero: float | None = None) -> None:
        """`zero` is the epoch second at which `elapsed_s` was 0; None is what this machine says."""
        self._zero = time.time() - elapsed_s() if zero is None else zero

    def now(self) -> float:
        """Return seconds since the epoch."""
        return self._zero + elapsed_s()

    def monotonic(self) -> float:
        """Return seconds that never go back."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Block for `seconds`."""
        time.sleep(seconds)

    @property
    def machine_ahead_s(self) -> float:
        """By how many seconds the machine's own clock is ahead of this one."""
        return time.time() - self.now()

    def turn_back(self, seconds: float) -> None:
        """Count from an earlier instant: the machine's clock was so far ahead when it was read."""
        self._zero -= seconds


class _FreshClock(SteadyClock):
    """The clock of a machine that has just begun: its own may still be set right.

    Many machines boot with a clock of their hardware's, wrong by an hour, say, and hear the true
    time seconds later. That one step is followed, by all processes that share the file, for time
    would be missing in the bill until the next boot. Back it never goes.
    """

    def __init__(self, zero: float, path: Path, boot: str) -> None:
        super().__init__(zero)
        self._path = path
        self._boot = boot
        self._is_final = False

    def now(self) -> float:
        """Return seconds since the epoch."""
        if not self._is_final:
            self._look_again()
        return self._zero + elapsed_s()

    def _look_again(self) -> None:
        machine_zero = time.time() - elapsed_s()
        is_over = not _is_fresh()
        if not is_over and machine_zero - self._zero <= _STEP_S:
            return
        kept = _read_kept(self._path, self._boot)
        if not (is_over or (kept is not None and kept.is_set_right)):
            log.warning("the machine's clock was set right: %.0f s", machine_zero - self._zero)
            kept = _Kept(machine_zero, is_set_right=True)
            with contextlib.suppress(OSError):
                _create(self._path, self._boot, kept)
        if kept is not None:
            self._zero = max(self._zero, kept.zero)
        self._is_final = True


def clock_kept_at(path: Path, last_told: Callable[[], float | None] = lambda: None) -> SteadyClock:
    """Return the clock that all processes of this machine share by a file, until its next boot.

    `last_told` says what time it was at last; a new clock begins no earlier. A file that cannot be
    written or makes no sense costs the sharing, and nothing else.
    """
    boot = _boot_id()
    if boot is None:
        return SteadyClock()
    kept = _read_kept(path, boot)
    if kept is None:
        kept = _Kept(max(time.time(), last_told() or 0.0) - elapsed_s())
        with contextlib.suppress(OSError):
            _create(path, boot, kept)
        kept = _read_kept(path, boot) or kept  # another process may have been faster
    return _FreshClock(kept.zero, path, boot) if _is_fresh() else SteadyClock(kept.zero)


def _is_fresh() -> bool:
    return elapsed_s() < _FRESH_S


class _Kept(NamedTuple):
    """What the file says."""

    zero: float
    is_set_right: bool = False


def _create(path: Path, boot: str, kept: _Kept) -> None:
    """Put a whole file where none is, or an older one."""
    body = {"boot": boot, "zero": kept.zero, "set_right": kept.is_set_right}
    fresh = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        fresh.write_text(json.dumps(body))
        if path.exists():
            fresh.replace(path)
        else:
            os.link(fresh, path)  # unlike a rename, it fails if another one has come
    finally:
        fresh.unlink(missing_ok=True)


def _read_kept(path: Path, boot: str) -> _Kept | None:
    try:
        body = json.loads(path.read_bytes()[:1000])
        is_set_right = body.get("set_right") is True
        return _Kept(float(body["zero"]), is_set_right) if body["boot"] == boot else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return None


def _boot_id() -> str | None:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return None
