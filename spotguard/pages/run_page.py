"""A run as a page: the report, and the page of the dashboard that shows the same, live."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spotguard.control.status import words
from spotguard.events import metric
from spotguard.events.states import EndReason, RunState
from spotguard.pages.layout import Breakdown, Card, Cell, Chart, Curve, Mark, Slice, Table, WebPage
from spotguard.shared.plain_text import clean
from spotguard.shared.units import format_bytes, format_duration, format_usd
from spotguard.shared.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from spotguard.control.checkpoints.commands import CheckpointRow
    from spotguard.control.report.document import ReportDocument
    from spotguard.control.report.series import PlottedSeries
    from spotguard.control.report.time_use import TimeShare
    from spotguard.control.status.recovery import Recovery
    from spotguard.control.status.view import AttemptView, HistoryLine, RunView

_RECOVERY_PARTS = (
    ("detect", "noticing", "releasing"),
    ("release", "releasing the old nodes", "releasing"),
    ("waiting", "waiting for capacity", "waiting"),
    ("provision", "provisioning", "provisioning"),
    ("setup", "set-up", "setup"),
    ("restore", "restoring", "restoring"),
    ("first_step", "first step", "training"),
)
_PARTS_OF_A_STEP = {
    metric.STEP_S: ("step", "blue"),
    metric.COMPUTE_S: ("compute", "green"),
    metric.DATA_S: ("waiting for data", "orange"),
    metric.COMMUNICATION_S: ("communication", "dim"),
    metric.SAVE_S: ("held up by a save", "red"),
}
_CALM_ENDS = (EndReason.FINISHED, EndReason.STOPPED)


def run_page(report: ReportDocument, *, live: bool = False, may_act: bool = False) -> WebPage:
    """Return the page of a run: `live` on the dashboard, whose user may act on it or not."""
    view = report.run
    return WebPage(
        kind="run" if live else "report",
        title=view.name,
        subtitle=view.run_id,
        run_id=view.run_id,
        state=Cell(text=view.state_label, tone=view.state.colour, note=view.state_detail),
        banner=words.DEMO if view.demo_prices else "",
        warnings=view.warnings,
        error=view.traceback or "",
        actions=actions(view.state) if may_act else (),
        cards=tuple(_cards(report)),
        charts=tuple(_charts(report)),
        breakdowns=(_time(report), *_recovery_bars(view)),
        tables=(
            _attempts(view),
            _recoveries(view),
            _checkpoints(report),
            _history(report),
            _log(report),
            _carbon(report),
            _environment(report),
        ),
        made_at=report.made_at,
        version=__version__,
    )


def actions(state: RunState) -> tuple[str, ...]:
    """Return what a user can ask for in a state."""
    if state is RunState.FINISHED:
        return ()
    return ("resume",) if state.settled else ("stop",)


def usd(amount: float | None, *, demo: bool) -> str:
    """Return money in words; what is played says so."""
    told = format_usd(amount)
    return f"{told} (demo)" if demo and amount is not None else told


def money_column(name: str, *, demo: bool) -> str:
    """Return the heading of a column of money, which says so for all of it."""
    return f"{name} (demo)" if demo else name


# ---------------------------------------------------------------- cards


def _cards(report: ReportDocument) -> Iterator[Card]:
    view, demo = report.run, report.run.demo_prices
    share = words.fraction(view.step, view.total_steps)
    yield Card(
        label="progress",
        value="–" if share is None else words.percent(share),  # noqa: RUF001 - as DASH
        note=words.steps_done(view)
        + ("" if view.state.settled else f" · {words.pace(view)}")
        + (f" · loss {view.loss:.4g}" if view.state.settled and view.loss is not None else ""),
        share=share,
        tone="green",
    )
    spent = words.fraction(view.spent_usd, view.budget_usd)
    limit = "no budget set" if view.budget_usd is None else f"of {format_usd(view.budget_usd)}"
    yield Card(
        label="spent",
        value=usd(view.spent_usd, demo=demo),
        note=limit if view.state.settled else f"{limit} · {words.rate(view.rate_usd_per_h)} now",
        share=spent,
        tone="default" if spent is None else "yellow" if spent >= 0.8 else "cyan",
    )
    saved = words.saved_money(view.saved_pct)
    yield Card(
        label="beside on demand",
        value=saved,
        note=f"{usd(view.on_demand_usd, demo=demo)} for the same work, undisturbed",
    )
    yield Card(
        label="goodput",
        value="unknown" if view.goodput is None else words.percent(view.goodput),
        note="of the billed time went into steps that count",
        share=view.goodput,
        tone="green",
    )
    lost = [each.steps_lost for each in view.attempts]
    known = sum(each or 0 for each in lost)
    yield Card(
        label="interruptions",
        value=str(len(_taken(view.attempts))),
        note=f"{len(view.attempts)} attempts · {known} steps lost",
    )
    yield Card(
        label="last save",
        value="nothing yet" if view.saved_step is None else f"step {view.saved_step}",
        note=words.last_save(view, report.made_at).partition(", ")[2] or "no checkpoint counts yet",
    )
    until = report.made_at if view.finished_at is None else view.finished_at
    left = "" if view.eta_s is None else f" · {format_duration(view.eta_s)} left at this pace"
    yield Card(
        label="time",
        value=format_duration(max(0.0, until - view.created_at)),
        note=("until it came to rest" if view.state.settled else "so far") + left,
    )
    carbon = view.carbon
    how = "measured" if carbon.measured else "estimated, an upper bound"
    amounts = f" · {report.equivalent.text}" if report.equivalent else ""
    yield Card(
        label="energy and carbon",
        value=words.energy(carbon.energy_kwh),
        note=f"{words.co2e(carbon.co2e_kg)}, {how}{amounts}"
        if carbon.co2e_kg is not None
        else "the devices of its nodes are not known",
    )


# ---------------------------------------------------------------- charts


def _charts(report: ReportDocument) -> Iterator[Chart]:
    first, *others = report.series
    yield _curve(first, report.run)
    yield _money(report)
    yield _nodes(report)
    parts = [each for each in others if each.name in _PARTS_OF_A_STEP]
    if parts:
        yield _step_parts(parts)
    for each in others:
        if each.name not in _PARTS_OF_A_STEP:
            yield _curve(each, report.run)


def _step_parts(parts: list[PlottedSeries]) -> Chart:
    """Where the time of a step goes, as the runtime measured it."""
    positions = tuple(sorted({step for each in parts for step in each.steps}))
    return Chart(
        id="step-parts",
        title="where the time of a step goes",
        summary="seconds of a step, and what of them went into waiting",
        along="step",
        positions=tuple(map(float, positions)),
        curves=tuple(
            Curve(
                name=_PARTS_OF_A_STEP[each.name][0],
                values=tuple(map(dict(zip(each.steps, each.values, strict=True)).get, positions)),
                tone=_PARTS_OF_A_STEP[each.name][1],
                unit="s",
            )
            for each in parts
        ),
    )


def _curve(told: PlottedSeries, view: RunView) -> Chart:
    """A number over the steps: the values that count as a line, the superseded as dots."""
    positions = tuple(sorted(set(told.steps)))
    counted: dict[int, float] = {}
    again: dict[int, float] = {}
    for step, value, counts in zip(told.steps, told.values, told.counts, strict=True):
        (counted if counts else again)[step] = value
    curves = [
        Curve(name=told.name, values=tuple(map(counted.get, positions)), tone="blue"),
    ]
    if again:
        curves.append(
            Curve(
                name="superseded",
                values=tuple(map(again.get, positions)),
                tone="dim",
                dots=True,
            )
        )
    ends = [each for each in view.attempts if each.end_reason is not None]
    marks = tuple(
        Mark(
            at=each.last_step,
            text=f"#{each.attempt} {words.why(each)[0]}",
            tone=words.why(each)[1],
        )
        for each in ends
        if each.last_step is not None and each.end_reason not in _CALM_ENDS
    )
    newest = next((value for value in reversed(told.values)), None)
    now = "no value yet" if newest is None else f"newest value {newest:.4g}"
    return Chart(
        id=f"series-{told.name}",
        title=f"{told.name} over all attempts",
        summary=f"{told.name} over the steps of all attempts: {now}, "
        f"{len(_taken(view.attempts))} interruptions",
        along="step",
        positions=tuple(map(float, positions)),
        curves=tuple(curves),
        marks=marks,
        empty=f"{told.name} has no finite value yet",
    )


def _taken(attempts: Sequence[AttemptView]) -> list[AttemptView]:
    """Return those that were interrupted: not what ends by its budget, its script or its phase."""
    return [each for each in attempts if each.end_reason is not None and each.end_reason.retried]


def _money(report: ReportDocument) -> Chart:
    points, view = report.spend, report.run
    budget = tuple(view.budget_usd for _ in points)
    curves = [
        Curve(
            name="spent, demo prices" if view.demo_prices else "spent",
            values=tuple(point.spent_usd for point in points),
            tone="blue",
            unit="$",
        ),
        Curve(
            name="price of a node",
            values=tuple(point.price_usd_per_h for point in points),
            tone="orange",
            unit="$/h",
            scale="right",
            stepped=True,
        ),
    ]
    if view.budget_usd is not None:
        curves.append(Curve(name="budget", values=budget, tone="red", unit="$"))
    return Chart(
        id="money",
        title="money and price over time",
        summary=f"spent {format_usd(view.spent_usd)} by now",
        along="time",
        positions=tuple(point.at for point in points),
        curves=tuple(curves),
        marks=_ends(view),
    )


def _nodes(report: ReportDocument) -> Chart:
    points = report.spend
    return Chart(
        id="nodes",
        title="nodes over time",
        summary="how many nodes the run had",
        along="time",
        positions=tuple(point.at for point in points),
        curves=(
            Curve(
                name="nodes",
                values=tuple(float(point.nodes) for point in points),
                tone="green",
                stepped=True,
            ),
        ),
        marks=_ends(report.run),
    )


def _ends(view: RunView) -> tuple[Mark, ...]:
    return tuple(
        Mark(
            at=each.ended_at, text=f"#{each.attempt} {words.why(each)[0]}", tone=words.why(each)[1]
        )
        for each in view.attempts
        if each.ended_at is not None and each.end_reason not in _CALM_ENDS
    )


# ---------------------------------------------------------------- breakdowns


def _time(report: ReportDocument) -> Breakdown:
    whole = sum(share.seconds for share in report.time)
    known = all(share.usd is not None for share in report.time)
    money = sum(share.usd or 0.0 for share in report.time)
    return Breakdown(
        id="time",
        title="where each hour and each dollar went",
        summary=f"{format_duration(whole)} in all"
        + (f", {usd(money, demo=report.run.demo_prices)}" if known else ""),
        columns=("", "time", "share", money_column("money", demo=report.run.demo_prices)),
        slices=tuple(_slice(share, whole) for share in report.time),
        empty="no node was billed yet",
    )


def _slice(share: TimeShare, whole: float) -> Slice:
    part = share.seconds / whole if whole else 0.0
    return Slice(
        label=share.label,
        hint=share.hint,
        tone=share.use.value,
        amount=share.seconds,
        cells=(format_duration(share.seconds), words.percent(part), format_usd(share.usd)),
    )


def _recovery_bars(view: RunView) -> tuple[Breakdown, ...]:
    """Where the time between attempts went, over all recoveries."""
    if not view.recoveries:
        return ()
    totals = [
        (label, tone, sum(getattr(each, f"{part}_s") or 0.0 for each in view.recoveries))
        for part, label, tone in _RECOVERY_PARTS
    ]
    whole = sum(seconds for _, _, seconds in totals)
    return (
        Breakdown(
            id="recovery-time",
            title="where the time of recoveries went",
            summary=f"{len(view.recoveries)} recoveries, {format_duration(whole)} in all",
            columns=("", "time", "share"),
            slices=tuple(
                Slice(
                    label=label,
                    hint="",
                    tone=tone,
                    amount=seconds,
                    cells=(
                        format_duration(seconds),
                        words.percent(seconds / whole if whole else 0.0),
                    ),
                )
                for label, tone, seconds in totals
                if seconds > 0
            ),
        ),
    )


# ---------------------------------------------------------------- tables


def _attempts(view: RunView) -> Table:
    return Table(
        id="attempts",
        title="attempts",
        columns=(
            *("#", "where", "nodes", "began", "steps", "why it ended", "notice", "saved before"),
            *("steps lost", money_column("cost", demo=view.demo_prices), "energy"),
        ),
        numbers=(0, 2, 6, 7, 8, 9, 10),
        rows=tuple(_attempt(each, demo=view.demo_prices) for each in view.attempts),
        empty="no attempt yet",
    )


def _attempt(each: AttemptView, *, demo: bool) -> tuple[Cell, ...]:
    """Return an attempt's row; `demo`: the column says already that all money is played."""
    why, tone = words.why(each)
    machine = f"{each.instance_type or ''} {each.market.replace('_', '-')}".strip()
    return (
        Cell(text=str(each.attempt)),
        Cell(text=words.cluster(each), note=f"{machine} at {words.rate(each.price_usd_per_h)}"),
        Cell(text=str(each.nodes)),
        Cell(at=each.started_at),
        Cell(text=words.steps_span(each)),
        Cell(text=why, tone=tone, note="" if each.end_detail == why else each.end_detail),
        Cell(text=words.seconds(each.notice_s)),
        Cell(text=words.seconds(each.saved_before_end_s)),
        Cell(text=words.DASH if each.steps_lost is None else str(each.steps_lost)),
        Cell(text=usd(each.cost_usd, demo=each.demo_prices and not demo)),
        Cell(text=words.energy(each.carbon.energy_kwh), note=words.co2e(each.carbon.co2e_kg)),
    )


