"""What sizes of micro-batches take in memory and in time, and which one `auto` takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from spotguard.cli.views.formats import short_time
from spotguard.cli.views.lists import plain_table
from spotguard.shared.units import format_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType

    from spotguard.api.documents import BatchCurve, TriedSize


def curve_screen(curve: BatchCurve) -> RenderableType:
    """Return a row for each size that was tried, and what `auto` takes: the row next to it is bold.

    `auto` takes a little less than what was found to fit, which mostly was not tried itself.
    """
    table = plain_table("micro-batch", "memory", "forward and backward", "samples/s")
    for column in table.columns:
        column.justify = "right"
    nearest = _nearest(curve)
    for each in curve.tried:
        table.add_row(*_row(each), style="bold" if each is nearest else "")
    memory = format_bytes(curve.memory_bytes)
    head = f"micro-batches on this machine's CPU, in {memory} of memory"
    if curve.kept_free_bytes is not None:
        head += f", {format_bytes(curve.kept_free_bytes)} of it kept free for saves"
    return Group(Text(head, style="bold"), table, *map(Text, _words(curve)))


def _nearest(curve: BatchCurve) -> TriedSize | None:
    fitting = [each for each in curve.tried if each.fits]
    if not curve.chosen or not fitting:
        return None
    chosen = curve.chosen
    return min(fitting, key=lambda each: abs(each.samples - chosen))


def _row(each: TriedSize) -> tuple[str, str, str, str]:
    if not each.fits or each.pass_s is None:
        return str(each.samples), "does not fit", "", ""
    rate = f"{each.samples / each.pass_s:.4g}" if each.pass_s else ""
    return str(each.samples), format_bytes(each.peak_bytes), short_time(each.pass_s), rate


def _words(curve: BatchCurve) -> list[str]:
    ranks = "1 rank" if curve.ranks == 1 else f"{curve.ranks} ranks"
    share = f"{curve.global_batch_size} samples of a step on {ranks}"
    if curve.chosen is None:
        said = "time was over before the largest that fits was found: with less --probe-memory it "
        words = [f"{said}is found sooner ({share})"]
    elif not curve.chosen:
        words = ["not even one sample fits: shard the model, or recompute activations"]
    elif curve.chosen >= curve.most:
        words = [f'micro_batch_size="auto" takes {curve.chosen}, all that a rank has: {share}']
    else:
        words = [f'micro_batch_size="auto" takes {curve.chosen} of {curve.most}: {share}']
    if curve.bytes_per_sample is not None:
        words.append(f"one sample more takes {format_bytes(curve.bytes_per_sample)}")
    return words
