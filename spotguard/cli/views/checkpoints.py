"""Checkpoints as tables: the list, one in detail, what verification found."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from spotguard.api.checkpoints import CheckpointRef, Validity, short_name
from spotguard.cli.terminal.output import clean
from spotguard.cli.views import formats
from spotguard.cli.views.lists import plain_table
from spotguard.shared.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.table import Column

    from spotguard.api.checkpoints import (
        Archivable,
        CheckpointDetail,
        CheckpointRow,
        Pruned,
        TensorRow,
        Verified,
    )

_OUTSIDE = (
    "counts: no = outside the run's history, written after a later attempt had taken over; "
    "never restored"
)

_LONGEST_COUNTER = 200


def checkpoints_screen(rows: Sequence[CheckpointRow]) -> RenderableType:
    """Return the checkpoints, one in a row, and below it what is wrong with the damaged ones."""
    table = plain_table("checkpoint", "kind", "created", "size", "ranks", "counts", "state")
    _right(table.columns[3], table.columns[4])
    for row in rows:
        table.add_row(
            short_name(row.step, row.attempt),
            formats.DASH if row.kind is None else row.kind.label,
            _created(row.created_at),
            _size(row),
            formats.count(row.world_size),
            _counts(row),
            _state(row),
        )
    notes = [
        Text(f"{short_name(row.step, row.attempt)}: {clean(row.problem)}", style="red")
        for row in rows
        if row.problem
    ]
    if any(_counts(row) == "no" for row in rows):
        notes.append(Text(_OUTSIDE, style="dim"))
    if any(row.in_history is None for row in rows):
        notes.append(Text("counts: ? = unknown, for an attempt's claim is damaged", style="red"))
    return Group(table, *notes)


def detail_screen(
    detail: CheckpointDetail, run_id: str, *, most: int | None = None
) -> RenderableType:
    """Return what is known of one checkpoint; of each table `most` rows, and how many are left."""
    numbers = {file: number for number, (file, _) in enumerate(detail.files)}
    objects = plain_table("object", "tensors", "")
    _right(objects.columns[1])
    files = plain_table("shard", "file", "size")
    _right(files.columns[0], files.columns[2])
    tensors = plain_table("tensor", "dtype", "shape", "size", "in shard")
    _right(tensors.columns[3])
    for item in detail.objects[:most]:
        objects.add_row(clean(item.name), str(item.tensors), "module" if item.is_module else "")
    for number, (file, size_bytes) in enumerate(detail.files[:most]):
        files.add_row(str(number), clean(file), format_bytes(size_bytes))
    for tensor in detail.tensors[:most]:
        tensors.add_row(*_tensor_cells(tensor, numbers))
    gap = Text("")
    return Group(
        _facts(detail, run_id),
        gap,
        Group(objects, *_left_out("objects", len(detail.objects), most)),
        gap,
        Group(files, *_left_out("shards", len(detail.files), most)),
        gap,
        Group(tensors, *_left_out("tensors", len(detail.tensors), most)),
    )


def _facts(detail: CheckpointDetail, run_id: str) -> Table:
    row = detail.row
    facts = Table.grid(padding=(0, 2, 0, 0))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column(overflow="fold")
    facts.add_row("checkpoint", f"{short_name(row.step, row.attempt)} of {run_id}")
    facts.add_row("state", _state(row))
    if row.problem:
        facts.add_row("problem", Text(clean(row.problem), style="red"))
    facts.add_row("counts", _counts(row))
    facts.add_row("kind", formats.DASH if row.kind is None else row.kind.label)
    facts.add_row("created", _created(row.created_at))
    facts.add_row("size", f"{_size(row)} by {formats.count(row.world_size)} ranks")
    facts.add_row("parents", _parents(detail))
    counters = {name: _beginning(json.dumps(value)) for name, value in detail.counters.items()}
    facts.add_row("counters", _pairs(counters))
    facts.add_row("written by", _pairs(detail.versions))
    return facts


def _size(row: CheckpointRow) -> str:
    """Return what a checkpoint takes, and the base that it refers to, if there is one."""
    base = f" + base {format_bytes(row.base_bytes)}" if row.base_bytes else ""
    return f"{format_bytes(row.size_bytes)}{base}"


def _tensor_cells(tensor: TensorRow, numbers: dict[str, int]) -> tuple[str, str, str, str, str]:
    return (
        clean(tensor.name),
        tensor.dtype,
        _shape(tensor.shape),
        format_bytes(tensor.size_bytes),
        "  ".join(_places(tensor, numbers)),
    )


def _left_out(what: str, count: int, most: int | None) -> Iterator[Text]:
    """Yield a line if a table has not all of its rows."""
    if most is not None and count > most:
        yield Text(f"({count - most} more {what} are not shown; --all shows them)", style="dim")


def verified_screen(results: Sequence[Verified]) -> RenderableType:
    """Return the verdict on each checkpoint, and what is wrong with which file."""
    table = plain_table("checkpoint", "size", "verdict", "file")
    _right(table.columns[1])
    for item in results:
        name, size = short_name(item.step, item.attempt), format_bytes(item.size_bytes)
        verdict = Text(item.condition.label, style=item.condition.colour)
        table.add_row(name, size, verdict, "\n".join(clean(file) for file, _ in item.problems))
    problems = [
        Text(f"{short_name(item.step, item.attempt)}: {clean(problem)}", style="red")
        for item in results
        for _, problem in item.problems
    ]
    return Group(table, *problems)


def pruned_lines(planned: Pruned) -> Iterator[str]:
    """Yield a line for each checkpoint that retention deletes."""
    for prefix in planned.checkpoints:
        ref = CheckpointRef.of(prefix)
        assert ref is not None
        yield f"delete {short_name(ref.step, ref.attempt)}"


def archivable_table(planned: Sequence[Archivable]) -> RenderableType:
    """Return the checkpoints that are archived, one in a row."""
    table = plain_table("checkpoint", "created", "shards", "size")
    _right(table.columns[2], table.columns[3])
    for item in planned:
        table.add_row(
            short_name(item.step, item.attempt),
            _created(item.created_at),
            str(len(item.shards)),
            format_bytes(item.size_bytes),
        )
    return table


def _state(row: CheckpointRow) -> Text:
    more = {
        ", archived": row.archived and row.condition is Validity.WHOLE,
        ", pinned": row.pinned,
    }
    said = "".join(word for word, holds in more.items() if holds)
    return Text(f"{row.condition.label}{said}", style=row.condition.colour)


def _counts(row: CheckpointRow) -> str:
    if row.in_history is None:
        return "?"
    if row.is_next:
        return "next"
    if row.created_at is None and not row.in_history:
        return formats.DASH
    return "yes" if row.in_history else "no"


def _created(at: float | None) -> str:
    if at is None:
        return formats.DASH
    return f"{formats.local_day(at).split()[0]} {formats.clock_time(at)[:5]}"


def _parents(detail: CheckpointDetail) -> str:
    names = [_short(prefix) for prefix in detail.parents]
    if detail.lost_parent is not None:
        names.append(f"{_short(detail.lost_parent)} (deleted or unreadable)")
    if detail.more_parents:
        names.append("...")
    return " ← ".join(names) or "nothing: the first"


def _short(prefix: str) -> str:
    ref = CheckpointRef.of(prefix)
    return short_name(ref.step, ref.attempt) if ref else clean(prefix)


def _beginning(value: str) -> str:
    """Return the beginning of what is long, such as the state of a random generator."""
    return value if len(value) <= _LONGEST_COUNTER else f"{value[:_LONGEST_COUNTER]} …"


def _pairs(values: dict[str, str]) -> str:
    return clean(", ".join(f"{name} {value}" for name, value in values.items())) or formats.DASH


def _shape(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape)) or "scalar"  # noqa: RUF001 - a multiplication sign


def _places(tensor: TensorRow, numbers: dict[str, int]) -> Iterator[str]:
    """Yield `2` for a whole tensor in shard 2, `2[16,0]` for a part that begins there."""
    for part in tensor.parts:
        begin = "" if part.offsets is None else f"[{','.join(map(str, part.offsets))}]"
        yield f"{numbers[part.file]}{begin}"


def _right(*columns: Column) -> None:
    for column in columns:
        column.justify = "right"
        column.no_wrap = True
