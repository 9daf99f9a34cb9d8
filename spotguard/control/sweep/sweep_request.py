"""What was asked for as a sweep: written once into this machine's home, and into the store.

sweeps/<sweep_id>/sweep.json    what was asked for, with the whole job
sweeps/<sweep_id>/lock          held (flock) by who creates its runs
sweeps/<sweep_id>/stopped       it was stopped: no more runs are created

All of its runs are named here before the first is created. So whoever dies while he creates them
leaves behind what is to be done: to do it again changes nothing of what is done.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from spotguard.control.create_run import new_run_id
from spotguard.control.journal.sweep.part import MAXIMIZE, MINIMIZE, SweepPart, sweep_store
from spotguard.errors import AlreadyExists, EnvironmentFailure, NotFound, StoreError, UsageError
from spotguard.events import keys
from spotguard.events.untrusted import (
    Refused,
    an_object,
    needed,
    objects,
    parse_object,
    seconds,
    text,
)
from spotguard.shared.typo_guess import nearest
from spotguard.spec.home_folder import spotguard_home
from spotguard.spec.model import JobSpec, TeamCap
from spotguard.spec.model.sweep import arguments_of, in_words
from spotguard.spec.model.team import SWEEP
from spotguard.storage import open_store
from spotguard.storage.small_objects import get_small
from spotguard.storage.urls import below, split_last, whole_url

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

SCHEMA = 1
_WHAT = "the sweep"


@dataclass(frozen=True, kw_only=True)
class SweepPlan:
    """What is asked of a sweep, beside its job; its budget is the job's."""

    points: tuple[Mapping[str, str], ...]
    """The arguments of each."""
    at_once: int
    """So many points go on side by side."""
    point_budget_usd: float | None = None
    """The most that one of them may cost; None: as many equal parts as there are points."""
    metric: str | None = None
    goal: str = MINIMIZE
    first_step: int | None = None
    """Steps done at which the worse points are stopped first; None: none ever is."""

    def __post_init__(self) -> None:
        if self.at_once < 1:
            raise UsageError(f"--parallel: given {self.at_once}; allowed: 1 or more")
        if self.goal not in (MINIMIZE, MAXIMIZE):
            raise UsageError(f"--sweep-goal: given {self.goal!r}; allowed: min or max")
        if self.first_step is not None and self.metric is None:
            raise UsageError(
                "--sweep-prune compares points, and nothing says by what",
                hint="--sweep-metric loss, as run.log(loss=...) calls it",
            )
        if self.first_step is not None and self.first_step < 1:
            raise UsageError(f"--sweep-prune: given {self.first_step}; allowed: 1 step or more")

    def job(self, job: JobSpec, number: int) -> JobSpec:
        """Return the job of a point, by its number from 1 on; its sum is a part of the whole."""
        args = (*job.args, *arguments_of(self.points[number - 1]))
        return job.replace(args=args, budget_usd=self.share_usd(job))

    def share_usd(self, job: JobSpec) -> float:
        """Return the most that one point may cost.

        Raises:
            UsageError: the job has no budget, or it is less than that.
        """
        if job.budget_usd is None:
            raise UsageError(
                "A sweep needs a budget: the most that all of its points may cost together.",
                hint="--budget USD",
            )
        share_usd = self.point_budget_usd
        if share_usd is None:
            return job.budget_usd / len(self.points)
        if share_usd > job.budget_usd:
            raise UsageError(
                f"--point-budget: given {share_usd:g}; the whole sweep may cost {job.budget_usd:g}"
            )
        return share_usd


