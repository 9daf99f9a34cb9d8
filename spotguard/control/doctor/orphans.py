"""Orphans: clusters that spotguard launched, that cost money, and that no run wants any more.

A cluster is wanted while its run has a living controller: on this machine (the lock of the run's
folder) or on another one (the lease in the run's store). It is an orphan when its run is at rest,
or when its controller is silent and its job sends no heartbeat either. Anything else is left
alone: a job whose controller is silent trains on, and a store that cannot be read proves nothing.
Nodes that a controller has for itself are judged by themselves (`controller_nodes`).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Protocol

from spotguard.control.controller.one_run import run_store
from spotguard.control.doctor.controller_nodes import judge_node, tell_gone
from spotguard.control.doctor.orphan_report import ClusterFate, Findings, Judgement, Leftover
from spotguard.control.home_name import machine_id
from spotguard.control.journal.fold import read_record
from spotguard.control.journal.job_events import read_beats
from spotguard.control.journal.stored.published_launch import launched_numbers
from spotguard.control.run_folder import RunFolder, runs_folder
from spotguard.control.supervisor.lease import VALID_S, read_holder
from spotguard.control.supervisor.request import heartbeat_s
from spotguard.errors import JournalDamaged, LauncherFailure, NotFound, SpotguardError, UsageError
from spotguard.events import keys
from spotguard.events.untrusted import parse_object
from spotguard.shared.units import SystemClock, format_duration
from spotguard.spec.home_folder import spotguard_home
from spotguard.spec.model import JobSpec
from spotguard.storage.deadline import give_up_after
from spotguard.storage.small_objects import get_small
from spotguard.storage.urls import is_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from spotguard.control.journal.record import RunRecord
    from spotguard.control.supervisor.lease import Holder
    from spotguard.launch.skypilot.cluster_list import OurCluster
    from spotguard.shared.units import Clock
    from spotguard.storage.base import ObjectStore

_STORE_S = 20.0
"""How long one run's store may take to answer."""
_BEATS_MISSED = 3
"""A job that missed so many heartbeats in a row, and for as long as a lease lasts, is silent."""
_DOWN_PATIENCE_S = 400.0
"""SkyPilot needs some minutes to end nodes in a cloud."""
_DOWN_POLL_S = 1.0


class Books(Protocol):
    """What is asked of SkyPilot; `launch.skypilot.sdk.SkySdk` answers."""

    def ours(self, names: Sequence[str] | None = None, *, fresh: bool = False) -> list[OurCluster]:
        """Return spotguard's clusters, as last seen or with `fresh` as the clouds say now."""
        ...

    def end(self, cluster: str) -> None:
        """Have a cluster terminated; return when it is."""
        ...


def find_leftovers(books: Books, now: Callable[[], float] = time.time) -> Findings:
    """Return the clusters of spotguard's that no living controller looks after.

    Blocks for seconds. What SkyPilot only believes to be there is asked for in its cloud first.
    """
    try:
        listed = books.ours()
        verdicts = {cluster.name: judge(cluster, now()) for cluster in listed}
        doubtful = [
            name for name, verdict in verdicts.items() if verdict.fate is not ClusterFate.WANTED
        ]
        there = books.ours(doubtful, fresh=True) if doubtful else []
    except SpotguardError as problem:
        return Findings(asked=True, problem=problem.message)
    leftovers = [
        Leftover(
            cluster=cluster,
            verdict=verdicts[cluster.name],
            looked_at=now(),
        )
        for cluster in there
        if cluster.name in verdicts
    ]
    dearest_first = sorted(leftovers, key=lambda each: -(each.usd_per_h or 0.0))
    wanted = len(listed) - len(doubtful)
    return Findings(asked=True, wanted=wanted, leftovers=tuple(dearest_first))


def skypilot_books() -> Books | None:
    """Return SkyPilot's; None where it is not installed or was never used."""
    from spotguard.launch.skypilot.import_sky import in_use
    from spotguard.launch.skypilot.sdk import SkySdk

    return SkySdk() if in_use() else None


# ---------------------------------------------------------------- judging


