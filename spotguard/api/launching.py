"""From a script to a running job: where nodes can be had, what is tried, the plan, the launch."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from spotguard.api.run import Run, silent
from spotguard.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from spotguard.control.doctor.local_requirements import Lack
    from spotguard.control.drill.smoke.run import SmokeOutcome
    from spotguard.launch.base import Survey
    from spotguard.launch.workdir.snapshot import Snapshot
    from spotguard.policy.plan.batch_curve import BatchCurve
    from spotguard.policy.plan.job import JobPlan
    from spotguard.policy.plan.smoke import Smoke
    from spotguard.spec.model import JobSpec

__all__ = [
    "first_task",
    "fix_code",
    "known_smoke",
    "lack_of_job",
    "plan",
    "plan_job",
    "plan_phase",
    "probe_batches",
    "start",
    "survey",
    "survey_phases",
    "team_outlook",
    "try_first_steps",
    "up",
]


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
    from spotguard.spec.sources import resolve_launch

    return start(resolve_launch(script, flags=settings or {}, args=args).spec)


def fix_code(spec: JobSpec, tell: Callable[[str], None]) -> Snapshot:
    """Copy the job's folder as its nodes get it at each launch, and return the copy.

    `tell` hears what of the folder they will not have, and what of it is large.

    Raises:
        SpecError: it is too large, or the script or its requirements are not copied.
        EnvironmentFailure: it cannot be copied.
    """
    from spotguard.control.journal.stored import code

    return code.fix_code(spec, tell)


def start(
    spec: JobSpec,
    found: Survey | Sequence[Survey] | None = None,
    *,
    code: Snapshot | None = None,
) -> Run:
    """Launch a job whose settings are resolved already; raises as `up`.

    Args:
        spec: the job.
        found: where nodes can be had, in each of its phases, by a caller that has asked: clouds
            take seconds to say.
        code: what `fix_code` returned; None: the job's folder as it is now.
    """
    from spotguard.control import api

    run_id = api.create_run(spec, found, code=code)
    api.start_controller(run_id)
    return Run(run_id)


def plan(
    script: str | Path,
    args: Sequence[str] = (),
    settings: Mapping[str, object] | None = None,
    tell: Callable[[str], None] | None = None,
) -> JobPlan:
    """Return where a script would run, and what it would cost and when it would be done.

    Nothing is started and nothing is tried. Clouds take seconds to say what they have.

    Args:
        script: its path.
        args: the script's own arguments.
        settings: as for `up`.
        tell: hears what of the settings has no effect; None is nobody.

    Raises:
        SpecError: something is wrong with the script or a setting.
        EnvironmentFailure: SkyPilot's prices can be neither read nor fetched.
    """
    from spotguard.spec.sources import resolve_launch

    found = resolve_launch(script, flags=settings or {}, args=args)
    job = found.spec
    return plan_job(
        job,
        survey_phases(job, tell),
        batches=found.batches,
        lack=lack_of_job(job).requirements,
        smoke=known_smoke(job),
    )


def survey_phases(job: JobSpec, tell: Callable[[str], None] | None = None) -> list[Survey]:
    """Return where nodes can be had in each phase, or for all of a job that has none."""
    return [survey(job.in_phase(index), tell) for index in range(max(1, len(job.phases)))]


def survey(spec: JobSpec, tell: Callable[[str], None] | None = None) -> Survey:
    """Return where nodes can be had: this machine's launcher knows at once, clouds take a while.

    Raises:
        SpecError: a place, the folders, or the job's own task template make no sense.
        EnvironmentFailure: SkyPilot's prices can be neither read nor fetched.
    """
    from spotguard.spec.infra import LOCAL
    from spotguard.spec.model.own_template import is_own_template

    if is_own_template(spec.template):
        from spotguard.control.supervisor.skypilot_request import check_template

        check_template(spec)
        if spec.infra == LOCAL:
            (tell or silent)(f"nodes of this machine take nothing from {spec.template}")
    if spec.infra != LOCAL:
        from spotguard.control.supervisor.skypilot_request import (
            check_folders,
            check_places,
            find_offers,
        )

        check_folders(spec)
        unchecked = check_places(spec)
        return replace(find_offers(spec), unchecked=unchecked)
    from spotguard.control import api
    from spotguard.launch.base import Survey
    from spotguard.spec.home_folder import spotguard_home

    return Survey(offers=tuple(api.launcher_for(spec, spotguard_home() / "runs").offers()))


def lack_of_job(job: JobSpec) -> Lack:
    """Return what a script needs and nodes of this machine, if it has some, do not have."""
    from spotguard.control.doctor.local_requirements import lack_of
    from spotguard.spec.infra import LOCAL

    places = [job.in_phase(index) for index in range(max(1, len(job.phases)))]
    return lack_of(next((place for place in places if place.infra == LOCAL), places[0]))


def try_first_steps(
    spec: JobSpec, tell: Callable[[str], None], code: Snapshot | None = None
) -> SmokeOutcome | None:
    """Train for two steps on this machine's CPU, save and restore, if the settings want that.

    Blocks for seconds to minutes; what passed before, and has not changed, is not tried again.
    `code` is what `fix_code` returned: of a job whose nodes get that, it is what is tried.

    Returns:
        What came of it; None if nothing was to be tried.

    Raises:
        JobFailed: it does not work; says what.
    """
    from spotguard.control.drill.smoke.run import run_smoke, wanted

    return run_smoke(spec, tell, code) if wanted(spec) else None


def known_smoke(spec: JobSpec) -> Smoke | None:
    """Return what a script's first steps measured when they last passed; None if they did not."""
    from spotguard.control.drill.smoke import run

    return run.known_smoke(spec)


