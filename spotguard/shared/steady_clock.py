"""A clock that no jump of the machine's own clock moves.

Money and deadlines are counted by it. The machine's clock is read once, when counting begins; from
there on the seconds are counted that really pass, a sleeping laptop's too. Who keeps such a clock
in a file goes on counting where another process of the same machine began, so that a controller
that is started again after a jump lives in the same time as the one before.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from pathlib import Path

CLOCK_FILE = "clock.json"
"""Its name in the folder of a run."""
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


def clock_kept_at(path: Path) -> SteadyClock:
    """Return the clock that all processes of this machine share by a file, until its next boot.

    A file that cannot be written or makes no sense costs the sharing, and nothing else.
    """
    clock = SteadyClock()
    boot = _boot_id()
    if boot is None:
        return clock
    kept = _read_zero(path, boot)
    if kept is not None:
        return SteadyClock(kept)
    with contextlib.suppress(OSError):
        _create(path, {"boot": boot, "zero": clock.now() - elapsed_s()})
    kept = _read_zero(path, boot)  # another process may have been faster
    return clock if kept is None else SteadyClock(kept)


def _create(path: Path, body: dict[str, object]) -> None:
    """Put a whole file where none is, or one of an earlier boot."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        fresh.write_text(json.dumps(body))
        if path.exists():
            fresh.replace(path)
        else:
            os.link(fresh, path)  # unlike a rename, it fails if another one has come
    finally:
        fresh.unlink(missing_ok=True)


def _read_zero(path: Path, boot: str) -> float | None:
    try:
        body = json.loads(path.read_bytes()[:1000])
        return float(body["zero"]) if body["boot"] == boot else None
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None


def _boot_id() -> str | None:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return None
