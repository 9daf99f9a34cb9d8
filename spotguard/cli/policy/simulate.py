"""`simulate`: what a job would have cost on a recorded market, under each policy."""

# No postponed annotations: typer reads them, and ruff would move their imports away.
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spotguard.cli.common import JsonOption
from spotguard.cli.flags import resolve_job, takes_job_flags
from spotguard.cli.terminal.output import console, note, print_json
from spotguard.cli.up import JobArguments, ScriptArgument
from spotguard.errors import EnvironmentFailure, SpecError, UsageError
from spotguard.shared.units import parse_duration_s

if TYPE_CHECKING:
    from spotguard.policy.market.recorded import RecordedZone
    from spotguard.spec.model import JobSpec


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
    from spotguard.cli.views.simulation import simulation_screen
    from spotguard.policy.simulation.plot import svg
    from spotguard.policy.simulation.report import simulate as simulated

    spec = resolve_job(script, args or [], flags).spec
    if spec.deadline_s is None:
        raise SpecError("deadline", "simulate needs one", hint="give it: --deadline 36h")
    zones, name, gpus = _market(spec, market, trace)
    made = simulated(
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
            plot.write_text(svg(made))
        except OSError as problem:
            reason = problem.strerror or str(problem)
            raise EnvironmentFailure(f"{plot} cannot be written: {reason}") from problem
    if as_json:
        print_json(made.to_json())
    else:
        console().print(simulation_screen(made))


def _market(
    spec: "JobSpec", market: str | None, trace: Path | None
) -> "tuple[tuple[RecordedZone, ...], str, int]":
    """Return the recorded zones, the market's name, and recorded nodes per node of the job."""
    from spotguard.policy.market.recorded import accelerators, zones_of, zones_of_folder
    from spotguard.spec.infra import gpu_alternatives

    gpu, _, count = next(iter(gpu_alternatives(spec.gpus)), "").partition(":")
    gpus = int(count) if count.isdigit() else 1
    if trace is not None:
        if market is not None:
            raise UsageError("--market and --trace cannot both be given")
        return zones_of_folder(trace), str(trace), 1
    name = (market or gpu).upper()
    known = ", ".join(accelerators())
    if not name:
        raise UsageError("no GPU is named", hint=f"give --gpus, or --market with one of: {known}")
    zones = zones_of(name)
    if not zones:
        raise UsageError(
            f"no forecast: nothing is recorded for {name}",
            hint=f"recorded are: {known}; your own traces: --trace DIR",
        )
    gang = spec.nodes.max * gpus
    gaps = {zone.gap_s: [each for each in zones if each.gap_s == zone.gap_s] for zone in zones}
    able = [group for group in gaps.values() if max(each.nodes_max for each in group) >= gang]
    return tuple(able[0] if able else zones), name, gpus
