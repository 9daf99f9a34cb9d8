"""All that is told of one run in one document: what `report` prints and its pages show."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, Literal

from spotguard.control.journal import cost
from spotguard.control.journal.fold import read_record
from spotguard.control.journal.journal import making_sense
from spotguard.control.report.reading import StoreReader
from spotguard.control.report.series import PlottedSeries, read_losses
from spotguard.control.report.time_use import AttemptTime, TimeShare, attempt_times, run_times
from spotguard.control.status.history_words import newest_lines
from spotguard.control.status.watch import picture
from spotguard.events.masking import shown_arguments
from spotguard.policy.plan.carbon.factors import CAR
from spotguard.shared.json_documents import INSTANT
from spotguard.shared.units import sum_known
from spotguard.shared.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

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
    bills = sorted(_bills(record, until), key=lambda bill: bill.begun_at)
    instants = {until} | {at for bill in bills for at in (bill.begun_at, bill.gone_at)}
    coming, living = deque(bills), list[_Bill]()
    over_usd: float | None = 0.0
    points = []
    for at in sorted(at for at in instants if at <= until):
        while coming and coming[0].begun_at <= at:
            living.append(coming.popleft())
        over_usd = sum_known([over_usd, *(bill.usd for bill in living if bill.gone_at <= at)])
        living = [bill for bill in living if bill.gone_at > at]
        costs = [bill.usd_by(at) for bill in living]
        points.append(_spend_point(at, living, sum_known([over_usd, *costs])))
    return (*points[:-1], _as_it_stands(points[-1], record))


@dataclass(frozen=True, kw_only=True)
class _Bill:
    """What was paid for the nodes of an attempt, or for one of the controller's own.

    Or for a launch that came to nothing, at once.
    """

    begun_at: float
    gone_at: float
    usd: float | None
    nodes: int = 0
    price_usd_per_h: float | None = None
    rate_usd_per_h: float | None = None

    def usd_by(self, at: float) -> float | None:
        """Return what was paid by an instant before its end: the same each second."""
        if self.usd is None:
            return None
        return self.usd * (at - self.begun_at) / (self.gone_at - self.begun_at)


def _bills(record: RunRecord, until: float) -> Iterator[_Bill]:
    rates, usd = cost.attempt_rates_usd_per_h(record), cost.attempts_usd(record, until)
    for attempt in cost.launched(record):
        yield _Bill(
            begun_at=min(until, attempt.billed_from),
            gone_at=min(until, attempt.billed_from + cost.billed_s(attempt, until)),
            usd=usd[attempt.number],
            nodes=attempt.nodes,
            price_usd_per_h=attempt.offer.price_usd_per_h,
            rate_usd_per_h=rates[attempt.number],
        )
    for lost in record.lost_launches:
        over_at = min(until, lost.at + lost.paid_s)
        yield _Bill(begun_at=over_at, gone_at=over_at, usd=lost.usd)
    for node, node_usd in zip(record.controller_nodes, cost.nodes_usd(record, until), strict=True):
        yield _Bill(
            begun_at=min(until, node.since),
            gone_at=until if node.until is None else min(until, node.until),
            usd=node_usd,
            rate_usd_per_h=node.price_usd_per_h,
        )


def _spend_point(at: float, living: Sequence[_Bill], spent_usd: float | None) -> SpendPoint:
    priced = [bill for bill in living if bill.nodes]
    return SpendPoint(
        at=at,
        nodes=sum(bill.nodes for bill in living),
        price_usd_per_h=priced[-1].price_usd_per_h if priced else None,
        rate_usd_per_h=sum_known(bill.rate_usd_per_h for bill in living),
        spent_usd=spent_usd,
    )


def _as_it_stands(last: SpendPoint, record: RunRecord) -> SpendPoint:
    """Return the last point with the nodes that are paid on."""
    if record.settled is not None:
        return last
    current = record.current
    paid = [each for each in (current, record.ahead, *record.leaving) if each is not None]
    return replace(
        last,
        nodes=sum(each.nodes for each in paid),
        price_usd_per_h=paid[0].offer.price_usd_per_h if paid else None,
        rate_usd_per_h=cost.rate_usd_per_h(record),
    )


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
        ("arguments", " ".join(shown_arguments([str(each) for each in spec.get("args") or ()]))),
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
