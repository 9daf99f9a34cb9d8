"""What may start: a new run, and a settled one that shall go on. Checks all, then writes."""

from __future__ import annotations

import json
import secrets
import shutil
import time
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from spotguard.control.controller.one_run import launcher_for, run_store
from spotguard.control.home_name import machine_id
from spotguard.control.journal import cost
from spotguard.control.journal.fold import apply, limits_to_json, read_record
from spotguard.control.journal.journal import Journal
from spotguard.control.journal.launches import forget_wish
from spotguard.control.journal.record import Kind, Limits, RunRecord
from spotguard.control.journal.stored.code import (
    code_data,
    code_to_go_on,
    fix_code,
    in_copy,
    publish_code,
    read_code,
)
from spotguard.control.journal.stored.known_jobs import remember_made
from spotguard.control.journal.stored.places import place_data
from spotguard.control.journal.team import membership
from spotguard.control.run_folder import RunFolder, folder_of, runs_folder
from spotguard.control.supervisor.decide import phase_due
from spotguard.control.supervisor.lease import check_ours
from spotguard.control.supervisor.notify import check_urls
from spotguard.errors import (
    BudgetExhausted,
    DeadlineReached,
    EnvironmentFailure,
    SpecError,
    UsageError,
)
from spotguard.events import keys
from spotguard.events.states import RunState
from spotguard.events.untrusted import Refused
from spotguard.launch.workdir.snapshot import keep_for
from spotguard.policy.plan.money import check_budget
from spotguard.shared.units import to_iso
from spotguard.spec.home_folder import keep_private, spotguard_home
from spotguard.spec.infra import LOCAL
from spotguard.spec.model import JobSpec
from spotguard.spec.model.own_template import is_own_template
from spotguard.spec.nodes import NodeRange
from spotguard.storage import check_conditions, open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path
    from typing import Any

    from spotguard.control.journal.sweep.part import SweepPart
    from spotguard.launch.base import Offer, Survey
    from spotguard.launch.workdir.snapshot import Snapshot

RUN_SCHEMA = 1
_MAX_NAME_CHARS = 40
_MOST_FILES_TOLD = 100


def _nobody(_: str) -> None:
    """Tell nobody."""


def create_run(
    job: JobSpec,
    found: Survey | Sequence[Survey] | None = None,
    part: SweepPart | None = None,
    *,
    code: Snapshot | None = None,
    tell: Callable[[str], None] = _nobody,
) -> str:
    """Create a run for the job and return its id; nothing is launched yet.

    Checks the launcher's options, the budget and the store first, of each phase. On failure nothing
    is left. `found` is where the nodes can be had (of each phase), if the caller has asked: the
    clouds take seconds to say. A sweep's run, whose `part` is given, has its id from there: to
    create it again, after whoever did so died, takes up what he left. `code` is the copy of the
    job's folder that all its launches get, if it was made already; `tell` hears of it otherwise.

    Raises:
        SpecError: an option of the launcher makes no sense, or a price is unknown, or the team's
            budget does not allow the run's.
        BudgetExhausted: the budget buys no useful training.
        StoreError: the store cannot be written.
    """
    now = time.time()
    spec = job.in_phase(0)
    run_id = new_run_id(spec.name, now) if part is None else part.run_id
    final = RunFolder(runs_folder() / run_id)
    begins_at = max(now, spec.start_at or now)
    limits = Limits(
        budget_usd=spec.budget_usd,
        deadline_at=None if spec.deadline_s is None else begins_at + spec.deadline_s,
        nodes_min=spec.nodes.min,
        nodes_max=spec.nodes.max,
        allow_unknown_price=spec.allow_unknown_price,
    )
    seen = _of_phases(found)
    for index in range(max(1, len(job.phases))):
        each = seen[index] if index < len(seen) else None
        _check_place(job, index, limits, each, final.path)
    check_urls(spec.notify)
    store_root = open_store(spec.store).url
    keep_private(spec.store)
    membership.join(
        store_root,
        spec.team.budget,
        budget_usd=limits.budget_usd,
        allow_unknown_price=limits.allow_unknown_price,
    )
    code = code or fix_code(job, tell)
    # Built aside and renamed: a run that is half made is never seen.
    aside = runs_folder() / f".new-{run_id}"
    if part is not None:
        shutil.rmtree(aside, ignore_errors=True)
    draft = _make_folder(aside)
    try:
        data = {
            "run_id": run_id,
            "name": spec.name,
            "store_root": store_root,
            "limits": limits_to_json(limits),
            "spec": spec.to_json(),
            "job": job.to_json() if job.phases else None,
            "sweep": None if part is None else part.to_json(),
            "code": code_data(code),
        }
        with Journal.create(draft.journal_path) as journal:
            journal.append(Kind.CREATED.value, at=now, data=data)
        remember_made(draft.path, job)
        public = {**data, "spec": job.public_json(), "created_at": to_iso(now)}
        del public["job"]
        keep_for(draft.path, code.digest)
        body = json.dumps({"schema": RUN_SCHEMA, **public}, sort_keys=True, indent=1)
        run_store(store_root, run_id).put(keys.RUN, body.encode(), if_absent=part is None)
        publish_code(run_store(store_root, run_id), code)
        draft.path.rename(final.path)
    except BaseException:
        shutil.rmtree(draft.path, ignore_errors=True)
        raise
    return run_id


