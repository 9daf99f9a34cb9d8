"""`drill` and `doctor`: proof before trust."""

# No postponed annotations: typer reads them, and ruff would move their imports away.
import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from spotguard.cli.common import JsonOption, YesOption, heard_as_ctrl_c
from spotguard.cli.flags import (
    OldSeedOption,
    interrupt_seed,
    resolve_job,
    takes_job_flags,
    with_variables,
)
from spotguard.cli.terminal.output import clean, confirm, console, note, print_json
from spotguard.cli.terminal.progress import QUIET_S
from spotguard.cli.up import JobArguments, ScriptArgument, tell_lack
from spotguard.errors import EnvironmentFailure, JobFailed, UsageError

if TYPE_CHECKING:
    from spotguard.api.doctor import Books, Findings


@takes_job_flags(
    only=("nproc_per_node", "save_every", "env", "trust_script", "local.metadata", "local.speed_up")
)
def drill(
    script: ScriptArgument,
    args: JobArguments = None,
    *,
    flags: dict[str, object],
    nodes: Annotated[int, typer.Option(min=1, metavar="N", help="Nodes to drill with.")] = 2,
    kills: Annotated[int, typer.Option(min=1, metavar="N", help="Interruptions to play.")] = 4,
    steps: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Train so many steps; default: chosen.")
    ] = None,
    new_seed: Annotated[
        int | None,
        typer.Option(
            "--interrupt-seed",
            min=0,
            metavar="N",
            help="Seed of the interruptions.",
            show_default="0",
        ),
    ] = None,
    old_seed: OldSeedOption = None,
    as_json: JsonOption = False,
) -> None:
    """Prove that SCRIPT restores everything, by interrupting it.

    Runs it undisturbed, then interrupted, and compares. PASS, or exactly which state is not
    restored and the step where the two runs part (exit 10).
    """
    from spotguard.api import doctor as api
    from spotguard.api.settings import LOCAL
    from spotguard.cli.views.lists import drill_screen

    seed = interrupt_seed(new_seed, old_seed) or 0
    options = api.DrillOptions(nodes=nodes, kills=kills, steps=steps, seed=seed)
    tell_lack(resolve_job(script, args or [], {**flags, "infra": LOCAL}).spec)
    with heard_as_ctrl_c(signal.SIGTERM, signal.SIGHUP):
        report = api.run_drill(script, args or [], with_variables(flags), options, note)
    if as_json:
        print_json(report.to_json())
    else:
        console().print(drill_screen(report))
    if not report.passed:
        raise typer.Exit(JobFailed.exit_code)


def doctor(
    store: Annotated[
        str | None,
        typer.Argument(
            metavar="STORE|SCRIPT",
            help="The store to try; default: the local one. Or a script: its loader is tried.",
        ),
    ] = None,
    args: JobArguments = None,
    *,
    infra: Annotated[
        str | None,
        typer.Option(
            "--infra",
            metavar="PLACE",
            help="Where jobs shall run; default: what the settings here say.",
        ),
    ] = None,
    end_orphans: Annotated[
        bool,
        typer.Option("--end-orphans", help="End the clusters that nobody wants, after asking."),
    ] = False,
    end: Annotated[
        list[str] | None,
        typer.Option(
            "--end", metavar="CLUSTER", help="End this one, also where its job still trains."
        ),
    ] = None,
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Check this machine and a store: what works, what is missing, how fast it is.

    Tells which clouds SkyPilot has enabled, and why not those on which jobs shall run: those of
    `--infra`, else of `infra` and `on_demand_infra` in spotguard.toml, your own file or a variable.
    Tells how long an emergency save would take from here, and of clusters that cost money though
    nobody wants them: their run is at rest, or neither its controller nor its job gives a sign of
    life. One whose job still trains is ended only by its name, with `--end`. What is written to
    try the store is deleted again. Exits with 3 when something that is required does not work, or
    a cluster that nobody wants is left.

    With a SCRIPT it tries that one's loader instead, on this machine's CPU: workers, pinning, how
    long each step waits for data, and what to change with the gain to expect. The script's own
    arguments come after `--`.
    """
    if store is not None and store.endswith(".py"):
        if end_orphans or end:
            raise UsageError("a script's loader is tried, or clusters are ended: not both at once")
        _try_loader(store, args or [], infra, as_json=as_json)
        return
    if args:
        raise UsageError(f"{args[0]}: arguments are for a script, and {store} is none")
    from spotguard.api import doctor as api
    from spotguard.api.settings import places_named
    from spotguard.cli.views.lists import doctor_screen

    places = places_named(infra)
    books = api.skypilot_books()
    with _telling() as tell:
        report = api.examine(store, tell, books, places)
    if not as_json:
        console().print(doctor_screen(report))
    if (end_orphans or end) and books is None:
        note("no cluster to end: SkyPilot was never used here")
    if end and books is not None:
        report = replace(report, clusters=_ended_by_name(report.clusters, end, books))
    if end_orphans and books is not None and report.clusters.orphans:
        report = replace(report, clusters=_ended(report.clusters, books, yes=yes))
    if as_json:
        print_json(report.to_json())
    if not report.ok:
        raise typer.Exit(EnvironmentFailure.exit_code)


def _try_loader(script: str, args: list[str], infra: str | None, *, as_json: bool) -> None:
    from spotguard.api.doctor import DoctorReport, try_loader
    from spotguard.cli.views.loader import loader_screen

    spec = resolve_job(script, args, {} if infra is None else {"infra": infra}).spec
    with heard_as_ctrl_c(signal.SIGTERM, signal.SIGHUP):
        found = try_loader(spec, note)
    if as_json:
        print_json(DoctorReport(checks=(), loader=found).to_json())
    else:
        console().print(loader_screen(found))


def _ended(found: "Findings", books: "Books", *, yes: bool) -> "Findings":
    from spotguard.api.doctor import end_orphans

    if not yes:
        training = sum(each.training_at_step is not None for each in found.orphans)
        confirm(
            f"{found.words()}. End them{f', though {training} of them train' if training else ''}?",
            refused="nothing was ended",
        )
    with _telling() as tell:
        ended = end_orphans(found, books, tell)
    _tell_ended(ended)
    return ended


def _ended_by_name(found: "Findings", names: list[str], books: "Books") -> "Findings":
    from spotguard.api.doctor import end_named

    with _telling() as tell:
        ended = end_named(found, names, books, tell)
    _tell_ended(ended)
    return ended


def _tell_ended(found: "Findings") -> None:
    for each in found.leftovers:
        if each.ended or each.problem:
            note(f"{each.cluster.name}: {'ended' if each.ended else each.problem}")


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
