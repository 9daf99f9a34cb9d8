"""Following a run: it ends when the run does, and outlives what may happen to the controller."""

from __future__ import annotations

import contextlib
import io
import signal
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from spotguard.cli.common import follow_to_end
from spotguard.cli.follow import LineScreen, LiveScreen, RunSource, SilentScreen, follow
from spotguard.control.status.view import Look
from spotguard.errors import ContactLost, EnvironmentFailure
from spotguard.events.states import RunState
from spotguard.testing import FakeClock
from tests.cli import pictures

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spotguard.control.status.view import HistoryLine, RunView


def seen(view: RunView, *news: HistoryLine, earlier: int = 0) -> Look:
    """Return what a look shows."""
    return Look(view=view, news=news, earlier=earlier)


@dataclass
class FakeSource:
    """Shows pictures one after the other; the last one stays."""

    views: list[RunView]
    repairs: int = 0

    def look(self) -> Look:
        """Return the next picture."""
        return seen(self.views.pop(0) if len(self.views) > 1 else self.views[0])

    def repair(self) -> None:
        """Count."""
        self.repairs += 1


@dataclass
class FakeScreen:
    """Remembers what it showed."""

    shown: list[RunState] = field(default_factory=list)
    closed: bool = False

    def show(self, look: Look, now: float) -> None:
        """Remember."""
        self.shown.append(look.view.state)

    def close(self) -> None:
        """Remember."""
        self.closed = True


def test_following_ends_with_the_run_and_shows_its_last_picture() -> None:
    """The final state is on the screen before the screen is closed."""
    screen = FakeScreen()
    ends = follow(
        FakeSource([pictures.run(), pictures.run(), pictures.finished()]),
        screen,
        clock=FakeClock(),
    )
    assert ends.state is RunState.FINISHED
    assert screen.shown == [RunState.RUNNING, RunState.RUNNING, RunState.FINISHED]
    assert screen.closed


def test_a_dead_controller_is_noticed_while_following() -> None:
    """Every few seconds the follower makes sure that somebody still looks after the run."""
    source = FakeSource([pictures.run()] * 60 + [pictures.finished()])
    follow(source, SilentScreen(), clock=FakeClock())
    assert 4 <= source.repairs <= 7  # 30 s of looking


def test_lost_contact_is_given_up_after_the_patience_only() -> None:
    """Nothing is decided on one failed look; after the patience the exit code is 30."""
    lost = pictures.run(state=RunState.CONTACT_LOST)
    screen, clock = FakeScreen(), FakeClock()
    began_at = clock.monotonic()
    with pytest.raises(ContactLost, match=r"1 min 00 s.*nothing was killed") as caught:
        follow(FakeSource([lost]), screen, patience_s=60, clock=clock)
    assert clock.monotonic() - began_at >= 60
    assert caught.value.exit_code == 30
    assert pictures.RUN in caught.value.hint
    assert screen.closed


def test_a_silent_cloud_is_followed_for_as_long_as_the_job_is_heard() -> None:
    """Exit 30 is for a run of which nothing is heard at all."""
    silent = pictures.run(state=RunState.CLOUD_SILENT)
    done = pictures.run(state=RunState.FINISHED)
    source = FakeSource([silent] * 1000 + [done])
    last = follow(source, SilentScreen(), patience_s=60.0, clock=FakeClock())
    assert last.state is RunState.FINISHED


def test_contact_that_comes_back_is_forgiven() -> None:
    """The patience counts from the last sign of life, not from the first doubt."""
    lost = pictures.run(state=RunState.CONTACT_LOST)
    looks = ([lost] * 100 + [pictures.run()]) * 3 + [pictures.finished()]
    assert follow(FakeSource(looks), SilentScreen(), patience_s=60, clock=FakeClock())


def test_a_screen_is_closed_when_the_user_leaves() -> None:
    """Ctrl-C must not leave the terminal without its cursor."""

    class Impatient(FakeSource):
        def look(self) -> Look:
            raise KeyboardInterrupt

    screen = FakeScreen()
    with pytest.raises(KeyboardInterrupt):
        follow(Impatient([]), screen, clock=FakeClock())
    assert screen.closed


def test_each_happening_is_one_line_in_a_log(capsys: pytest.CaptureFixture[str]) -> None:
    """A log without a terminal has what each look brings, also what was learned late."""
    screen, lines = LineScreen(), pictures.history()
    for news in ((lines[0], lines[4]), (), (lines[1],), (lines[2], lines[3]), ()):
        screen.show(seen(pictures.run(), *news), pictures.NOW)
    said = capsys.readouterr().out.splitlines()
    assert len(said) == len(set(said)) == 5
    assert "node 1 got a notice" in said[2]


@pytest.mark.parametrize(("since_at", "told"), [(0.0, True), (pictures.NOW, False)])
def test_a_log_that_begins_in_the_middle_says_so(
    capsys: pytest.CaptureFixture[str], since_at: float, told: bool
) -> None:
    """How much went before is said, unless the log is only about what comes."""
    screen = LineScreen(since_at=since_at)
    screen.show(seen(pictures.run(), *pictures.history(), earlier=7), pictures.NOW)
    assert (
        "(7 earlier happenings are not shown: spotguard history --all)" in capsys.readouterr().out
    ) is told