def _recoveries(view: RunView) -> Table:
    return Table(
        id="recoveries",
        title="recoveries",
        columns=("recovery", *(label for _, label, _ in _RECOVERY_PARTS), "in all"),
        numbers=tuple(range(1, 9)),
        rows=tuple(_recovery(each) for each in view.recoveries),
        empty="none was needed yet",
    )


def _recovery(each: Recovery) -> tuple[Cell, ...]:
    parts = [getattr(each, f"{part}_s") for part, _, _ in _RECOVERY_PARTS]
    how = "in place" if each.in_place else each.reason.label.partition(",")[0]
    return (
        Cell(text=f"#{each.ended} → #{each.attempt}", note=how),
        *(Cell(text=words.seconds(seconds)) for seconds in [*parts, each.total_s]),
    )


def _checkpoints(report: ReportDocument) -> Table:
    return Table(
        id="checkpoints",
        title="checkpoints",
        columns=("step", "attempt", "kind", "created", "size", "ranks", "counts", "state"),
        numbers=(0, 1, 4, 5),
        rows=tuple(_checkpoint(row) for row in report.checkpoints),
        note=report.store_problem or "",
        empty="no checkpoint yet",
    )


def _checkpoint(row: CheckpointRow) -> tuple[Cell, ...]:
    counts = {True: "yes", False: "no", None: "unknown"}[row.in_history]
    return (
        Cell(text=str(row.step)),
        Cell(text=str(row.attempt)),
        Cell(text=row.kind.label if row.kind else words.DASH),
        Cell(at=row.created_at) if row.created_at is not None else Cell(text=words.DASH),
        Cell(text=format_bytes(row.size_bytes)),
        Cell(text=words.DASH if row.world_size is None else str(row.world_size)),
        Cell(text="next" if row.is_next else counts),
        Cell(
            text=row.condition.label + (", pinned" if row.pinned else ""),
            tone=row.condition.colour,
            note=row.problem,
        ),
    )


