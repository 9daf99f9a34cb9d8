"""`stop`, `down`, `resume` and `adopt`: changing a run's course. `ssh` and `exec`: to its nodes.

Where the journal or the controller cannot be used, `stop` and `down` do without them.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spotguard.api import Run
from spotguard.cli.common import (
    AnyRunArgument,
    DetachOption,
    JsonOption,
    PatienceOption,
    RunArgument,
    YesOption,
    aside,
    follow_to_end,
    outcome,
    say_detached,
    steered_run,
)
from spotguard.cli.flags import setting_value, takes_job_flags, with_variables
from spotguard.cli.follow import DEFAULT_PATIENCE_S, LineScreen, RunSource, SilentScreen, follow
from spotguard.cli.terminal.output import confirm, note, print_json, say
from spotguard.errors import Detached, EnvironmentFailure, JournalDamaged, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from spotguard.api.documents import Left, NodeCommand, RunView, StoredJob, Survey
    from spotguard.api.settings import JobSpec
    from spotguard.cli.follow import Screen

NodeOption = Annotated[
    int, typer.Option("--node", min=0, metavar="N", help="Which node; the first is 0.")
]
_PLACE = (
    *("infra", "gpus", "nproc_per_node", "template"),
    *("market", "on_demand", "on_demand_infra", "max_price", "price", "on_demand_price"),
)
"""Options that say where a run goes on, beside its nodes."""
_BY_SIGNAL = 128
"""What a shell adds to the number of the signal that ended a command."""


def stop(
    run: AnyRunArgument = None,
    *,
    yes: YesOption = False,
    contact_patience: PatienceOption = DEFAULT_PATIENCE_S,
) -> None:
    """Save a run's state, then release its nodes.

    `spotguard resume` goes on from there.
    """
    known = Run.find(run)
    try:
        _end(steered_run(known.name), Run.stop, "asked to save and stop", contact_patience)
    except EnvironmentFailure as problem:
        _stop_alone(known, problem, yes=yes)


def down(
    run: AnyRunArgument = None,
    *,
    yes: YesOption = False,
    contact_patience: PatienceOption = DEFAULT_PATIENCE_S,
) -> None:
    """Release a run's nodes at once, without saving first.

    `spotguard resume` goes on from the last save.
    """
    known = Run.find(run)
    try:
        steered = steered_run(known.name)
        _confirm_down(steered, yes=yes)
        _end(steered, Run.down, "its nodes are being released", contact_patience)
    except EnvironmentFailure as problem:
        _down_alone(known, problem, yes=yes)


@takes_job_flags(only=_PLACE)
def resume(
    run: AnyRunArgument = None,
    *,
    flags: dict[str, object],
    budget: Annotated[
        str | None, typer.Option(metavar="USD", help="New budget for the whole run.")
    ] = None,
    deadline: Annotated[
        str | None, typer.Option(metavar="DURATION", help="New deadline, from now on.")
    ] = None,
    nodes: Annotated[
        str | None, typer.Option(metavar="N|MIN:MAX", help="New node count or range.")
    ] = None,
    stop_first: Annotated[
        bool, typer.Option("--stop", help="Where it still goes on: save and stop it first.")
    ] = False,
    same_code: Annotated[
        bool, typer.Option("--same-code", help="Keep the code that the run has.")
    ] = False,
    yes: YesOption = False,
    detach: DetachOption = False,
    contact_patience: PatienceOption = DEFAULT_PATIENCE_S,
    as_json: JsonOption = False,
) -> None:
    """Go on with a paused, stopped or failed run, from its last save.

    What has changed in the job's folder since counts from here on, and is told.

    With --infra, --gpus or another word on where, it moves there: what that costs is shown, and
    asked for, first. The steps, the budget and the history go on.
    """
    known = steered_run(run)
    budget_usd, deadline_s = setting_value("budget", budget), setting_value("deadline", deadline)
    if flags:
        moves = _Move.of(known, {**flags, "nodes": nodes}, budget_usd=budget_usd)
        moves.confirm(stop_first=stop_first, yes=yes, as_json=as_json)
    if stop_first and not known.status().state.settled:
        _stop_first(known, contact_patience, as_json=as_json)
        if flags:
            moves.check_still(known)
    resumed_at = known.now()
    if flags:
        known.move(
            {**flags, "nodes": nodes},
            budget_usd=budget_usd,
            deadline_s=deadline_s,
            found=moves.found,
            same_code=same_code,
            tell=note,
        )
    else:
        known.resume(
            budget_usd=budget_usd,
            deadline_s=deadline_s,
            nodes=setting_value("nodes", nodes),
            same_code=same_code,
            tell=note,
        )
    if detach:
        if as_json:
            print_json(known.status().to_json())
        else:
            say_detached(known)
        return
    note(f"{known.name} {'goes on elsewhere' if flags else 'resumed'}")
    follow_to_end(known, since_at=resumed_at, patience_s=contact_patience, as_json=as_json)


@dataclass(frozen=True, kw_only=True)
class _Move:
    """What a run would be elsewhere, looked up before it is asked for."""

    view: RunView
    spec: JobSpec
    """With the new place, and the whole run's budget."""
    settings: dict[str, object]
    found: Survey

    @classmethod
    def of(cls, run: Run, settings: dict[str, object], *, budget_usd: float | None) -> _Move:
        """Look up where nodes can be had there; clouds take seconds to say."""
        from spotguard.api.launching import survey

        spec = run.move_plan(settings)
        if budget_usd is not None:
            spec = spec.replace(budget_usd=budget_usd)
        return cls(view=run.status(), spec=spec, settings=settings, found=survey(spec, aside))

    def confirm(self, *, stop_first: bool, yes: bool, as_json: bool) -> None:
        """Show what it costs there, and ask; refuse what is not to be moved.

        Raises:
            UsageError: the run goes on, and is not to be stopped first.
        """
        from spotguard.api.launching import plan_phase
        from spotguard.cli.up import show_plan, tell_lack

        run_id, living = self.view.run_id, not self.view.state.settled
        if living and not stop_first:
            raise UsageError(
                f"Run {run_id} still goes on, so it cannot be moved.",
                hint=f"spotguard stop {run_id} comes first, or --stop with this command",
            )
        if as_json:
            if not yes:
                raise UsageError("--json leaves no room for a question", hint="pass --yes as well")
            return
        plan = plan_phase(self.spec, self.found, lack=tell_lack(self.spec))
        show_plan(replace(plan, moves=self._words(), name=run_id))
        if not yes:
            question = "Stop it, and go on there?" if living else "Go on there?"
            confirm(question, refused="nothing was changed")

    def check_still(self, run: Run) -> None:
        """Refuse a move that is no more the one that was shown: a phase has ended meanwhile."""
        now = run.move_plan(self.settings).replace(budget_usd=self.spec.budget_usd)
        if now != self.spec:
            raise UsageError(
                f"{run.name} has come into another phase meanwhile; it did not move.",
                hint="repeat the command: it shows what the move is now",
            )

    def _words(self) -> str:
        from spotguard.cli.views import formats

        view = self.view
        last = view.attempts[-1] if view.attempts else None
        came = ""
        if last is not None:
            came = f", last in {formats.place(last)} on {formats.nodes(last.nodes)}"
        spent = formats.usd(view.spent_usd, demo=view.demo_prices)
        begin = f"step {view.saved_step}" if view.saved_step else "the beginning: nothing is saved"
        return f"from {begin}{came}; spent so far {spent}"


