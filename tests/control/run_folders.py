"""A run as this machine knows it, without launching anything."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from spotguard.control.journal.fold import limits_to_json
from spotguard.control.journal.journal import Journal
from spotguard.control.journal.record import Kind, Limits
from spotguard.control.run_folder import RunFolder
from spotguard.spec.model import JobSpec
from spotguard.storage import PrefixedStore, open_store

if TYPE_CHECKING:
    from pathlib import Path

    from spotguard.storage.base import ObjectStore


def make_run(home: Path, run_id: str, *, settled: bool = False) -> ObjectStore:
    """Write a run's journal below `home`; return the run's own part of the store beside it."""
    folder = RunFolder(home / "runs" / run_id)
    folder.path.mkdir(parents=True, mode=0o700)
    root = open_store(str(home / "store")).url
    spec = JobSpec(script="/job.py", workdir="/", name="job", store=root)
    with Journal.create(folder.journal_path) as journal:
        created = {
            "run_id": run_id,
            "name": "job",
            "store_root": root,
            "limits": limits_to_json(Limits()),
            "spec": spec.to_json(),
        }
        journal.append(Kind.CREATED.value, at=time.time(), data=created)
        if settled:
            data = {"state": "finished", "detail": "", "exit_code": 0}
            journal.append(Kind.SETTLED.value, at=time.time(), data=data)
    return PrefixedStore(open_store(root), run_id)
