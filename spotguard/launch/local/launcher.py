"""`LocalLauncher`: a cloud made of this machine's processes, behind the `Launcher` protocol."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import sysconfig
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import spotguard
from spotguard.errors import LauncherFailure, NoCapacity
from spotguard.events.states import Market
from spotguard.launch.base import (
    ClusterState,
    ClusterView,
    LaunchRequest,
    LogChunk,
    NodeEnd,
    NodeView,
    Offer,
)
from spotguard.launch.local.cluster import ClusterFolder, ClusterOrder, Record
from spotguard.launch.local.files import try_lock
from spotguard.launch.local.options import (
    DEFAULT_ON_DEMAND_USD_PER_H,
    DEFAULT_SPOT_USD_PER_H,
    LocalOptions,
)
from spotguard.launch.local.processes import find_processes, kill_all, signal_all
from spotguard.launch.local.simulation_state import World
from spotguard.shared.steady_clock import CLOCK_FILE, clock_kept_at

if TYPE_CHECKING:
    from spotguard.shared.units import Clock

_LOG_CHUNK_BYTES = 1024 * 1024
_SPAWN_TIMEOUT_S = 60.0
_ORPHANS_GRACE_S = 2.0


class LocalLauncher:
    """Starts and ends clusters of local processes. Keeps all its state below `run_dir`/local."""

    name = "local"

    def __init__(self, run_dir: Path, options: LocalOptions, *, clock: Clock | None = None) -> None:
        """Look at `run_dir`, which need not exist; SpecError if the options make no sense."""
        options.check()
        self._folder = run_dir.resolve() / "local"
        self._options = options
        self._clock = clock or clock_kept_at(run_dir / CLOCK_FILE)
        self._world = World(self._folder, options, self._clock)

    def offers(self) -> list[Offer]:
        """Return the spot nodes of this machine, then the same on demand."""
        trace = self._world.trace
        on_demand = self._options.on_demand_usd_per_h
        if on_demand is None and trace is not None:
            on_demand = trace.on_demand_usd_per_h
        if on_demand is None:
            on_demand = DEFAULT_ON_DEMAND_USD_PER_H
        spot = self._world.spot_usd_per_h()
        prices = {
            Market.SPOT: DEFAULT_SPOT_USD_PER_H if spot is None else spot,
            Market.ON_DEMAND: on_demand,
        }
        return [
            Offer(
                infra=self.name,
                region="loopback" if trace is None else trace.region,
                zone=None if trace is None else trace.zone,
                instance_type="process" if trace is None else trace.instance_type,
                market=market,
                price_usd_per_h=price,
                on_demand_usd_per_h=on_demand,
            )
            for market, price in prices.items()
        ]

    def launch(self, request: LaunchRequest) -> None:
        """Start the cluster; return when its cloud process has taken it on.

        Idempotent by `request.cluster`, also when two ask at the same time or one was killed
        half-way: who comes later finishes what is missing.

        Raises:
            NoCapacity: fewer nodes can be had; nothing was started.
            LauncherFailure: this machine cannot start processes or write files.
        """
        folder = self._cluster(request.cluster)
        try:
            if folder.read_record() is not None:
                return
            self._require_capacity(request)
            folder.create()
            ordered_at = self._clock.now()
            folder.order(
                ClusterOrder(
                    request=request,
                    options=self._options,
                    ordered_at=ordered_at,
                    folder=str(folder.path),
                )
            )
            self._spawn(folder)
        except OSError as problem:
            words = f"the local cloud cannot start {request.cluster}: {problem}"
            raise LauncherFailure(words, hint="free what is missing, then try again") from problem

    def observe(self, cluster: str, *, heard: bool = False) -> ClusterView:
        """Return what is known now. Cheap: reads a few small files.

        If the cloud process died, it looks for the nodes' processes, and buries the cluster
        when there are none.
        """
        folder = self._cluster(cluster)
        try:
            return self._observe(folder)
        except (OSError, ValueError) as problem:
            words = f"{folder.path} cannot be read: {problem}"
            return ClusterView(state=ClusterState.UNREACHABLE, detail=words)

    def files_of(self, cluster: str) -> tuple[str, ...]:
        """Return the file in which the cloud process writes what becomes of the nodes."""
        return (str(self._cluster(cluster).state_path),)

    def down(self, cluster: str) -> None:
        """Ask for the end of the cluster; SIGTERM now, SIGKILL within 2 s.

        Returns at once while the cloud process lives; without it, ends the nodes itself.
        """
        folder = self._cluster(cluster)
        if not folder.path.exists():
            return
        folder.ask_down()
        record = folder.read_record()
        if record is None or record.state is ClusterState.GONE:
            return
        if folder.has_cloud() and folder.ordered_elsewhere() is None:
            return  # else it looks where it was started, and hears nothing here
        places = _places(folder)
        for place in places:
            signal_all(place, signal.SIGTERM)
        give_up_at = time.monotonic() + _ORPHANS_GRACE_S
        while time.monotonic() < give_up_at and any(map(_is_alive, places)):
            time.sleep(0.05)
        for place in places:
            kill_all(place)

    def close(self) -> None:
        """Nothing is held."""

    def read_log(self, cluster: str, node: int, offset: int) -> LogChunk:
        """Return what the node printed from byte `offset` on, 1 MiB at most."""
        try:
            with self._cluster(cluster).node(node).log.open("rb") as log:
                log.seek(offset)
                return LogChunk(node=node, offset=offset, data=log.read(_LOG_CHUNK_BYTES))
        except FileNotFoundError:
            return LogChunk(node=node, offset=offset, data=b"")

    def _cluster(self, name: str) -> ClusterFolder:
        assert name == Path(name).name, f"a cluster's name is a folder's too: {name!r}"
        return ClusterFolder(self._folder / "clusters" / name)

    def _observe(self, folder: ClusterFolder) -> ClusterView:
        record = folder.read_record()
        if record is None:
            taking_on = folder.has_cloud()
            return ClusterView(state=ClusterState.STARTING if taking_on else ClusterState.ABSENT)
        if record.state is not ClusterState.GONE and not folder.has_cloud():
            record = self._without_cloud(folder)
        return ClusterView(
            state=record.state,
            nodes=record.nodes,
            gone_at=record.gone_at,
            last_step=folder.last_step(),
            detail=record.detail,
        )

    def _without_cloud(self, folder: ClusterFolder) -> Record:
        """Return what is true of a cluster whose cloud process died; bury it if its nodes have."""
        lock = try_lock(folder.lock)
        try:
            record = folder.read_record()
            assert record is not None, "it was there"
            if lock is None or record.state is ClusterState.GONE:
                return record  # another one is about it, or it had just ended properly
            if folder.down_asked:  # it may have died before it could do so itself
                for place in _places(folder):
                    kill_all(place)
            alive = {
                found.folder.name for place in _places(folder) for found in find_processes(place)
            }
            record = replace(
                record,
                state=ClusterState.UP,
                nodes=tuple(
                    _unseen_end(node) if folder.node(node.index).path.name not in alive else node
                    for node in record.nodes
                ),
                detail="its cloud process died",
            )
            return record if alive else folder.bury(record, at=self._clock.now())
        finally:
            if lock is not None:
                os.close(lock)

    def _require_capacity(self, request: LaunchRequest) -> None:
        # The run's time starts here even if nothing can be had yet: a trace must go on.
        self._world.begin()
        self._world.claim_due_capacity()
        capacity = self._world.capacity()
        if request.offer.market is not Market.SPOT or capacity is None:
            return
        if request.nodes > capacity:
            where = "this machine" if self._world.trace is None else "the trace"
            nodes = "node" if capacity == 1 else "nodes"
            words = f"{where} has {capacity} {nodes} now, {request.nodes} were asked"
            raise NoCapacity(words, hint="ask for fewer nodes, or wait")

    def _spawn(self, folder: ClusterFolder) -> None:
        with folder.log.open("ab") as log:
            outcome = subprocess.run(
                [sys.executable, "-m", f"{__package__}.cloud", str(folder.path)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=folder.path,
                env=_environment(),
                start_new_session=True,
                timeout=_SPAWN_TIMEOUT_S,
                check=False,
            )
        if folder.read_record() is None:
            last = folder.log.read_text(errors="replace").strip().rpartition("\n")[2]
            raise LauncherFailure(
                f"the local cloud did not start (exit code {outcome.returncode}): {last}",
                hint=f"{folder.log} has the whole story",
            )


def _places(folder: ClusterFolder) -> list[Path]:
    """Return where processes of the cluster believe their nodes to be."""
    return [place for place in (folder.path, folder.ordered_elsewhere()) if place is not None]


def _is_alive(place: Path) -> bool:
    return any(find_processes(place))


def _environment() -> dict[str, str]:
    """Return this process's environment, in which spotguard can be imported from anywhere."""
    home = str(Path(spotguard.__file__).parents[1])
    path = os.environ.get("PYTHONPATH", "")
    if home in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        return dict(os.environ)  # installed: found anyway, and must not shadow what is built in
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (home, path)))}


def _unseen_end(node: NodeView) -> NodeView:
    if node.end is not NodeEnd.RUNNING:
        return node
    words = "ended unseen: its cloud process had died"
    return NodeView(index=node.index, end=NodeEnd.LOST, detail=words)
