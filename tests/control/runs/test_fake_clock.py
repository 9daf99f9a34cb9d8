from __future__ import annotations

import pytest

from spotguard.testing import FakeClock


def test_sleep_passes_time_without_waiting() -> None:
    """An hour's sleep is over at once and moves both clocks by an hour."""
    clock = FakeClock(now=100.0, monotonic=5.0)

    clock.sleep(3600)

    assert (clock.now(), clock.monotonic(), clock.slept) == (3700.0, 3605.0, [3600])


def test_wall_clock_jumps_alone() -> None:
    """A step of the wall clock leaves the monotonic one alone."""
    clock = FakeClock(now=100.0, monotonic=5.0)

    clock.jump_wall(-50)

    assert (clock.now(), clock.monotonic()) == (50.0, 5.0)


def test_time_does_not_run_backwards() -> None:
    """Advancing by less than nothing is a mistake in the test, and says so."""
    with pytest.raises(ValueError, match="jump_wall"):
        FakeClock().advance(-1)