def judge(cluster: OurCluster, now: float) -> Judgement:
    """Return whether anybody wants a cluster, and how that is known."""
    if cluster.controller is not None:
        return judge_node(cluster, now, patience_s=_STORE_S)
    folder = RunFolder(runs_folder() / cluster.run_id)
    if folder.controller_pid() is not None:
        return Judgement(fate=ClusterFate.WANTED, why="its controller lives on this machine")
    record = _record(folder)
    over = _over(record, cluster.name) if record is not None else ""
    if over:  # its name is never used again, so nobody else can mean it either
        return Judgement(fate=ClusterFate.ORPHAN, why=over)
    try:
        with give_up_after(_STORE_S):
            told = _ask_store(run_store(cluster.store, cluster.run_id), record, now)
    except SpotguardError as problem:
        return Judgement(
            fate=ClusterFate.UNSURE, why=f"its run's store cannot be asked: {problem.message}"
        )
    return _by_store(cluster, record, told, now)


@dataclass(frozen=True, kw_only=True)
class _Told:
    """What a run's store says of it."""

    holder: Holder | None
    """Who had the run last; None if nobody did."""
    known: bool
    training_at_step: int | None
    """The step of a job that gave a sign of life a moment ago; None if it is silent."""


def _ask_store(store: ObjectStore, record: RunRecord | None, now: float) -> _Told:
    found = read_holder(store)
    spec = _spec(store) if record is None else JobSpec.from_json(record.spec)
    beats_s = 0.0 if spec is None else heartbeat_s(spec)
    return _Told(
        holder=found[0] if found else None,
        known=store.head(keys.RUN) is not None,
        training_at_step=_newest_beat(store, now - max(VALID_S, _BEATS_MISSED * beats_s)),
    )


