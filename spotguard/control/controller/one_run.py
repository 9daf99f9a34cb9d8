"""One run's controller: takes the run, and looks after it until it is at rest."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from spotguard.control.home_name import machine_id
from spotguard.control.journal.fold import read_record
from spotguard.control.journal.launches import Launches
from spotguard.control.journal.ledger import Ledger
from spotguard.control.journal.market_log import market_path
from spotguard.control.journal.record import Kind
from spotguard.control.journal.stored.code import in_copy
from spotguard.control.journal.sweep.comparison import Comparison
from spotguard.control.journal.sweep.part import SweepPart, sweep_store
from spotguard.control.journal.team.budget import TeamBudget
from spotguard.control.journal.team.gate import sweep_budget
from spotguard.control.run_folder import RunFolder
from spotguard.control.status.metrics import ValuesOfRun
from spotguard.control.status.watch import summary
from spotguard.control.supervisor.decide import EXIT_UNFINISHED
from spotguard.control.supervisor.end_reason import without_store
from spotguard.control.supervisor.lease import Lease
from spotguard.control.supervisor.policy import Policy, policy_for
from spotguard.control.supervisor.supervisor import Supervisor
from spotguard.errors import DiskFailure, EnvironmentFailure, JournalDamaged
from spotguard.events import keys
from spotguard.events.states import RunState
from spotguard.launch.base import ChangesFiles
from spotguard.launch.local import LocalLauncher, LocalOptions
from spotguard.shared.json_documents import document
from spotguard.shared.units import Clock, SystemClock, format_duration
from spotguard.spec.home_folder import spotguard_home
from spotguard.spec.infra import LOCAL, split_places
from spotguard.spec.model import JobSpec
from spotguard.storage import PrefixedStore, open_store
from spotguard.storage.remote.bounded import AwayStore, BoundedStore
from spotguard.storage.urls import folder_at

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path
    from typing import Any

    from spotguard.control.controller.rest import Rest
    from spotguard.control.journal.journal import Journal
    from spotguard.control.journal.record import RunRecord
    from spotguard.launch.base import Launcher, Offer
    from spotguard.launch.skypilot.strays import Strays
    from spotguard.storage.base import ObjectStore

log = logging.getLogger(__name__)

T = TypeVar("T")

_buckets: dict[str, ObjectStore] = {}
"""By their URL: the runs of a process share connections and threads."""
_opening = threading.Lock()
"""All runs begin at once in a new process, and opening a store asks nobody."""
_PREDECESSOR_PATIENCE_S = 10.0
_STORE_RETRY_S = 5.0
"""How long until a store that cannot be read is tried again: its own retries come on top."""
_DISK_RETRY_S = 10.0
"""How long until a journal that cannot be written is tried again."""


def control(folder: RunFolder, rest: Rest) -> None:
    """Be the run's controller until it settles; return at once if another one is.

    Raises:
        LetGo: somebody else is to look after the run. It is left as it is, and free.
    """
    with folder.control(patience_s=_PREDECESSOR_PATIENCE_S, says_who=False) as in_control:
        if not in_control:
            log.info("another controller is in control")
            return
        with folder.journal() as journal:
            ledger = Ledger(journal, folder.clock())
            folder.say_who_controls()  # who waits for it goes on now: the journal can be read
            taken = _despite_disk(rest, lambda: _take(ledger, journal, folder, rest))
            if taken is None:
                return
            store, lease = taken
            try:
                with lease.kept():
                    here = partial(_control_here, folder, journal, store, lease, rest)
                    goes_on = False
                    while _despite_disk(rest, partial(here, goes_on=goes_on)):
                        goes_on = True  # in the next phase
            finally:  # this process may live on, and must not be taken for the run's controller
                lease.release()


def _despite_disk(rest: Rest, act: Callable[[], T]) -> T:
    """Do it; once more from its beginning whenever a disk was full for a while, or a file locked.

    Who ended instead would leave nodes behind that are paid, and nobody would hear of it.
    """
    while True:
        try:
            return act()
        except DiskFailure as problem:
            again = format_duration(_DISK_RETRY_S)
            log.warning("%s The run goes on once it can be: tried again in %s.", problem, again)
        rest.sleep(_DISK_RETRY_S)


def _control_here(
    folder: RunFolder,
    journal: Journal,
    store: ObjectStore,
    lease: Lease,
    rest: Rest,
    *,
    goes_on: bool,
) -> bool:
    """Control the run in the place where it is; return True once it is to go on in another."""
    record = read_record(journal)
    if record.settled is not None:
        return False
    launcher = launcher_for(JobSpec.from_json(record.spec), folder.path, code=record.code)
    supervisor = _supervisor(folder, journal, record, store, launcher, rest, lease=lease)
    lease.tell = lambda: document(summary(folder, supervisor.record))
    try:
        return supervisor.run(goes_on=goes_on).settled is None
    finally:
        launcher.close()  # the process goes on, and with it the threads that look for this run


def _supervisor(
    folder: RunFolder,
    journal: Journal,
    record: RunRecord,
    store: ObjectStore,
    launcher: Launcher,
    rest: Rest,
    *,
    lease: Lease | None,
) -> Supervisor:
    """Return the run's supervisor; without a lease it only may end things."""
    spec = JobSpec.from_json(record.spec)
    return Supervisor(
        journal=journal,
        launcher=launcher,
        store=store,
        clock=folder.clock(),
        policy=policy_for(spec),
        live_path=folder.live_path,
        lease=lease,
        launches=Launches.of(folder.launches_path, record),
        machine_clock=time.time,
        cache_key=folder.cache_key(),
        market_path=market_path() if spec.learn_market and spec.infra != LOCAL else None,
        budgets=_budgets_of(spec, record) if lease is not None else (),
        comparison=_comparison_of(record, store, folder.clock()) if lease is not None else None,
        rest=lambda record, acted: rest.until_next(
            record,
            tuple(_news(record, store, launcher)),
            acted=acted,
            unhurried=folder_at(store.url) is None or isinstance(launcher, ChangesFiles),
        ),
    )


