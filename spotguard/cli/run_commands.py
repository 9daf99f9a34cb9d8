"""`stop`, `down`, `resume` and `adopt`: changing a run's course.

Where the journal or the controller cannot be used, `stop` and `down` do without them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from spotguard.cli.common import (
    DetachOption,
    JsonOption,
    PatienceOption,
    RunArgument,
    YesOption,
    follow_to_end,
    named_run,
    outcome,
    say_detached,
)
from spotguard.cli.flags import setting_value
from spotguard.cli.follow import DEFAULT_PATIENCE_S, LineScreen, RunSource, follow
from spotguard.cli.terminal.output import confirm, note, print_json, say
from spotguard.errors import Detached, EnvironmentFailure, JournalDamaged

if TYPE_CHECKING:
    from collections.abc import Callable

    from spotguard.control.without_journal import Left


def stop(
    run: RunArgument = None,
    *,
    yes: YesOption = False,
    contact_patience: PatienceOption = DEFAULT_PATIENCE_S,
) -> None:
    """Save a run's state, then release its nodes.

    `spotguard resume` goes on from there.
    """
    from spotguard.control import api

    run_id = api.find_run(run)
    try:
        _end(named_run(run_id), api.request_stop, "asked to save and stop", contact_patience)
    except EnvironmentFailure as problem:
        _stop_alone(_left(run_id, problem), problem, yes=yes)


def down(
    run: RunArgument = None,
    *,
    yes: YesOption = False,
    contact_patience: PatienceOption = DEFAULT_PATIENCE_S,
) -> None:
    """Release a run's nodes at once, without saving first.

    `spotguard resume` goes on from the last save.
    """
    from spotguard.control import api

    run_id = api.find_run(run)
    try:
        _confirm_down(named_run(run_id), yes=yes)
        _end(run_id, api.request_down, "its nodes are being released", contact_patience)
    except EnvironmentFailure as problem:
        _down_alone(_left(run_id, problem), problem, yes=yes)


def resume(
    run: RunArgument = None,
    *,
    budget: Annotated[
        str | None, typer.Option(metavar="USD", help="New budget for the whole run.")
    ] = None,
    deadline: Annotated[
        str | None, typer.Option(metavar="DURATION", help="New deadline, from now on.")
    ] = None,
    nodes: Annotated[
        str | None, typer.Option(metavar="N|MIN:MAX", help="New node count or range.")
    ] = None,
    detach: DetachOption = False,
    contact_patience: PatienceOption = DEFAULT_PATIENCE_S,
    as_json: JsonOption = False,
) -> None:
    """Go on with a paused, stopped or failed run, from its last save."""
    from spotguard.control import api

    run_id = named_run(run)
    resumed_at = api.now(run_id)
    api.resume(
        run_id,
        budget_usd=setting_value("budget", budget),
        deadline_s=setting_value("deadline", deadline),
        nodes=setting_value("nodes", nodes),
    )
    if detach:
        if as_json:
            print_json(api.view(run_id).to_json())
        else:
            say_detached(run_id)
        return
    note(f"{run_id} resumed")
    follow_to_end(run_id, since_at=resumed_at, patience_s=contact_patience, as_json=as_json)


def adopt(
    url: Annotated[str, typer.Argument(metavar="URL", help="The run's own place: STORE/RUN_ID.")],
) -> None:
    """Take over a run from its store alone.

    For a new machine, or after the journal was damaged; that file is kept.
    """
    from spotguard.cli.common import show_status
    from spotguard.control import api

    run_id = api.adopt(url, note)
    show_status(api.view(run_id))


def _end(run_id: str, ask: Callable[[str], object], asked: str, patience_s: float) -> None:
    from spotguard.control import api

    view = api.view(run_id)
    if view.state.settled:
        say(f"nothing to do: {outcome(view)}")
        return
    asked_at = api.now(run_id)
    ask(run_id)
    note(f"{run_id}: {asked}")
    try:
        view = follow(RunSource(run_id), LineScreen(since_at=asked_at), patience_s=patience_s)
    except KeyboardInterrupt:
        note(f"\nleft before the end; the request stands. Look: spotguard status {run_id} --watch")
        raise typer.Exit(Detached.exit_code) from None
    say(outcome(view))


def _confirm_down(run_id: str, *, yes: bool) -> None:
    from spotguard.cli.views import formats
    from spotguard.control import api

    view = api.view(run_id)
    if not yes and not view.state.settled:
        kept = f"step {formats.count(view.saved_step)} of {formats.count(view.step)} done"
        confirm(
            f"Release the nodes of {run_id} without saving? The last save is {kept}.",
            refused="the run goes on",
        )


# ---------------------------------------------------------------- without a journal


def _left(run_id: str, problem: EnvironmentFailure) -> Left:
    """Return what can be done without a journal; raise the problem where that is nothing."""
    from spotguard.control import api

    left = api.what_is_left(run_id)
    if left is None or not (left.clusters or left.released):
        raise problem
    return left


def _down_alone(left: Left, problem: EnvironmentFailure, *, yes: bool) -> None:
    from spotguard.control import api

    if left.released:
        say(f"nothing to do: {left.run_id} has no cluster any more; {_rest(left, problem)}")
        return
    names = ", ".join(left.clusters)
    _confirm_alone(f"Release {names} without saving?", left, problem, yes=yes)
    note(f"{left.run_id}: {names} is being released, by what is written down of its launches")
    api.down_alone(left.run_id, note)
    say(f"{left.run_id} has no cluster any more: {names} released; {_rest(left, problem)}")


def _stop_alone(left: Left, problem: EnvironmentFailure, *, yes: bool) -> None:
    from spotguard.cli.views import formats
    from spotguard.control import api

    if left.released:
        say(f"nothing to do: {left.run_id} has no cluster any more; {_rest(left, problem)}")
        return
    names = ", ".join(left.clusters)
    yes = yes or left.controller_pid is None
    _confirm_alone(f"Save and release {names}?", left, problem, yes=yes)
    note(f"{left.run_id}: asked to save and stop, by what is written down of its launches")
    try:
        step = api.stop_alone(left.run_id, note)
    except KeyboardInterrupt:
        note(f"\nleft before the end; the job saves and leaves. Then: spotguard down {left.run_id}")
        raise typer.Exit(Detached.exit_code) from None
    saved = "nothing is saved" if step is None else f"saved at step {formats.count(step)}"
    say(f"{left.run_id}: {saved}, {names} released; {_rest(left, problem)}")


def _confirm_alone(question: str, left: Left, problem: EnvironmentFailure, *, yes: bool) -> None:
    if yes:
        note(problem.message)
        return
    pid = left.controller_pid
    first = "" if pid is None else f" Its controller (process {pid}) is ended first."
    confirm(f"{problem.message} {question}{first}", refused="the run goes on")


def _rest(left: Left, problem: EnvironmentFailure) -> str:
    """Return how the rest of the run is had again."""
    if isinstance(problem, JournalDamaged):
        return f"its story is in the store: spotguard adopt {left.place}"
    return f"once the problem is mended, `spotguard status {left.run_id}` tells the rest"
