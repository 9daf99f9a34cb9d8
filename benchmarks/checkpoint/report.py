"""From samples to a table: medians, spread, ratios to the floors, and the bars to pass."""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.checkpoint.contestants import FLOORS, METHODS
from benchmarks.checkpoint.floors import DirectWrite, Memcpy
from benchmarks.checkpoint.measure import Samples
from benchmarks.checkpoint.rivals import DcpSave

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from benchmarks.checkpoint.flips import Flips
    from benchmarks.checkpoint.method import Contestant

_UNKNOWN = "n/a"


@dataclass(frozen=True, kw_only=True)
class Row:
    """What the table says of one method; None is unknown or does not apply."""

    name: str
    note: str
    problem: str | None
    stall_ms: float | None
    stall_spread_ms: tuple[float, float] | None
    stall_over_memcpy: float | None
    long_step_stall_over_memcpy: float | None
    stall_us_per_tensor: float | None
    """What the stall exceeds one memcpy by, per tensor."""
    copy_gb_per_s: float | None
    """The state's bytes over the stall: of interest where the stall is the copy."""
    durable_ms: float | None
    durable_spread_ms: tuple[float, float] | None
    durable_over_direct: float | None
    slow_down_ms: float | None
    slow_down_spread_ms: tuple[float, float] | None
    loss_ms: float | None
    loss_spread_ms: tuple[float, float] | None
    warm_ms: float | None
    warm_over_dcp: float | None
    cold_ms: float | None
    cold_over_dcp: float | None
    memory_over_state: float | None
    bytes_over_state: float | None
    flips_found: int | None
    flips_tried: int | None
    """Without the harmless ones."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """The whole outcome, for people and for programs."""

    machine: dict[str, str]
    state_bytes: int
    tensors: int
    rounds: int
    rows: list[Row]
    samples: dict[str, Samples]

    def to_json(self) -> dict[str, Any]:
        """Return everything, raw samples included."""
        return {"schema": 1, **asdict(self)}

    def row(self, name: str) -> Row | None:
        """Return the row of a method, if it was measured."""
        found = (row for row in self.rows if row.name == name and row.problem is None)
        return next(found, None)


def make_report(
    samples: Mapping[str, Samples],
    *,
    state_bytes: int,
    tensors: int,
    rounds: int,
    machine: dict[str, str],
    memory: Mapping[str, float | None],
    flips: Mapping[str, Flips],
) -> Report:
    """Return the report on these measurements."""
    reference = _Reference(
        memcpy_s=_median(samples.get(Memcpy.name, Samples()).stall_s),
        direct_s=_median(samples.get(DirectWrite.name, Samples()).durable_s),
        dcp_warm_s=_median(samples.get(DcpSave.name, Samples()).warm_s),
        dcp_cold_s=_median(samples.get(DcpSave.name, Samples()).cold_s),
        state_bytes=state_bytes,
        tensors=tensors,
    )
    kinds: tuple[type[Contestant], ...] = (*FLOORS, *METHODS)
    rows = [
        reference.row(kind, samples[kind.name], memory.get(kind.name), flips.get(kind.format))
        for kind in kinds
        if kind.name in samples
    ]
    return Report(
        machine=machine,
        state_bytes=state_bytes,
        tensors=tensors,
        rounds=rounds,
        rows=rows,
        samples=dict(samples),
    )


@dataclass(frozen=True, kw_only=True)
class _Reference:
    """What the others are measured against."""

    memcpy_s: float | None
    direct_s: float | None
    dcp_warm_s: float | None
    dcp_cold_s: float | None
    state_bytes: int
    tensors: int

    def row(
        self, kind: type[Contestant], found: Samples, memory: float | None, flips: Flips | None
    ) -> Row:
        stall_s, durable_s = _median(found.stall_s), _median(found.durable_s)
        warm_s, cold_s = _median(found.warm_s), _median(found.cold_s)
        return Row(
            name=kind.name,
            note=kind.note,
            problem=found.problem,
            stall_ms=_ms(stall_s),
            stall_spread_ms=_spread_ms(found.stall_s),
            stall_over_memcpy=_ratio(stall_s, self.memcpy_s),
            long_step_stall_over_memcpy=_ratio(_median(found.long_step_stall_s), self.memcpy_s),
            stall_us_per_tensor=self._us_per_tensor(stall_s),
            copy_gb_per_s=_ratio(self.state_bytes / 1e9, stall_s),
            durable_ms=_ms(durable_s),
            durable_spread_ms=_spread_ms(found.durable_s),
            durable_over_direct=_ratio(durable_s, self.direct_s),
            slow_down_ms=_ms(_median(found.slow_down_s)),
            slow_down_spread_ms=_spread_ms(found.slow_down_s),
            loss_ms=_ms(_median(found.loss_s)),
            loss_spread_ms=_spread_ms(found.loss_s),
            warm_ms=_ms(warm_s),
            warm_over_dcp=_ratio(warm_s, self.dcp_warm_s),
            cold_ms=_ms(cold_s),
            cold_over_dcp=_ratio(cold_s, self.dcp_cold_s),
            memory_over_state=memory,
            bytes_over_state=found.size_bytes / self.state_bytes if found.size_bytes else None,
            flips_found=flips.found if flips else None,
            flips_tried=flips.found + flips.missed if flips else None,
        )

    def _us_per_tensor(self, stall_s: float | None) -> float | None:
        if stall_s is None or self.memcpy_s is None:
            return None
        return 1e6 * (stall_s - self.memcpy_s) / self.tensors


_COLUMNS: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("method", lambda row: row.name),
    ("stall ms", lambda row: _with_spread(row.stall_ms, row.stall_spread_ms)),
    ("÷ memcpy", lambda row: _number(row.stall_over_memcpy)),
    ("long step ÷ memcpy", lambda row: _number(row.long_step_stall_over_memcpy)),
    ("stall µs/tensor", lambda row: _number(row.stall_us_per_tensor, 1)),
    ("copy GB/s", lambda row: _number(row.copy_gb_per_s, 1)),
    ("durable ms", lambda row: _with_spread(row.durable_ms, row.durable_spread_ms)),
    ("÷ O_DIRECT", lambda row: _number(row.durable_over_direct)),
    ("slow-down ms", lambda row: _with_spread(row.slow_down_ms, row.slow_down_spread_ms)),
    ("loss ms", lambda row: _with_spread(row.loss_ms, row.loss_spread_ms)),
    ("warm ms", lambda row: _number(row.warm_ms, 0)),
    ("÷ DCP", lambda row: _number(row.warm_over_dcp)),
    ("cold ms", lambda row: _number(row.cold_ms, 0)),
    ("÷ DCP", lambda row: _number(row.cold_over_dcp)),
    ("memory ÷ state", lambda row: _number(row.memory_over_state)),
    ("bytes ÷ state", lambda row: _number(row.bytes_over_state, 4)),
    ("flips found", lambda row: _of(row.flips_found, row.flips_tried)),
)


def to_markdown(report: Report) -> str:
    """Return the table, what was left out and why, and the machine."""
    lines = [
        f"{report.state_bytes / 1e6:.1f} MB in {report.tensors} tensors, medians of "
        f"{report.rounds} interleaved rounds [min..max].",
        "",
        *_table([name for name, _ in _COLUMNS], _cells(report.rows)),
        "",
        *(f"- {row.name}: {row.problem}" for row in report.rows if row.problem),
        *(f"- {row.name}: {row.note}" for row in report.rows if row.note and not row.problem),
        *(f"- {key}: {value}" for key, value in report.machine.items()),
    ]
    return "\n".join(lines) + "\n"


def _cells(rows: Sequence[Row]) -> list[list[str]]:
    return [[cell(row) for _, cell in _COLUMNS] for row in rows if row.problem is None]


def _table(header: list[str], rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in (header, *rows)
    ]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return [lines[0], rule, *lines[1:]]


def _median(samples: Sequence[float]) -> float | None:
    return statistics.median(samples) if samples else None


def _ratio(value: float | None, to: float | None) -> float | None:
    return None if value is None or not to else value / to


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds


def _spread_ms(samples: Sequence[float]) -> tuple[float, float] | None:
    return (1e3 * min(samples), 1e3 * max(samples)) if samples else None


def _number(value: float | None, digits: int = 2) -> str:
    return _UNKNOWN if value is None or math.isnan(value) else f"{value:.{digits}f}"


def _with_spread(value: float | None, spread: tuple[float, float] | None) -> str:
    if value is None or spread is None:
        return _UNKNOWN
    return f"{value:.0f} [{spread[0]:.0f}..{spread[1]:.0f}]"


def _of(found: int | None, tried: int | None) -> str:
    return _UNKNOWN if found is None else f"{found} of {tried}"
