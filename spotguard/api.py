"""Runs from Python: what the command line does, without its words.

The commands `up`, `runs`, `status`, `history`, `logs`, `stop`, `down`, `resume` and `sweep` use
these names.
Nothing is printed and nobody is asked. A run goes on when the program ends: its controller
is a process of its own. Errors are those of `spotguard.errors`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from spotguard.control.journal.stored.logs import LogLine, LogQuery
    from spotguard.control.status.view import RunSummary, RunView, Story, UnreadableRun
    from spotguard.control.sweep.more_budget import Raised
    from spotguard.control.sweep.sweep_request import SweepPlan
    from spotguard.control.sweep.table import SweepDocument, SweepWatch
    from spotguard.launch.base import Survey
    from spotguard.spec.model import JobSpec
    from spotguard.spec.nodes import NodeRange

__all__ = ["Run", "Sweep", "runs", "runs_of", "start", "start_sweep", "sweep", "up"]

_POLL_S = 2.0


@dataclass(frozen=True)
class Run:
    """A run, by its id or by its place in a store. Each method asks anew, and blocks briefly."""

    name: str
    """Its whole id; or `STORE/RUN_ID`: then it is looked at in its store, and cannot be steered."""

    @property
    def run_id(self) -> str:
        """Its id alone."""
        from spotguard.storage.urls import split_last

        return split_last(self.name)[1]

    @classmethod
    def find(cls, text: str | None = None) -> Run:
        """Return the run that is meant: an id, its beginning, `STORE/RUN_ID`, None the newest.

        Raises:
            UsageError: there is none, or several begin like that.
            StoreError: the store cannot be read.
        """
        from spotguard.control import api

        return cls(api.find_any_run(text))

    def status(self, *, forecast: bool = False) -> RunView:
        """Return how the run stands: state, progress, attempts, money.

        Args:
            forecast: with what it will cost and when it will be done, which takes up to a second.

        Raises:
            UsageError: there is no such run.
            JournalDamaged: what is known of it cannot be read.
        """
        from spotguard.control import api

        return api.foretold(self.name) if forecast else api.view(self.name)

    def history(self, *, newest: int | None = None) -> Story:
        """Return what happened, by time, each line with what the run had cost by then.

        Args:
            newest: how many lines at most; None is all, read as they are asked for.
        """
        from spotguard.control import api

        return api.history(self.name, newest=newest)

    def logs(self, *, follow: bool = False, query: LogQuery | None = None) -> Iterator[LogLine]:
        """Yield what the job printed, attempt after attempt.

        Args:
            follow: whether to go on until the run settles; blocks while nothing is printed.
            query: which lines; None is all.

        Raises:
            UsageError: the run has no such attempt.
        """
        from spotguard.control import api

        return api.logs(self.name, follow, query)

    def stop(self) -> bool:
        """Ask the run to save and then to release its nodes; return at once.

        Returns:
            False if it had settled already.

        Raises:
            UsageError: there is no such run on this machine.
        """
        from spotguard.control import api

        return api.request_stop(self.name)

    def down(self) -> bool:
        """Ask the run to release its nodes without saving; return at once, as `stop` does."""
        from spotguard.control import api

        return api.request_down(self.name)

    def resume(
        self,
        *,
        budget_usd: float | None = None,
        deadline_s: float | None = None,
        nodes: NodeRange | str | int | None = None,
    ) -> None:
        """Let a settled run go on from its last save; return once its controller has begun.

        To go on in another place, `move` it.

        Args:
            budget_usd: new budget of the whole run, with what it has spent so far.
            deadline_s: new deadline in seconds, from now on.
            nodes: new count, or a range such as "2:4".

        Raises:
            UsageError: the run has finished, or still goes on.
            BudgetExhausted: what is left of the budget buys no useful training.
            DeadlineReached: the old deadline has passed and no new one is given.
        """
        from spotguard.control import api

        api.resume(self.name, budget_usd=budget_usd, deadline_s=deadline_s, nodes=nodes)

    def move(
        self,
        settings: Mapping[str, object],
        *,
        budget_usd: float | None = None,
        deadline_s: float | None = None,
        found: Survey | None = None,
    ) -> None:
        """Let a settled run go on from its last save elsewhere; return once it has a controller.

        Args:
            settings: what is new of where it runs, by the keys of docs/configuration.md:
                `{"infra": "aws", "gpus": "A100:8", "nodes": 2}`. What they leave open is as before,
                but for prices, an instance type and a cloud's image, which are of one machine.
            budget_usd: new budget of the whole run, with what it has spent so far.
            deadline_s: new deadline in seconds, from now on.
            found: where nodes can be had, by a caller that has asked: clouds take seconds to say.

        Raises:
            UsageError: the run has finished, or still goes on.
            SpecError: a setting makes no sense, or says nothing of where a job runs; a price is
                unknown.
            BudgetExhausted: what is left of the budget buys no useful training there.
            DeadlineReached: the old deadline has passed and no new one is given.
        """
        from spotguard.control import api
        from spotguard.spec.sources import place_of

        api.move(
            self.name,
            place_of(settings),
            found=found,
            budget_usd=budget_usd,
            deadline_s=deadline_s,
        )


@dataclass(frozen=True)
class Sweep:
    """Many runs of one script under one budget, by the sweep's id or its place in a store."""

    name: str
    """Its whole id; or `STORE/SWEEP_ID`: then it is looked at in its store, and not steered."""

    @classmethod
    def find(cls, text: str | None = None) -> Sweep:
        """Return the sweep that is meant: an id, its beginning, `STORE/SWEEP_ID`, None the newest.

        Raises:
            UsageError: there is none, or several begin like that.
            StoreError: the store cannot be read.
        """
        from spotguard.control.sweep import commands

        return cls(commands.name_of(text))

    def table(self) -> SweepDocument:
        """Return how each of its points stands, or why it ended, and which is the best.

        Raises:
            StoreError: the store cannot be read.
        """
        return self.watch().look()

    def watch(self) -> SweepWatch:
        """Return what makes such a table again and again, at the price of what is new."""
        from spotguard.control.sweep import commands

        return commands.watch(self.name)

    def wait(self) -> SweepDocument:
        """Return its table once all of its points have ended; blocks until then."""
        watch = self.watch()
        while not (told := watch.look()).settled:
            time.sleep(_POLL_S)
            self.go_on()
        return told

    def go_on(self) -> bool:
        """Create its runs that are missing, and start missing controllers; False if none were.

        Somebody was killed then who had just begun to. `wait` and `spotguard sweep` do so, too.
        """
        from spotguard.control.sweep import commands

        return commands.go_on(self.name)

    def raise_budget(self, usd: float) -> Raised:
        """Let all points cost `usd` together; those that paused for want of money go on.

        Each point's own part grows as the whole does, as far as there is money for it; one that
        goes on keeps the part that it has.

        Returns:
            Which runs go on, and why others do not.

        Raises:
            UsageError: that is less than now, or the sweep was stopped, or is named by its place
                in a store.
            EnvironmentFailure, StoreError: the sweep's ledger cannot be read or written.
        """
        from spotguard.control.sweep import commands

        return commands.raise_budget(self.name, usd)

    def stop(self) -> int:
        """Ask all of its runs to save and then to release their nodes; return how many go on.

        Raises:
            EnvironmentFailure: some could not be asked; names them and the way out. All others
                were.
        """
        from spotguard.control.sweep import commands

        return commands.end(self.name, save=True)

    def down(self) -> int:
        """Ask all of its runs to release their nodes without saving, as `stop` does."""
        from spotguard.control.sweep import commands

        return commands.end(self.name, save=False)


