"""The controller as a background process: how it is started, and what it runs."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from spotguard.control.home_name import machine_id
from spotguard.control.journal.fold import read_record
from spotguard.control.journal.launches import Launches
from spotguard.control.journal.ledger import Ledger
from spotguard.control.journal.market_log import market_path
from spotguard.control.journal.record import Kind
from spotguard.control.journal.team.budget import TeamBudget
from spotguard.control.status.watch import summary
from spotguard.control.supervisor.decide import EXIT_UNFINISHED
from spotguard.control.supervisor.lease import Lease
from spotguard.control.supervisor.policy import policy_for
from spotguard.control.supervisor.supervisor import Supervisor
from spotguard.errors import EnvironmentFailure
from spotguard.events.states import RunState
from spotguard.launch.local import LocalLauncher, LocalOptions
from spotguard.shared.documents import document
from spotguard.shared.units import SystemClock
from spotguard.spec.home import spotguard_home
from spotguard.spec.infra import LOCAL
from spotguard.spec.model import JobSpec
from spotguard.storage import PrefixedStore, open_store

if TYPE_CHECKING:
    from pathlib import Path

    from spotguard.control.journal.journal import Journal
    from spotguard.control.journal.record import RunRecord
    from spotguard.control.run_folder import RunFolder
    from spotguard.launch.base import Launcher, Offer
    from spotguard.storage.base import ObjectStore

log = logging.getLogger(__name__)

_START_PATIENCE_S = 60.0
_PREDECESSOR_PATIENCE_S = 10.0
_POLL_S = 0.02
_STORE_RETRY_S = 5.0
"""How long until a store that cannot be read is tried again: its own retries come on top."""
_LOG_TAIL_CHARS = 2000

_children: list[subprocess.Popen[bytes]] = []
"""Controllers started by this process; kept so that they are reaped, not waited for."""


def start(folder: RunFolder) -> None:
    """Start the run's controller in the background; return once it is in control.

    It has its own session, so it survives the terminal. Where another controller is already
    alive, nothing changes.

    Raises:
        EnvironmentFailure: it did not start; says what it printed.
    """
    begin = folder.log_path.stat().st_size if folder.log_path.exists() else 0
    with open(  # pathlib's open takes no opener, and only this user may read the log
        folder.log_path, "ab", opener=lambda path, flags: os.open(path, flags, 0o600)
    ) as output:
        child = subprocess.Popen(
            [sys.executable, "-m", "spotguard.control", folder.run_id],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd="/",
            start_new_session=True,
        )
    _children[:] = [child, *(old for old in _children if old.poll() is None)]
    give_up_at = time.monotonic() + _START_PATIENCE_S
    while folder.controller_pid() != child.pid:
        if child.poll() is not None:
            if child.returncode == 0:  # it settled at once, or another one is in control
                return
            raise _did_not_start(folder, begin)
        if time.monotonic() > give_up_at:
            raise _did_not_start(folder, begin)
        time.sleep(_POLL_S)


def control(folder: RunFolder) -> None:
    """Be the run's controller until it settles; return at once if another one is."""
    with folder.control(patience_s=_PREDECESSOR_PATIENCE_S) as in_control:
        if not in_control:
            log.info("another controller is in control")
            return
        with folder.journal() as journal:
            taken = _take(journal, folder)
            if taken is None:
                return
            store, lease = taken
            with lease.kept():
                goes_on = False
                while _control_here(folder, journal, store, lease, goes_on=goes_on):
                    goes_on = True  # in the next phase
            lease.release()


def _control_here(
    folder: RunFolder, journal: Journal, store: ObjectStore, lease: Lease, *, goes_on: bool
) -> bool:
    """Control the run in the place where it is; return True once it is to go on in another."""
    record = read_record(journal)
    if record.settled is not None:
        return False
    spec = JobSpec.from_json(record.spec)
    launcher = launcher_for(spec, folder.path)
    supervisor = Supervisor(
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
        team=_team_of(spec, record),
    )
    lease.tell = lambda: document(summary(folder, supervisor.record))
    return supervisor.run(goes_on=goes_on).settled is None


def _team_of(spec: JobSpec, record: RunRecord) -> TeamBudget:
    return TeamBudget(
        open_store(record.store_root),
        SystemClock(),
        record.run_id,
        cap=spec.team.budget,
        priority=spec.priority,
    )


def _take(journal: Journal, folder: RunFolder) -> tuple[ObjectStore, Lease] | None:
    """Return the run's store and the hold on the run, once that store can be read and written.

    Who ended instead would be restarted by the next command that looks, again and again, and
    nobody would hear why. None if the user ended the run meanwhile, and it has no nodes.

    Raises:
        UsageError: another controller of this machine has the run.
    """
    clock = folder.clock()
    ledger = Ledger(journal, clock)
    while True:
        try:
            store = run_store(ledger.record.store_root, ledger.record.run_id)
            lease = Lease(
                store,
                SystemClock(),
                machine_id(spotguard_home()),
                tell=lambda: document(summary(folder, ledger.record)),
            )
            lease.take()
        except EnvironmentFailure as problem:
            if ledger.record.store_problem != problem.message:
                ledger.write(Kind.STORE_LOST, {"problem": problem.message})
        else:
            if ledger.record.store_problem is not None:
                ledger.write(Kind.STORE_BACK)
            return store, lease
        ledger.catch_up()
        record = ledger.record
        costs = record.current or record.ahead or record.leaving
        if record.wish is not None and not costs:
            ledger.write(
                Kind.SETTLED,
                {
                    "state": RunState.STOPPED.value,
                    "detail": f"stopped by you; its store cannot be read: {record.store_problem}",
                    "exit_code": EXIT_UNFINISHED,
                },
            )
            return None
        clock.sleep(_STORE_RETRY_S)


def launcher_for(spec: JobSpec, run_dir: Path) -> Launcher:
    """Return the launcher that the job asks for; it may keep its own files below `run_dir`."""
    if spec.infra != LOCAL:
        return _sky_launcher(spec)
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


def _sky_launcher(spec: JobSpec) -> Launcher:
    from spotguard.control.supervisor.skypilot_request import find_offers, machine_for, task_for
    from spotguard.launch.skypilot.launcher import SkyPilotLauncher
    from spotguard.launch.skypilot.sdk import SkySdk
    from spotguard.launch.skypilot.strays import Ec2Strays, regions_of

    def offers() -> list[Offer]:
        return list(find_offers(spec).offers)

    on_aws = any(place.partition("/")[0] == "aws" for place in spec.infra.split(","))
    return SkyPilotLauncher(
        SkySdk(),
        offers=offers,
        task=lambda request: task_for(spec, request),
        machine=lambda: machine_for(spec),
        strays=Ec2Strays(lambda: regions_of(offers())) if on_aws else None,
    )


def run_store(store_root: str, run_id: str) -> ObjectStore:
    """Return the run's own part of the store."""
    return PrefixedStore(open_store(store_root), run_id)


def _did_not_start(folder: RunFolder, begin: int) -> EnvironmentFailure:
    with folder.log_path.open("rb") as file:
        file.seek(begin)
        printed = file.read().decode(errors="replace").strip()
    last = printed[-_LOG_TAIL_CHARS:].splitlines()[-1:] or ["it printed nothing"]
    return EnvironmentFailure(
        f"The controller of {folder.run_id} did not start: {last[0]}",
        hint=f"all that it printed is in {folder.log_path}",
    )
