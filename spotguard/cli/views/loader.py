"""How fast a script's loader reads, and what to change."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from spotguard.cli.terminal.output import clean
from spotguard.cli.views.formats import short_time
from spotguard.cli.views.lists import plain_table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from spotguard.api.doctor import LoaderReport, TriedWorkers


def loader_screen(found: LoaderReport) -> RenderableType:
    """Return what was measured on this machine's CPU, and the advice."""
    head = Text(
        f"{found.steps} steps on this CPU ({found.cores} cores): {short_time(found.step_s)} each, "
        f"of which {short_time(found.data_s)} ({found.wait_pct:.0f} %) waits for data\n"
    )
    head.append(f"{_settings(found)}\n")
    parts: list[RenderableType] = [head]
    if found.tried:
        table = plain_table("workers", "samples/s, read alone", "first batch after")
        for each in found.tried:
            own = " (yours)" if each.num_workers == found.num_workers else ""
            table.add_row(f"{each.num_workers}{own}", _rate(each), _first(each))
        parts += [table, Text("")]
    for advice in found.advice:
        parts.append(Text(clean(advice.change), style="bold"))
        parts.append(Text(f"   {clean(advice.gain)}"))
    if not found.advice:
        parts.append(Text("nothing to change: the loader keeps up with these steps", style="green"))
    return Group(*parts)


def _settings(found: LoaderReport) -> str:
    if found.num_workers is None:
        return "a stream, which reads as it likes"
    pinned = "pinned" if found.pin_memory else "not pinned"
    words = f"num_workers={found.num_workers}, {pinned}"
    if found.num_workers:
        ahead = found.prefetch_factor or 2
        words += f", {ahead} micro-batches ahead of each worker, which live as long as the attempt"
    return words


def _rate(each: TriedWorkers) -> str:
    if each.problem:
        return clean(each.problem)
    return "too few came" if each.samples_per_s is None else f"{each.samples_per_s:.4g}"


def _first(each: TriedWorkers) -> str:
    return "" if each.first_s is None else short_time(each.first_s)
