"""What the commands share: naming a run, following it, showing how it stands."""

from __future__ import annotations

import contextlib
import signal
import time
from typing import TYPE_CHECKING, Annotated

import typer

from spotguard.cli.terminal.output import console, note, print_json
from spotguard.errors import Detached, EnvironmentFailure, JournalDamaged
from spotguard.shared.units import format_duration, parse_duration_s

if TYPE_CHECKING:
    from collections.abc import Iterator

    from spotguard.api.documents import RunView
    from spotguard.api.run import Run


def aside(words: str) -> None:
    """Say on stderr what the user need not act on."""
    note(f"note: {words}")


RunArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="RUN", help="The run's id, or its unique beginning; default: the newest."
    ),
]
AnyRunArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="RUN",
        help="The run's id, or its unique beginning, or STORE/RUN_ID; default: the newest.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document to stdout.")]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
DetachOption = Annotated[
    bool, typer.Option("--detach", "-d", help="Start, then leave it in the background.")
]


@contextlib.contextmanager
def heard_as_ctrl_c(*numbers: signal.Signals) -> Iterator[None]:
    """Inside the block these signals end the command as Ctrl-C does, with all that it began.

    A signal that is ignored, as by `nohup`, stays so.
    """

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.getsignal(number) for number in numbers}
    heard = [number for number, handler in before.items() if handler is signal.SIG_DFL]
    for number in heard:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in heard:
            signal.signal(number, signal.SIG_DFL)


def _duration(text: str) -> float:
    try:
        return parse_duration_s(text)
    except ValueError:
        raise typer.BadParameter(
            f"given {text!r}; allowed: a duration, such as 90s, 10m or 1h30m"
        ) from None


PatienceOption = Annotated[
    float,
    typer.Option(
        "--contact-patience",
        metavar="DURATION",
        parser=_duration,
        help="Give up following (exit 30) after this long without a sign of life.",
        show_default="10m",
    ),
]
StepPatienceOption = Annotated[
    float,
    typer.Option(
        "--patience",
        metavar="DURATION",
        parser=_duration,
        help="Give up (exit 3) when the job takes no step, or leaves no profile, for this long.",
        show_default="2m",
    ),
]


def looked_at_run(text: str | None) -> Run:
    """Return the run meant by `text`, which may be its place in a store.

    A dead controller of this machine is restarted, if that can be.
    """
    from spotguard.api.run import Run

    found = Run.find(text)
    if not found.in_store:
        try:
            return controlled(found)
        except JournalDamaged:
            raise
        except EnvironmentFailure as problem:  # what is known of it can be told all the same
            note(f"note: nobody controls it: {problem.message}")
            return found
    if told := found.holder():
        note(f"note: read from its store; it is, or was last, in the hands of {told}")
    return found


def steered_run(text: str | None) -> Run:
    """Return the run meant by `text`: by its place, if its controller is elsewhere.

    A dead controller of this machine is restarted.
    """
    from spotguard.api.run import Run

    found = Run.find(text)
    return found if found.in_store else controlled(found)


def controlled(run: Run) -> Run:
    """Return a run of this machine, whose dead controller is restarted."""
    from spotguard.api.run import home_news

    if news := home_news():
        note(f"note: {news}")
    if run.keep_controlled():
        note(f"note: the controller of {run.name} was gone; it has been restarted")
    return run


def show_status(run: Run, view: RunView) -> None:
    """Print the whole story of a run."""
    from spotguard.cli.views.run import status

    screen = console()
    place = run.name if run.in_store else None
    screen.print(status(view, now=run.now(), width=screen.width, place=place))


def follow_to_end(run: Run, *, patience_s: float, as_json: bool, since_at: float = 0.0) -> None:
    """Follow a started run, print how it ended, and exit with its code; Ctrl-C detaches.

    What happened before `since_at` is not told again.

    Raises:
        EnvironmentFailure: its controller could not be restarted for the whole patience.
    """
    from spotguard.cli.follow import LineScreen, LiveScreen, RunSource, Screen, SilentScreen, follow

    terminal = console()
    screen: Screen
    if as_json:
        screen = SilentScreen()
    elif terminal.is_terminal:
        screen = LiveScreen(terminal)
    else:
        screen = LineScreen(since_at=since_at)
    try:
        source = RunSource(run, repair_patience_s=patience_s)
        view = follow(source, screen, patience_s=patience_s)
    except KeyboardInterrupt:
        say_detached(run)
        raise typer.Exit(Detached.exit_code) from None
    if as_json:
        print_json(view.to_json())
    else:
        show_status(run, view)
    raise typer.Exit(run.exit_code())


def say_detached(run: Run) -> None:
    """Tell how to look at a run that goes on, how to stop it, and what it needs of this machine."""
    note(f"\n{run.name} goes on in the background.")
    if run.needs_this_machine:
        note(
            "  This machine must stay on: it replaces nodes that are lost. To let a node do that:\n"
            f"         spotguard controller move {run.name}"
        )
    note(f"  look:  spotguard status {run.name} --watch")
    note(f"  stop:  spotguard stop {run.name}")


def outcome(view: RunView) -> str:
    """Return one sentence on a settled run: what is saved, what it cost."""
    from spotguard.cli.views import formats

    saved = "nothing is saved" if view.saved_step is None else f"saved at step {view.saved_step}"
    age = format_duration((view.finished_at or time.time()) - view.created_at)
    most = "" if view.spent_most_usd is None else f" to {formats.usd(view.spent_most_usd)}"
    cost = formats.usd(view.spent_usd) + most + (" (demo prices)" if view.demo_prices else "")
    return f"{view.run_id} is {view.state.label}: {saved}, spent {cost} in {age}"