def _stop_first(run: Run, patience_s: float, *, as_json: bool) -> None:
    """Have a living run save and come to rest; what it prints is no part of the answer."""
    screen: Screen = SilentScreen() if as_json else LineScreen(since_at=run.now())
    run.stop()
    note(f"{run.name}: asked to save and stop")
    view = follow(RunSource(run, repair_patience_s=0), screen, patience_s=patience_s)
    if not view.state.settled:  # contact was lost, and nothing is known of its nodes
        raise UsageError(
            f"{run.name} has not come to rest, so it did not move: {view.state_detail}.",
            hint=f"look: spotguard status {run.name} --watch; then repeat the command",
        )
    note(outcome(view))


@takes_job_flags(only=("env",))
def adopt(
    url: Annotated[str, typer.Argument(metavar="URL", help="The run's own place: STORE/RUN_ID.")],
    *,
    flags: dict[str, object],
    yes: YesOption = False,
) -> None:
    """Take over a run from its store alone.

    For a new machine, or after the journal was damaged; that file is kept. What a run that was not
    made here would run is shown, and asked for, first; it gets no variables but those of --env.
    """
    from spotguard.cli.common import show_status

    def ask(job: StoredJob) -> bool:
        _show_stored(job)
        if not yes:
            confirm("Adopt it, and let it run that?", refused="nothing was changed")
        return True

    given: Any = with_variables(flags).get("env", {})
    run = Run.adopt(url, note, env=given, ask=ask)
    show_status(run, run.status())