def up(
    script: str | Path, args: Sequence[str] = (), settings: Mapping[str, object] | None = None
) -> Run:
    """Launch a training script in the background, and return its run once a controller has it.

    Args:
        script: its path.
        args: the script's own arguments.
        settings: by the keys of docs/configuration.md (`{"budget": 20, "infra": "aws"}`). They
            come before all other sources: variables, the script's own block, `spotguard.toml`.

    Raises:
        SpecError: something is wrong with the script or a setting; nothing was started.
        BudgetExhausted: the budget buys no useful training.
        StoreError: the store cannot be written.
        EnvironmentFailure: no controller could be started.
    """
    from spotguard.spec.sources import resolve

    return start(resolve(script, flags=settings or {}, args=args).spec)


def start(spec: JobSpec, found: Survey | Sequence[Survey] | None = None) -> Run:
    """Launch a job whose settings are resolved already; raises as `up`.

    Args:
        spec: the job.
        found: where nodes can be had, in each of its phases, by a caller that has asked: clouds
            take seconds to say.
    """
    from spotguard.control import api

    run_id = api.create_run(spec, found)
    api.start_controller(run_id)
    return Run(run_id)


def sweep(
    script: str | Path,
    points: str | Sequence[Mapping[str, object]],
    args: Sequence[str] = (),
    settings: Mapping[str, object] | None = None,
    *,
    parallel: int = 4,
    point_budget_usd: float | None = None,
    metric: str | None = None,
    goal: str = "min",
    prune_from: int | None = None,
) -> Sweep:
    """Launch a run for each of many points, and return their sweep once all have a controller.

    Args:
        script: its path.
        points: arguments by name: `"lr=1e-3,3e-4 seed=1..4"` for all combinations, or each point
            as a mapping. A point's stand behind the script's own: `--lr 1e-3 --seed 1`.
        args: the script's own arguments.
        settings: as for `up`; `budget` is what all points may cost together.
        parallel: so many go on side by side, the others wait.
        point_budget_usd: the most that one may cost; None: as many equal parts as there are points.
        metric: by which they are compared, as `run.log` calls it.
        goal: `min` or `max`.
        prune_from: steps done at which the worse ones are stopped first, and then at twice as many,
            and so on; None: none is stopped. Takes the extra `spotguard[optuna]`.

    Raises:
        UsageError: a sweep without a budget, or a point that may cost more than all may.
        MissingExtra: Optuna is not installed.
        SpecError, BudgetExhausted, StoreError, EnvironmentFailure: as for `up`.
    """
    from spotguard.control.sweep.sweep_request import SweepPlan
    from spotguard.spec.model.sweep import checked_points, points_of
    from spotguard.spec.sources import resolve

    made = points_of(points) if isinstance(points, str) else checked_points(points)
    plan = SweepPlan(
        points=tuple(made),
        at_once=parallel,
        point_budget_usd=point_budget_usd,
        metric=metric,
        goal=goal,
        first_step=prune_from,
    )
    return start_sweep(resolve(script, flags=settings or {}, args=args).spec, plan)


def start_sweep(
    spec: JobSpec, plan: SweepPlan, found: Survey | Sequence[Survey] | None = None
) -> Sweep:
    """Launch a sweep whose settings are resolved already; raises as `sweep`, `found` as `start`."""
    from spotguard.control.sweep import commands

    return Sweep(commands.start(spec, plan, found))


def runs() -> list[RunSummary]:
    """Return a line on each run of this machine, newest first."""
    from spotguard.control import api

    return api.list_runs()


def runs_of(
    stores: Sequence[str], tell: Callable[[str], None] | None = None
) -> tuple[list[RunSummary], list[UnreadableRun]]:
    """Return a line on each run of these stores, whoever controls it, and what cannot be read.

    Needs nothing of this machine, and writes nothing.

    Args:
        stores: their URLs.
        tell: hears how far a long list is; None is nobody.

    Raises:
        UsageError, StoreError: a store makes no sense or cannot be read.
    """
    from spotguard.control import api

    return api.list_stored_runs(stores, tell or _silent)


def _silent(_: str) -> None:
    """Tell nobody."""
