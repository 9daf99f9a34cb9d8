"""All that is told of one run in one document: what `report` prints and its pages show."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

from spotguard.control.journal import cost
from spotguard.control.journal.fold import read_record
from spotguard.control.journal.journal import making_sense
from spotguard.control.report.reading import StoreReader
from spotguard.control.report.series import PlottedSeries, read_losses
from spotguard.control.report.time_use import AttemptTime, TimeShare, attempt_times, run_times
from spotguard.control.status.history_words import newest_lines
from spotguard.control.status.watch import picture
from spotguard.policy.plan import money
from spotguard.policy.plan.carbon.factors import CAR
from spotguard.shared.documents import INSTANT
from spotguard.shared.version import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spotguard.control.checkpoints.commands import CheckpointRow
    from spotguard.control.journal.record import RunRecord
    from spotguard.control.report.reading import Stored
    from spotguard.control.run_folder import RunFolder
    from spotguard.control.status.view import HistoryLine, LogDocument, RunView
    from spotguard.policy.plan.carbon.factors import Factor

SCHEMA: Final = 1
NEWEST_LINES = 500


@dataclass(frozen=True, kw_only=True)
class SpendPoint:
    """What the run cost at an instant at which its nodes changed."""

    at: float = field(metadata=INSTANT)
    nodes: int
    """From here on."""
    price_usd_per_h: float | None
    """Of one of them, from here on; None is unknown, or there is no node."""
    rate_usd_per_h: float | None
    """Of all of them, from here on."""
    spent_usd: float | None
    """By then."""


@dataclass(frozen=True, kw_only=True)
class EnvironmentLine:
    """One fact of how the run was asked for, and of what ran it."""

    name: str
    value: str


@dataclass(frozen=True, kw_only=True)
class Equivalent:
    """What causes as much CO2e as the run did."""

    text: str
    factor: Factor


@dataclass(frozen=True, kw_only=True)
class ReportDocument:
    """What `report --json` prints."""

    schema: Literal[1] = field(default=SCHEMA, init=False)
    """Version of this document's form."""
    made_at: float = field(metadata=INSTANT)
    run: RunView
    """How it stands, as `status --json` tells it."""
    series: tuple[PlottedSeries, ...]
    """Numbers over the steps; `loss` is the first one."""
    spend: tuple[SpendPoint, ...]
    """What it cost over time, from change to change."""
    time: tuple[TimeShare, ...]
    """Where the time and the money of the whole run went."""
    attempt_time: tuple[AttemptTime, ...]
    """The same of each attempt."""
    equivalent: Equivalent | None
    """What the CO2e amounts to; None if that is not known."""
    checkpoints: tuple[CheckpointRow, ...]
    """The newest, newest first."""
    log: tuple[LogDocument, ...]
    """The last lines that the newest attempt printed."""
    store_problem: str | None
    """Why the store could not be read, so that checkpoints and logs are missing; None if it was."""
    environment: tuple[EnvironmentLine, ...]
    earlier: int
    """How many happenings before those in `history` are left out."""
    history: tuple[HistoryLine, ...]
    """The newest happenings, by time."""


def make_report(folder: RunFolder, *, newest: int = NEWEST_LINES) -> ReportDocument:
    """Return the report of a run. Reads its journal and lists its checkpoints.

    Raises:
        JournalDamaged: the journal cannot be read or makes no sense.
    """
    controlled = folder.is_controlled()
    with folder.journal() as journal, making_sense(journal.path):
        record = read_record(journal)
        losses = read_losses(journal)
        lines, earlier = newest_lines(journal, newest, until=record.seq)
    view = picture(folder, record, controlled=controlled)
    with making_sense(folder.journal_path):
        return assemble(
            record,
            view,
            now=folder.clock().now(),
            stored=StoreReader().read(record, losses, controlled=controlled),
            lines=lines,
            earlier=earlier,
        )


