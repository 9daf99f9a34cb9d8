"""What looking after many runs costs that have nothing to do: memory and time of the controllers.

python -m benchmarks.scale.idle_runs [--runs 100] [--kind waiting|training]

`waiting` runs begin tomorrow. `training` runs have a node that is up and gives signs of life: its
lock and its heartbeats are made up here, the controllers and all that they read are real. Memory
is the sum of the controllers' resident sets, time the sum of what they took of a core.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import psutil

from benchmarks.machine import describe_machine
from spotguard.control import api
from spotguard.control.journal.fold import allotment_to_json
from spotguard.control.journal.nodes.offer import offer_to_json
from spotguard.control.journal.record import Allotment, Kind
from spotguard.control.run_folder import folder_of
from spotguard.events import keys
from spotguard.events.event import Event, Heartbeat, JobEvent
from spotguard.launch.base import ClusterState, LaunchRequest, NodeEnd, NodeView
from spotguard.launch.local import LocalOptions
from spotguard.launch.local.cluster import ClusterFolder, ClusterOrder, Record
from spotguard.launch.local.files import try_lock
from spotguard.spec.model import JobSpec, build_spec
from spotguard.storage import PrefixedStore, open_store

MOST_MB = 300.0
MOST_CPU_PERCENT = 10.0
_BEAT_S = 5.0
_DAY_S = 86_400.0


def make_run(home: Path, store_url: str, *, waits: bool) -> str:
    """Create a run: one that begins tomorrow, or one whose node seems to train."""
    given = {"script": str(home.parent / "job.py"), "workdir": str(home.parent), "name": "idle"}
    spec = build_spec({**given, "store": store_url})
    if waits:
        return api.create_run(spec.replace(start_at=time.time() + _DAY_S))
    run_id = api.create_run(spec)
    _put_a_node(store_url, spec, run_id)
    return run_id


def _put_a_node(store_url: str, spec: JobSpec, run_id: str) -> None:
    folder, cluster = folder_of(run_id), f"{run_id}-1"
    offer = api.launcher_for(spec, folder.path).offers()[0]
    allotment = allotment_to_json(Allotment())
    intent = {"cluster": cluster, "nodes": 1, "offer": offer_to_json(offer), "why": ""}
    now = folder.clock().now()
    with folder.journal() as journal:
        data = {**intent, "allotment": allotment, "ahead": False}
        journal.append(Kind.INTENDED.value, at=now, attempt=1, data=data)
        journal.append(Kind.LAUNCHED.value, at=now, attempt=1)
    there = ClusterFolder(folder.path / "local" / "clusters" / cluster)
    there.create()
    request = LaunchRequest(
        cluster=cluster,
        run_id=run_id,
        attempt=1,
        nodes=1,
        nproc_per_node=1,
        script=spec.script,
        args=(),
        workdir=spec.workdir,
        env={},
        offer=offer,
        max_lifetime_s=None,
    )
    there.order(ClusterOrder(request=request, options=LocalOptions(), ordered_at=now))
    there.write_record(
        Record(state=ClusterState.UP, nodes=(NodeView(index=0, end=NodeEnd.RUNNING),))
    )
    assert try_lock(there.lock) is not None, "held until this process ends"
    data = {"world_size": 1, "nodes": 1, "resumed_from": None, "resumed_step": 0}
    started = Event(kind=JobEvent.STARTED.value, at=now, attempt=1, data=data)
    store = PrefixedStore(open_store(store_url), run_id)
    store.put(keys.event(1, at=now, node=0, rank=0, count=1), started.to_json())


def beat(store_url: str, runs: list[str]) -> None:
    """Give each run's sign of life."""
    for run_id in runs:
        sign = Heartbeat(
            at=time.time(),
            attempt=1,
            node=0,
            step=100,
            total_steps=None,
            epoch=0,
            train_s=100.0,
            step_s=1.0,
            loss=1.0,
            saved_step=None,
            saved_at=None,
        )
        store = PrefixedStore(open_store(store_url), run_id)
        store.put(keys.heartbeat(1, 0), sign.to_json())


def measure(
    store_url: str, runs: list[str], *, beats: bool, settle_s: float, rounds: int
) -> list[str]:
    """Return what the runs' controllers took; print a line for each round of a minute."""
    took: list[tuple[float, float]] = []
    lines = []
    for number in range(-1, rounds):
        controllers = {folder_of(run_id).controller_pid() for run_id in runs}
        assert None not in controllers, "a controller has ended"
        processes = [psutil.Process(pid) for pid in controllers if pid]
        before_s, began_at = _cpu_s(processes), time.monotonic()
        until = began_at + (settle_s if number < 0 else 60.0)
        while time.monotonic() < until:
            if beats:
                beat(store_url, runs)
            time.sleep(min(_BEAT_S, max(0.0, until - time.monotonic())))
        percent = 100 * (_cpu_s(processes) - before_s) / (time.monotonic() - began_at)
        memory_mb = sum(each.memory_info().rss for each in processes) / 2**20
        threads = sum(each.num_threads() for each in processes)
        if number >= 0:
            took.append((memory_mb, percent))
            lines.append(
                f"  {len(processes)} processes, {threads} threads: {memory_mb:.0f} MB, "
                f"{percent:.1f} % of a core; load {os.getloadavg()[0]:.1f}"
            )
            print(lines[-1], flush=True)
    memory_mb, percent = (statistics.median(column) for column in zip(*took, strict=True))
    verdict = "holds" if memory_mb <= MOST_MB and percent <= MOST_CPU_PERCENT else "misses"
    lines.append(
        f"median {memory_mb:.0f} MB and {percent:.1f} % of a core; {verdict} {MOST_MB:.0f} MB and "
        f"{MOST_CPU_PERCENT:.0f} %"
    )
    return lines


def _cpu_s(processes: list[psutil.Process]) -> float:
    return sum(sum(each.cpu_times()[:2]) for each in processes)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--kind", choices=("waiting", "training"), default="training")
    parser.add_argument("--store", help="URL of a store; a folder otherwise")
    parser.add_argument("--settle", type=float, default=60.0)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    print(describe_machine("cpu")["machine"])
    with tempfile.TemporaryDirectory() as made:
        home = Path(made) / "home"
        os.environ["SPOTGUARD_HOME"] = str(home)
        (home.parent / "job.py").write_text("pass")
        store_url = given.store or str(home / "store")
        waits = given.kind == "waiting"
        runs = [make_run(home, store_url, waits=waits) for _ in range(given.runs)]
        if not waits:
            beat(store_url, runs)
        for run_id in runs:
            api.start_controller(run_id)
        print(f"{given.runs} runs that are {given.kind}")
        told = measure(store_url, runs, beats=not waits, settle_s=given.settle, rounds=given.rounds)
        print(told[-1])
        for pid in {folder_of(run_id).controller_pid() for run_id in runs}:
            if pid:
                os.kill(pid, 9)


if __name__ == "__main__":
    main()
