"""`up --sweep` and `sweep`: many runs of one script under one budget, and one table of them."""

# No postponed annotations: typer reads them, and ruff would move their imports away.
import signal
import time
from typing import TYPE_CHECKING, Annotated

import typer

from spotguard.cli.common import JsonOption, YesOption
from spotguard.cli.flags import setting_value
from spotguard.cli.terminal.output import confirm, console, note, print_json, say
from spotguard.errors import Detached, EnvironmentFailure, SpecError, UsageError
from spotguard.shared.json_documents import document

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spotguard.api.documents import (
        Snapshot,
        Survey,
        SweepDocument,
        SweepPlan,
        SweepPoint,
    )
    from spotguard.api.settings import JobSpec
    from spotguard.api.sweeps import Sweep

DEFAULT_PARALLEL = 4
DEFAULT_GOAL = "min"
_PANEL = "A sweep"
_LOOK_EVERY_S, _LOOK_AT_BUCKET_EVERY_S = 1.0, 10.0
_REPAIR_EVERY_S = 15.0

SweepOption = Annotated[
    str | None,
    typer.Option(
        "--sweep",
        metavar="POINTS",
        help="A run for each combination: 'lr=1e-3,3e-4 seed=1..4'; --budget is that of all.",
        rich_help_panel=_PANEL,
        show_default=False,
    ),
]
ParallelOption = Annotated[
    int | None,
    typer.Option(
        "--parallel",
        min=1,
        metavar="N",
        help="At once.",
        rich_help_panel=_PANEL,
        show_default=str(DEFAULT_PARALLEL),
    ),
]
PointBudgetOption = Annotated[
    str | None,
    typer.Option(
        "--point-budget",
        metavar="USD",
        help="The most that one may cost.",
        rich_help_panel=_PANEL,
        show_default="an equal part of --budget",
    ),
]
MetricOption = Annotated[
    str | None,
    typer.Option(
        "--sweep-metric",
        metavar="NAME",
        help="What they are compared by, as run.log calls it.",
        rich_help_panel=_PANEL,
        show_default=False,
    ),
]
GoalOption = Annotated[
    str | None,
    typer.Option(
        "--sweep-goal",
        metavar="min|max",
        help="Which is better.",
        rich_help_panel=_PANEL,
        show_default=DEFAULT_GOAL,
    ),
]
PruneOption = Annotated[
    int | None,
    typer.Option(
        "--sweep-prune",
        min=1,
        metavar="STEPS",
        help="After so many steps, then twice as many, stop all but the best half.",
        rich_help_panel=_PANEL,
        show_default=False,
    ),
]


def plan_of_sweep(
    points: str | None,
    *,
    parallel: int | None,
    point_budget: str | None,
    metric: str | None,
    goal: str | None,
    prune: int | None,
) -> "SweepPlan | None":
    """Return what is asked of a sweep; None for a single run.

    Raises:
        UsageError: a sweep's option without --sweep, or one that makes no sense.
    """
    if points is None:
        alone = {
            "--parallel": parallel,
            "--point-budget": point_budget,
            "--sweep-metric": metric,
            "--sweep-goal": goal,
            "--sweep-prune": prune,
        }
        given = [name for name, value in alone.items() if value is not None]
        if given:
            raise UsageError(f"{given[0]} is of a sweep, and there is no --sweep")
        return None
    from spotguard.api.documents import SweepPlan
    from spotguard.api.settings import points_of

    return SweepPlan(
        points=tuple(points_of(points)),
        at_once=DEFAULT_PARALLEL if parallel is None else parallel,
        point_budget_usd=_usd(point_budget),
        metric=metric,
        goal=DEFAULT_GOAL if goal is None else goal,
        first_step=prune,
    )


def _usd(text: str | None) -> float | None:
    try:
        usd: float | None = setting_value("budget", text)
    except SpecError as problem:
        raise SpecError("--point-budget", problem.message.partition(": ")[2]) from None
    return usd


def begin_sweep(
    spec: "JobSpec",
    plan: "SweepPlan",
    found: "Sequence[Survey] | None",
    code: "Snapshot | None" = None,
    *,
    yes: bool,
    detach: bool,
    as_json: bool,
) -> None:
    """Tell what the sweep is, ask, begin it, and follow it unless it is to be left."""
    from spotguard.api.sweeps import start_sweep

    if not as_json:
        say(_plan_words(spec, plan))
    if not yes:
        confirm(f"Start {len(plan.points)} runs?", refused="nothing was started")
    before = signal.getsignal(signal.SIGHUP)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a terminal that closes leaves no half of it
    try:
        begun = start_sweep(spec, plan, found, code=code)
    except KeyboardInterrupt:
        note("\nsome of its runs may have begun: `spotguard sweep` goes on, with --stop it ends")
        raise
    finally:
        signal.signal(signal.SIGHUP, before)
    if detach and as_json:
        print_json(document(begun.table()))
    elif detach:
        _say_left(begun)
    else:
        note(f"{begun.name} started: {len(plan.points)} runs")
        follow_sweep(begun, as_json=as_json)


def _plan_words(spec: "JobSpec", plan: "SweepPlan") -> str:
    from spotguard.shared.units import format_usd

    of_one = plan.share_usd(spec)
    sums = f"{format_usd(spec.budget_usd)} for all, at most {format_usd(of_one)} for each"
    count = len(plan.points)
    points = "1 point" if count == 1 else f"{count} points, {plan.at_once} at once"
    words = f"sweep: {points}; {sums}"
    if of_one * len(plan.points) > (spec.budget_usd or 0.0) * (1 + 1e-9):
        words += "; the last are not begun if those before them use it all"
    if plan.first_step is not None:
        words += f"; compared by {plan.metric} from step {plan.first_step} on"
    return words