def _budgets_of(spec: JobSpec, record: RunRecord) -> list[TeamBudget]:
    """Return the sums that the run shares with others: its sweep's, then its team's."""
    root, clock = BoundedStore(_opened(record.store_root)), SystemClock()
    priority = spec.priority
    team = TeamBudget(root, clock, record.run_id, cap=spec.team.budget, priority=priority)
    return [*sweep_budget(root, record, clock, priority=priority), team]


def _comparison_of(record: RunRecord, store: ObjectStore, clock: Clock) -> Comparison | None:
    """Return what compares the run with the other points of its sweep, if anything does."""
    part = SweepPart.of(record.sweep)
    if part is None or part.metric is None or part.first_step is None:
        return None
    shared = sweep_store(BoundedStore(_opened(record.store_root)), part.sweep_id)
    return Comparison(part, shared, ValuesOfRun(store, part.metric), clock)


def _news(record: RunRecord, store: ObjectStore, launcher: Launcher) -> Iterator[str]:
    """Yield the files and folders that change with what is to be seen of the run's nodes."""
    root = folder_at(store.url)
    for attempt in (record.current, record.ahead):
        if attempt is None:
            continue
        if root is not None:
            yield f"{root}/{keys.events(attempt.number)}"
        if isinstance(launcher, ChangesFiles):
            yield from launcher.files_of(attempt.cluster)


def _take(
    ledger: Ledger, journal: Journal, folder: RunFolder, rest: Rest
) -> tuple[ObjectStore, Lease] | None:
    """Return the run's store and the hold on the run, once that store can be read and written.

    Who ended instead would be restarted by the next command that looks, again and again, and
    nobody would hear why. Nodes that the run has are looked after meanwhile, and ended where that
    is due. None if the run came to rest by that, or by the user's wish.

    Raises:
        UsageError: another controller of this machine has the run.
    """
    alone: _Alone | None = None
    while True:
        try:
            store = _shared_store(ledger.record.store_root, ledger.record.run_id)
            lease = Lease(
                store,
                SystemClock(),
                machine_id(spotguard_home()),
                tell=lambda: document(summary(folder, ledger.record)),
            )
            lease.take()
        except EnvironmentFailure as problem:
            away = problem
            if ledger.record.store_problem is None:
                effect = without_store(ledger.record, Policy.stop_patience_s)
                data = {"problem": problem.message, "effect": effect}
                ledger.write(Kind.STORE_LOST, data)
        else:
            if ledger.record.store_problem is not None:
                ledger.write(Kind.STORE_BACK)
            if alone is not None:
                alone.close()
            return store, lease
        ledger.catch_up()
        if ledger.record.may_cost:
            alone = alone or _Alone(folder, journal, ledger.record, rest, away)
            alone.tick(away)
            ledger.catch_up()
        record = ledger.record
        if record.settled is not None:
            if alone is not None:
                alone.close()
            return None
        if record.wish is not None and not record.may_cost:
            ledger.write(
                Kind.SETTLED,
                {
                    "state": RunState.STOPPED.value,
                    "detail": f"stopped by you; its store cannot be read: {record.store_problem}",
                    "exit_code": EXIT_UNFINISHED,
                },
            )
            return None
        rest.sleep(_STORE_RETRY_S)


