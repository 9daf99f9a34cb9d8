"""`down` and `stop` without a journal: from the file of launches, the launcher and the store.

For a journal that is gone, damaged or locked, whose events make no sense, or whose controller does
not start. The command ends a living controller, which could only act on what it cannot read, and
does the rest itself under the controller's lock and lease. What the user wants is left in the file,
so that no later controller launches again.
"""

from __future__ import annotations

import logging
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spotguard.checkpoint.lineage import restorable
from spotguard.control.controller.one_run import launcher_for, run_store
from spotguard.control.controller.start import control_alone
from spotguard.control.home_name import machine_id
from spotguard.control.journal.launches import Launches
from spotguard.control.journal.record import Kind
from spotguard.control.journal.stored.published_launch import launched_numbers
from spotguard.control.supervisor.lease import Lease, check_ours
from spotguard.control.supervisor.policy import policy_for
from spotguard.control.supervisor.request import ask_to_stop
from spotguard.errors import (
    EnvironmentFailure,
    LauncherFailure,
    SpotguardError,
    StoreError,
    UsageError,
)
from spotguard.events.states import EndReason
from spotguard.launch.base import ClusterState
from spotguard.shared.units import SystemClock, format_duration
from spotguard.spec.home_folder import spotguard_home
from spotguard.storage.deadline import give_up_after
from spotguard.storage.urls import below, is_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from spotguard.control.run_folder import RunFolder
    from spotguard.launch.base import ClusterView, Launcher
    from spotguard.shared.units import Clock
    from spotguard.storage.base import ObjectStore

log = logging.getLogger(__name__)

_NOTHING_LEFT = frozenset({ClusterState.GONE, ClusterState.REFUSED, ClusterState.FAILED})
_POLL_S = 0.2
_BUCKET_POLL_S = 5.0
_STORE_S = 20.0
"""How long the store may take to say who has the run, or to take a request."""
_DOUBT_S = 2.0
"""A launch that was asked for a moment before its asker was ended may not be in the books yet."""
_ORDERS = 2
"""How often the end of a cluster is asked for, with the launcher's patience each."""


@dataclass(frozen=True, kw_only=True)
class Left:
    """What is known of a run without its journal."""

    run_id: str
    place: str
    """STORE/RUN_ID: what `adopt` takes."""
    clusters: tuple[str, ...]
    """Those that may live."""
    released: bool
    """The user has asked for the end of all before."""
    controller_pid: int | None


def what_is_left(folder: RunFolder) -> Left | None:
    """Return what the file of launches says; None if there is none.

    Raises:
        LaunchesDamaged: it cannot be read.
    """
    launches = Launches.read(folder.launches_path)
    if launches is None:
        return None
    return Left(
        run_id=folder.run_id,
        place=below(launches.store_root, folder.run_id),
        clusters=tuple(launches.clusters),
        released=launches.wish is not None and not launches.clusters,
        controller_pid=folder.controller_pid(),
    )


def down(folder: RunFolder, tell: Callable[[str], None], clock: Clock | None = None) -> None:
    """End every cluster that the run may have; return once nothing is left of them.

    Raises:
        UsageError: another machine has the run, or had it since.
        EnvironmentFailure: the controller does not end.
        LauncherFailure: some could not be ended; says which.
    """
    with _alone(folder) as launches:
        launches.ask(Kind.USER_DOWN)
        launcher = launcher_for(launches.spec, folder.path)
        _release(launches, launcher, tell, clock or SystemClock())


def stop(folder: RunFolder, tell: Callable[[str], None], clock: Clock | None = None) -> int | None:
    """Have the job save and leave, then end its clusters; return the step that is saved.

    None is none. Nothing is ended before the job has left, or had as long for it as a controller
    gives it.

    Raises:
        UsageError: another machine has the run, or had it since.
        EnvironmentFailure: the job cannot be asked, or the controller does not end.
        LauncherFailure: some clusters could not be ended; says which.
    """
    clock = clock or SystemClock()
    launches = Launches.read(folder.launches_path)
    assert launches is not None, "it was there"
    store = _ask_first(launches)
    with _alone(folder) as launches:
        launches.ask(Kind.USER_STOP)
        launcher = launcher_for(launches.spec, folder.path)
        _await_leave(launches, launcher, store, tell, clock)
        _release(launches, launcher, tell, clock)
    return _saved_step(store)


# ---------------------------------------------------------------- being alone


@contextmanager
def _alone(folder: RunFolder) -> Iterator[Launches]:
    """Hold the run, here and between machines; the launches are read once nobody else acts."""
    with control_alone(folder):
        launches = Launches.read(folder.launches_path)
        assert launches is not None, "nobody takes it away"
        lease = _lease(launches)
        if lease is None:
            yield launches
            return
        try:
            with lease.kept():
                yield launches
        finally:
            lease.release()


