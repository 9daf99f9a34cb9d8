"""A stand-in for `spotguard.control.api`: one run whose pictures the test lays out in advance."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from spotguard.control.status.view import HistoryLine, Look, RunSummary, RunView, Story
from spotguard.errors import SpotguardError, UsageError
from spotguard.events.states import Market, RunState
from spotguard.launch.base import Offer
from spotguard.spec.model import JobSpec
from tests.cli import pictures

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from spotguard.control.handover.stored_job import StoredJob
    from spotguard.control.journal.stored.logs import LogLine
    from spotguard.launch.base import Survey

EXIT_CODES = {RunState.FINISHED: 0, RunState.FAILED: 10, RunState.STOPPED: 75, RunState.PAUSED: 20}


class FakeLauncher:
    """Offers one place and starts nothing."""

    def offers(self) -> list[Offer]:
        """Return the one place."""
        return [
            Offer(
                infra="local",
                region="us-east-2",
                zone="us-east-2a",
                instance_type="p3.2xlarge",
                market=Market.SPOT,
                price_usd_per_h=0.918,
                on_demand_usd_per_h=3.06,
            )
        ]


@dataclass
class FakeWatch:
    """Sees the next picture at each look, and the story at the first."""

    control: FakeControl
    run_id: str
    told: int = 0

    def look(self) -> Look:
        """Return what is new."""
        view = self.control.view(self.run_id)
        news = tuple(self.control.lines[self.told :])
        self.told += len(news)
        return Look(view=view, news=news)


@dataclass
class FakeControl:
    """Answers as the controller's interface does, and notes what it was asked."""

    views: list[RunView] = field(default_factory=lambda: [pictures.finished()])
    """Shown one after the other; the last one stays."""
    lines: list[HistoryLine] = field(default_factory=pictures.history)
    log: list[LogLine] = field(default_factory=list)
    asked: list[tuple[Any, ...]] = field(default_factory=list)
    dead: bool = False
    """The controller is gone and has to be restarted."""
    cannot_start: SpotguardError | None = None
    """Why it cannot be."""
    interrupt_after: int | None = None
    """The user presses Ctrl-C at this look."""
    refuse: SpotguardError | None = None
    """What `create_run` and `resume` raise."""
    found: list[Survey] | None = None
    """What `create_run` was told of where nodes can be had, in each phase."""
    moved_to: JobSpec | None = None
    """What the run's job would be elsewhere."""
    stranger: StoredJob | None = None
    """What `adopt` asks about."""
    looks: int = 0

    def now(self, run_id: str) -> float:
        """Return this machine's time."""
        assert run_id == pictures.RUN
        return time.time()

    def create_run(
        self,
        spec: JobSpec,
        found: list[Survey] | None = None,
        *,
        code: object = None,
        tell: Callable[[str], None] = lambda _: None,
    ) -> str:
        """Note the spec."""
        if self.refuse:
            raise self.refuse
        self.found = found
        self.asked.append(("create", spec))
        return pictures.RUN

    def job_of(self, run_id: str) -> JobSpec:
        """Return the job that was given to `create_run`; of a run that was there before, any."""
        made = [what for kind, *(what, *_) in self.asked if kind == "create"]
        return made[-1] if made else JobSpec(script="/job.py", workdir="/", name="job", store="/s")

    def start_controller(self, run_id: str) -> None:
        """Note it."""
        self.asked.append(("start", run_id))

    def ensure_controlled(self, run_id: str) -> bool:
        """Restart the controller, once."""
        if self.dead and self.cannot_start:
            raise self.cannot_start
        was_dead, self.dead = self.dead, False
        return was_dead

    def view(self, run_id: str) -> RunView:
        """Return the next picture."""
        self.looks += 1
        if self.interrupt_after is not None and self.looks > self.interrupt_after:
            raise KeyboardInterrupt
        return self.views.pop(0) if len(self.views) > 1 else self.views[0]

    def history(self, run_id: str, *, newest: int | None = None) -> Story:
        """Return the story."""
        lines = self.lines if newest is None else self.lines[-newest:]
        return Story(lines=iter(lines), earlier=len(self.lines) - len(lines))

    def foretold(self, run_id: str) -> RunView:
        """Return the picture as it is: nothing is forecast."""
        return self.view(run_id)

    def plan_forecast(self, spec: JobSpec, found: Survey, state_bytes: float) -> None:
        """Return no forecast, as of nodes of this machine."""

    def team_outlook(self, spec: JobSpec) -> str:
        """Return no outlook, as of a store whose runs have no budget together."""
        return ""

    def watch(self, run_id: str) -> FakeWatch:
        """Return what looks again and again."""
        return FakeWatch(self, run_id)

    def list_runs(self) -> list[RunSummary]:
        """Return the one run."""
        view = self.views[0]
        return [
            RunSummary(
                run_id=view.run_id,
                name=view.name,
                state=view.state,
                created_at=view.created_at,
                spent_usd=view.spent_usd,
            )
        ]

    def find_run(self, text: str | None) -> str:
        """Return the one run, if it is meant."""
        if text is not None and not pictures.RUN.startswith(text):
            raise UsageError(f"there is no run {text!r}", hint=f"did you mean {pictures.RUN}?")
        return pictures.RUN

    def find_any_run(self, text: str | None) -> str:
        """Return the one run, if it is meant."""
        return self.find_run(text)

    def is_place(self, text: str) -> bool:
        """Say that the one run is known by its id."""
        return False

    def request_stop(self, run_id: str) -> bool:
        """Note it; the run settles at the next look."""
        return self._stopped("stop", run_id)

    def request_down(self, run_id: str) -> bool:
        """Note it; the run settles at the next look."""
        return self._stopped("down", run_id)

    def _stopped(self, how: str, run_id: str) -> bool:
        self.asked.append((how, run_id))
        self.views = [replace(self.views[-1], state=RunState.STOPPED)]
        return True

    def home_news(self) -> str:
        """Say that nothing is new."""
        return ""

    def what_is_left(self, run_id: str) -> None:
        """Know nothing without the journal."""

    def resume(
        self,
        run_id: str,
        *,
        budget_usd: float | None = None,
        deadline_s: float | None = None,
        nodes: Any = None,
        same_code: bool = False,
        tell: object = None,
    ) -> None:
        """Note the new limits."""
        if self.refuse:
            raise self.refuse
        self.asked.append(("resume", run_id, budget_usd, deadline_s, nodes))

    def move_plan(self, run_id: str, place: Mapping[str, Any]) -> JobSpec:
        """Return the job as the test has it elsewhere."""
        self.asked.append(("move_plan", run_id, dict(place)))
        assert self.moved_to is not None
        return self.moved_to

    def move(
        self,
        run_id: str,
        place: Mapping[str, Any],
        *,
        found: Survey | None = None,
        budget_usd: float | None = None,
        deadline_s: float | None = None,
        same_code: bool = False,
        tell: object = None,
    ) -> None:
        """Note where to, and the new limits."""
        limits = {"found": found, "budget_usd": budget_usd, "deadline_s": deadline_s}
        self.asked.append(("move", run_id, dict(place), limits))

    def logs(self, run_id: str, follow: bool = False, query: object = None) -> Iterator[LogLine]:
        """Yield the log; note what was asked for."""
        self.asked.append(("logs", run_id, follow, query))
        yield from self.log

    def adopt(
        self,
        url: str,
        tell: Callable[[str], None],
        *,
        private: object = None,
        given: Mapping[str, str] | None = None,
        ask: Callable[[StoredJob], bool] | None = None,
    ) -> str:
        """Note it; ask if it was not made here."""
        if self.stranger is not None:
            assert ask is not None
            assert ask(self.stranger)
        self.asked.append(("adopt", url, *(given or {}).items()))
        tell("reading")
        return pictures.RUN

    def exit_code(self, run_id: str) -> int:
        """Return what the newest picture stands for."""
        return EXIT_CODES[self.views[-1].state]

    def launcher_for(self, spec: JobSpec, run_dir: Path) -> FakeLauncher:
        """Return a launcher that only offers."""
        return FakeLauncher()