@dataclass(frozen=True, kw_only=True)
class SweepRecord:
    """A sweep as it was begun."""

    part: SweepPart
    """Of its first point: what all have in common."""
    points: tuple[Mapping[str, str], ...]
    created_at: float
    store_root: str
    job: Mapping[str, Any] = field(default_factory=dict)
    """Each run's, but for its arguments, with its part of the money; empty if read in a store."""

    @property
    def sweep_id(self) -> str:
        """Its id."""
        return self.part.sweep_id

    def parts(self) -> Iterator[SweepPart]:
        """Yield what each point's run knows of the sweep."""
        for number in range(1, len(self.points) + 1):
            yield replace(self.part, number=number)

    def words(self, number: int) -> str:
        """Return a point for people, by its number."""
        return in_words(self.points[number - 1])

    def job_of(self, part: SweepPart) -> JobSpec:
        """Return the job of one of its points."""
        job = JobSpec.from_json(dict(self.job))
        return job.replace(args=(*job.args, *arguments_of(self.points[part.number - 1])))

    def to_json(self, *, public: bool) -> dict[str, Any]:
        """Return what `of` takes; what is `public` holds no job."""
        body = {
            "schema": SCHEMA,
            "part": self.part.to_json(),
            "points": [dict(point) for point in self.points],
            "created_at": self.created_at,
            "store_root": self.store_root,
        }
        return body if public else {**body, "job": dict(self.job)}

    @classmethod
    def of(cls, raw: bytes) -> SweepRecord:
        """Return what `to_json` became; `Refused` if it makes no sense."""
        body = parse_object(raw, _WHAT)
        part = SweepPart.of(an_object(body.get("part"), "what its points have in common"))
        points = objects(body, "points")
        texts = all(isinstance(value, str) for point in points for value in point.values())
        if body.get("schema") != SCHEMA or part is None or not points or not texts:
            raise Refused(f"{_WHAT} was written by another version of spotguard")
        return cls(
            part=part,
            points=tuple(points),
            created_at=needed(seconds(body, "created_at"), "instant"),
            store_root=needed(text(body, "store_root"), "store"),
            job=an_object(body.get("job") or {}, "its job"),
        )


def sweeps_folder() -> Path:
    """Return the folder of this machine's sweeps; it need not exist."""
    return spotguard_home() / "sweeps"


def write_down(job: JobSpec, plan: SweepPlan, now: float) -> SweepRecord:
    """Name a new sweep's runs on this machine; nothing is created yet."""
    share_usd = plan.share_usd(job)
    assert job.budget_usd is not None
    sweep_id = new_run_id(job.name, now)
    sweep = SweepRecord(
        part=SweepPart(
            sweep_id=sweep_id,
            number=1,
            cap=TeamCap(job.budget_usd, SWEEP, plan.at_once),
            metric=plan.metric,
            goal=plan.goal,
            first_step=plan.first_step,
        ),
        points=plan.points,
        created_at=now,
        store_root=open_store(job.store).url,
        job=job.replace(budget_usd=share_usd).to_json(),
    )
    folder = sweeps_folder() / sweep_id
    draft = sweeps_folder() / f".new-{sweep_id}"
    with _written(folder):
        draft.mkdir(mode=0o700, parents=True)
        with os.fdopen(
            os.open(draft / keys.SWEEP, os.O_WRONLY | os.O_CREAT, 0o600), "w", encoding="utf-8"
        ) as file:
            json.dump(sweep.to_json(public=False), file)
        draft.rename(folder)
    return sweep


def publish(sweep: SweepRecord) -> None:
    """Have the store say what was asked for, so that everybody finds its runs."""
    body = json.dumps(sweep.to_json(public=True), sort_keys=True).encode()
    store = sweep_store(open_store(sweep.store_root), sweep.sweep_id)
    try:
        store.put(keys.SWEEP, body, if_absent=True)
    except AlreadyExists:  # it was begun before
        return


def forget(sweep: SweepRecord) -> None:
    """Remove what is left of a sweep of which no run could be created."""
    folder = sweeps_folder() / sweep.sweep_id
    aside = sweeps_folder() / f".old-{sweep.sweep_id}"
    with contextlib.suppress(OSError):  # who is killed in between leaves no half of a sweep
        folder.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)
    with contextlib.suppress(StoreError):
        sweep_store(open_store(sweep.store_root), sweep.sweep_id).delete(keys.SWEEP)


