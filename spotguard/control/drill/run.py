"""`spotguard drill`: prove that a script survives, before money is spent.

The job runs twice on local nodes, capped to some steps: once undisturbed, once under scripted
notices, SIGTERMs, kills and a node-count change. The two are compared step by step.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spotguard.control import api
from spotguard.control.drill.report import (
    DrillReport,
    Finding,
    InterruptedAttempt,
    ProbedRun,
    compare,
)
from spotguard.control.journal.stored.code import fix_code
from spotguard.control.run_folder import RunFolder, runs_folder
from spotguard.errors import JobFailed, UsageError
from spotguard.events import env
from spotguard.events.states import Market, RunState
from spotguard.spec.home_folder import spotguard_home
from spotguard.spec.model.team import TeamSpec
from spotguard.spec.sources import resolve

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from spotguard.control.status.view import AttemptView, RunView
    from spotguard.launch.workdir.snapshot import Snapshot
    from spotguard.spec.model import JobSpec

_STEPS = 60
_SPEED_UP = 40.0
_POLL_S = 0.2
_LAST_WORDS_S = 20.0
_HOLD_S = 20.0
"""The loop waits this long at most where a notice or signal is played, so that a fast script does
not run past it."""
_HOLD_FOR_KILL_S = 1.5

_UNTOUCHED: dict[str, object] = {
    "phases": (),
    "market": Market.SPOT,
    "on_demand": "never",
    "max_price_usd_per_h": None,
    "template": "base",
    "budget_usd": None,
    "team": TeamSpec(),
    "deadline_s": None,
    "start_at": None,
    "notify": (),
    "cache": (),
}
"""What the settings say of the real run and no drill heeds: it is here, now and free of charge,
tells nobody, and stores nothing but the training. They are taken out of the made job, since a flag
that is None or empty counts as not given."""


@dataclass(frozen=True, kw_only=True)
class DrillOptions:
    """How hard to shake."""

    nodes: int = 2
    kills: int = 4
    steps: int | None = None
    """Steps to train; None: 60, or all if the script has fewer."""
    seed: int = 0
    """Which interruption comes first; the others follow in turn."""


@dataclass(frozen=True)
class _Play:
    """One scripted interruption and the pause that it needs."""

    step: int
    text: str
    hold_s: float


def run_drill(
    script: str | Path,
    args: Sequence[str],
    flags: dict[str, object],
    options: DrillOptions,
    on_progress: Callable[[str], None],
) -> DrillReport:
    """Run the job undisturbed and disturbed, and return what the comparison shows.

    Blocks for two runs of the (capped) job and its restarts. Works in a folder of its own below
    the home; it is removed unless something was found.

    Raises:
        SpecError: the script or a setting makes no sense.
        UsageError: the script has too few steps for so many interruptions.
        JobFailed: the undisturbed run fails already.
    """
    folder = spotguard_home() / "drills" / f"{time.strftime('%y%m%d-%H%M%S')}-{os.getpid()}"
    drill = _Drill(folder, script, args, flags, options, on_progress)
    drill.check()
    folder.mkdir(parents=True, mode=0o700)
    report = drill.run()
    if report.passed:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        on_progress(f"the logs of both runs are kept in {folder}")
    return report


class _Drill:
    def __init__(
        self,
        folder: Path,
        script: str | Path,
        args: Sequence[str],
        flags: dict[str, object],
        options: DrillOptions,
        on_progress: Callable[[str], None],
    ) -> None:
        self._folder = folder
        self._script = script
        self._args = args
        self._flags = flags
        self._options = options
        self._say = on_progress
        self._code: Snapshot | None = None
        """What both runs train with, whatever is edited meanwhile."""

    def check(self) -> None:
        """Raise what is wrong with the script, the settings or the options; train nothing."""
        plays = self._plays(self._options.steps or _STEPS)
        for nodes in (str(self._options.nodes), f"1:{self._options.nodes}"):
            api.launcher_for(self._spec("checked", nodes=nodes, plays=plays), self._folder)

    def run(self) -> DrillReport:
        self._say("undisturbed run ...")
        calm_view = self._job("calm", nodes=str(self._options.nodes), plays=[])
        if calm_view.state is not RunState.FINISHED:
            raise JobFailed(
                f"the undisturbed run {calm_view.state.label}: {calm_view.state_detail}",
                hint="run it without a drill, which shows all that it says: spotguard up "
                f"{self._script} --nodes {self._options.nodes}",
            )
        steps = calm_view.step or 0
        plays = self._plays(steps)
        self._say(f"disturbed run, {len(plays)} interruptions in {steps} steps ...")
        view = self._job("shaken", nodes=f"1:{self._options.nodes}", plays=plays)
        return self._report(view, steps, len(plays))

    def _plays(self, steps: int) -> list[_Play]:
        kills, nodes = self._options.kills, self._options.nodes
        if steps <= kills:
            raise UsageError(
                f"the job has {steps} steps, too few for {kills} interruptions",
                hint=f"spotguard drill --kills {max(steps - 1, 1)}, or more steps",
            )
        last = nodes - 1
        menu = (
            (f"node={last}@step={{}}:notice", _HOLD_S),
            ("node=0@step={}:term", _HOLD_S),
            ("all@step={}:kill", _HOLD_FOR_KILL_S),
        )
        plays = []
        for number in range(1, kills + 1):
            step = steps * number // (kills + 1) or number
            shape, hold_s = menu[(number - 1 + self._options.seed) % len(menu)]
            if number == kills and nodes > 1 and kills > 1:
                shape, hold_s = f"capacity={last}@step={{}}", _HOLD_S
            plays.append(_Play(step, shape.format(step), hold_s))
        return plays

    def _job(self, name: str, *, nodes: str, plays: list[_Play]) -> RunView:
        """Run the job to its end under a home of its own, and return its picture."""
        spec = self._spec(name, nodes=nodes, plays=plays)
        with _home(self._folder):
            self._code = self._code or fix_code(spec, self._say)
            run_id = api.create_run(spec, code=self._code)
            try:
                api.start_controller(run_id)
                return self._wait(run_id)
            except BaseException:
                with contextlib.suppress(Exception):  # leave no node behind; the first error counts
                    api.request_down(run_id)
                raise

    def _spec(self, name: str, *, nodes: str, plays: list[_Play]) -> JobSpec:
        """Return the job of one of the two runs."""
        steps = self._options.steps or _STEPS
        variables = {
            env.MAX_STEPS: str(steps),
            env.PROBE: str(self._folder / f"{name}.probe.jsonl"),
            env.TRACE_SAMPLES: str(self._folder / f"{name}.samples.jsonl"),
            env.HOLD: ",".join(f"{play.step}:{play.hold_s}" for play in plays),
        }
        interval = max(2, steps // (2 * (self._options.kills + 1)))
        flags: dict[str, object] = {
            "save_every": f"{interval} steps",
            "local.speed_up": _SPEED_UP,
            **{key: value for key, value in self._flags.items() if value is not None},
            "infra": "local",
            "name": f"drill-{name}",
            "nodes": nodes,
            "in_place": False,  # on as many nodes as before, so that all bits can be compared
            "store": str(self._folder / "store"),
        }
        environ = {k: v for k, v in os.environ.items() if k not in variables}
        spec = resolve(
            self._script,
            flags=flags,
            args=self._args,
            environ={**environ, **{k: v for k, v in variables.items() if v}},
        ).spec
        local = spec.local.model_copy(
            update={"interrupt": tuple(play.text for play in plays), "mtbf_s": None, "trace": None}
        )
        return spec.replace(**_UNTOUCHED, local=local)

    def _wait(self, run_id: str) -> RunView:
        told = 0
        while True:
            picture = api.view(run_id)
            for attempt in picture.attempts[told:]:
                if attempt.end_reason is None:
                    break
                told += 1
                self._say(
                    f"  attempt {attempt.attempt} on {attempt.nodes} nodes: "
                    f"{attempt.end_reason.told(attempt.saved)} after step {attempt.last_step}"
                )
            if api.settled(picture):
                # Its controller writes some last words; a folder that is removed meanwhile stays.
                with RunFolder(runs_folder() / run_id).control(patience_s=_LAST_WORDS_S):
                    return picture
            api.ensure_controlled(run_id)
            time.sleep(_POLL_S)

    def _report(self, view: RunView, steps: int, plays: int) -> DrillReport:
        calm, shaken = (
            ProbedRun.read(
                self._folder / f"{name}.probe.jsonl", self._folder / f"{name}.samples.jsonl"
            )
            for name in ("calm", "shaken")
        )
        findings, notes, parted, drift = compare(calm, shaken)
        happened = len(view.attempts) - 1
        if view.state is not RunState.FINISHED:
            findings.insert(0, _did_not_finish(view))
        elif happened < plays:
            notes.append(f"only {happened} of {plays} interruptions hit before the job was done")
        return DrillReport(
            passed=not findings,
            summary=_summary(findings, view, steps, happened, drift),
            findings=findings,
            notes=notes,
            interruptions=[interruption(attempt) for attempt in view.attempts[:-1]],
            steps=steps,
            parted_at=parted,
            largest_loss_difference=drift,
        )


@contextlib.contextmanager
def _home(folder: Path) -> Iterator[None]:
    """Let runs made inside live below `folder`, out of the user's own list of runs."""
    before = os.environ.get("SPOTGUARD_HOME")
    os.environ["SPOTGUARD_HOME"] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ["SPOTGUARD_HOME"]
        else:
            os.environ["SPOTGUARD_HOME"] = before


def _did_not_finish(view: RunView) -> Finding:
    return Finding(
        variable="the job",
        label="resume",
        step=(view.step or 0) + 1,
        detail=_last_lines(view.traceback) or view.state_detail,
    )


def interruption(attempt: AttemptView) -> InterruptedAttempt:
    """Return what is told of an attempt that was interrupted."""
    return InterruptedAttempt(
        attempt=attempt.attempt,
        nodes=attempt.nodes,
        first_step=attempt.first_step,
        last_step=attempt.last_step,
        end_reason=attempt.end_reason,
        steps_lost=attempt.steps_lost,
    )


def _summary(
    findings: list[Finding], view: RunView, steps: int, happened: int, drift: float | None
) -> str:
    if findings:
        first = findings[0]
        return f"not restored: {first.label} ({first.variable}), after step {first.step}"
    exact = f"{steps} steps, {happened} interruptions, weights and losses equal to the last bit"
    if drift is None:
        return exact
    nodes = " → ".join(str(attempt.nodes) for attempt in view.attempts)
    return f"{exact}; on other node counts ({nodes}) losses within {drift:.0e}"


def _last_lines(traceback: str | None) -> str:
    lines = (traceback or "").strip().splitlines()
    return lines[-1] if lines else ""
