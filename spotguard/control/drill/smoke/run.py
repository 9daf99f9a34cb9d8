"""Smoke before money: a script's first steps here, for nothing, before nodes are paid for.

One process on this machine's CPU trains for some steps on a few samples each, is told to stop as
by a cloud, saves and leaves; another one restores and trains one step more. The store is a folder
of the smoke's own, which is removed.
"""

from __future__ import annotations

import math
import shutil
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from spotguard.control.drill.smoke.memory import key_of, leaves, remember, remembered
from spotguard.control.drill.smoke.on_nodes import NodesView
from spotguard.control.drill.smoke.places import Code
from spotguard.control.drill.smoke.process import SAMPLES, Facts, Stint, run_stint
from spotguard.control.drill.smoke.verdict import (
    Stopped,
    Unproven,
    Verdict,
    judge,
    nothing_learned,
)
from spotguard.control.journal.stored.code import fix_code
from spotguard.errors import EnvironmentFailure, SmokeFailed
from spotguard.events.event import JobEvent
from spotguard.launch.requirements_check import missing
from spotguard.launch.workdir.requirements_file import plain_requirements
from spotguard.policy.plan.smoke import Smoke, emergency_s, notice_s
from spotguard.shared.units import format_bytes, format_duration
from spotguard.spec.home_folder import spotguard_home
from spotguard.spec.script import read_script
from spotguard.spec.setting_layers import script_needs

if TYPE_CHECKING:
    from collections.abc import Callable

    from spotguard.launch.workdir.snapshot import Snapshot
    from spotguard.spec.model import JobSpec

_AS_LONG = 1.5
"""A process that restores needs about as long as the one before it: what takes longer hangs."""
_CLUSTERS = ("slurm", "kubernetes")
"""Where nodes are somebody's own: they may have files and packages that nobody names."""
_LEAST_S = 8.0
"""Less time than this is none for another process that imports torch."""


@dataclass(frozen=True, kw_only=True)
class SmokeOutcome:
    """What came of a smoke that stops nothing."""

    smoke: Smoke | None
    """What it measured; None if it was skipped."""
    skipped: str = ""
    """Why nothing is proven."""
    is_old: bool = False
    """It passed before, and nothing has changed since."""
    warning: str = ""
    """What may be wrong with a script that passed; it is tried again, so that it is told again."""


def wanted(spec: JobSpec) -> bool:
    """Return whether the job's script is to be tried before it is launched."""
    if spec.smoke.when == "paid":
        return leaves(spec)
    return spec.smoke.when == "always"


def _all_nan(facts: Facts) -> bool:
    return bool(facts.losses) and not any(map(math.isfinite, facts.losses))


def known_smoke(spec: JobSpec) -> Smoke | None:
    """Return what the last smoke of this very job measured; None if it was not, or did not pass."""
    found = remembered(key_of(spec))
    return None if found is None else _judged(found, spec)


def run_smoke(
    spec: JobSpec, tell: Callable[[str], None], snapshot: Snapshot | None = None
) -> SmokeOutcome:
    """Try the script, unless it passed before; return what that measured.

    Blocks for `smoke.limit` at most, with the look at what is installed and what passed before, and
    beside the moments in which processes are ended. `tell` hears what is done. What is tried is a
    copy of the job's folder, as its nodes get it; `snapshot`, if that was made already.

    Raises:
        SmokeFailed: the script does not work, or a save of it is too large; names file and line.
        EnvironmentFailure: there is no room for the smoke's own files.
    """
    over_at = time.monotonic() + spec.smoke.limit_s
    if lack := lacking(spec):
        return SmokeOutcome(smoke=None, skipped=lack)
    key = key_of(spec)
    found = remembered(key)
    if found is not None:
        return SmokeOutcome(smoke=_checked(found, spec), is_old=True)
    if snapshot is None and leaves(spec):
        snapshot = fix_code(spec, tell)
    folder = room_for_smoke()
    try:
        trial = _Trial(NodesView(spec, snapshot, folder), folder, tell, over_at)
        verdict = trial.run()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if isinstance(verdict, Unproven):
        return SmokeOutcome(smoke=None, skipped=verdict.why)
    if isinstance(verdict, Stopped):
        raise SmokeFailed(trial.view.in_words(verdict), hint=verdict.hint)
    measured = trial.measured()
    if not trial.warning:
        remember(key, measured)
    return SmokeOutcome(smoke=_checked(measured, spec), warning=trial.warning)