class _Alone:
    """Looks after a run's nodes while its store can't say whether the run is still ours."""

    def __init__(
        self,
        folder: RunFolder,
        journal: Journal,
        record: RunRecord,
        rest: Rest,
        problem: EnvironmentFailure,
    ) -> None:
        self._store = AwayStore(record.store_root, problem)
        self._launcher = launcher_for(JobSpec.from_json(record.spec), folder.path, code=record.code)
        self._supervisor = _supervisor(
            folder, journal, record, self._store, self._launcher, rest, lease=None
        )

    def tick(self, problem: EnvironmentFailure) -> None:
        """Look at the nodes, and end those whose end is due; `problem` is the store's."""
        self._store.problem = problem
        self._supervisor.tick(alone=True)

    def close(self) -> None:
        """Let the launcher go."""
        self._launcher.close()


def launcher_for(
    spec: JobSpec,
    run_dir: Path,
    *,
    regions: Sequence[str] = (),
    code: Mapping[str, Any] | None = None,
) -> Launcher:
    """Return the launcher that the job asks for; it may keep its own files below `run_dir`.

    `regions` of AWS may hold nodes of the run, beside those that the job and the journal name.
    `code` is the record's: what each launch takes instead of the user's folder.
    """
    if spec.infra != LOCAL:
        return _sky_launcher(spec, run_dir, regions, code or {})
    local = spec.local
    options = LocalOptions(
        metadata=local.metadata,
        interruptions=local.interrupt,
        mtbf_s=local.mtbf_s,
        seed=local.interrupt_seed,
        trace=local.trace,
        speed_up=local.speed_up,
        price_usd_per_h=spec.price_usd_per_h,
        on_demand_usd_per_h=spec.on_demand_usd_per_h,
    )
    options.check()
    return LocalLauncher(run_dir, options)


def _sky_launcher(
    spec: JobSpec, run_dir: Path, regions: Sequence[str], code: Mapping[str, Any]
) -> Launcher:
    from spotguard.control.supervisor.skypilot_request import find_offers, machine_for, task_for
    from spotguard.launch.skypilot.kubernetes_strays import KubernetesStrays
    from spotguard.launch.skypilot.launcher import SkyPilotLauncher
    from spotguard.launch.skypilot.prices import Place
    from spotguard.launch.skypilot.sdk import SkySdk
    from spotguard.launch.skypilot.slurm_strays import SlurmStrays
    from spotguard.launch.skypilot.strays import Ec2Strays, Everywhere, regions_of

    def as_known() -> JobSpec:
        """Return the job by its own copy of the code; nodes may be looked for without one."""
        with suppress(EnvironmentFailure):
            return in_copy(spec, code)
        return spec

    def offers() -> list[Offer]:
        return list(find_offers(as_known()).offers)

    named = [Place.parse(place) for place in split_places(spec.infra, spec.on_demand_infra)]

    def where_nodes_may_be() -> list[str]:
        """Return also regions that offer nothing now: nodes may live there all the same."""
        places: list[Offer | Place] = [*_offers_that_live(run_dir), *named, *offers()]
        return list(dict.fromkeys([*regions, *regions_of("aws", places)]))

    def clusters_of(infra: str) -> list[str]:
        return regions_of(infra, [*named, *_offers_that_live(run_dir)])

    infras = {place.infra for place in named}
    # Without a context SkyPilot tries all that it is allowed, and nobody could ask all of them.
    is_named = all(place.region for place in named if place.infra == "kubernetes")
    lists: list[Strays] = [Ec2Strays(where_nodes_may_be)] if "aws" in infras else []
    lists += [SlurmStrays(partial(clusters_of, "slurm"))] if "slurm" in infras else []
    if "kubernetes" in infras and is_named:
        lists.append(KubernetesStrays(partial(clusters_of, "kubernetes")))
    return SkyPilotLauncher(
        SkySdk(),
        offers=offers,
        task=lambda request: task_for(in_copy(spec, code), request),
        machine=lambda: machine_for(as_known()),
        strays=Everywhere(lists) if lists else None,
    )


def _offers_that_live(run_dir: Path) -> list[Offer]:
    """Return where the nodes of the run are that its journal does not know to be gone."""
    folder = RunFolder(run_dir)
    if not folder.journal_path.exists():
        return []
    try:
        with folder.journal() as journal:
            record = read_record(journal)
    except JournalDamaged:
        return []
    living = [each for each in record.attempts if each.end is None or each.end.leaving]
    return [each.offer for each in (*living, record.ahead) if each is not None]


def run_store(store_root: str, run_id: str) -> ObjectStore:
    """Return the run's own part of the store."""
    return PrefixedStore(open_store(store_root), run_id)


def _shared_store(store_root: str, run_id: str) -> ObjectStore:
    return BoundedStore(PrefixedStore(_opened(store_root), run_id))


def _opened(store_root: str) -> ObjectStore:
    """Return a store, of a bucket always the same: each of its clients takes 12 MB."""
    if folder_at(store_root) is not None:
        return open_store(store_root)
    with _opening:
        if store_root not in _buckets:
            _buckets[store_root] = open_store(store_root)
        return _buckets[store_root]
