"""Checkpoints of a run: listed, shown, verified, pruned, archived, pinned, exported."""

from __future__ import annotations

from spotguard.checkpoint.lineage import CheckpointRef, list_all
from spotguard.checkpoint.retention import Retention
from spotguard.control.checkpoints.archive import Archivable, ArchiveDocument, archive, plan_archive
from spotguard.control.checkpoints.commands import (
    CheckpointRow,
    CheckpointsDocument,
    Pruned,
    Validity,
    VerificationDocument,
    Verified,
    check_at_rest,
    check_own,
    list_checkpoints,
    pin,
    plan_prune,
    prune,
    unpin,
    verify,
)
from spotguard.control.checkpoints.detail import (
    CheckpointDetail,
    CheckpointDocument,
    TensorRow,
    describe,
)
from spotguard.control.checkpoints.export import export
from spotguard.control.checkpoints.find import (
    OpenedRun,
    committed,
    find_checkpoint,
    open_run,
    short_name,
)

__all__ = [
    "Archivable",
    "archive",
    "ArchiveDocument",
    "check_at_rest",
    "check_own",
    "CheckpointDetail",
    "CheckpointDocument",
    "CheckpointRef",
    "CheckpointRow",
    "CheckpointsDocument",
    "committed",
    "describe",
    "export",
    "find_checkpoint",
    "list_all",
    "list_checkpoints",
    "open_run",
    "OpenedRun",
    "pin",
    "plan_archive",
    "plan_prune",
    "prune",
    "Pruned",
    "Retention",
    "short_name",
    "TensorRow",
    "unpin",
    "Validity",
    "VerificationDocument",
    "Verified",
    "verify",
]