def test_a_quiet_log_still_tells_progress(capsys: pytest.CaptureFixture[str]) -> None:
    """Every half minute a line says how far the run is, but only if it moved."""
    screen = LineScreen(since_at=pictures.NOW)
    for tick in range(200):
        view = pictures.run(step=100 + min(tick, 120))
        screen.show(seen(view, *pictures.history()), pictures.NOW + tick)
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 4
    assert "130 of 600 steps · 3.1 steps/s" in said[0]
    assert "$0.11" in said[0]


def test_the_live_screen_draws_in_place_and_gives_the_cursor_back() -> None:
    """What was drawn is wiped, the cursor is visible again."""
    stream = io.StringIO()
    screen = LiveScreen(Console(file=stream, force_terminal=True, width=80, height=30))
    screen.show(seen(pictures.run(), *pictures.history()), pictures.NOW)
    began = stream.tell()
    screen.show(seen(replace(pictures.run(), step=413)), pictures.NOW)
    screen.close()
    drawn = stream.getvalue()
    assert "attempt 2 starts on 2 nodes" in drawn[began:]  # told by the look before
    assert "413 of 600" in drawn
    assert drawn.rfind("\x1b[?25h") > drawn.rfind("\x1b[?25l") >= 0


def test_a_silent_screen_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """`--json` has one document on stdout and nothing else."""
    screen = SilentScreen()
    screen.show(seen(pictures.run(), *pictures.history()), pictures.NOW)
    screen.close()
    assert capsys.readouterr() == ("", "")


def test_a_slow_look_is_not_repeated_at_once() -> None:
    """A long history on a loaded machine does not make the follower a load of its own."""
    clock = FakeClock()

    class Slow(FakeSource):
        def look(self) -> Look:
            clock.advance(2.0)
            return super().look()

    began_at = clock.monotonic()
    follow(Slow([pictures.run()] * 3 + [pictures.finished()]), SilentScreen(), clock=clock)
    assert clock.monotonic() - began_at >= 3 * 20


def test_ctrl_c_counts_where_python_swallows_it() -> None:
    """Pressed while a destructor runs, say: the user is heard a moment later, and the old
    handler is back."""

    class Unlucky(FakeSource):
        def look(self) -> Look:
            with contextlib.suppress(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
            return super().look()

    before = signal.getsignal(signal.SIGINT)
    screen = FakeScreen()
    with pytest.raises(KeyboardInterrupt):
        follow(Unlucky([pictures.run()]), screen, clock=FakeClock())
    assert screen.shown == [RunState.RUNNING]
    assert screen.closed
    assert signal.getsignal(signal.SIGINT) is before


class Uncontrolled:
    """A run whose controller cannot be started, but for the tries of these numbers."""

    def __init__(self, *, pictures_shown: int = 40, started: Sequence[int] = ()) -> None:
        self.tries = 0
        self._shown = pictures_shown
        self._started = started

    def watch(self) -> FakeSource:
        """Return its pictures."""
        return FakeSource([pictures.run()] * self._shown + [pictures.finished()])

    def keep_controlled(self) -> bool:
        """Say why not."""
        self.tries += 1
        if self.tries in self._started:
            return True
        raise EnvironmentFailure("it did not start: no room left")


def test_who_only_looks_goes_on_without_a_controller(capsys: pytest.CaptureFixture[str]) -> None:
    """It is said once, and tried again and again. Who asked for a stop needs one."""
    run: Any = Uncontrolled()
    view = follow(RunSource(run), SilentScreen(), clock=FakeClock())
    assert view.state is RunState.FINISHED
    assert run.tries > 1
    assert capsys.readouterr().err.count("no room left") == 1
    with pytest.raises(EnvironmentFailure):
        follow(RunSource(run, repair_patience_s=0), SilentScreen(), clock=FakeClock())


def test_a_run_that_nobody_will_ever_control_is_followed_for_the_patience_only() -> None:
    """What nobody controls never settles: `up` in a script must end, with code 3."""
    run: Any = Uncontrolled(pictures_shown=10_000)
    clock = FakeClock()
    began_at = clock.monotonic()
    source = RunSource(run, repair_patience_s=60, clock=clock)
    with pytest.raises(EnvironmentFailure, match="no room left") as caught:
        follow(source, SilentScreen(), patience_s=60, clock=clock)
    assert caught.value.exit_code == 3
    assert 60 <= clock.monotonic() - began_at <= 75


def test_a_controller_that_was_restarted_begins_the_patience_anew(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of 20 tries in 100 s none fails for a minute on end; each failure is told once."""
    run: Any = Uncontrolled(pictures_shown=200, started=(7, 14))
    clock = FakeClock()
    source = RunSource(run, repair_patience_s=60, clock=clock)
    assert follow(source, SilentScreen(), clock=clock).state is RunState.FINISHED
    assert run.tries > 14
    assert capsys.readouterr().err.count("no room left") == 3


def test_up_waits_for_a_controller_as_long_as_for_contact(monkeypatch: pytest.MonkeyPatch) -> None:
    """The patience that `--contact-patience` names holds for both."""
    clock = FakeClock()
    monkeypatch.setattr("spotguard.cli.follow.SystemClock", lambda: clock)
    run: Any = Uncontrolled(pictures_shown=10_000)
    with pytest.raises(EnvironmentFailure, match="no room left"):
        follow_to_end(run, patience_s=30, as_json=True)
    assert run.tries == 7
