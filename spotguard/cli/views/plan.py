"""What a launch would do and cost: for `plan`, and before `up` asks."""

from __future__ import annotations

import math
import shlex
import time
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from spotguard.api.states import Market
from spotguard.cli.terminal.output import clean
from spotguard.cli.views import formats
from spotguard.shared.units import format_bytes, format_duration, format_usd, to_iso

if TYPE_CHECKING:
    from spotguard.api.documents import Candidate, JobPlan, Rung, Smoke


_MOST_PLACES = 6
_MOST_SKIPPED = 5
_ROOM_FOR_ALL = 90
"""Columns of a terminal that has room for each place's carbon, too."""


def plan_screen(plan: JobPlan, *, width: int) -> RenderableType:
    """Return the plan: what would run, then one row for each place, in the order of trying."""
    if not plan.candidates and not plan.phases:
        market = plan.market.replace("_", "-")
        nowhere = Text(f"no place offers {market} nodes", style="yellow")
        return Group(_what(plan, width), nowhere, *_notes(plan, carbon=False))
    if plan.phases:
        return Group(_what(plan, width), *_phases(plan), *_notes(plan, carbon=False), Text(""))
    carbon = _tells_carbon(plan) and (width >= _ROOM_FOR_ALL or not _tells_interruptions(plan))
    steps: list[RenderableType] = [_steps(plan), Text("")] if plan.rungs else []
    return Group(
        _what(plan, width),
        _places(plan, carbon=carbon),
        *_notes(plan, carbon=carbon),
        Text(""),
        *steps,
    )


def _what(plan: JobPlan, width: int) -> Panel:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, value in _facts(plan):
        grid.add_row(label, Text(clean(value)))
    return Panel(
        grid,
        box=box.ROUNDED,
        title=Text.assemble("plan  ", (plan.name, "not dim bold")),
        title_align="left",
        border_style="dim",
        padding=(0, 1),
        width=min(width, formats.WIDEST),
    )


def _facts(plan: JobPlan) -> list[tuple[str, str]]:
    each = "1 process" if plan.nproc_per_node == 1 else f"{plan.nproc_per_node} processes"
    facts = [
        ("script", shlex.join((plan.script, *plan.args))),
        ("nodes", f"{plan.nodes}, {each} on each"),
        ("budget", _budget(plan)),
    ]
    if plan.phases:
        facts[1] = ("phases", f"{len(plan.phases)}, each saved before the next one begins")
    if plan.moves is not None:
        facts.insert(0, ("goes on", plan.moves))
    if plan.on_demand_infra is not None:
        facts.append(("on demand at", f"{plan.on_demand_infra}, when: {_when_on_demand(plan)}"))
    if plan.start_at is not None:
        facts.append(("begins", to_iso(plan.start_at)))
    if plan.deadline_s is not None:
        facts.append(("deadline", f"{format_duration(plan.deadline_s)} after the start"))
    if plan.global_batch is not None:
        batch = f"{plan.global_batch} samples a step, in micro-batches of {plan.micro_batch}"
        last = plan.rungs[0].last_samples if plan.rungs else plan.micro_batch
        batch += f", the last one of {last}" if last != plan.micro_batch else ""
        facts.append(("batch", batch))
    automatic = "automatically, by what a save costs and what an interruption would"
    facts.append(("saves", automatic if plan.save_every == "auto" else f"every {plan.save_every}"))
    facts.append(("store", plan.store))
    if plan.forecast is not None:
        facts += formats.forecast(plan.forecast, now=time.time(), budget_usd=plan.budget_usd)
    if plan.smoke is not None:
        facts.append(("smoke", _smoke(plan.smoke)))
    return facts


