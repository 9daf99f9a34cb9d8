"""`stop`, `down`, `resume` and `adopt`: changing a run's course."""

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
from spotguard.cli.output import confirm, note, print_json, say
from spotguard.errors import Detached

if TYPE_CHECKING:
    from collections.abc import Callable


def stop(run: RunArgument = None, *, contact_patience: PatienceOption = DEFAULT_PATIENCE_S) -> None:
    """Save a run's state, then release its nodes.

    `spotguard resume` goes on from there.
    """
    from spotguard.control import api

    run_id = named_run(run)
    _end(run_id, api.request_stop, "asked to save and stop", contact_patience)


def down(
    run: RunArgument = None,
    *,
    yes: YesOption = False,
    contact_patience: PatienceOption = DEFAULT_PATIENCE_S,
) -> None:
    """Release a run's nodes at once, without saving first.

    `spotguard resume` goes on from the last save.
    """
    from spotguard.cli.views import words
    from spotguard.control import api

    run_id = named_run(run)
    view = api.view(run_id)
    if not yes and not view.state.settled:
        kept = f"step {words.count(view.saved_step)} of {words.count(view.step)} done"
        confirm(
            f"Release the nodes of {run_id} without saving? The last save is {kept}.",
            refused="the run goes on",
        )
    _end(run_id, api.request_down, "its nodes are being released", contact_patience)


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
