"""Progress of long tasks over bytes, on stderr: nothing for a second, then a bar or lines."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Protocol

from spotguard.cli.terminal.output import console, note
from spotguard.shared.units import Clock, SystemClock, format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import Console

QUIET_S = 1.0
LINE_EVERY_S = 10.0


@contextlib.contextmanager
def bytes_progress(
    doing: str, *, clock: Clock | None = None, terminal: Console | None = None
) -> Iterator[Callable[[int, int], None]]:
    """Yield what is to be told (bytes done, bytes in all); a bar is wiped at the end.

    Without a terminal a line is printed every ten seconds.
    """
    ticker = clock or SystemClock()
    screen = terminal or console(stderr=True)
    meter: _Meter = _Bar(doing, screen) if screen.is_terminal else _Lines(doing, ticker)
    began_at = ticker.monotonic()

    def tell(done: int, total: int) -> None:
        if ticker.monotonic() - began_at >= QUIET_S:
            meter.show(done, total)

    try:
        yield tell
    finally:
        meter.close()


class _Meter(Protocol):
    def show(self, done: int, total: int) -> None: ...

    def close(self) -> None: ...


class _Bar:
    """A bar with rate and time left, redrawn in place."""

    def __init__(self, doing: str, screen: Console) -> None:
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=screen,
            transient=True,
        )
        self._task = self._bar.add_task(doing, total=None)

    def show(self, done: int, total: int) -> None:
        self._bar.start()  # nothing happens if it was started before
        self._bar.update(self._task, completed=done, total=total)

    def close(self) -> None:
        self._bar.stop()


class _Lines:
    """A line now and then, for logs."""

    def __init__(self, doing: str, ticker: Clock) -> None:
        self._doing = doing
        self._ticker = ticker
        self._told_at = ticker.monotonic()

    def show(self, done: int, total: int) -> None:
        if self._ticker.monotonic() - self._told_at >= LINE_EVERY_S:
            self._told_at = self._ticker.monotonic()
            note(f"{self._doing}: {format_bytes(done)} of {format_bytes(total)}")

    def close(self) -> None:
        """Nothing to give back."""
