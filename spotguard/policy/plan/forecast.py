"""What a job is expected to cost and when it is done, as `plan`, `up` and `status` tell it."""

from __future__ import annotations

from dataclasses import dataclass, field

from spotguard.shared.json_documents import INSTANT


@dataclass(frozen=True, kw_only=True)
class CostForecast:
    """Either numbers, or why there are none. Intervals are of 80 %; money is of all nodes."""

    none: str | None = None
    """Why there is no forecast; None if there is one."""
    work_s: float | None = None
    """Training that is left, on all nodes and undisturbed."""
    work_from: str | None = None
    """Where that is from: the run's own pace, an earlier run, or `--work`."""
    cost_usd: float | None = None
    """Mean of the whole run's cost, what is spent already included."""
    cost_low_usd: float | None = None
    cost_high_usd: float | None = None
    finish_at: float | None = field(default=None, metadata=INSTANT)
    """Mean instant at which the work is done; for `plan` if it began now, or at `start_at`."""
    finish_low_at: float | None = field(default=None, metadata=INSTANT)
    finish_high_at: float | None = field(default=None, metadata=INSTANT)
    late_pct: float | None = None
    """Share of futures in which the deadline is missed; None without a deadline."""
    on_demand_usd: float | None = None
    """What the whole run costs if the rest is bought on demand now."""
    market: str | None = None
    """On which market it rests."""
    market_at: float | None = field(default=None, metadata=INSTANT)
    """When that was recorded, or last seen."""
