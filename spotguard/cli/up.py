"""`up` and `plan`: from a script to a running job."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from spotguard.cli.common import (
    DetachOption,
    JsonOption,
    PatienceOption,
    YesOption,
    aside,
    follow_to_end,
    heard_as_ctrl_c,
    say_detached,
)
from spotguard.cli.flags import SmokeOption, resolve_launch, takes_job_flags, with_smoke
from spotguard.cli.follow import DEFAULT_PATIENCE_S
from spotguard.cli.policy.controller import ControllerOption, offer_words
from spotguard.cli.policy.sweep import (
    GoalOption,
    MetricOption,
    ParallelOption,
    PointBudgetOption,
    PruneOption,
    SweepOption,
    begin_sweep,
    plan_of_sweep,
)
from spotguard.cli.terminal.output import confirm, console, note, print_json
from spotguard.errors import SpotguardError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spotguard.api.documents import BatchCurve, JobPlan, Offer, Smoke, Snapshot, Survey
    from spotguard.api.run import Run
    from spotguard.api.settings import JobSpec, Resolved

ScriptArgument = Annotated[
    str, typer.Argument(metavar="SCRIPT", help="The training script.", show_default=False)
]
JobArguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="-- ARGS", help="The script's own arguments, after `--`."),
]

GlobalBatchOption = Annotated[
    int | None,
    typer.Option(
        "--global-batch",
        min=1,
        metavar="SAMPLES",
        help="Samples of one step, over all ranks.",
        show_default="what the script says",
    ),
]
MicroBatchOption = Annotated[
    int | None,
    typer.Option(
        "--micro-batch",
        min=1,
        metavar="SAMPLES",
        help="Samples of one forward pass.",
        show_default="what the script says",
    ),
]


ProbeOption = Annotated[
    bool,
    typer.Option(
        "--probe",
        help="Try sizes of micro-batches on this machine's CPU, of a script with "
        'micro_batch_size="auto": what each takes in memory and time, and which is taken.',
    ),
]
ProbeMemoryOption = Annotated[
    float | None,
    typer.Option(
        "--probe-memory",
        min=0.01,
        metavar="GB",
        help="For --probe: the memory that stands in for a device's.",
        show_default="most of what is free here",
    ),
]
YamlOption = Annotated[
    bool,
    typer.Option("--yaml", help="Print the SkyPilot task that would be launched first."),
]


@takes_job_flags()
def up(
    script: ScriptArgument,
    args: JobArguments = None,
    *,
    flags: dict[str, object],
    smoke: SmokeOption = None,
    points: SweepOption = None,
    parallel: ParallelOption = None,
    point_budget: PointBudgetOption = None,
    metric: MetricOption = None,
    goal: GoalOption = None,
    prune: PruneOption = None,
    controller: ControllerOption = "local",
    yes: YesOption = False,
    detach: DetachOption = False,
    contact_patience: PatienceOption = DEFAULT_PATIENCE_S,
    as_json: JsonOption = False,
) -> None:
    """Launch SCRIPT and follow it through every interruption.

    Shows the plan and asks first. Ctrl-C leaves; the run goes on in the background. The script's
    own arguments come after `--`: spotguard up train.py --nodes 2 -- --lr 3e-4

    Before nodes cost money, the script trains for two steps on this machine's CPU, saves and
    restores; what does not work is told in a sentence, and nothing is launched (exit 10).

    With --sweep, each combination of values is a run of its own, and all have one budget.
    """
    from spotguard.api import launching

    resolved = resolve_launch(script, args or [], with_smoke(flags, smoke))
    swept = plan_of_sweep(
        points,
        parallel=parallel,
        point_budget=point_budget,
        metric=metric,
        goal=goal,
        prune=prune,
    )
    whole = resolved.spec
    if swept is not None:
        from spotguard.api.sweeps import check_sweep

        check_sweep(whole, swept)
        resolved = replace(resolved, spec=swept.job(whole, 1))
    if as_json and not yes:
        raise UsageError("--json leaves no room for a question", hint="pass --yes as well")
    if swept is not None and controller != "local":
        raise UsageError(
            "--controller: a sweep's points are controlled from this machine",
            hint="leave --controller out, or start the points one by one",
        )
    node = _controller_node(resolved.spec, controller)
    found = launching.survey_phases(resolved.spec, aside)
    code = launching.fix_code(resolved.spec, aside)
    if as_json:
        tell_lack(resolved.spec)
        _smoke(resolved.spec, code)
    else:
        show_plan(_plan(resolved, found, _smoke(resolved.spec, code)))
        if told := launching.team_outlook(resolved.spec):
            note(told)
    if swept is not None:
        begin_sweep(whole, swept, found, code, yes=yes, detach=detach, as_json=as_json)
        return
    if node is not None:
        note(f"controller: {offer_words(node)}")
    if not yes:
        confirm("Start?", refused="nothing was started")
    run = launching.start(resolved.spec, found, code=code)
    if node is not None:
        run = _move_controller(run)
    if detach:
        if as_json:
            print_json(run.status().to_json())
        else:
            say_detached(run)
        return
    note(f"{run.name} started")
    follow_to_end(run, patience_s=contact_patience, as_json=as_json)


def _controller_node(job: JobSpec, where: str) -> Offer | None:
    """Return the node that a job's controller gets; None where it stays on this machine."""
    if where == "local":  # the usual one: SkyPilot is not loaded for it
        return None
    from spotguard.api.controllers import node_for_job

    return node_for_job(job, where)