def _show_stored(job: StoredJob) -> None:
    """Say what a store would have this machine run."""
    note(f"{job.place} was not made on this machine. Its store says:")
    wide = max(len(name) for name, _ in job.settings)
    for name, value in job.settings:
        note(f"  {name:<{wide}}  {value}")
    names = [name if name in job.given else f"{name} (not given)" for name in job.variables]
    note(f"  {'variables':<{wide}}  {', '.join(names) or 'none'}")


def _end(run: Run, ask: Callable[[Run], object], asked: str, patience_s: float) -> None:
    view = run.status()
    if view.state.settled:
        say(f"nothing to do: {outcome(view)}")
        return
    asked_at = run.now()
    ask(run)
    note(f"{run.name}: {asked}")
    try:
        source, screen = RunSource(run, repair_patience_s=0), LineScreen(since_at=asked_at)
        view = follow(source, screen, patience_s=patience_s)
    except KeyboardInterrupt:
        note(
            f"\nleft before the end; the request stands. Look: spotguard status {run.name} --watch"
        )
        raise typer.Exit(Detached.exit_code) from None
    say(outcome(view))


def _confirm_down(run: Run, *, yes: bool) -> None:
    from spotguard.cli.views import formats

    view = run.status()
    if not view.state.settled:
        run.check_heard()  # before anything is asked
    if not yes and not view.state.settled:
        kept = f"step {formats.count(view.saved_step)} of {formats.count(view.step)} done"
        confirm(
            f"Release the nodes of {run.name} without saving? The last save is {kept}.",
            refused="the run goes on",
        )


# ---------------------------------------------------------------- without a journal


def _left(run: Run, problem: EnvironmentFailure) -> Left:
    """Return what can be done without a journal; raise the problem where that is nothing."""
    left = run.left()
    if left is None or not (left.clusters or left.released):
        raise problem
    return left


def _down_alone(run: Run, problem: EnvironmentFailure, *, yes: bool) -> None:
    left = _left(run, problem)
    if left.released:
        say(f"nothing to do: {left.run_id} has no cluster any more; {_rest(left, problem)}")
        return
    names = ", ".join(left.clusters)
    _confirm_alone(f"Release {names} without saving?", left, problem, yes=yes)
    note(f"{left.run_id}: {names} is being released, by what is written down of its launches")
    run.down_alone(note)
    say(f"{left.run_id} has no cluster any more: {names} released; {_rest(left, problem)}")


def _stop_alone(run: Run, problem: EnvironmentFailure, *, yes: bool) -> None:
    from spotguard.cli.views import formats

    left = _left(run, problem)
    if left.released:
        say(f"nothing to do: {left.run_id} has no cluster any more; {_rest(left, problem)}")
        return
    names = ", ".join(left.clusters)
    yes = yes or left.controller_pid is None
    _confirm_alone(f"Save and release {names}?", left, problem, yes=yes)
    note(f"{left.run_id}: asked to save and stop, by what is written down of its launches")
    try:
        step = run.stop_alone(note)
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


# ---------------------------------------------------------------- onto the nodes


def ssh(
    run: RunArgument = None,
    node: Annotated[
        int, typer.Argument(min=0, metavar="NODE", help="Which node; the first is 0.")
    ] = 0,
) -> None:
    """Open a shell on a node of a living run."""
    raise typer.Exit(_ran(Run.find_here(run).ssh(node)))


def exec_(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="The run's id, or its unique beginning.")
    ],
    command: Annotated[
        list[str], typer.Argument(metavar="-- CMD", help="The command, after `--`.")
    ],
    *,
    node: NodeOption = 0,
) -> None:
    """Run a command on a node of a living run, in the job's folder; exit with its code."""
    raise typer.Exit(_ran(Run.find_here(run).exec(command, node)))


def _ran(command: NodeCommand) -> int:
    """Run it with this terminal's input and output; return its exit code."""
    from spotguard.api.documents import SSH_FAILED

    try:
        code = subprocess.run(command.words, cwd=command.folder, check=False).returncode
    except OSError as problem:
        raise EnvironmentFailure(
            f"{command.words[0]} cannot be run: {problem.strerror or problem}.",
            hint="is it installed?" if command.host is None else "install an ssh client",
        ) from problem
    if code == SSH_FAILED and command.host is not None:
        note(
            f"hint: if ssh did not find {command.host}, `sky status --refresh` writes its address"
            " into the ssh configuration; it is known where the run was launched"
        )
    return code if code >= 0 else _BY_SIGNAL - code