def _smoke(smoke: Smoke) -> str:
    """Return what the first steps on this machine's CPU showed."""
    state = f"state {format_bytes(smoke.state_bytes)}"
    if smoke.emergency_s is not None:
        save = f"an emergency save takes about {format_duration(smoke.emergency_s)}"
        if smoke.notice_s is not None:
            save += f" of the notice's {format_duration(smoke.notice_s)}"
        state += f", {save}"
    if smoke.step_s is None:
        return f"passed; {state}"
    samples = smoke.step_samples
    of = "" if samples is None else f" of {samples} samples"
    return f"passed; {state}; a step{of} took {format_duration(smoke.step_s)} on this CPU"


def _when_on_demand(plan: JobPlan) -> str:
    return "always" if plan.market == Market.ON_DEMAND.value else plan.on_demand


def _budget(plan: JobPlan) -> str:
    if plan.budget_usd is None:
        return "none: nothing limits what it costs (--budget USD)"
    places = [*plan.candidates, *(each for phase in plan.phases for each in phase.candidates)]
    kept = f"{format_usd(plan.budget_usd)}, never more"
    if all(each.rate_usd_per_h is not None for each in places):
        return kept
    if plan.allow_unknown_price:
        return f"{format_usd(plan.budget_usd)}, not kept where the price is unknown"
    return f"{kept} (places without a price are left out)"


def _phases(plan: JobPlan) -> list[RenderableType]:
    """Return a table of places for each phase, with what it is above it."""
    shown: list[RenderableType] = []
    for phase in plan.phases:
        each = "1 process" if phase.nproc_per_node == 1 else f"{phase.nproc_per_node} processes"
        ends = "to the end" if phase.until_step is None else f"until step {phase.until_step}"
        gpus = f" with {phase.gpus}" if phase.gpus and phase.infra != "local" else ""
        free = ", which costs nothing (demo prices)" if phase.demo_prices else ""
        having = f"{formats.nodes(phase.nodes)}{gpus}, {each} on each{free}"
        words = f"phase {phase.phase}, {ends}: {having}"
        shown.append(Text(words, style="bold"))
        own = replace(plan, candidates=phase.candidates, market=phase.market, phases=())
        if phase.candidates:
            shown.append(_places(own, carbon=False))
        else:
            market = phase.market.replace("_", "-")
            shown.append(Text(f"no place offers {market} nodes", style="yellow"))
        shown += [
            Text(f"skipped {clean(place.place)}: {clean(place.why)}", style="dim")
            for place in phase.skipped[:_MOST_SKIPPED]
        ]
        shown.append(Text(""))
    return shown


def _places(plan: JobPlan, *, carbon: bool) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("place", overflow="fold")
    table.add_column("market", no_wrap=True)
    numbers = ["nodes", "a\nnode", "all\nnodes", "on\ndemand"]
    if plan.budget_usd is not None:
        numbers.append("budget\nbuys")
    if _tells_interruptions(plan):
        numbers.append("lost to\nspot")
    if carbon:
        numbers.append("gCO2e\n/h")
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    for candidate in _shown(plan):
        table.add_row(*_row(plan, candidate, carbon=carbon))
    return table


def _shown(plan: JobPlan) -> list[Candidate]:
    """Return the first candidates of each market on the most nodes, and the first on fewer.

    Of several kinds of GPU, each one's cheapest is there.
    """
    seen: Counter[tuple[str, int]] = Counter()
    kinds: set[tuple[str, str | None]] = set()
    most = max((candidate.nodes for candidate in plan.candidates), default=0)
    shown = []
    for candidate in plan.candidates:
        kind = (candidate.market, candidate.nodes)
        seen[kind] += 1
        first = candidate.nodes == most and (candidate.market, candidate.gpus) not in kinds
        kinds.add((candidate.market, candidate.gpus))
        if first or seen[kind] <= (_MOST_PLACES if candidate.nodes == most else 1):
            shown.append(candidate)
    return shown