def _move_controller(run: Run) -> Run:
    """Move the controller of a run that has begun; the run goes on here where that cannot be."""
    from spotguard.api.controllers import move_away

    note(f"{run.name} started; its controller moves to a node of its own")
    try:
        return move_away(run, note)
    except SpotguardError as problem:
        note(f"note: {problem.message}")
        if problem.hint:
            note(f"hint: {problem.hint}")
        return run


@takes_job_flags()
def plan(
    script: ScriptArgument,
    args: JobArguments = None,
    *,
    flags: dict[str, object],
    global_batch: GlobalBatchOption = None,
    micro_batch: MicroBatchOption = None,
    smoke: SmokeOption = None,
    probe: ProbeOption = False,
    probe_memory: ProbeMemoryOption = None,
    as_yaml: YamlOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show where SCRIPT would run and what it would cost; start nothing.

    With the sizes of its batches, also how a step falls onto the ranks on each number of nodes.
    With --smoke, what its first steps on this machine's CPU measure; without, what they did when
    they last passed. With --probe, what micro-batches of each size take.
    """
    from spotguard.api import launching

    if probe_memory is not None and not probe:
        raise UsageError("--probe-memory says nothing without --probe", hint="pass both")
    unheard = {"--json": as_json, "--smoke": smoke, "--probe": probe}
    if as_yaml and any(unheard.values()):
        given = next(name for name, value in unheard.items() if value)
        raise UsageError(
            f"--yaml and {given} exclude each other", hint="--yaml prints the task, and no plan"
        )
    resolved = resolve_launch(script, args or [], with_smoke(flags, smoke))
    batches = _batches(resolved.batches, global_batch, micro_batch)
    found = launching.survey_phases(resolved.spec, aside)
    if as_yaml:
        _print_tasks(resolved.spec, found)
        return
    measured = _smoke(resolved.spec) if smoke else launching.known_smoke(resolved.spec)
    planned = _plan(replace(resolved, batches=batches), found, measured)
    if probe:
        planned = replace(planned, probe=_probe(resolved.spec, probe_memory))
    if as_json:
        print_json(planned.to_json())
    else:
        show_plan(planned)


def _batches(
    said: tuple[int, int] | None, global_batch: int | None, micro_batch: int | None
) -> tuple[int, int] | None:
    """Return the sizes of the command line, and else of the script."""
    chosen = (global_batch or (said and said[0]), micro_batch or (said and said[1]))
    if chosen[0] and chosen[1]:
        return chosen[0], chosen[1]
    if global_batch or micro_batch:
        missing = "--micro-batch" if global_batch else "--global-batch"
        raise UsageError(
            f"the script does not say the other size of its batches: {missing} is missing",
            hint="give both --global-batch and --micro-batch",
        )
    return None


def _smoke(spec: JobSpec, code: Snapshot | None = None) -> Smoke | None:
    """Try the script if it is to be tried; return what that measured, None if it was not."""
    from spotguard.api.launching import try_first_steps

    with heard_as_ctrl_c(signal.SIGTERM, signal.SIGHUP):
        outcome = try_first_steps(spec, note, code)
    if outcome is None:
        return None
    if outcome.skipped:
        note(f"smoke: skipped, so nothing is proven: {outcome.skipped}")
    elif outcome.warning:
        note(f"smoke: passed, but {outcome.warning}")
    elif outcome.is_old:
        note("smoke: passed before, and nothing has changed since")
    else:
        note("smoke: passed; the same is not tried again")
    return outcome.smoke


def _probe(spec: JobSpec, memory_gb: float | None) -> BatchCurve:
    from spotguard.api.launching import probe_batches

    memory = None if memory_gb is None else int(memory_gb * 1e9)
    with heard_as_ctrl_c(signal.SIGTERM, signal.SIGHUP):
        return probe_batches(spec, note, memory_bytes=memory)


def _plan(resolved: Resolved, found: Sequence[Survey], smoke: Smoke | None) -> JobPlan:
    from spotguard.api.launching import plan_job

    job, batches = resolved.spec, resolved.batches
    return plan_job(job, found, batches=batches, lack=tell_lack(job), smoke=smoke)


def tell_lack(spec: JobSpec) -> tuple[str, ...]:
    """Say what the script needs and local nodes lack; return the requirements."""
    from spotguard.api.launching import lack_of_job

    lack = lack_of_job(spec)
    for sentence in lack.words():
        note(f"note: {sentence}")
    return lack.requirements


def _print_tasks(job: JobSpec, found: Sequence[Survey]) -> None:
    """Print the task of each phase; a phase on this machine has none."""
    from spotguard.api.launching import first_task
    from spotguard.api.settings import LOCAL

    for index, each in enumerate(found):
        spec = job.in_phase(index)
        if job.phases:
            until = job.phases[index].until_step
            ends = "to the end" if until is None else f"until step {until}"
            typer.echo(f"{'---' if index else ''}\n# phase {index + 1}, {ends}".lstrip())
        if job.phases and spec.infra == LOCAL:
            typer.echo("# on this machine, without SkyPilot")
            continue
        typer.echo(first_task(spec, each), nl=False)


def show_plan(planned: JobPlan) -> None:
    """Print what would be launched, and for how much."""
    from spotguard.cli.views.plan import plan_screen

    terminal = console()
    terminal.print(plan_screen(planned, width=terminal.width))
    if planned.probe is not None:
        from spotguard.cli.views.batch_curve import curve_screen

        terminal.print(curve_screen(planned.probe))
