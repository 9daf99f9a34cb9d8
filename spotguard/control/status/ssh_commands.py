"""How a person gets onto the nodes of a run: a command line for each, made of quoted words.

SkyPilot writes the address and the key of each node of a cluster into the ssh configuration of who
launched it: `CLUSTER` is the first node, `CLUSTER-worker1` the second. Nodes of this machine are
processes: a command runs beside them, in the folder in which they work.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spotguard.control.journal.fold import read_record
from spotguard.control.run_folder import folder_of
from spotguard.control.supervisor.decide import state_of
from spotguard.errors import UsageError
from spotguard.spec.infra import LOCAL
from spotguard.spec.model import JobSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spotguard.control.journal.record import AttemptRecord, RunRecord

WORKDIR = "sky_workdir"
"""Where SkyPilot puts the job's folder, below the home of who logs in."""
SSH_FAILED = 255
"""What ssh exits with where it cannot get there."""


@dataclass(frozen=True, kw_only=True)
class NodeCommand:
    """A command line that gets to a node."""

    words: tuple[str, ...]
    folder: str | None = None
    """Where it is run; None is here."""
    host: str | None = None
    """What the node is called in the ssh configuration; None: it is this machine."""


def shell_on(run_id: str, node: int = 0) -> NodeCommand:
    """Return what opens a shell on a node of a run.

    Raises:
        UsageError: the run has no such node now, or its nodes are processes of this machine.
    """
    record, attempt = _living(run_id, node)
    if _spec(record).infra == LOCAL:
        raise UsageError(
            f"The nodes of {run_id} are processes of this machine: there is nothing to log in to.",
            hint=f"a shell in the folder where they work: spotguard exec {run_id} -- bash",
        )
    host = _host(attempt, node)
    return NodeCommand(words=("ssh", host), host=host)


def command_on(run_id: str, command: Sequence[str], node: int = 0) -> NodeCommand:
    """Return what runs a command on a node, in the job's folder there; its words stay as they are.

    Raises:
        UsageError: the run has no such node now, or the command is empty.
    """
    if not command or not command[0]:
        raise UsageError(
            "There is no command to run.", hint=f"after `--`: spotguard exec {run_id} -- nvidia-smi"
        )
    record, attempt = _living(run_id, node)
    spec = _spec(record)
    if spec.infra == LOCAL:
        return NodeCommand(words=tuple(command), folder=spec.workdir)
    host = _host(attempt, node)
    there = f"cd {WORKDIR} 2>/dev/null; {shlex.join(command)}"
    return NodeCommand(words=("ssh", "-T", host, there), host=host)


def _living(run_id: str, node: int) -> tuple[RunRecord, AttemptRecord]:
    """Return the attempt whose nodes live."""
    with folder_of(run_id).journal() as journal:
        record = read_record(journal)
    attempt = record.current
    if attempt is None or not attempt.launched:
        raise UsageError(
            f"{run_id} has no nodes now: it is {state_of(record).label}.",
            hint=f"look: spotguard status {run_id}",
        )
    nodes = attempt.cluster_nodes
    if node not in nodes:
        known = ", ".join(map(str, nodes))
        raise UsageError(f"{run_id} has no node {node} now.", hint=f"it has: {known}")
    return record, attempt


def _host(attempt: AttemptRecord, node: int) -> str:
    return attempt.cluster if node == 0 else f"{attempt.cluster}-worker{node}"


def _spec(record: RunRecord) -> JobSpec:
    return JobSpec.from_json(record.spec)
