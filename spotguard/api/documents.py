"""What is told of runs, and planned: the types of what `run` and `launching` return.

Each is loaded when it is first asked for: a plain look at runs needs few of them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from spotguard.control.handover.stored_job import StoredJob
    from spotguard.control.journal.stored.logs import LogLine, LogQuery
    from spotguard.control.report.document import ReportDocument
    from spotguard.control.report.profile.document import ProfiledCost, ProfileDocument
    from spotguard.control.status.footprint import Footprint, RunFootprint
    from spotguard.control.status.recovery import Recovery
    from spotguard.control.status.ssh_commands import SSH_FAILED, NodeCommand
    from spotguard.control.status.view import (
        AttemptView,
        HistoryDocument,
        HistoryLine,
        LogDocument,
        Look,
        RunsDocument,
        RunSummary,
        RunView,
        Story,
        UnreadableRun,
    )
    from spotguard.control.sweep.sweep_request import SweepPlan
    from spotguard.control.sweep.table import SweepDocument, SweepPoint
    from spotguard.control.without_journal import Left
    from spotguard.launch.base import Offer, PriceSource, Skipped, Survey, Unchecked
    from spotguard.launch.workdir.snapshot import Snapshot
    from spotguard.policy.plan.batch_curve import BatchCurve, TriedSize
    from spotguard.policy.plan.carbon.factors import Factor
    from spotguard.policy.plan.forecast import CostForecast
    from spotguard.policy.plan.job import Candidate, JobPlan, Rung
    from spotguard.policy.plan.smoke import Smoke

__all__ = [
    "AttemptView",
    "BatchCurve",
    "Candidate",
    "CostForecast",
    "Factor",
    "Footprint",
    "HistoryDocument",
    "HistoryLine",
    "JobPlan",
    "Left",
    "LogDocument",
    "LogLine",
    "LogQuery",
    "Look",
    "NodeCommand",
    "Offer",
    "PriceSource",
    "ProfiledCost",
    "ProfileDocument",
    "Recovery",
    "ReportDocument",
    "RunFootprint",
    "Rung",
    "RunsDocument",
    "RunSummary",
    "RunView",
    "Skipped",
    "Smoke",
    "Snapshot",
    "SSH_FAILED",
    "StoredJob",
    "Story",
    "Survey",
    "SweepDocument",
    "SweepPlan",
    "SweepPoint",
    "TriedSize",
    "Unchecked",
    "UnreadableRun",
]

_HOMES: Final = {
    "spotguard.control.handover.stored_job": ("StoredJob",),
    "spotguard.control.journal.stored.logs": ("LogLine", "LogQuery"),
    "spotguard.control.report.document": ("ReportDocument",),
    "spotguard.control.report.profile.document": ("ProfiledCost", "ProfileDocument"),
    "spotguard.control.status.footprint": ("Footprint", "RunFootprint"),
    "spotguard.control.status.recovery": ("Recovery",),
    "spotguard.control.status.ssh_commands": ("NodeCommand", "SSH_FAILED"),
    "spotguard.control.status.view": (
        "AttemptView",
        "HistoryDocument",
        "HistoryLine",
        "LogDocument",
        "Look",
        "RunsDocument",
        "RunSummary",
        "RunView",
        "Story",
        "UnreadableRun",
    ),
    "spotguard.control.sweep.sweep_request": ("SweepPlan",),
    "spotguard.control.sweep.table": ("SweepDocument", "SweepPoint"),
    "spotguard.control.without_journal": ("Left",),
    "spotguard.launch.base": ("Offer", "PriceSource", "Skipped", "Survey", "Unchecked"),
    "spotguard.launch.workdir.snapshot": ("Snapshot",),
    "spotguard.policy.plan.batch_curve": ("BatchCurve", "TriedSize"),
    "spotguard.policy.plan.carbon.factors": ("Factor",),
    "spotguard.policy.plan.forecast": ("CostForecast",),
    "spotguard.policy.plan.job": ("Candidate", "JobPlan", "Rung"),
    "spotguard.policy.plan.smoke": ("Smoke",),
}


def __getattr__(name: str) -> Any:
    """Return one of the names above."""
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