def _history(report: ReportDocument) -> Table:
    left = f"{report.earlier} earlier happenings are left out" if report.earlier else ""
    return Table(
        id="history",
        title="history",
        columns=(
            *("when", "#", "what happened"),
            money_column("spent by then", demo=report.run.demo_prices),
        ),
        numbers=(1, 3),
        rows=tuple(map(_happening, reversed(report.history))),
        note=left,
        find=True,
    )


def _happening(line: HistoryLine) -> tuple[Cell, ...]:
    return (
        Cell(at=line.at),
        Cell(text="" if line.attempt is None else str(line.attempt)),
        Cell(text=line.text, tone=line.colour),
        Cell(text="" if line.cost_usd is None else format_usd(line.cost_usd)),
    )


def _log(report: ReportDocument) -> Table:
    return Table(
        id="log",
        title="what the newest attempt printed last",
        columns=("when", "rank", "line"),
        numbers=(1,),
        rows=tuple(
            (
                Cell() if line.at is None else Cell(at=line.at),
                Cell(text="" if line.rank is None else str(line.rank)),
                Cell(text=clean(line.text), tone="red" if line.stream == "stderr" else "default"),
            )
            for line in reversed(report.log)
        ),
        empty="nothing is stored of what it printed",
        folded=True,
        find=True,
    )


def _carbon(report: ReportDocument) -> Table:
    used = list(report.run.carbon.factors)
    if report.equivalent:
        used.append(report.equivalent.factor)
    return Table(
        id="carbon",
        title="what the carbon estimate is made of",
        columns=("number", "value", "source", "year", "looked up"),
        numbers=(1, 3),
        rows=tuple(
            (
                Cell(text=factor.name),
                Cell(text=f"{factor.value:,g}", note=factor.unit),
                Cell(text=factor.source),
                Cell(text=str(factor.year)),
                Cell(text="yes") if factor.verified else Cell(text="no", tone="yellow"),
            )
            for factor in used
        ),
        empty="nothing is known of its devices",
        folded=True,
    )


def _environment(report: ReportDocument) -> Table:
    return Table(
        id="environment",
        title="environment",
        columns=("", ""),
        rows=tuple((Cell(text=e.name, tone="dim"), Cell(text=e.value)) for e in report.environment),
        folded=True,
    )