def _row(plan: JobPlan, candidate: Candidate, *, carbon: bool) -> list[str]:
    machine = f" {candidate.instance_type}" if candidate.instance_type else ""
    if len({each.gpus for each in plan.candidates}) > 1 or not machine:
        machine += f" {candidate.gpus}" if candidate.gpus else ""
    row = [
        f"{formats.place(candidate)}{machine}",
        candidate.market.replace("_", "-"),
        str(candidate.nodes),
        formats.rate(candidate.price_usd_per_h),
        formats.rate(candidate.rate_usd_per_h),
        formats.rate(candidate.on_demand_rate_usd_per_h),
    ]
    if plan.budget_usd is not None:
        hours = candidate.hours_bought
        row.append("unknown" if hours is None else format_duration(hours * 3600))
    if _tells_interruptions(plan):
        row.append(_interruptions(candidate))
    if carbon:
        grams = candidate.co2e_g_per_h
        row.append("unknown" if grams is None else f"{grams:,.0f}")
    return row


def _tells_carbon(plan: JobPlan) -> bool:
    """Return whether anything is known; of played nodes nobody wants to know."""
    return not plan.demo_prices and any(c.co2e_g_per_h is not None for c in plan.candidates)


def _tells_interruptions(plan: JobPlan) -> bool:
    return any(candidate.interruptions for candidate in plan.candidates)


def _interruptions(candidate: Candidate) -> str:
    if candidate.interruptions is None:
        return "unknown"
    lost = candidate.interruptions_usd
    times = f"{candidate.interruptions:.0f}\u00d7"
    return times if lost is None else f"{times} {format_usd(lost)}"


def _notes(plan: JobPlan, *, carbon: bool) -> list[Text]:
    """Return what the table leaves open: more places, those without offers, the prices' age."""
    lines = [formats.DEMO] if plan.demo_prices else []
    if carbon:
        sources = "; ".join(f"{f.name} {f.value:g} {f.unit} ({f.year})" for f in plan.carbon)
        lines.append(f"gCO2e/h of all nodes, at most: {sources}; sources: --json")
    if more := len(plan.candidates) - len(_shown(plan)):
        lines.append(f"and {more} more; --json lists all")
    if _tells_interruptions(plan):
        span = format_duration(plan.span_h * 3600)
        lines.append(f"lost to spot: interruptions in {span}, or while the money lasts, at the")
        lines.append("rate of recorded ones, and what the nodes cost meanwhile")
    lines += [
        f"skipped {clean(place.place)} ({place.market.value.replace('_', '-')}): {clean(place.why)}"
        for place in plan.skipped[:_MOST_SKIPPED]
    ]
    if len(plan.skipped) > _MOST_SKIPPED:
        lines.append(f"and {len(plan.skipped) - _MOST_SKIPPED} more skipped")
    lines += [
        f"not known whether there is {clean(place.place)}: {clean(place.why)}"
        for place in plan.unchecked
    ]
    lines += [f"prices of {p.infra}: {p.source}{_age(p.read_at)}" for p in plan.prices]
    return [Text(line, style="dim") for line in lines]


def _age(read_at: float | None) -> str:
    return "" if read_at is None else f", {format_duration(max(0.0, time.time() - read_at))} old"


def _steps(plan: JobPlan) -> Table:
    """Return a row for each number of nodes: how a global batch falls onto the ranks."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for name in ("nodes", "ranks", "micro-batches\na step", "of each\nrank", "idle\nranks", "busy"):
        table.add_column(name, justify="right", no_wrap=True)
    for rung in plan.rungs:
        table.add_row(*_step(rung))
    return table


def _step(rung: Rung) -> list[str]:
    alike = rung.least == rung.accumulation
    each = str(rung.least) if alike else f"{rung.least} or {rung.accumulation}"
    # 64 of 65 ranks at work must not read as all of them.
    busy = math.floor(rung.busy_pct * 10) / 10
    return [
        str(rung.nodes),
        str(rung.ranks),
        str(rung.micro_batches),
        each,
        str(rung.idle_ranks or formats.DASH),
        f"{busy:g} %",
    ]
