"""Sweeps: many runs of one script under one budget."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spotguard.api.run import Run

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from spotguard.control.sweep.more_budget import Raised
    from spotguard.control.sweep.sweep_request import SweepPlan
    from spotguard.control.sweep.table import SweepDocument, SweepPoint, SweepWatch
    from spotguard.launch.base import Survey
    from spotguard.launch.workdir.snapshot import Snapshot
    from spotguard.spec.model import JobSpec

__all__ = ["check_sweep", "start_sweep", "Sweep", "sweep"]

_POLL_S = 2.0


@dataclass(frozen=True)
class Sweep:
    """Many runs of one script under one budget, by the sweep's id or its place in a store."""

    name: str
    """Its whole id; or `STORE/SWEEP_ID`: then it is looked at in its store, and not steered."""

    @property
    def in_store(self) -> bool:
        """Whether it is known by its place in a store, and not as a sweep of this machine."""
        from spotguard.control import api

        return api.is_place(self.name)

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

    def run_of(self, point: SweepPoint) -> Run:
        """Return the run of one of its points, named as the sweep is: by its id or its place."""
        from spotguard.storage.urls import below, split_last

        store = split_last(self.name)[0]
        return Run(below(store, point.run_id) if self.in_store else point.run_id)

    def watch(self) -> SweepWatch:
        """Return what makes such a table again and again, at the price of what is new."""
        from spotguard.control.sweep import commands

        return commands.watch(self.name)

    def wait(self) -> SweepDocument:
        """Return its table once all of its points have ended; blocks until then.

        Where for a minute all that is left cannot be read, it returns without: `settled` is False.
        """
        watch = self.watch()
        while not watch.is_over(told := watch.look()):
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
    from spotguard.spec.sources import resolve_launch

    made = points_of(points) if isinstance(points, str) else checked_points(points)
    plan = SweepPlan(
        points=tuple(made),
        at_once=parallel,
        point_budget_usd=point_budget_usd,
        metric=metric,
        goal=goal,
        first_step=prune_from,
    )
    return start_sweep(resolve_launch(script, flags=settings or {}, args=args).spec, plan)


def start_sweep(
    spec: JobSpec,
    plan: SweepPlan,
    found: Survey | Sequence[Survey] | None = None,
    *,
    code: Snapshot | None = None,
) -> Sweep:
    """Launch a sweep whose settings are resolved; raises as `sweep`, the rest as in `start`."""
    from spotguard.control.sweep import commands

    return Sweep(commands.start(spec, plan, found, code))


def check_sweep(spec: JobSpec, plan: SweepPlan) -> None:
    """Let pass a sweep that can begin.

    Raises:
        UsageError: it has no budget, or a point may cost more than all may.
        MissingExtra: Optuna is not installed, and worse points are to be stopped.
    """
    from spotguard.control.sweep.begin import check

    check(spec, plan)