def known_sweeps() -> list[str]:
    """Return the ids of this machine's sweeps, newest first."""
    folder = sweeps_folder()
    if not folder.is_dir():
        return []
    named = [path for path in folder.iterdir() if keys.RUN_ID_PATTERN.fullmatch(path.name)]
    found = {path.name: at for path in named if (at := _written_at(path)) is not None}
    return sorted(found, key=lambda name: -found[name])


def _written_at(path: Path) -> float | None:
    """Return when a sweep was written down; None if what is there is none, or was forgotten."""
    try:
        return (path / keys.SWEEP).stat().st_mtime
    except OSError:
        return None


def find_sweep(wanted: str | None) -> SweepRecord:
    """Return the sweep of this machine that is meant: an id, its beginning, None the newest.

    Raises:
        UsageError: there is none, or several begin like that.
    """
    every = known_sweeps()
    if not every:
        raise UsageError(
            f"There is no sweep on this machine yet (in {sweeps_folder()}).",
            hint="begin one: spotguard up train.py --sweep 'lr=1e-3,3e-4' --budget 20",
        )
    matches = every[:1] if wanted is None else [each for each in every if each.startswith(wanted)]
    matches = [wanted] if wanted is not None and wanted in matches else matches
    if len(matches) != 1:
        close = nearest(wanted or "", every)
        raise UsageError(
            f"{len(matches)} sweeps begin with {wanted!r}"
            if matches
            else f"There is no sweep {wanted!r} on this machine.",
            hint=f"did you mean {matches[0] if matches else close}?"
            if matches or close
            else f"the newest is {every[0]}",
        )
    try:
        return SweepRecord.of((sweeps_folder() / matches[0] / keys.SWEEP).read_bytes())
    except (OSError, Refused) as problem:
        raise EnvironmentFailure(f"The sweep {matches[0]} cannot be read: {problem}.") from problem


def stored_sweep(place: str) -> SweepRecord:
    """Return the sweep at `STORE/SWEEP_ID`; needs nothing of this machine.

    Raises:
        UsageError: there is none.
        StoreError: the store cannot be read.
    """
    root, sweep_id = split_last(whole_url(place).removesuffix("/"))
    if not root or not keys.RUN_ID_PATTERN.fullmatch(sweep_id):
        raise UsageError(f"{place!r} does not name a sweep.", hint="give it as STORE/SWEEP_ID")
    root = _below_sweeps(root)
    try:
        raw = get_small(sweep_store(open_store(root), sweep_id), keys.SWEEP)
        return replace(SweepRecord.of(raw), store_root=root)
    except NotFound as problem:
        raise UsageError(
            f"There is no sweep at {place}.", hint="give it as STORE/SWEEP_ID"
        ) from problem
    except Refused as problem:
        raise UsageError(f"The sweep at {place} makes no sense: {problem}.") from problem


def _below_sweeps(root: str) -> str:
    """Return the root of the runs, also for who names the folder of sweeps below it."""
    above, last = split_last(root)
    return above if f"{last}/" == keys.SWEEPS else root


def place_of(sweep: SweepRecord, run_id: str) -> str:
    """Return where one of its runs is, as a URL."""
    return below(sweep.store_root, run_id)


@contextmanager
def alone(sweep: SweepRecord) -> Iterator[None]:
    """Hold the right to create the sweep's runs inside the block; waits for who has it.

    Raises:
        EnvironmentFailure: its folder cannot be written, or is gone.
    """
    path = sweeps_folder() / sweep.sweep_id / "lock"
    with _written(path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def mark_stopped(sweep: SweepRecord) -> None:
    """Have no more runs created; `EnvironmentFailure` if that cannot be written down."""
    with _written(stopped_mark(sweep)):
        stopped_mark(sweep).touch()


@contextmanager
def _written(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        raise EnvironmentFailure(f"{path} cannot be written: {problem.strerror}.") from problem


def stopped_mark(sweep: SweepRecord) -> Path:
    """Return the file that says that no more runs are to be created."""
    return sweeps_folder() / sweep.sweep_id / "stopped"
