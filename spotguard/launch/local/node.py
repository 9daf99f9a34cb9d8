"""One local node inside the cloud process: its processes, its metadata service, its fate."""

from __future__ import annotations

import json
import os
import signal
import site
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spotguard.events import env
from spotguard.launch.base import LaunchRequest, NodeEnd, NodeView
from spotguard.launch.local.interruption_timing import Fate, term_grace_s
from spotguard.launch.local.metadata_service import FakeMetadata
from spotguard.launch.local.processes import find_processes, kill_all, signal_all
from spotguard.launch.ranks.worker_environment import import_from_copy, script_command
from spotguard.shared.units import format_duration, to_iso

if TYPE_CHECKING:
    from pathlib import Path

    from spotguard.launch.local.cluster import ClusterOrder, NodeFolder

_STRAGGLERS_GRACE_S = 2.0
"""How long helpers may outlive a node's main process before they are killed."""
_RESCAN_S = 0.1


@dataclass(frozen=True, kw_only=True)
class MeetingPoint:
    """Where the nodes of one cluster meet."""

    port: int
    scratch: Path
    """Short: sockets below TMPDIR must fit into 107 bytes."""


class LocalNode:
    """A node that runs. Used by one thread."""

    def __init__(self, folder: NodeFolder, order: ClusterOrder, index: int) -> None:
        self.folder = folder
        self.index = index
        self.view = NodeView(index=index, end=NodeEnd.RUNNING)
        self.fate: Fate | None = None
        self._order = order
        self._main: subprocess.Popen[bytes] | None = None
        self._ended_at: float | None = None
        self._rescan_at = 0.0
        self._cloud = order.options.metadata
        self._metadata = (
            None if self._cloud == "none" else FakeMetadata(self._cloud, name=f"node-{index}")
        )

    @property
    def running(self) -> bool:
        """True until its end is certain."""
        return self.view.end is NodeEnd.RUNNING

    def start(self, rendezvous: MeetingPoint) -> None:
        """Boot the node and start its part of the job; OSError if the machine cannot."""
        self.folder.create()
        if self._metadata is not None:
            self._metadata.start()
        scratch = rendezvous.scratch / str(self.index)
        scratch.mkdir(mode=0o700)
        with self.folder.log.open("ab") as log:
            self._main = subprocess.Popen(
                command_line(self._order, self.index, rendezvous.port),
                cwd=self._order.request.workdir,
                env={**base_environment(self._order), **self._own_environment(scratch)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def abandon(self, words: str) -> None:
        """Stop its metadata service; a node that has no end yet is lost. Kill it before."""
        if self.running:
            self._end(NodeEnd.LOST, None, words)
        self._close()

    def doom(self, fate: Fate) -> bool:
        """Let `fate` befall the node, unless it is to end earlier; return whether it does."""
        if not self.running or (self.fate is not None and self.fate.kill_at <= fate.kill_at):
            return False
        self.fate = fate
        if fate.announced_at is not None:
            self._announce(time.time() + fate.announced_at - time.monotonic())
        return True

    def is_due(self, now: float) -> bool:
        """Return whether it is to be killed now, and has not ended by itself."""
        lives = self._main is not None and self._main.poll() is None
        return lives and self.fate is not None and now >= self.fate.kill_at

    def kill(self) -> bool:
        """Kill all its processes, as its fate says; return True, since its end is certain."""
        assert self.fate is not None
        assert self._main is not None
        kill_all(self.folder.path)
        self._main.wait()
        after = format_duration(time.monotonic() - self.fate.since)
        return self._end(NodeEnd.LOST, None, self.fate.taken.format(after=after))

    def tick(self, now: float) -> bool:
        """Do what is due at `now` (monotonic); return True if the node's end became certain."""
        if not self.running:
            return False
        self._hasten_if_acknowledged(now)
        if self._main is not None and self._main.poll() is not None:
            return self._wait_for_stragglers(now)
        fate = self.fate
        if fate is None:
            return False
        if now >= fate.kill_at:
            return self.kill()
        if fate.term_at and now >= fate.term_at[0]:
            self.fate = fate.after_term()
            signal_all(self.folder.path, signal.SIGTERM)
        return False

    def _announce(self, deadline_at: float) -> None:
        if self._metadata is not None:
            self._metadata.notice_at(deadline_at)
            return
        temporary = self.folder.notice.with_suffix(".new")
        temporary.write_text(json.dumps({"deadline_at": to_iso(deadline_at)}))
        temporary.replace(self.folder.notice)

    def _hasten_if_acknowledged(self, now: float) -> None:
        """Azure starts the event as soon as the node says that it is ready."""
        acknowledged = self._metadata is not None and self._metadata.acknowledged_at is not None
        if acknowledged and self.fate is not None and self.fate.announced_at is not None:
            self.fate = self.fate.hastened(now)

    def _wait_for_stragglers(self, now: float) -> bool:
        if self._ended_at is None:
            self._ended_at = now
        if now < self._rescan_at:
            return False
        self._rescan_at = now + _RESCAN_S
        if next(find_processes(self.folder.path), None) is not None:
            kill_at = self._ended_at + _STRAGGLERS_GRACE_S
            if self.fate is not None:
                kill_at = min(kill_at, self.fate.kill_at)
            if now < kill_at:
                return False
            kill_all(self.folder.path)
        return self._end_by_itself(self._ended_at)

    def _end_by_itself(self, ended_at: float) -> bool:
        assert self._main is not None
        code = self._main.wait()
        if code < 0:
            # Not an exit: somebody or something killed the main process.
            words = f"its main process died of signal {-code}"
            if self.fate is not None:
                words = f"{self.fate.left}: {words}"
            return self._end(NodeEnd.LOST, None, words)
        words = "" if code == 0 else f"exited with {code}"
        if self.fate is not None:
            words = f"{self.fate.left}, {format_duration(ended_at - self.fate.since)} into it"
        return self._end(NodeEnd.EXITED, code, words)

    def _end(self, end: NodeEnd, exit_code: int | None, detail: str) -> bool:
        self.view = NodeView(index=self.index, end=end, exit_code=exit_code, detail=detail)
        self._close()  # a node that is gone answers nobody
        return True

    def _close(self) -> None:
        if self._metadata is not None:
            self._metadata.close()

    def _own_environment(self, scratch: Path) -> dict[str, str]:
        source = self._cloud if self._metadata is None else f"{self._cloud}={self._metadata.url}"
        return {
            "HOME": str(self.folder.home),
            "TMPDIR": str(scratch),
            # The user's own packages must stay importable though HOME is another.
            "PYTHONUSERBASE": os.environ.get("PYTHONUSERBASE") or site.getuserbase(),
            env.CLUSTER: self._order.request.cluster,
            env.NODE: str(self.index),
            env.METADATA: source,
            env.PROGRESS: str(self.folder.progress),
            env.NOTICE_FILE: str(self.folder.notice),
            env.LEAVING: str(self.folder.leaving),
            env.GRACE_S: f"{term_grace_s(self._order.options.speed_up):g}",
        }


def command_line(order: ClusterOrder, node: int, port: int) -> list[str]:
    """Return what starts the job on a node."""
    request = order.request
    if order.options.runner == "python":
        script = script_command([request.script, *request.args], request.env)
        return [sys.executable, *script]
    return [
        sys.executable,
        *("-m", "spotguard.launch.agent"),
        f"--nodes={request.nodes}",
        f"--node={node}",
        f"--nproc={request.nproc_per_node}",
        f"--master=127.0.0.1:{port}",
        "--",
        request.script,
        *request.args,
    ]


def base_environment(order: ClusterOrder) -> dict[str, str]:
    """Return what all nodes share: this machine's environment, then the request's.

    `SPOTGUARD_*` comes only from the request: what the user's shell says was read already.
    """
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("SPOTGUARD_")}
    defaults = {"OMP_NUM_THREADS": str(_threads_per_rank(order.request))}
    given = {**defaults, **inherited, "PYTHONUNBUFFERED": "1", **order.request.env}
    if order.options.runner == "python":  # nothing of ours begins the script there
        import_from_copy(given)
    return given


def _threads_per_rank(request: LaunchRequest) -> int:
    # All nodes share this one machine's cores.
    return max(1, (os.cpu_count() or 1) // (request.nodes * request.nproc_per_node))
