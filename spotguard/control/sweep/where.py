"""Where the run of a sweep's point is: on this machine, away from it, or nowhere yet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spotguard.control.controller.one_run import run_store
from spotguard.control.journal.fold import read_record
from spotguard.control.run_folder import RunFolder, runs_folder
from spotguard.control.status.watch import picture
from spotguard.events import keys

if TYPE_CHECKING:
    from spotguard.control.journal.record import RunRecord
    from spotguard.control.status.view import RunView
    from spotguard.control.sweep.sweep_request import SweepRecord


def folder_here(run_id: str) -> RunFolder | None:
    """Return the folder of a run on this machine; None if there is none."""
    folder = RunFolder(runs_folder() / run_id)
    return folder if folder.path.is_dir() else None


def created_runs(sweep: SweepRecord) -> list[RunFolder]:
    """Return the folders of its runs that there are on this machine."""
    found = [folder_here(part.run_id) for part in sweep.parts()]
    return [folder for folder in found if folder is not None]


def look_at(folder: RunFolder) -> tuple[RunView, RunRecord]:
    """Return how a run stands by its journal, or by the one that was rebuilt from its store.

    Raises:
        JournalDamaged: it cannot be read or makes no sense.
    """
    controlled = folder.is_controlled()
    with folder.journal() as journal:
        record = read_record(journal)
    return picture(folder, record, controlled=controlled), record


def was_launched(sweep: SweepRecord, run_id: str) -> bool:
    """Return whether one of its runs ever had nodes, by the store alone.

    So one whose folder is gone from this machine is told from one that was never begun.

    Raises:
        StoreError: the store cannot be read.
    """
    store = run_store(sweep.store_root, run_id)
    return bool(store.list_folders(keys.ATTEMPTS))
