"""`simulate`: what a job would have cost on a recorded market, under each policy."""

# No postponed annotations: typer reads them, and ruff would move their imports away.
from pathlib import Path
from typing import Annotated

import typer

from spotguard.cli.common import JsonOption
from spotguard.cli.flags import resolve_job, takes_job_flags
from spotguard.cli.terminal.output import console, note, print_json
from spotguard.cli.up import JobArguments, ScriptArgument
from spotguard.errors import EnvironmentFailure, SpecError
from spotguard.shared.units import parse_duration_s


def _duration(text: str) -> float:
    try:
        return parse_duration_s(text)
    except ValueError:
        raise typer.BadParameter(
            f"given {text!r}; allowed: a duration, such as 90s, 10m or 1h30m"
        ) from None


@takes_job_flags(only=("infra", "nodes", "deadline", "gpus"))
def simulate(
    script: ScriptArgument,
    args: JobArguments = None,
    *,
    flags: dict[str, object],
    work: Annotated[
        float,
        typer.Option(
            metavar="DURATION", parser=_duration, help="Training time on all nodes, undisturbed."
        ),
    ],
    start: Annotated[
        float,
        typer.Option(
            metavar="DURATION",
            parser=_duration,
            help="From buying nodes to the first step.",
            show_default="10m",
        ),
    ] = 600.0,
    market: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="A recorded accelerator; default: that of --gpus."),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A folder with traces of your own.")
    ] = None,
    policy: Annotated[
        str, typer.Option(metavar="A,B", help="Policies to compare.")
    ] = "rollout,constants",
    runs: Annotated[
        int, typer.Option(min=1, max=100_000, metavar="N", help="Runs of each policy.")
    ] = 200,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Of the runs' beginnings.")] = 0,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a picture (SVG) there.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Play SCRIPT's job on a recorded spot market, many times, without launching anything.

    Prints what each policy costs and when it is done, against on demand and against somebody who
    knows the market. The same seed gives the same answer.
    """
    from spotguard.api import simulation
    from spotguard.cli.views.simulation import simulation_screen

    spec = resolve_job(script, args or [], flags).spec
    if spec.deadline_s is None:
        raise SpecError("deadline", "simulate needs one", hint="give it: --deadline 36h")
    zones, name, gpus = simulation.recorded_market(spec, market, trace)
    made = simulation.simulate(
        zones,
        market=name,
        gang=spec.nodes.max * gpus,
        work_s=work,
        deadline_s=spec.deadline_s,
        start_s=start,
        policies=[each.strip() for each in policy.split(",") if each.strip()],
        runs=runs,
        seed=seed,
        progress=None if as_json else lambda words: note(f"simulating: {words} ..."),
    )
    if plot is not None:
        try:
            plot.write_text(simulation.svg(made))
        except OSError as problem:
            reason = problem.strerror or str(problem)
            raise EnvironmentFailure(f"{plot} cannot be written: {reason}") from problem
    if as_json:
        print_json(made.to_json())
    else:
        console().print(simulation_screen(made))