class _Trial:
    """The processes of one smoke."""

    def __init__(
        self, view: NodesView, folder: Path, tell: Callable[[str], None], over_at: float
    ) -> None:
        self.view = view
        self._spec = spec = view.spec
        self._folder = folder
        self._tell = tell
        self._code = Code(spec.script, spec.workdir)
        self._over_at = over_at
        self._facts: Facts
        self._whole_batches = False
        self.warning = ""
        """What may be wrong, though nothing proves it."""

    def run(self) -> Verdict:
        steps = self._spec.smoke.steps
        self._tell(f"smoke: {steps} steps on this machine's CPU, before anything is paid for ...")
        verdict = self._stint(attempt=1, stop_after=steps)
        if isinstance(verdict, Stopped) and verdict.may_be_size:
            # Few samples may be what a script cannot do with: then its own batches decide.
            verdict = self._again(verdict, steps)
        if verdict is not None:
            return verdict
        if _all_nan(self._facts) and not self._whole_batches:
            # A mean over two samples may be one over none, which a whole batch never is.
            again = self._again(self._not_finite(self._facts), steps)
            if again is not None:
                return again
        facts = self._facts
        if _all_nan(facts):
            return self._not_finite(facts)
        learned = nothing_learned(facts, self._code)
        if isinstance(learned, Stopped):
            return learned
        self.warning = learned
        unnamed = self.view.unnamed(facts, self._code, ready_made=self._ready_made)
        if unnamed is not None:
            return unnamed
        return self._restored(facts)

    def measured(self) -> Smoke:
        """Return what the process that saved measured."""
        facts = self._facts
        saved = facts.event(JobEvent.SAVED) or {}
        ended = facts.event(JobEvent.ENDED) or {}
        train_s = ended.get("train_s")
        return Smoke(
            state_bytes=int(saved.get("size_bytes") or 0),
            save_s=float(saved.get("duration_s") or 0.0),
            step_s=float(train_s) / facts.steps if train_s and facts.steps else None,
            step_samples=None if self._whole_batches else SAMPLES,
            first_step_s=facts.first_step_s,
            at=time.time(),
        )

    def _stint(self, *, attempt: int, stop_after: int) -> Verdict:
        self._facts = run_stint(
            self._spec,
            self._folder,
            Stint(
                attempt=attempt,
                stop_after=stop_after,
                whole_batches=self._whole_batches,
                limit_s=max(1.0, self._over_at - time.monotonic()),
            ),
        )
        if (lack := self.view.lacks(self._facts, self._code)) is not None:
            return lack
        node = self._spec.node
        return judge(
            self._facts,
            self._code,
            stop_after=stop_after,
            ready_made=self._ready_made,
            mounted=(*node.file_mounts, *node.volumes),
            gpus=self._spec.gpus is not None,
        )

    @property
    def _ready_made(self) -> bool:
        """Nodes may have packages that nobody names."""
        node = self._spec.node
        return bool(node.image or node.setup) or self._spec.infra.startswith(_CLUSTERS)

    def _again(self, first: Stopped, steps: int) -> Verdict:
        if self._over_at - time.monotonic() < _LEAST_S:
            return first
        few = self._facts
        self._whole_batches = True
        self._tell("smoke: once more, with whole batches ...")
        verdict = self._stint(attempt=1, stop_after=steps)
        if verdict is not None and self._facts.ended_for:
            self._facts = few  # a whole batch takes too long here: what was seen counts
            return first
        return verdict

    def _not_finite(self, facts: Facts) -> Stopped:
        place = self._code.told(self._code.call_of("backward", "fit", "train"))
        each = ", ".join(f"{loss:g}" for loss in facts.losses)
        return Stopped(
            what=f"{place}: no loss of the first {len(facts.losses)} steps is a finite number "
            f"({each})",
            hint="look at the learning rate, the data and divisions by zero; --no-smoke launches "
            "it without a look",
        )

    def _restored(self, before: Facts) -> Verdict:
        """Have another process go on from the save; the facts that count stay the first one's."""
        left_s = self._over_at - time.monotonic()
        too_late = Unproven(
            f"it trained and saved, which took {format_duration(before.seconds)}; to restore as "
            "well, there was too little time (--smoke-limit)"
        )
        if left_s < _LEAST_S:
            return too_late
        self._tell("smoke: restoring in another process ...")
        verdict = self._stint(attempt=2, stop_after=before.steps + 1)
        after, self._facts = self._facts, before
        if after.ended_for == "time" and left_s < _AS_LONG * before.seconds:
            return too_late
        if isinstance(verdict, Stopped):
            return replace(verdict, what=f"after a resume, {verdict.what}")
        if verdict is not None:
            return verdict
        started = after.event(JobEvent.STARTED) or {}
        if started.get("resumed_step") != before.steps:
            track = self._code.told(self._code.call_of("track"))
            return Stopped(
                what=f"{track}: the state of step {before.steps} was saved, and not restored: the "
                f"next process began with {started.get('resumed_step')} steps done",
                hint="spotguard drill SCRIPT shows more",
            )
        return None


