"""Clusters on Slurm that another machine's SkyPilot launched: asked for, and ended, at Slurm.

SkyPilot names Slurm's job after its cluster, with a mark of the user's behind it. Slurm is asked as
SkyPilot asks it: by SSH, with the addresses and keys of `~/.slurm/config`.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spotguard.errors import LauncherFailure
from spotguard.launch.base import ClusterState, ClusterView, NodeEnd, NodeView, Unreachable
from spotguard.shared.paths import expanded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


CONFIG = "~/.slurm/config"
"""An SSH configuration, in which each host is a login node of the cluster of that name."""
_SLURM = "slurm"
_ASK_WITHIN_S = 30.0
_SSH_FAILED = 255
# Not `--me`: SkyPilot may submit a job as another user than the one who logs in, and no stranger's
# job has the name of a run.
_LIST = "squeue --noheader --states=all --format='%i|%T|%D|%j'"
_WAITING = ("PENDING", "CONFIGURING", "REQUEUED")
_GOING = ("COMPLETING",)
_OVER = (
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "REVOKED",
    "SPECIAL_EXIT",
    "TIMEOUT",
)
"""Slurm's words for a job that has no nodes any more; what is none of these may cost."""


@dataclass(frozen=True, kw_only=True)
class _Job:
    where: str
    number: str
    state: str
    nodes: int

    @property
    def is_over(self) -> bool:
        return self.state in _OVER


class SlurmStrays:
    """Slurm's own list of jobs, by the name of the cluster. Safe from any thread.

    A machine without any configuration of Slurm has nobody to ask: no cluster is there for it.
    """

    def __init__(
        self,
        clusters: Callable[[], Iterable[str]],
        *,
        ask: Callable[[str, str], str] | None = None,
    ) -> None:
        """`clusters` says where nodes of the run may be; `ask` has a command run at one of them.

        `ask` raises `Unreachable` if nobody answers, and `LauncherFailure` if it is refused.
        """
        self._clusters = clusters
        self._ask = ask or ask_login_node

    def look(self, cluster: str) -> ClusterView:
        """Ask each Slurm cluster; one that has not ended in any is there."""
        jobs = self._find(cluster)
        living = [job for job in jobs if not job.is_over]
        if not jobs:
            return ClusterView(state=ClusterState.ABSENT)
        if not living:
            return ClusterView(state=ClusterState.GONE)
        job = living[-1]
        if job.state in _WAITING:
            return ClusterView(state=ClusterState.STARTING)
        is_going = job.state in _GOING
        return ClusterView(
            state=ClusterState.UP,
            nodes=tuple(
                NodeView(
                    index=index,
                    end=NodeEnd.LOST if is_going else NodeEnd.RUNNING,
                    detail="Slurm says that its job ends" if is_going else "",
                )
                for index in range(job.nodes)
            ),
            detail="launched by another machine",
        )

    def down(self, cluster: str) -> None:
        """Cancel its job."""
        for job in self._find(cluster):
            if not job.is_over:
                self._ask(job.where, f"scancel -- {job.number}")

    def _find(self, cluster: str) -> list[_Job]:
        if not expanded(CONFIG).exists():
            return []
        clusters = list(self._clusters())
        if not clusters:  # not absent: nobody was asked
            raise Unreachable(f"Nobody knows on which Slurm cluster {cluster} would be.")
        name = re.compile(re.escape(cluster) + r"-[0-9a-f]+")
        found: list[_Job] = []
        for where in clusters:
            for line in self._ask(where, _LIST).splitlines():
                words = line.strip().split("|", 3)
                if len(words) == 4 and name.fullmatch(words[3]):
                    found.append(_job(where, words))
        return sorted(found, key=lambda job: int(job.number))


def _job(where: str, words: list[str]) -> _Job:
    number, state, nodes, _ = words
    if not number.isdecimal() or not nodes.isdecimal():
        raise Unreachable(f"Slurm's list of jobs makes no sense: {'|'.join(words)!r}")
    return _Job(where=where, number=number, state=state, nodes=int(nodes))


def ask_login_node(cluster: str, command: str) -> str:
    """Return what a command prints on a login node of a Slurm cluster; blocks for half a minute.

    A login shell runs it, as SkyPilot has it: often only such a one knows where Slurm's commands
    are. What the shell prints by itself comes first.

    Raises:
        Unreachable: nobody answers.
        LauncherFailure: Slurm refuses it.
    """
    in_login_shell = f"/bin/bash --login -c {shlex.quote(command)}"
    words = [
        *("ssh", "-F", str(expanded(CONFIG)), "-o", "BatchMode=yes"),
        # As SkyPilot does: there may be several login nodes behind one name.
        *("-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null"),
        *("-o", f"ConnectTimeout={_ASK_WITHIN_S / 2:.0f}", "-o", "LogLevel=ERROR"),
        *("--", cluster, in_login_shell),
    ]
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_ASK_WITHIN_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as problem:
        raise Unreachable(f"Slurm's login node of {cluster} does not answer: {problem}") from None
    said = " ".join(done.stderr.split())
    if done.returncode == _SSH_FAILED:
        raise Unreachable(f"Slurm's login node of {cluster} does not answer: {said}")
    if done.returncode:
        raise LauncherFailure(f"Slurm on {cluster} refuses: {said}")
    return done.stdout