def admit_resume(
    run_id: str,
    *,
    budget_usd: float | None = None,
    deadline_s: float | None = None,
    nodes: NodeRange | str | int | None = None,
    same_code: bool = False,
    tell: Callable[[str], None] = _nobody,
) -> None:
    """Write down that a settled run goes on, with new limits where they are given.

    Args:
        run_id: the run.
        budget_usd: new budget of the whole run, with what it has spent so far.
        deadline_s: new deadline, counted from now.
        nodes: new count or range of nodes.
        same_code: what is in the job's folder now does not count.
        tell: hears which files have changed since.

    Raises:
        UsageError: the run has finished, or still goes on, or another machine had it since; or the
            same code is asked for, and it is not here.
        BudgetExhausted: what is left of the budget buys no useful training.
        DeadlineReached: the old deadline has passed and no new one is given.
    """
    folder = folder_of(run_id)
    with folder.journal() as journal:
        record = read_record(journal)
        now = folder.clock().now()
        limits = _checked_resume(record, now, budget_usd, deadline_s, nodes)
        job = _job_of(record)
        code = _code_of(folder, record, job, tell, same_code=same_code)
        spec = in_copy(job.in_phase(phase_due(record)), code.get("code") or record.code)
        spent_usd = cost.spent_usd(record, now)
        offers = _as_paid(record, _offers(spec, folder.path))
        _check_budget(limits, offers, spent_usd=spent_usd)
        with _still_at_rest(journal, record):
            forget_wish(folder.launches_path)
            data = {"limits": limits_to_json(limits), **code}
            journal.append(Kind.RESUMED.value, at=now, data=data)


def _code_of(
    folder: RunFolder,
    record: RunRecord,
    job: JobSpec,
    tell: Callable[[str], None],
    *,
    same_code: bool,
) -> dict[str, Any]:
    """Return what the journal says of the code with which a run goes on; keep it from here on."""
    store = run_store(record.store_root, record.run_id)
    try:
        snapshot, files = code_to_go_on(
            job, record.code, tell, same_code=same_code, listed=lambda: read_code(store)[1]
        )
    except Refused as problem:
        raise UsageError(f"The code of {record.run_id} makes no sense: {problem}.") from problem
    keep_for(folder.path, snapshot.digest)
    if snapshot.digest == record.code.get("digest"):
        return {}
    publish_code(store, snapshot)
    return {"code": code_data(snapshot), "changed_files": files[:_MOST_FILES_TOLD]}


@contextmanager
def _still_at_rest(journal: Journal, record: RunRecord) -> Iterator[None]:
    """Write in the block what lets a run go on, unless another command did so since it was read.

    Of two moves at once the second would let the first one's nodes live on, known to nobody: where
    the run is then, no launcher has them.

    Raises:
        UsageError: the run goes on already, or did meanwhile. Nothing was written.
    """
    with journal.all_or_nothing():
        now = record
        for entry in journal.events(record.seq):
            now = apply(now, entry)
        _check_resumable(now)
        if now.settled != record.settled:
            raise UsageError(
                f"Run {record.run_id} has gone on and come to rest since this was asked for.",
                hint=f"look: spotguard status {record.run_id}; then repeat the command",
            )
        yield


def _as_paid(record: RunRecord, offers: Iterable[Offer]) -> list[Offer]:
    """Return offers at the price that they take from the run's budget."""
    return [replace(offer, price_usd_per_h=cost.price_usd_per_h(record, offer)) for offer in offers]