def sweep(
    wanted: Annotated[
        str | None,
        typer.Argument(
            metavar="SWEEP",
            help="Its id, or its unique beginning, or STORE/SWEEP_ID; default: the newest.",
        ),
    ] = None,
    *,
    stop: Annotated[bool, typer.Option("--stop", help="Have all its runs save and stop.")] = False,
    down: Annotated[
        bool, typer.Option("--down", help="Release the nodes of all its runs without saving.")
    ] = False,
    budget: Annotated[
        str | None,
        typer.Option(
            "--budget",
            metavar="USD",
            help="Raise what all may cost together; runs that paused for want of money go on.",
            show_default=False,
        ),
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Follow it until all have ended.")
    ] = False,
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Tell how each point of a sweep stands, or why it ended, and which is the best."""
    from spotguard.api.sweeps import Sweep

    known = Sweep.find(wanted)
    if stop + down + (budget is not None) > 1:
        raise UsageError("--stop, --down and --budget exclude each other")
    if stop or down:
        if down and not (yes or known.in_store):
            confirm(f"Release the nodes of all runs of {known.name} unsaved?", refused="no change")
        count = known.stop() if stop else known.down()
        note(f"{known.name}: {count} runs asked to {'save and stop' if stop else 'end'}")
    elif budget is not None:
        _raise_budget(known, budget)
    elif known.go_on():
        note("note: some of its runs had no controller; they go on now")
    if watch:
        follow_sweep(known, as_json=as_json)
    told = known.table()
    if as_json:
        print_json(document(told))
    else:
        show_sweep(told, known)


def _raise_budget(known: "Sweep", budget: str) -> None:
    usd: float | None = setting_value("budget", budget)
    if usd is None:
        raise UsageError("--budget: a sweep has one; it can be raised, and not be taken away")
    raised = known.raise_budget(usd)
    note(f"{known.name}: {len(raised.resumed)} paused runs go on")
    for run_id, problem in raised.problems.items():
        note(f"{run_id} does not: {problem.message}")


def follow_sweep(known: "Sweep", *, as_json: bool) -> None:
    """Follow a sweep until all its points have ended, and exit with its code; Ctrl-C leaves."""
    watch, seen = known.watch(), dict[int, tuple[str, str]]()
    repaired_at = time.monotonic()
    try:
        while True:
            told = watch.look()
            if not as_json:
                _tell_news(told.points, seen)
            if watch.is_over(told):
                break
            time.sleep(_LOOK_EVERY_S if told.in_folder else _LOOK_AT_BUCKET_EVERY_S)
            if time.monotonic() - repaired_at > _REPAIR_EVERY_S:
                known.go_on()
                repaired_at = time.monotonic()
    except KeyboardInterrupt:
        _say_left(known)
        raise typer.Exit(Detached.exit_code) from None
    if as_json:
        print_json(document(told))
    else:
        show_sweep(told, known)
    raise typer.Exit(exit_code(told.points))


def _tell_news(points: "Sequence[SweepPoint]", seen: dict[int, tuple[str, str]]) -> None:
    for point in points:
        if point.state is None and not point.unreadable:
            continue
        ended = point.detail if point.settled or point.unreadable else ""
        ended = ended.removeprefix("pruned ")
        if seen.get(point.number) != (label := point.state_label, ended):
            seen[point.number] = label, ended
            why = f" {ended}" if point.pruned else f": {ended}" if ended else ""
            say(f"{point.number:02d} {point.words} {label}{why}")


def exit_code(points: "Sequence[SweepPoint]") -> int:
    """Return that of the first point which neither finished nor was pruned; 0 without one."""
    codes = [_code_of(each) for each in points if not each.pruned]
    return next((code for code in codes if code != 0), 0)


def _code_of(point: "SweepPoint") -> int:
    """Return how a point's run ended; of one that goes on, that it was left, or unreadable."""
    if point.unreadable:
        return EnvironmentFailure.exit_code
    return Detached.exit_code if point.exit_code is None else point.exit_code


def show_sweep(told: "SweepDocument", known: "Sweep") -> None:
    """Print the table of a sweep, and which point is the best."""
    from spotguard.cli.views import formats
    from spotguard.cli.views.lists import sweep_table

    console().print(sweep_table(told))
    played = " (demo prices)" if told.demo_prices else ""
    say(f"{formats.usd(told.spent_usd)} of {formats.usd(told.budget_usd)} spent{played}")
    best = next((point for point in told.points if point.run_id == told.best), None)
    if best is not None:
        run = known.run_of(best).name
        value = f"{told.metric} {formats.value(best.value)}"
        say(f"best: {best.run_id}, {value}, saved at step {best.saved_step}")
        say(f"to prove that save: spotguard checkpoints verify {run}")
    elif told.metric and any(point.saved_step is not None for point in told.points):
        say(f"none has logged {told.metric!r} so far: run.log({told.metric}=...) in the script")


def _say_left(known: "Sweep") -> None:
    note(f"\n{known.name} goes on in the background.")
    note(f"  look:  spotguard sweep {known.name}")
    note(f"  stop:  spotguard sweep {known.name} --stop")
