"""What the commands share: naming a run, following it, showing how it stands."""

from __future__ import annotations

import contextlib
import signal
import time
from typing import TYPE_CHECKING, Annotated

import typer

from spotguard.cli.terminal.output import console, note, print_json
from spotguard.errors import Detached
from spotguard.shared.units import format_duration, parse_duration_s

if TYPE_CHECKING:
    from collections.abc import Iterator

    from spotguard.control.status.view import RunView

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


def named_run(text: str | None) -> str:
    """Return the full id of the run meant by `text`; a dead controller of it is restarted."""
    from spotguard.control import api

    run_id = api.find_run(text)
    if news := api.home_news():
        note(f"note: {news}")
    if api.ensure_controlled(run_id):
        note(f"note: the controller of {run_id} was gone; it has been restarted")
    return run_id


def looked_at_run(text: str | None) -> str:
    """Return what names the run meant by `text`, which may be its place in a store."""
    from spotguard.control import api

    found = api.find_any_run(text)
    if not api.is_place(found):
        return named_run(found)
    if told := api.who_controls(found):
        note(f"note: read from its store; it is, or was last, in the hands of {told}")
    return found


def steered_run(text: str | None) -> str:
    """Return what names the run meant by `text`: its place, if its controller is elsewhere.

    A dead controller of this machine is restarted.
    """
    from spotguard.control import api

    found = api.find_any_run(text)
    return found if api.is_place(found) else named_run(found)


def show_status(view: RunView, *, run: str | None = None) -> None:
    """Print the whole story of a run; `run` names it if its id does not."""
    from spotguard.cli.views.run import status
    from spotguard.control import api

    screen = console()
    place = run if run is not None and api.is_place(run) else None
    now = api.now(run or view.run_id)
    screen.print(status(view, now=now, width=screen.width, place=place))


def follow_to_end(run_id: str, *, patience_s: float, as_json: bool, since_at: float = 0.0) -> None:
    """Follow a started run, print how it ended, and exit with its code; Ctrl-C detaches.

    What happened before `since_at` is not told again.
    """
    from spotguard.cli.follow import LineScreen, LiveScreen, RunSource, Screen, SilentScreen, follow
    from spotguard.control import api

    terminal = console()
    screen: Screen
    if as_json:
        screen = SilentScreen()
    elif terminal.is_terminal:
        screen = LiveScreen(terminal)
    else:
        screen = LineScreen(since_at=since_at)
    try:
        view = follow(RunSource(run_id), screen, patience_s=patience_s)
    except KeyboardInterrupt:
        say_detached(run_id)
        raise typer.Exit(Detached.exit_code) from None
    if as_json:
        print_json(view.to_json())
    else:
        show_status(view)
    raise typer.Exit(api.exit_code(run_id))


def say_detached(run_id: str) -> None:
    """Tell how to look at a run that goes on, and how to stop it."""
    note(f"\n{run_id} goes on in the background.")
    note(f"  look:  spotguard status {run_id} --watch")
    note(f"  stop:  spotguard stop {run_id}")


def outcome(view: RunView) -> str:
    """Return one sentence on a settled run: what is saved, what it cost."""
    from spotguard.cli.views import formats

    saved = "nothing is saved" if view.saved_step is None else f"saved at step {view.saved_step}"
    age = format_duration((view.finished_at or time.time()) - view.created_at)
    cost = formats.usd(view.spent_usd) + (" (demo prices)" if view.demo_prices else "")
    return f"{view.run_id} is {view.state.label}: {saved}, spent {cost} in {age}"