def _checked(smoke: Smoke, spec: JobSpec) -> Smoke:
    """Return what was measured, with what it means where the job is to run.

    Raises:
        SmokeFailed: an emergency save would take longer than the cloud's notice.
    """
    judged = _judged(smoke, spec)
    if not judged.fits:
        code = Code(spec.script, spec.workdir)
        nodes = spec.nodes.min
        raise SmokeFailed(
            f"{code.told(code.call_of('track'))}: a save of this state "
            f"({format_bytes(smoke.state_bytes)}) would take {format_duration(judged.emergency_s)} "
            f"on {nodes} {'node' if nodes == 1 else 'nodes'}, and the notice is "
            f"{format_duration(judged.notice_s)} ({spec.infra})",
            hint=f"more nodes share it (--nodes), AWS gives {format_duration(120.0)}, or track "
            "less; nodes that write more than "
            f"{spec.smoke.upload_mb_per_s:g} MB/s: smoke.upload_mb_per_s; --no-smoke launches it "
            "all the same, and periodic saves alone count",
        )
    return judged


def _judged(smoke: Smoke, spec: JobSpec) -> Smoke:
    rate = spec.smoke.upload_mb_per_s * 1e6
    needs_s = emergency_s(smoke.state_bytes, nodes=spec.nodes.min, bytes_per_s=rate)
    is_spot = spec.market.value == "spot"
    return replace(smoke, emergency_s=needs_s, notice_s=notice_s(spec.infra) if is_spot else None)


def lacking(spec: JobSpec) -> str:
    """Return what is said to be needed and is not installed here, in words; empty if nothing."""
    script = read_script(Path(spec.script))
    if spec.node.requirements is not None:
        lack = missing(plain_requirements(Path(spec.node.requirements)).lines)
    else:
        lack = missing(script_needs(script.path, script.source).dependencies)
    if not lack:
        return ""
    more = f" and {len(lack) - 3} more" if len(lack) > 3 else ""
    return f"this machine's Python lacks {', '.join(lack[:3])}{more}, which the nodes install"


def room_for_smoke() -> Path:
    """Return a new folder for one smoke, for nobody else to enter."""
    above = spotguard_home() / "smokes"
    try:
        above.mkdir(parents=True, exist_ok=True, mode=0o700)
        return Path(tempfile.mkdtemp(prefix="running-", dir=above))
    except OSError as problem:
        raise EnvironmentFailure(
            f"{above} cannot be written: {problem.strerror}.",
            hint="set SPOTGUARD_HOME to a folder that you can write, or pass --no-smoke",
        ) from problem