def _checked_resume(
    record: RunRecord,
    now: float,
    budget_usd: float | None,
    deadline_s: float | None,
    nodes: NodeRange | str | int | None,
) -> Limits:
    """Return the limits with which a run goes on; raise if it cannot."""
    _check_resumable(record)
    store = run_store(record.store_root, record.run_id)
    check_ours(store, machine_id(spotguard_home()), now)
    limits = _new_limits(record.limits, now, budget_usd, deadline_s, nodes)
    if limits.deadline_at is not None and limits.deadline_at <= now:
        raise DeadlineReached(
            f"The deadline of {record.run_id} passed at {to_iso(limits.deadline_at)}.",
            hint="give it more time: --deadline 2h (from now)",
        )
    keep_private(str(record.spec.get("store")))
    check_conditions(record.store_root)  # no controller could take the run there
    membership.check_budget(
        record.store_root,
        budget_usd=limits.budget_usd,
        allow_unknown_price=limits.allow_unknown_price,
        spent_usd=cost.known_spent_usd(record, now),
    )
    return limits


def _of_phases(found: Survey | Sequence[Survey] | None) -> Sequence[Survey]:
    """Return what is known of each phase; nothing where nobody has asked."""
    if found is None:
        return ()
    return found if isinstance(found, Sequence) else (found,)


def move_plan(run_id: str, place: Mapping[str, Any]) -> JobSpec:
    """Return the job as it would be elsewhere: what `plan_job` and `find_offers` take.

    `place` has some of `PLACE_FIELDS`, as `JobSpec` holds them. What it leaves open is as before.

    Raises:
        UsageError: the run has finished.
        SpecError: it cannot be there.
    """
    with folder_of(run_id).journal() as journal:
        record = read_record(journal)
    _check_unfinished(record)
    job, nodes = _moved_job(record, place)
    spec = job.in_phase(phase_due(record))
    return spec.replace(nodes=nodes, budget_usd=record.limits.budget_usd)


def admit_move(
    run_id: str,
    place: Mapping[str, Any],
    *,
    found: Survey | None = None,
    budget_usd: float | None = None,
    deadline_s: float | None = None,
    same_code: bool = False,
    tell: Callable[[str], None] = _nobody,
) -> None:
    """Write down that a settled run goes on elsewhere, with new limits where they are given.

    One event says all of it, so that a run is either here or there. A phased run moves the phase
    that it is in; those to come stay as they are.

    Args:
        run_id: the run.
        place: some of `PLACE_FIELDS`, as `JobSpec` holds them.
        found: where the nodes can be had, if the caller has asked.
        budget_usd: new budget of the whole run, with what it has spent so far, wherever it was.
        deadline_s: new deadline, counted from now.
        same_code: what is in the job's folder now does not count.
        tell: hears which files have changed since.

    Raises:
        UsageError: the run has finished, or still goes on, or another machine had it since; or the
            same code is asked for, and it is not here.
        SpecError: it cannot be there, or a price is unknown.
        BudgetExhausted: what is left of the budget buys no useful training there.
        DeadlineReached: the old deadline has passed and no new one is given.
    """
    folder = folder_of(run_id)
    with folder.journal() as journal:
        record = read_record(journal)
        now = folder.clock().now()
        limits = _checked_resume(record, now, budget_usd, deadline_s, None)
        job, nodes = _moved_job(record, place)
        phase = phase_due(record)
        data = place_data(job, phase, limits, nodes)
        moved = replace(
            record, spec=data["spec"], job=data["job"] or {}, limits=Limits(**data["limits"])
        )
        _check_place(job, phase, moved.limits, found, folder.path, moved)
        data |= _code_of(folder, record, job, tell, same_code=same_code)
        with _still_at_rest(journal, record):
            forget_wish(folder.launches_path)
            remember_made(folder.path, job)
            journal.append(Kind.MOVED.value, at=now, data=data)


def _moved_job(record: RunRecord, place: Mapping[str, Any]) -> tuple[JobSpec, NodeRange]:
    """Return the job with another place for where it goes on, and on how many nodes it does.

    That is the phase in which its steps are, which may be later than the one it came to rest in.
    """
    job, phase = _job_of(record), phase_due(record)
    nodes = NodeRange(record.limits.nodes_min, record.limits.nodes_max)
    if phase > record.phase:
        nodes = job.in_phase(phase).nodes
    nodes = place.get("nodes") or nodes
    return job.moved(phase, {**place, "nodes": nodes}), nodes


def _job_of(record: RunRecord) -> JobSpec:
    """Return the job with all its phases."""
    return JobSpec.from_json(record.job or record.spec)


