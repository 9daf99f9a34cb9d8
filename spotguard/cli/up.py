"""`up` and `plan`: from a script to a running job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from spotguard.cli.common import (
    DetachOption,
    JsonOption,
    PatienceOption,
    YesOption,
    follow_to_end,
    say_detached,
)
from spotguard.cli.flags import resolve_job, takes_job_flags
from spotguard.cli.follow import DEFAULT_PATIENCE_S
from spotguard.cli.output import confirm, console, note, print_json
from spotguard.errors import UsageError

if TYPE_CHECKING:
    from spotguard.plan.job import JobPlan
    from spotguard.spec.sources import Resolved

ScriptArgument = Annotated[str, typer.Argument(help="The training script.", show_default=False)]
JobArguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="-- ARGS", help="The script's own arguments, after `--`."),
]


@takes_job_flags()
def up(
    script: ScriptArgument,
    args: JobArguments = None,
    *,
    flags: dict[str, object],
    yes: YesOption = False,
    detach: DetachOption = False,
    contact_patience: PatienceOption = DEFAULT_PATIENCE_S,
    as_json: JsonOption = False,
) -> None:
    """Launch SCRIPT and follow it through every interruption.

    Shows the plan and asks first. Ctrl-C leaves; the run goes on in the background. The script's
    own arguments come after `--`: spotguard up train.py --nodes 2 -- --lr 3e-4
    """
    from spotguard.control import api

    resolved = resolve_job(script, args or [], flags)
    if as_json and not yes:
        raise UsageError("--json leaves no room for a question", hint="pass --yes as well")
    if not as_json:
        _show_plan(_plan(resolved))
    if not yes:
        confirm("Start?", refused="nothing was started")
    run_id = api.create_run(resolved.spec)
    api.start_controller(run_id)
    if detach:
        if as_json:
            print_json(api.view(run_id).to_json())
        else:
            say_detached(run_id)
        return
    note(f"{run_id} started")
    follow_to_end(run_id, patience_s=contact_patience, as_json=as_json)


@takes_job_flags()
def plan(
    script: ScriptArgument,
    args: JobArguments = None,
    *,
    flags: dict[str, object],
    as_json: JsonOption = False,
) -> None:
    """Show where SCRIPT would run and what it would cost; start nothing."""
    planned = _plan(resolve_job(script, args or [], flags))
    if as_json:
        print_json(planned.to_json())
    else:
        _show_plan(planned)


def _plan(resolved: Resolved) -> JobPlan:
    from spotguard.control import api
    from spotguard.plan.job import plan_job
    from spotguard.spec.home import spotguard_home

    spec = resolved.spec
    offers = api.launcher_for(spec, spotguard_home() / "runs").offers()
    return plan_job(spec, offers, batches=resolved.batches)


def _show_plan(planned: JobPlan) -> None:
    from spotguard.cli.views.plan import plan_screen

    terminal = console()
    terminal.print(plan_screen(planned, width=terminal.width))
