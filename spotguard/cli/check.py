"""`drill` and `doctor`: proof before trust."""

# No postponed annotations: typer reads them, and ruff would move their imports away.
import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Annotated

import typer

from spotguard.cli.common import JsonOption
from spotguard.cli.flags import takes_job_flags, with_variables
from spotguard.cli.output import clean, console, note, print_json
from spotguard.cli.progress import QUIET_S
from spotguard.cli.up import JobArguments, ScriptArgument
from spotguard.errors import EnvironmentFailure, JobFailed


@takes_job_flags(only=("nproc_per_node", "save_every", "env", "local.metadata", "local.speed_up"))
def drill(
    script: ScriptArgument,
    args: JobArguments = None,
    *,
    flags: dict[str, object],
    nodes: Annotated[int, typer.Option(min=1, help="Nodes to drill with.")] = 2,
    kills: Annotated[int, typer.Option(min=1, help="Interruptions to play.")] = 4,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Train so many steps; default: chosen.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the interruptions.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Prove that SCRIPT restores everything, by interrupting it.

    Runs it undisturbed, then interrupted, and compares. PASS, or exactly which state is not
    restored and the step where the two runs part (exit 10).
    """
    from spotguard.cli.views.lists import drill_screen
    from spotguard.control.drill import DrillOptions, run_drill

    options = DrillOptions(nodes=nodes, kills=kills, steps=steps, seed=seed)
    report = run_drill(script, args or [], with_variables(flags), options, note)
    if as_json:
        print_json(report.to_json())
    else:
        console().print(drill_screen(report))
    if not report.passed:
        raise typer.Exit(JobFailed.exit_code)


def doctor(
    store: Annotated[
        str | None,
        typer.Argument(metavar="[STORE]", help="The store to try; default: the local one."),
    ] = None,
    *,
    as_json: JsonOption = False,
) -> None:
    """Check this machine and a store: what works, what is missing, how fast it is.

    Tells how long an emergency save would take from here. What is written to try the store is
    deleted again. Exits with 3 when something that is required does not work.
    """
    from spotguard.cli.views.lists import doctor_screen
    from spotguard.control.doctor import examine

    with _telling() as tell:
        report = examine(store, tell)
    if as_json:
        print_json(report.to_json())
    else:
        console().print(doctor_screen(report))
    if not report.ok:
        raise typer.Exit(EnvironmentFailure.exit_code)


@contextlib.contextmanager
def _telling() -> Iterator[Callable[[str], None]]:
    """Yield what is to be told what is done now: a line that is wiped, or lines in a log."""
    screen = console(stderr=True)
    if screen.is_terminal:
        with screen.status("") as line:
            yield lambda doing: line.update(clean(doing))
        return
    began_at = time.monotonic()

    def tell(doing: str) -> None:
        if time.monotonic() - began_at >= QUIET_S:
            note(f"{doing} ...")

    yield tell
