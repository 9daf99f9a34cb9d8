"""Runs: found, looked at, steered, and got onto."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from spotguard.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from spotguard.control.handover.stored_job import StoredJob
    from spotguard.control.journal.stored.logs import LogLine, LogQuery
    from spotguard.control.report.document import ReportDocument
    from spotguard.control.report.profile.document import ProfileDocument
    from spotguard.control.report.stored import StoredWatch
    from spotguard.control.status.ssh_commands import NodeCommand
    from spotguard.control.status.view import RunSummary, RunView, Story, UnreadableRun
    from spotguard.control.status.watch import Watch
    from spotguard.control.without_journal import Left
    from spotguard.launch.base import Survey
    from spotguard.spec.model import JobSpec
    from spotguard.spec.nodes import NodeRange

__all__ = ["home_news", "Run", "runs", "runs_of"]

_PROFILED_STEPS = 5


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

    @classmethod
    def find_here(cls, text: str | None = None) -> Run:
        """Return the run of this machine that is meant, also if its controller has moved away.

        Raises:
            UsageError: there is none, or several begin like that; or a place is given.
        """
        from spotguard.control import api

        return cls(api.find_run(text))

    @classmethod
    def adopt(
        cls,
        place: str,
        tell: Callable[[str], None] | None = None,
        *,
        env: Mapping[str, str] | None = None,
        ask: Callable[[StoredJob], bool] | None = None,
    ) -> Run:
        """Take a run over from its store alone, for this machine; return it.

        A damaged journal is moved aside. A run whose nodes live gets a controller here.

        Args:
            place: `STORE/RUN_ID`.
            tell: hears what is waited for; None is nobody.
            env: variables that it may have. A run that was made on this machine gets those of its
                job from this process, too; any other gets these alone.
            ask: is shown what the store of a run that was not made on this machine would have it
                run, and says whether it may; None refuses such a run.

        Raises:
            UsageError: there is no run, or its journal is whole; or it may not run.
            SpecError: one of its variables is not given.
        """
        from spotguard.control import api

        return cls(api.adopt(place, tell or silent, given=env, ask=ask))

    @property
    def in_store(self) -> bool:
        """Whether it is known by its place in a store, and not as a run of this machine."""
        from spotguard.control import api

        return api.is_place(self.name)

    @property
    def place(self) -> str:
        """Where it is, for any machine: `STORE/RUN_ID`."""
        from spotguard.control import api

        return api.place_of(self.name)

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

        Raises:
            UsageError: `newest` is below 0.
        """
        from spotguard.control import api

        if newest is not None and newest < 0:
            raise UsageError(f"newest must be 0 or more, not {newest}")

        return api.history(self.name, newest=newest)

    def watch(self) -> Watch | StoredWatch:
        """Return what looks at it again and again, each time at the price of what is new."""
        from spotguard.control import api

        return api.watch(self.name)

    def now(self) -> float:
        """Return what time it is in the run, which no jump of this machine's clock changes."""
        from spotguard.control import api

        return api.now(self.name)

    def exit_code(self) -> int:
        """Return the code with which a command that followed it ends; 75 while it goes on."""
        from spotguard.control import api

        return api.exit_code(self.name)

    def report(self) -> ReportDocument:
        """Return all that is told of it in one document; lists the checkpoints in its store."""
        from spotguard.control import api

        return api.report(self.name)

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

    def profile(
        self,
        steps: int | None = None,
        *,
        attempt: int | None = None,
        rank: int | None = None,
        patience_s: float = 120.0,
        tell: Callable[[str], None] | None = None,
        raw: bool = False,
    ) -> tuple[ProfileDocument, bytes | None]:
        """Have the living job record some steps; return what they cost, and the trace itself.

        Blocks until they are recorded.

        Args:
            steps: so many, 5 if None.
            attempt: ask nobody, but tell the newest profile that is kept of this one.
            rank: tell of this rank; None is the slowest, if ranks differ.
            patience_s: seconds without a step, or a profile, after which it is given up.
            tell: hears what is waited for; None is nobody.
            raw: whether the trace is wanted, too; else it is None.

        Raises:
            UsageError: both `steps` and `attempt` are given; or no such attempt or profile is kept.
            EnvironmentFailure: the job took no step, or left no profile.
            StoreError: the store cannot be read.
        """
        from spotguard.control.checkpoints.find import open_run
        from spotguard.control.report.profile.profile_request import Asking, read_profile
        from spotguard.events.profile import MOST_STEPS

        if steps is not None and attempt is not None:
            raise UsageError("steps of the living job, or an attempt that kept some: not both")
        if steps is not None and not 1 <= steps <= MOST_STEPS:
            raise UsageError(f"steps must be from 1 to {MOST_STEPS}, not {steps}")
        opened = open_run(self.name)
        number = None
        if attempt is None:
            ask = Asking(opened.store, self.status, patience_s=patience_s, tell=tell or silent)
            attempt, number = ask.ask(_PROFILED_STEPS if steps is None else steps)
        return read_profile(opened.run_id, opened.store, attempt, number=number, rank=rank, raw=raw)

    def ssh(self, node: int = 0) -> NodeCommand:
        """Return the command line that opens a shell on a node of the living run.

        Raises:
            UsageError: it has no such node now, or its nodes are processes of this machine.
        """
        from spotguard.control.status.ssh_commands import shell_on

        return shell_on(self.name, node)

    def exec(self, command: Sequence[str], node: int = 0) -> NodeCommand:
        """Return the command line that runs a command on a node, in the job's folder there.

        Its words arrive as they are, whatever a shell would make of them.

        Raises:
            UsageError: it has no such node now.
        """
        from spotguard.control.status.ssh_commands import command_on

        return command_on(self.name, command, node)

    def holder(self) -> str | None:
        """Return who controls a run that is known by its place, in words; None if nobody says."""
        from spotguard.control import api

        return api.who_controls(self.name)

    @property
    def needs_this_machine(self) -> bool:
        """Whether its nodes are elsewhere, and only this machine replaces those that are lost."""
        from spotguard.control import api
        from spotguard.spec.infra import LOCAL

        if self.in_store:
            return False
        job = api.job_of(self.name)
        places = (job.infra, *(phase.place.get("infra") for phase in job.phases))
        return any(place not in (None, LOCAL) for place in places)

    def keep_controlled(self) -> bool:
        """Make sure that it has a controller; True if that had died and was started again.

        One that is known by its place is another machine's to look after: False.
        """
        from spotguard.control import api

        return not self.in_store and api.ensure_controlled(self.name)

    def check_heard(self) -> None:
        """Let pass what a controller on a node of its own will hear of a wish, if it is there.

        Raises:
            UsageError, EnvironmentFailure: nobody would hear it; says who has the run.
        """
        from spotguard.control.handover.through_store import check_heard

        if self.in_store:
            check_heard(self.name)

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

    def left(self) -> Left | None:
        """Return what can be told, and ended, of it without its journal; None if nothing.

        Raises:
            LaunchesDamaged: what is written down of its launches cannot be read.
        """
        from spotguard.control import api

        return None if self.in_store else api.what_is_left(self.name)

    def stop_alone(self, tell: Callable[[str], None] | None = None) -> int | None:
        """Have its job save and leave, then end its clusters, all without its journal.

        Blocks until none is left; `tell` hears of each that is gone.

        Returns:
            The step that is saved; None if nothing is.

        Raises:
            EnvironmentFailure: the job cannot be asked; nothing was released.
        """
        from spotguard.control import api

        return api.stop_alone(self.name, tell or silent)

    def down_alone(self, tell: Callable[[str], None] | None = None) -> None:
        """End each cluster that it may have, without its journal; blocks until none is left.

        Raises:
            UsageError: another machine has the run, or had it since.
            EnvironmentFailure: its controller does not end.
            LauncherFailure: some clusters could not be ended; says which.
        """
        from spotguard.control import api

        api.down_alone(self.name, tell or silent)

    def resume(
        self,
        *,
        budget_usd: float | None = None,
        deadline_s: float | None = None,
        nodes: NodeRange | str | int | None = None,
        same_code: bool = False,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        """Let a settled run go on from its last save; return once its controller has begun.

        It goes on with the code that is in its folder now. To go on in another place, `move` it.

        Args:
            budget_usd: new budget of the whole run, with what it has spent so far.
            deadline_s: new deadline in seconds, from now on.
            nodes: new count, or a range such as "2:4".
            same_code: go on with the code that it had.
            tell: hears which files of the folder have changed since; None is nobody.

        Raises:
            UsageError: the run has finished, or still goes on; or the code that it had is not here.
            BudgetExhausted: what is left of the budget buys no useful training.
            DeadlineReached: the old deadline has passed and no new one is given.
        """
        from spotguard.control import api

        api.resume(
            self.name,
            budget_usd=budget_usd,
            deadline_s=deadline_s,
            nodes=nodes,
            same_code=same_code,
            tell=tell or silent,
        )

    def move_plan(self, settings: Mapping[str, object]) -> JobSpec:
        """Return its job as it would be elsewhere; `settings` as for `move`.

        Raises:
            UsageError: the run has finished.
            SpecError: it cannot be there.
        """
        from spotguard.control import api
        from spotguard.spec.sources import place_of

        return api.move_plan(self.name, place_of(settings))

    def move(
        self,
        settings: Mapping[str, object],
        *,
        budget_usd: float | None = None,
        deadline_s: float | None = None,
        found: Survey | None = None,
        same_code: bool = False,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        """Let a settled run go on from its last save elsewhere; return once it has a controller.

        Args:
            settings: what is new of where it runs, by the keys of docs/configuration.md:
                `{"infra": "aws", "gpus": "A100:8", "nodes": 2}`. What they leave open is as before,
                but for prices, an instance type and a cloud's image, which are of one machine.
            budget_usd: new budget of the whole run, with what it has spent so far.
            deadline_s: new deadline in seconds, from now on.
            found: where nodes can be had, by a caller that has asked: clouds take seconds to say.
            same_code: go on with the code that it had.
            tell: hears which files of the folder have changed since; None is nobody.

        Raises:
            UsageError: the run has finished, or still goes on; or the code that it had is not here.
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
            same_code=same_code,
            tell=tell or silent,
        )


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

    return api.list_stored_runs(stores, tell or silent)


def home_news() -> str:
    """Return one sentence if it is found only now that spotguard's home is a copy; else nothing."""
    from spotguard.control import api

    return api.home_news()


def silent(_: str) -> None:
    """Tell nobody."""
