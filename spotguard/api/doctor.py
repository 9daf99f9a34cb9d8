"""The doctor and the drill: what of a machine and a store works, and what a script restores."""

from __future__ import annotations

from spotguard.control.doctor.checks import DoctorDocument, DoctorReport, examine
from spotguard.control.doctor.orphan_report import Findings, ListedClusters
from spotguard.control.doctor.orphans import Books, end_named, end_orphans, skypilot_books
from spotguard.control.doctor.store_trial import NOTICES_S, SaveTime, TriedStore
from spotguard.control.drill.loader_trial import LoaderReport, TriedWorkers, try_loader
from spotguard.control.drill.report import DrillReport
from spotguard.control.drill.run import DrillOptions, run_drill

__all__ = [
    "Books",
    "DoctorDocument",
    "DoctorReport",
    "DrillOptions",
    "DrillReport",
    "end_named",
    "end_orphans",
    "examine",
    "Findings",
    "ListedClusters",
    "LoaderReport",
    "NOTICES_S",
    "run_drill",
    "SaveTime",
    "skypilot_books",
    "TriedStore",
    "TriedWorkers",
    "try_loader",
]
