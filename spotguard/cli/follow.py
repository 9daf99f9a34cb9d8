"""Following a run until it settles: a live view on a terminal, else one line per happening."""

from __future__ import annotations

import math
import signal
import threading
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Protocol

from spotguard.api.states import RunState
from spotguard.cli.terminal.output import note, say
from spotguard.errors import ContactLost, EnvironmentFailure, JournalDamaged
from spotguard.shared.units import Clock, SystemClock, format_duration

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import Console

    from spotguard.api.documents import HistoryLine, Look, RunView
    from spotguard.api.run import Run

POLL_S = 0.5
REPAIR_EVERY_S = 5.0
"""How often the follower makes sure that the run still has a controller."""
PROGRESS_EVERY_S = 30.0
"""How often a log without a terminal gets a line although nothing happened."""
_RECENT = 20
"""Happenings that the live view remembers: more than it ever shows."""
DEFAULT_PATIENCE_S = 600.0
"""How long contact may be lost before the follower gives up; the run is left alone."""


class Source(Protocol):
    """Where pictures of one run come from."""

    def look(self) -> Look:
        """Return how the run stands, and what happened since the last look."""
        ...

    def repair(self) -> None:
        """Make sure that an unsettled run has a controller."""
        ...


class Screen(Protocol):
    """Where pictures go."""

    def show(self, look: Look, now: float) -> None:
        """Show the newest picture, and what happened since the one before."""
        ...

    def close(self) -> None:
        """Leave the terminal as it was."""
        ...


def follow(
    source: Source,
    screen: Screen,
    *,
    patience_s: float = DEFAULT_PATIENCE_S,
    clock: Clock | None = None,
) -> RunView:
    """Show the run until it settles; return its last picture. The screen is closed in any case.

    Raises:
        ContactLost: the run showed no sign of life for `patience_s`. Nothing was killed.
        KeyboardInterrupt: the user leaves; the run goes on.
    """
    ticker = clock or SystemClock()
    repaired_at = ticker.monotonic()
    in_contact_at = repaired_at
    with closing(screen), _noticed_interrupts() as interrupted:
        while True:
            if interrupted():
                raise KeyboardInterrupt
            began_at = ticker.monotonic()
            look = source.look()
            view = look.view
            screen.show(look, ticker.now())
            if view.state.settled:
                return view
            at = ticker.monotonic()
            if view.state is not RunState.CONTACT_LOST:
                in_contact_at = at
            elif at - in_contact_at > patience_s:
                raise _contact_lost(view, patience_s)
            if at - repaired_at >= REPAIR_EVERY_S:
                source.repair()
                repaired_at = at
            # On a busy machine: looking must not take more than a tenth of a core.
            ticker.sleep(max(POLL_S, 9 * (ticker.monotonic() - began_at)))


@contextmanager
def _noticed_interrupts() -> Iterator[Callable[[], bool]]:
    """Tell whether Ctrl-C was pressed, also where Python swallows the exception.

    That is in a destructor, or in a callback of a library's C code.
    """
    pressed = threading.Event()

    def on_interrupt(*_: object) -> None:
        pressed.set()
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield pressed.is_set
        return
    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, before)


def _contact_lost(view: RunView, patience_s: float) -> ContactLost:
    return ContactLost(
        f"{view.run_id} showed no sign of life for {format_duration(patience_s)}; nothing was "
        f"killed, and it may come back",
        hint=f"look again: spotguard status {view.run_id} --watch · release its nodes: "
        f"spotguard down {view.run_id}",
    )


class RunSource:
    """One run, by its id or by its place in a store."""

    def __init__(
        self, run: Run, *, repair_patience_s: float = math.inf, clock: Clock | None = None
    ) -> None:
        """Look at a run.

        Args:
            run: which one.
            repair_patience_s: how long its controller may be gone and not be restarted; 0 for who
                asked for something that only a controller does.
            clock: for tests.
        """
        self._run = run
        self._repair_patience_s = repair_patience_s
        self._clock = clock or SystemClock()
        self._watch = run.watch()
        self._told = ""
        self._failing_since: float | None = None

    def look(self) -> Look:
        """Return how the run stands, and what happened since the last look."""
        return self._watch.look()

    def repair(self) -> None:
        """Restart the run's controller if it is gone; the journal gets a line about it.

        Raises:
            EnvironmentFailure: it could not be restarted for the whole patience: nobody would ever
                write how the run ends.
        """
        try:
            self._run.keep_controlled()
        except JournalDamaged:
            raise
        except EnvironmentFailure as problem:
            now = self._clock.monotonic()
            if self._failing_since is None:
                self._failing_since = now
            if now - self._failing_since >= self._repair_patience_s:
                raise
            if problem.message != self._told:
                self._told = problem.message
                note(f"note: nobody controls it, which is tried again: {problem.message}")
        else:
            self._told, self._failing_since = "", None


class LiveScreen:
    """Redraws one picture in place, and wipes it at the end."""

    def __init__(self, console: Console) -> None:
        from rich.live import Live

        self._console = console
        self._recent: list[HistoryLine] = []
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._live.start()

    def show(self, look: Look, now: float) -> None:
        """Redraw."""
        from spotguard.cli.views.run import live

        told = sorted([*self._recent, *look.news], key=lambda line: line.at)
        self._recent = told[-_RECENT:]
        size = self._console.size
        picture = live(look.view, self._recent, now=now, width=size.width, height=size.height)
        self._live.update(picture, refresh=True)

    def close(self) -> None:
        """Wipe the picture and give the cursor back."""
        self._live.stop()


class LineScreen:
    """Prints each happening once, and a line of progress now and then: for logs and pipes."""

    def __init__(self, *, since_at: float = 0.0) -> None:
        self._since_at = since_at
        self._progress_at: float | None = None
        self._progress_step: int | None = None

    def show(self, look: Look, now: float) -> None:
        """Print what is new, also what was learned late, but nothing from before `since_at`."""
        from spotguard.cli.views.history_table import happening, progress

        if look.earlier and not self._since_at:
            say(f"({look.earlier} earlier happenings are not shown: spotguard history --all)")
        for line in look.news:
            if line.at >= self._since_at:
                say(happening(line))
        view = look.view
        if self._progress_at is None:
            self._progress_at = now
        if now - self._progress_at >= PROGRESS_EVERY_S and view.step != self._progress_step:
            self._progress_at, self._progress_step = now, view.step
            say(progress(view, now))

    def close(self) -> None:
        """Nothing to give back."""


class SilentScreen:
    """Shows nothing: for `--json`, whose only output is the document at the end."""

    def show(self, look: Look, now: float) -> None:
        """Show nothing."""

    def close(self) -> None:
        """Nothing to give back."""
