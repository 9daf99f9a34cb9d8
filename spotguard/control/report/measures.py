"""The numbers of a run that monitoring keeps. Pure functions over the record."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spotguard.control.journal import cost
from spotguard.control.report.time_use import run_times
from spotguard.control.status.footprint import run_footprint
from spotguard.control.status.make_view import newest_save
from spotguard.events.states import Market
from spotguard.policy.plan.job import CLOUDS_THAT_TAKE
from spotguard.shared.hazard import hazard_per_h

if TYPE_CHECKING:
    from spotguard.control.journal.record import RunRecord
    from spotguard.control.report.time_use import TimeShare
    from spotguard.control.status.footprint import RunFootprint
    from spotguard.control.status.view import RunSummary


@dataclass(frozen=True, kw_only=True)
class RunMeasures:
    """One run in numbers. None is unknown, never zero."""

    summary: RunSummary
    nodes: int
    ends: dict[str, int]
    """How many attempts ended, by the reason's word."""
    time: tuple[TimeShare, ...]
    saves: int
    save_s: float
    """Seconds that all saves took together."""
    save_bytes: float
    """Of all saves together."""
    last_save_s: float | None
    last_save_bytes: float | None
    last_saved_at: float | None
    hazard_per_h: float | None
    """Interruptions to be expected in an hour at the age of its nodes; None where unknown."""
    carbon: RunFootprint


def run_measures(record: RunRecord, summary: RunSummary, now: float) -> RunMeasures:
    """Return the numbers of a run as it stands at `now`."""
    until = now if record.settled is None else record.settled.at
    attempts, current, save = record.attempts, record.current, newest_save(record)
    sizes = [a.saving.last_bytes for a in attempts if a.saving.last_bytes is not None]
    return RunMeasures(
        summary=summary,
        nodes=0 if current is None else current.nodes,
        ends=dict(Counter(a.end.reason.value for a in attempts if a.end is not None)),
        time=run_times(record, until),
        saves=sum(attempt.saving.count for attempt in attempts),
        save_s=sum(attempt.saving.duration_s for attempt in attempts),
        save_bytes=sum(attempt.saving.size_bytes for attempt in attempts),
        last_save_s=None if save is None else save.duration_s,
        last_save_bytes=sizes[-1] if sizes else None,
        last_saved_at=None if save is None else save.at,
        hazard_per_h=_hazard(record, until),
        carbon=run_footprint(record, until),
    )


def _hazard(record: RunRecord, now: float) -> float | None:
    attempt = record.current
    if attempt is None or attempt.offer.market is Market.ON_DEMAND:
        return 0.0
    if attempt.offer.infra not in CLOUDS_THAT_TAKE:
        return None
    return hazard_per_h(cost.billed_s(attempt, now))