def _spec(store: ObjectStore) -> JobSpec | None:
    """Return the job as the run's store has it; None if it does not, or makes no sense."""
    try:
        return JobSpec.from_json(parse_object(get_small(store, keys.RUN), keys.RUN)["spec"])
    except (NotFound, UsageError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _newest_beat(store: ObjectStore, since: float) -> int | None:
    """Return the step of the newest attempt that gave a sign of life since then; None if none did.

    The newest one may wait, silent, for the end of the one before it. The store's clock counts as
    well as the node's, which may be an hour behind.
    """
    for number in islice(launched_numbers(store), 2):
        beats = read_beats(store, number)
        signs = [beat.at for beat in beats]
        signs += [info.modified_at or 0.0 for info in store.list(keys.heartbeats(number))]
        if beats and any(at > since for at in signs):
            return max(beat.step for beat in beats)
    return None


def _by_store(cluster: OurCluster, record: RunRecord | None, told: _Told, now: float) -> Judgement:
    holder = told.holder
    if holder is not None and holder.lives(now):
        return Judgement(fate=ClusterFate.WANTED, why=holder.words(now))
    # A run that another machine had since is at rest here, and may go on there.
    moved = holder is not None and holder.is_foreign(machine_id(spotguard_home()))
    if record is not None and record.settled is not None and not moved:
        return Judgement(
            fate=ClusterFate.ORPHAN,
            why=f"its run is {record.settled.state.label}",
            training_at_step=told.training_at_step,
        )
    current = record.current if record is not None and not moved else None
    return Judgement(
        fate=_fate_without_controller(cluster, record, told),
        why=_why_without_controller(cluster, record, told, now),
        run_goes_on=current is not None and current.cluster == cluster.name,
        adoptable=told.known and (record is None or moved),
        training_at_step=told.training_at_step,
    )


def _fate_without_controller(
    cluster: OurCluster, record: RunRecord | None, told: _Told
) -> ClusterFate:
    if told.training_at_step is not None:
        return ClusterFate.TRAINING
    unheard_of = record is None and told.holder is None and not told.known
    return ClusterFate.UNSURE if unheard_of and is_folder(cluster.store) else ClusterFate.ORPHAN


def _why_without_controller(
    cluster: OurCluster, record: RunRecord | None, told: _Told, now: float
) -> str:
    holder = told.holder
    if holder is not None and holder.damaged:
        return f"it had {holder.words(now)}"
    if holder is not None and not holder.released:
        silent = format_duration(max(0.0, now - holder.renewed_at))
        return f"its controller on {holder.host} has been silent for {silent}"
    if record is not None or holder is not None or told.known:
        return "its run has no controller"
    if is_folder(cluster.store):
        return f"its run's store, {cluster.store}, is not on this machine"
    return "its run is known neither here nor in its store"


def _record(folder: RunFolder) -> RunRecord | None:
    """Return what this machine knows of a run; None if nothing, or if its journal is damaged."""
    if not folder.journal_path.exists():
        return None
    try:
        with folder.journal() as journal:
            return read_record(journal)
    except JournalDamaged:
        return None


def _over(record: RunRecord, name: str) -> str:
    """Return why a cluster's time is over by this machine's journal; empty if it is not."""
    attempts = [attempt for attempt in record.attempts if attempt.cluster == name]
    if not attempts or any(a.end is None or a.end.leaving for a in attempts):
        return ""
    end = attempts[-1].end
    assert end is not None
    if record.settled is not None:
        return f"its run is {record.settled.state.label}"
    return f"its attempt ended: {end.reason.told(None)}"


# ---------------------------------------------------------------- ending


def end_orphans(
    found: Findings, books: Books, tell: Callable[[str], None], clock: Clock | None = None
) -> Findings:
    """Return the findings once each orphan is ended, or has a reason why it is not.

    Blocks for minutes. What is not known to be an orphan is left alone.
    """
    orphans = [leftover.cluster.name for leftover in found.orphans]
    return _end(found, orphans, frozenset({ClusterFate.ORPHAN}), books, tell, clock)


def end_named(
    found: Findings,
    names: Sequence[str],
    books: Books,
    tell: Callable[[str], None],
    clock: Clock | None = None,
) -> Findings:
    """Return the same for the clusters of these names, also where a job still trains on one.

    Raises:
        UsageError: one is not among the findings; says which are.
    """
    there = [leftover.cluster.name for leftover in found.leftovers]
    for name in names:
        if name not in there:
            told = f"those are: {', '.join(there)}" if there else "there is no such cluster"
            raise UsageError(
                f"{name!r} is no cluster without a controller.",
                hint=f"{told}; one that has a controller is released by: spotguard down RUN",
            )
    return _end(found, names, frozenset(ClusterFate) - {ClusterFate.WANTED}, books, tell, clock)


def _end(
    found: Findings,
    names: Sequence[str],
    fates: frozenset[ClusterFate],
    books: Books,
    tell: Callable[[str], None],
    clock: Clock | None,
) -> Findings:
    leftovers = []
    for leftover in found.leftovers:
        if leftover.cluster.name in names:
            tell(f"ending {leftover.cluster.name}")
            leftover = end_leftover(books, leftover, fates, clock)
        leftovers.append(leftover)
    return replace(found, leftovers=tuple(leftovers))


def end_leftover(
    books: Books, leftover: Leftover, fates: frozenset[ClusterFate], clock: Clock | None = None
) -> Leftover:
    """Return the leftover once it is ended, or with the reason why it is not. Blocks for minutes.

    Looks again first: a controller may have come back meanwhile, and only what has one of these
    fates is ended.
    """
    clock = clock or SystemClock()
    again = judge(leftover.cluster, clock.now())
    if again.fate not in fates:
        return replace(leftover, problem=f"left alone: {again.why}")
    try:
        if again.run_goes_on:
            _down(leftover.cluster.run_id, clock)
        else:
            books.end(leftover.cluster.name)
            if leftover.cluster.controller is not None:
                tell_gone(leftover.cluster, clock.now())
    except SpotguardError as problem:
        return replace(leftover, problem=problem.message)
    return replace(leftover, ended=True)


def _down(run_id: str, clock: Clock) -> None:
    """Let a run's own controller, which is started for it, take its nodes down; wait for that."""
    from spotguard.control import api

    api.request_down(run_id)
    give_up_at = clock.monotonic() + _DOWN_PATIENCE_S
    while not api.view(run_id).state.settled:
        if clock.monotonic() >= give_up_at:
            raise LauncherFailure(f"not gone yet; look: spotguard status {run_id} --watch")
        clock.sleep(_DOWN_POLL_S)