def probe_batches(
    spec: JobSpec, tell: Callable[[str], None], *, memory_bytes: int | None = None
) -> BatchCurve:
    """Try sizes of micro-batches on this machine's CPU, of a script that leaves theirs open.

    Args:
        spec: the job.
        tell: hears how far it is.
        memory_bytes: what stands in for a device's memory; None is most of what is free here.

    Raises:
        JobFailed, UsageError: the script does not get that far, or has no such micro-batches.
    """
    from spotguard.control.drill import batch_trial

    return batch_trial.try_batches(spec, tell, memory_bytes=memory_bytes)


def plan_job(
    job: JobSpec,
    found: Sequence[Survey],
    *,
    batches: tuple[int, int] | None = None,
    lack: tuple[str, ...] = (),
    smoke: Smoke | None = None,
) -> JobPlan:
    """Return the plan of a job in all of its phases.

    Args:
        job: the job.
        found: what `survey_phases` returned.
        batches: the sizes of its global batch and its micro-batch, if known.
        lack: what it needs and nodes of this machine lack.
        smoke: what its first steps measured.
    """
    from spotguard.policy.plan.job import with_phases

    if not found:
        raise UsageError("found: a plan needs what `survey_phases` returned")
    plans = [
        plan_phase(job.in_phase(index), each, batches, lack, smoke if index == 0 else None)
        for index, each in enumerate(found)
    ]
    return with_phases(job, plans) if job.phases else plans[0]


def plan_phase(
    spec: JobSpec,
    found: Survey,
    batches: tuple[int, int] | None = None,
    lack: tuple[str, ...] = (),
    smoke: Smoke | None = None,
) -> JobPlan:
    """Return the plan of a job where it is in one phase; arguments as of `plan_job`."""
    from spotguard.control import api
    from spotguard.policy.plan.job import plan_job

    return plan_job(
        spec,
        found.offers,
        batches=batches,
        skipped=found.skipped,
        prices=found.sources,
        unchecked=found.unchecked,
        not_installed=lack,
        forecast=api.plan_forecast(spec, found, 0.0 if smoke is None else smoke.state_bytes),
        smoke=smoke,
    )


def first_task(spec: JobSpec, found: Survey) -> str:
    """Return the SkyPilot task, as YAML, that a job would launch first."""
    from spotguard.control.supervisor.skypilot_request import preview
    from spotguard.events.states import Market
    from spotguard.launch.taskyaml import as_text
    from spotguard.policy.plan.job import planned_markets

    task = as_text(preview(spec, found.offers))
    if spec.on_demand_infra is not None and Market.ON_DEMAND in planned_markets(spec)[1:]:
        task += f"# on demand ({spec.on_demand}): the same at {spec.on_demand_infra}\n"
    return task


def team_outlook(spec: JobSpec) -> str:
    """Return what of the team's budget is left for a new run, in words; empty without one.

    Raises:
        SpecError: the team's budget does not allow the run's.
        EnvironmentFailure: the store, or what stands there of it, cannot be read.
    """
    from spotguard.control import api

    return api.team_outlook(spec)