def assemble(
    record: RunRecord,
    view: RunView,
    *,
    now: float,
    stored: Stored,
    lines: Sequence[HistoryLine],
    earlier: int,
) -> ReportDocument:
    """Return the report made of what has been read. Pure."""
    until = now if record.settled is None else record.settled.at
    return ReportDocument(
        made_at=now,
        run=view,
        series=stored.series,
        spend=spend_points(record, until),
        time=run_times(record, until),
        attempt_time=attempt_times(record, until),
        equivalent=_equivalent(view),
        checkpoints=stored.checkpoints,
        log=stored.log,
        store_problem=stored.problem,
        environment=_environment(record),
        earlier=earlier,
        history=tuple(lines),
    )


def spend_points(record: RunRecord, until: float) -> tuple[SpendPoint, ...]:
    """Return when nodes came and went, with what the run had cost by then."""
    instants = {until}
    for attempt in record.attempts:
        begun_at = attempt.billed_from
        instants |= {begun_at, min(until, begun_at + cost.billed_s(attempt, until))}
    instants |= {min(until, each.at + each.paid_s) for each in record.lost_launches}
    return tuple(_spend_point(record, at, until) for at in sorted(instants) if at <= until)


def _spend_point(record: RunRecord, at: float, until: float) -> SpendPoint:
    living = [
        attempt
        for attempt in record.attempts
        if attempt.billed_from <= at < attempt.billed_from + cost.billed_s(attempt, until)
    ]
    if at == until and record.current is not None:
        living = [record.current]
    prices = [attempt.offer.price_usd_per_h for attempt in living]
    rates = [cost.attempt_rate_usd_per_h(record, attempt) for attempt in living]
    begun = [attempt for attempt in record.attempts if attempt.billed_from <= at]
    costs = [_cost_by(record, attempt, at, until) for attempt in begun]
    costs += [each.usd for each in record.lost_launches if each.at + each.paid_s <= at]
    return SpendPoint(
        at=at,
        nodes=sum(attempt.nodes for attempt in living),
        price_usd_per_h=prices[-1] if prices else None,
        rate_usd_per_h=None if None in rates else sum(rate or 0.0 for rate in rates),
        spent_usd=None if None in costs else sum(each or 0.0 for each in costs),
    )


def _cost_by(record: RunRecord, attempt: Any, at: float, until: float) -> float | None:
    rate = cost.attempt_rate_usd_per_h(record, attempt)
    seconds = min(at - attempt.billed_from, cost.billed_s(attempt, until))
    return money.cost_usd(rate, seconds)


def _equivalent(view: RunView) -> Equivalent | None:
    kg = view.carbon.co2e_kg
    if kg is None:
        return None
    km = kg / CAR.value
    far = f"{km:,.0f} km" if km >= 10 else f"{km:.1f} km" if km >= 0.1 else f"{km * 1000:.0f} m"
    return Equivalent(text=f"as much as {far} by car", factor=CAR)


def _environment(record: RunRecord) -> tuple[EnvironmentLine, ...]:
    """Return how the job was asked for. Of the variables only names: values may be secret."""
    spec, limits = record.spec, record.limits
    nodes = (limits.nodes_min, limits.nodes_max)
    variables = spec.get("env")
    facts: list[tuple[str, object]] = [
        ("script", spec.get("script")),
        ("arguments", " ".join(map(str, spec.get("args") or ()))),
        ("workdir", spec.get("workdir")),
        ("infra", spec.get("infra")),
        ("on demand at", spec.get("on_demand_infra")),
        ("nodes", nodes[0] if nodes[0] == nodes[1] else f"{nodes[0]} to {nodes[1]}"),
        ("processes on a node", spec.get("nproc_per_node")),
        ("GPUs of a node", spec.get("gpus")),
        ("market", spec.get("market")),
        ("save every", spec.get("save_every")),
        ("seed", spec.get("seed")),
        ("variables", ", ".join(sorted(variables)) if isinstance(variables, dict) else ""),
        ("store", record.store_root),
        ("spotguard that made this", __version__),
    ]
    return tuple(
        EnvironmentLine(name=name, value=str(value))
        for name, value in facts
        if value is not None and value != ""
    )
