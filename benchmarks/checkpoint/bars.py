"""What spotguard promises of its checkpoints, and whether a report shows it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.checkpoint.ours import Emergency, Periodic
from benchmarks.checkpoint.rivals import DcpAsyncThread, DcpSave

if TYPE_CHECKING:
    from benchmarks.checkpoint.report import Report, Row

_MOST_EMERGENCY_MEMORY_MB = 64


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One promise: a measured value and the most that it may be."""

    promise: str
    value: float | None
    """None: not measured."""
    most: float

    @property
    def verdict(self) -> str:
        """Return `passed`, `missed` or `not measured`."""
        if self.value is None:
            return "not measured"
        return "passed" if self.value <= self.most else "missed"


def bars(report: Report) -> list[Bar]:
    """Return all promises that this report can speak about."""
    ours, emergency = report.row(Periodic.name), report.row(Emergency.name)
    dcp, dcp_async = report.row(DcpSave.name), report.row(DcpAsyncThread.name)
    found = [
        ("periodic: stall with a short step ÷ memcpy", _of(ours, "stall_over_memcpy"), 1.2),
        (
            "periodic: stall with a long step ÷ memcpy",
            _of(ours, "long_step_stall_over_memcpy"),
            0.3,
        ),
        ("periodic: stall beyond memcpy, µs per tensor", _of(ours, "stall_us_per_tensor"), 5.0),
        ("periodic: durable ÷ O_DIRECT", _of(ours, "durable_over_direct"), 1.2),
        ("periodic: durable ÷ DCP save", _over(ours, dcp, "durable_ms"), 0.4),
        ("emergency: durable ÷ O_DIRECT", _of(emergency, "durable_over_direct"), 1.2),
        ("emergency: durable ÷ DCP save", _over(emergency, dcp, "durable_ms"), 0.4),
        ("periodic: slow-down ÷ DCP async", _over(ours, dcp_async, "slow_down_ms"), 0.15),
        ("restore, warm ÷ DCP", _of(ours, "warm_over_dcp"), 0.35),
        ("restore, cold ÷ DCP", _of(ours, "cold_over_dcp"), 0.4),
        ("periodic: extra memory ÷ state", _of(ours, "memory_over_state"), 1.05),
        ("emergency: extra memory, MB", _memory_mb(report, emergency), _MOST_EMERGENCY_MEMORY_MB),
        ("bytes ÷ state", _of(ours, "bytes_over_state"), 1.002),
        ("flipped bits missed", _missed(ours), 0.0),
    ]
    return [Bar(promise=promise, value=value, most=most) for promise, value, most in found]


def bars_to_markdown(found: list[Bar]) -> str:
    """Return the promises as a table."""
    rows = [
        f"| {bar.promise} | {'n/a' if bar.value is None else f'{bar.value:.3f}'} "
        f"| {bar.most:g} | {bar.verdict} |"
        for bar in found
    ]
    return "\n".join(["| bar | measured | at most | |", "|---|---|---|---|", *rows]) + "\n"


def _of(row: Row | None, name: str) -> float | None:
    value: float | None = None if row is None else getattr(row, name)
    return value


def _over(row: Row | None, other: Row | None, name: str) -> float | None:
    value, to = _of(row, name), _of(other, name)
    return None if value is None or to is None or to <= 0 else value / to


def _memory_mb(report: Report, row: Row | None) -> float | None:
    ratio = _of(row, "memory_over_state")
    return None if ratio is None else ratio * report.state_bytes / 1e6


def _missed(row: Row | None) -> float | None:
    if row is None or row.flips_found is None or row.flips_tried is None:
        return None
    return row.flips_tried - row.flips_found