def _lease(launches: Launches) -> Lease | None:
    """Return the hold on the run; None where its store cannot say who has it."""
    try:
        with give_up_after(_STORE_S):
            store = run_store(launches.store_root, launches.run_id)
            lease = Lease(store, SystemClock(), machine_id(spotguard_home()))
            lease.take()
    except EnvironmentFailure as problem:
        log.warning("nobody can say who has %s: %s", launches.run_id, problem)
        return None
    if lease.lost_to:
        raise UsageError(
            f"Another machine had the run since: {lease.lost_to}.",
            hint=f"bring it here: spotguard adopt {below(launches.store_root, launches.run_id)}",
        )
    return lease


# ---------------------------------------------------------------- asking the job


def _ask_first(launches: Launches) -> ObjectStore:
    """Ask the job to save and stop while nothing is changed yet; return the run's store."""
    try:
        with give_up_after(_STORE_S):
            store = run_store(launches.store_root, launches.run_id)
            check_ours(store, machine_id(spotguard_home()), time.time())
            _ask_all(launches, store)
    except EnvironmentFailure as problem:
        raise EnvironmentFailure(
            f"The job of {launches.run_id} cannot be asked to save, so nothing was released: "
            f"{problem.message}",
            hint=f"release its nodes without saving: spotguard down {launches.run_id}",
        ) from problem
    return store


def _ask_all(launches: Launches, store: ObjectStore) -> None:
    """Ask the newest attempt, and each of a cluster that may live: the newest may only wait."""
    for attempt in sorted({_newest(launches, store), *launches.clusters.values()}):
        ask_to_stop(store, attempt, EndReason.STOPPED)


def _newest(launches: Launches, store: ObjectStore) -> int:
    """Return the number of the newest attempt, also of one that the nodes began themselves."""
    newest = next(launched_numbers(store), 0)
    return max([newest, *launches.clusters.values()])


def _await_leave(
    launches: Launches,
    launcher: Launcher,
    store: ObjectStore,
    tell: Callable[[str], None],
    clock: Clock,
) -> None:
    """Return once no node of the run's clusters runs the job, or it had its time to leave."""
    poll_s = _POLL_S if is_folder(store.url) else _BUCKET_POLL_S
    patience_s = policy_for(launches.spec).stop_patience_s
    give_up_at = clock.monotonic() + patience_s
    while not all(_has_left(launcher.observe(cluster)) for cluster in launches.clusters):
        if clock.monotonic() >= give_up_at:
            tell(f"the job did not save and leave for {format_duration(patience_s)}")
            return
        _ask_again(launches, store)
        clock.sleep(poll_s)


def _has_left(view: ClusterView) -> bool:
    return view.job_over or view.state in {*_NOTHING_LEFT, ClusterState.ABSENT}


def _ask_again(launches: Launches, store: ObjectStore) -> None:
    """Ask also the attempt that the nodes may have begun themselves meanwhile."""
    try:
        _ask_all(launches, store)
    except StoreError as problem:
        log.warning("the store is silent: %s", problem)


def _saved_step(store: ObjectStore) -> int | None:
    try:
        return next((ref.step for ref in restorable(store)), None)
    except SpotguardError as problem:
        log.warning("what is saved cannot be told: %s", problem)
        return None


# ---------------------------------------------------------------- releasing


def _release(
    launches: Launches, launcher: Launcher, tell: Callable[[str], None], clock: Clock
) -> None:
    patience_s = policy_for(launches.spec).down_patience_s
    problems = []
    for cluster in list(launches.clusters):
        try:
            _end(cluster, launcher, patience_s, clock)
        except LauncherFailure as problem:
            problems.append(f"{cluster}: {problem.message}")
        else:
            launches.forget(cluster)
            tell(f"released {cluster}")
    if problems:
        raise LauncherFailure(
            f"Not all of {launches.run_id} is released. {'; '.join(problems)}",
            hint=f"try again: spotguard down {launches.run_id}",
        )


def _end(cluster: str, launcher: Launcher, patience_s: float, clock: Clock) -> None:
    """Return once nothing is left of a cluster, however little of it there was."""
    began_at = clock.monotonic()
    orders = 0
    while (waited_s := clock.monotonic() - began_at) < _ORDERS * patience_s:
        if waited_s >= orders * patience_s:
            launcher.down(cluster)
            orders += 1
        view = launcher.observe(cluster)
        if view.state in _NOTHING_LEFT:
            return
        if view.state is ClusterState.ABSENT and waited_s >= _DOUBT_S:
            return
        clock.sleep(_POLL_S)
    raise LauncherFailure(
        f"it is still there {format_duration(_ORDERS * patience_s)} after its end was asked for"
    )
