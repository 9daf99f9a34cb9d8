"""The controller as a background process: how it is started, and what it runs."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from spotguard.control.allot import Policy
from spotguard.control.fold import read_record
from spotguard.control.home_name import machine_id
from spotguard.control.launches import Launches
from spotguard.control.lease import Lease
from spotguard.control.request import heartbeat_s
from spotguard.control.supervisor import Supervisor
from spotguard.errors import EnvironmentFailure
from spotguard.launch.local import LocalLauncher, LocalOptions
from spotguard.spec.home import spotguard_home
from spotguard.spec.infra import DEADLINE, FALLBACK, LOCAL
from spotguard.spec.model import JobSpec
from spotguard.storage import PrefixedStore, open_store
from spotguard.units import SystemClock, parse_duration_s

if TYPE_CHECKING:
    from pathlib import Path

    from spotguard.control.folder import RunFolder
    from spotguard.launch.base import Launcher
    from spotguard.storage.base import ObjectStore

log = logging.getLogger(__name__)

_START_PATIENCE_S = 60.0
_PREDECESSOR_PATIENCE_S = 10.0
_POLL_S = 0.02
_LOCAL_CAPACITY_PATIENCE_S = 60.0
SKY_POLICY = Policy(
    down_patience_s=180.0,
    down_retry_s=15.0,
    intent_valid_s=180.0,
    capacity_patience_s=86_400.0,
    capacity_backoff_s=10.0,
    capacity_backoff_max_s=300.0,
    contact_patience_s=60.0,
    save_s=10.0,
    teardown_s=225.0,  # 60 s until a frozen job is killed; SkyPilot ended its cluster after 155 s
    useful_s=60.0,
    regrow_startups=3.0,
)
"""Where nodes are real, all takes longer: SkyPilot needs half a minute and more for a cluster."""
_LOCAL_BARREN_ATTEMPTS = 10
"""More than elsewhere: a local node costs nothing, and may be interrupted as often as you like."""
_BEATS_MISSED = 10
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
            record = read_record(journal)
            spec = JobSpec.from_json(record.spec)
            store = run_store(record.store_root, record.run_id)
            lease = Lease(store, SystemClock(), machine_id(spotguard_home()))
            lease.take()
            with lease.kept():
                Supervisor(
                    journal=journal,
                    launcher=launcher_for(spec, folder.path),
                    store=store,
                    clock=folder.clock(),
                    policy=policy_for(spec),
                    live_path=folder.live_path,
                    lease=lease,
                    launches=Launches.of(folder.launches_path, record),
                    machine_clock=time.time,
                ).run()
            lease.release()


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
    from spotguard.control.places import find_offers, machine_for, task_for
    from spotguard.launch.skypilot.launcher import SkyPilotLauncher
    from spotguard.launch.skypilot.sdk import SkySdk

    return SkyPilotLauncher(
        SkySdk(),
        offers=lambda: list(find_offers(spec).offers),
        task=lambda request: task_for(spec, request),
        machine=lambda: machine_for(spec),
    )


def policy_for(spec: JobSpec) -> Policy:
    """Return the controller's patience for such a job."""
    if spec.infra != LOCAL:
        beats_s = _BEATS_MISSED * heartbeat_s(spec)
        rule, _, after = spec.on_demand.partition(" ")
        return replace(
            SKY_POLICY,
            contact_patience_s=max(beats_s, SKY_POLICY.contact_patience_s),
            market=spec.market,
            on_demand_after_s=parse_duration_s(after) if rule == FALLBACK else None,
            on_demand_for_deadline=rule == DEADLINE,
        )
    return Policy(
        capacity_patience_s=_LOCAL_CAPACITY_PATIENCE_S,
        barren_attempts=_LOCAL_BARREN_ATTEMPTS,
        contact_patience_s=max(_BEATS_MISSED * heartbeat_s(spec), Policy().contact_patience_s),
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