def _check_place(
    job: JobSpec,
    phase: int,
    limits: Limits,
    found: Survey | None,
    run_dir: Path,
    record: RunRecord | None = None,
) -> None:
    """Let pass if nodes of a phase can be had within the budget, and all can be carried to them.

    `record` is of a run that is moved there; None: of one that has not begun.
    """
    spec = job.in_phase(phase)
    offers = _of_market(found.offers, spec) if found else _offers(spec, run_dir)
    nodes_min = limits.nodes_min if phase == 0 or record is not None else spec.nodes.min
    spent_usd = 0.0 if record is None else cost.spent_usd(record, time.time())
    taken = offers
    if record is not None or job.phases:
        taken = _as_paid(record or _unbegun(job, spec, limits), offers)
    _check_budget(replace(limits, nodes_min=nodes_min), taken, spent_usd=spent_usd)
    if is_own_template(spec.template):
        from spotguard.control.supervisor.skypilot_request import check_template

        check_template(spec)
    if spec.infra != LOCAL:
        from spotguard.control.supervisor.skypilot_request import check_places, preview

        if found is None:
            check_places(spec)
        preview(spec, offers)  # raises where something cannot be carried to the nodes


def _unbegun(job: JobSpec, spec: JobSpec, limits: Limits) -> RunRecord:
    """Return what would be known of a run in a phase before any nodes."""
    return RunRecord(
        run_id="",
        name=job.name,
        created_at=0.0,
        store_root=job.store,
        spec=spec.to_json(),
        job=job.to_json(),
        limits=limits,
    )


def new_run_id(name: str, now: float) -> str:
    """Return an id that no other run has, of a name and the instant."""
    if not name[0].isalpha():  # a cluster's name, which begins with it, needs a letter there
        name = f"run-{name}"
    stamp = time.strftime("%y%m%d-%H%M%S", time.gmtime(now))
    return f"{name[:_MAX_NAME_CHARS].strip('-')}-{stamp}-{secrets.token_hex(2)}"


def _make_folder(path: Path) -> RunFolder:
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.mkdir(mode=0o700)
    except OSError as problem:
        raise EnvironmentFailure(
            f"{path.parent} cannot be written: {problem.strerror}.",
            hint="set SPOTGUARD_HOME to a folder that you can write",
        ) from problem
    return RunFolder(path)


def _offers(spec: JobSpec, run_dir: Path) -> list[Offer]:
    return _of_market(launcher_for(spec, run_dir).offers(), spec)


def _of_market(offers: Iterable[Offer], spec: JobSpec) -> list[Offer]:
    return [offer for offer in offers if offer.market is spec.market]


def _check_budget(limits: Limits, offers: list[Offer], *, spent_usd: float | None) -> None:
    """Let pass if any place is within the budget; else raise what the best one lacks."""
    problem: BudgetExhausted | None = None
    for offer in offers:
        try:
            check_budget(
                limits.budget_usd,
                offer.price_usd_per_h,
                nodes=limits.nodes_min,
                spent_usd=spent_usd,
                allow_unknown_price=limits.allow_unknown_price,
            )
        except BudgetExhausted as found:
            problem = problem or found
        else:
            return
    if problem is not None:
        raise problem


def _check_resumable(record: RunRecord) -> None:
    if record.settled is None:
        raise UsageError(
            f"Run {record.run_id} still goes on, so there is nothing to resume.",
            hint=f"look: spotguard status {record.run_id} --watch; to have it go on elsewhere, "
            f"spotguard stop {record.run_id} comes first, or --stop with resume",
        )
    _check_unfinished(record)


def _check_unfinished(record: RunRecord) -> None:
    if record.settled is not None and record.settled.state is RunState.FINISHED:
        raise UsageError(
            f"Run {record.run_id} has finished all its steps, so there is nothing to resume.",
            hint="start a new run: spotguard up job.py",
        )


def _new_limits(
    old: Limits,
    now: float,
    budget_usd: float | None,
    deadline_s: float | None,
    nodes: NodeRange | str | int | None,
) -> Limits:
    try:
        wanted = (
            NodeRange(old.nodes_min, old.nodes_max) if nodes is None else NodeRange.parse(nodes)
        )
    except ValueError as problem:
        raise SpecError("nodes", f"given {nodes!r}; {problem}") from problem
    return Limits(
        budget_usd=old.budget_usd if budget_usd is None else budget_usd,
        deadline_at=old.deadline_at if deadline_s is None else now + deadline_s,
        nodes_min=wanted.min,
        nodes_max=wanted.max,
        allow_unknown_price=old.allow_unknown_price,
    )
