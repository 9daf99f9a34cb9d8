"""Processes that outlived their cluster: nothing should, and `doctor` looks whether it did."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

from spotguard.launch.base import ClusterState
from spotguard.launch.local.cluster import ClusterFolder
from spotguard.launch.local.processes import find_processes, kill_all

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class StrayProcess:
    """A process of a cluster that is gone."""

    pid: int
    cluster: str
    node: str
    """Name of the node's folder, such as `node-0`."""
    command: str


def find_strays(run_dir: Path) -> list[StrayProcess]:
    """Return the processes that still carry the mark of one of the run's clusters that is gone."""
    strays = []
    for found in find_processes(run_dir.resolve() / "local" / "clusters"):
        folder = ClusterFolder(found.folder.parent)
        record = folder.read_record()
        if record is None or record.state is ClusterState.GONE:
            try:
                command = " ".join(found.process.cmdline())
            except psutil.Error:
                continue  # it ended meanwhile
            strays.append(
                StrayProcess(
                    pid=found.pid, cluster=folder.name, node=found.folder.name, command=command
                )
            )
    return strays


def sweep(run_dir: Path) -> list[StrayProcess]:
    """Kill the run's stray processes and return what was killed."""
    strays = find_strays(run_dir)
    clusters = run_dir.resolve() / "local" / "clusters"
    for name in {stray.cluster for stray in strays}:
        kill_all(clusters / name)
    return strays
