"""What is told of runs, and planned: the types of what `run` and `launching` return."""

from __future__ import annotations

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
    "SSH_FAILED",
    "Story",
    "Survey",
    "SweepDocument",
    "SweepPlan",
    "SweepPoint",
    "TriedSize",
    "Unchecked",
    "UnreadableRun",
]
