"""The survival matrix: how often a two-rank torchrun job ends saved and complete.

    python -m benchmarks.survival --tries 20 --json out.json --markdown out.md

Each try starts a job, waits until it trains, hurts it, waits for the grace, kills what is left,
and asks: is there a complete checkpoint of the last finished step, and does a fresh process train
on from it? The blows (cells) are in `one_try.py`, the contestants in `ours.py`, `hf.py`,
`lightning_trainer.py` and `lightning_ours.py`, each with its job beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import statistics
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from benchmarks.survival.contestant import GRACE_S, Contestant
from benchmarks.survival.hf import HuggingFace, HuggingFaceWithSpotguard
from benchmarks.survival.lightning_ours import LightningWithSpotguard
from benchmarks.survival.lightning_trainer import Lightning
from benchmarks.survival.one_try import CELLS, Cell, Outcome, attempt
from benchmarks.survival.ours import Spotguard

if TYPE_CHECKING:
    from collections.abc import Sequence

CONTESTANTS: tuple[Contestant, ...] = (
    Spotguard(),
    HuggingFaceWithSpotguard(),
    HuggingFace(),
    Lightning(),
    LightningWithSpotguard(),
)
_Named = TypeVar("_Named", Cell, Contestant)
_HEADER = (
    "contestant",
    "cell",
    "saved",
    "loadable",
    "steps lost",
    "s to the last word",
    "s until the ranks left",
    "load",
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """All tries of one contestant in one cell."""

    contestant: str
    cell: str
    outcomes: list[Outcome]
    load: float
    """Of the machine, over the last minute, when the last try ended."""

    def to_json(self) -> dict[str, Any]:
        """Return everything, each try included."""
        tries = [{**asdict(one), "steps_lost": one.steps_lost} for one in self.outcomes]
        return {**asdict(self), "outcomes": tries}

    def cells(self) -> list[str]:
        """Return the row of the table."""
        tries = len(self.outcomes)
        loadable = [o for o in self.outcomes if o.loadable]
        return [
            self.contestant,
            self.cell,
            f"{sum(o.saved for o in self.outcomes)}/{tries}",
            f"{len(loadable)}/{tries}",
            _span([o.steps_lost for o in loadable]),
            _spread([o.last_word_s for o in loadable]),
            _spread([o.left_s for o in self.outcomes if o.finished is not None]),
            f"{self.load:.1f}",
        ]


def _span(values: Sequence[int | None]) -> str:
    known = sorted({value for value in values if value is not None})
    if not known:
        return "all"
    return f"{known[0]}" if len(known) == 1 else f"{known[0]}..{known[-1]}"


def _spread(values: Sequence[float | None]) -> str:
    """Return the median and the range; those that had to be killed count as the grace."""
    if not values:
        return "-"
    killed = sum(value is None for value in values)
    known = [GRACE_S if value is None else value for value in values]
    text = f"{statistics.median(known):.2f} [{min(known):.2f}..{max(known):.2f}]"
    return f"{text}, {killed} killed" if killed else text


def to_markdown(rows: Sequence[Row], notes: Sequence[str]) -> str:
    """Return the table, the reasons of what was not saved, and the notes."""
    lines = [
        f"2 ranks under torchrun, gloo on CPU; {GRACE_S:g} s from the blow to SIGKILL.",
        "",
        _line(_HEADER),
        _line(["---"] * len(_HEADER)),
        *(_line(row.cells()) for row in rows),
        "",
    ]
    for row in rows:
        reasons = Counter(_general(o.detail) for o in row.outcomes if not o.saved)
        lines += [f"- {row.contestant}, {row.cell}: {n} x {why}" for why, n in reasons.items()]
    return "\n".join([*lines, *(f"- {note}" for note in notes)]) + "\n"


def _general(detail: str) -> str:
    """Return the reason without pids, ports and steps, so that equal ones count as one."""
    return re.sub(r"\d{3,}", "N", detail)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _notes(contestants: Sequence[Contestant]) -> list[str]:
    described = [
        f"{one.name}: {one.missing() or f'{one.package} {one.version()}, {one.settings}'}"
        for one in contestants
    ]
    machine = f"{os.cpu_count()} CPUs, {platform.machine()}, Python {platform.python_version()}"
    return [*described, f"{machine}, torch {torch.__version__}"]


def _named(known: Sequence[_Named], names: str, parser: argparse.ArgumentParser) -> list[_Named]:
    """Return those of `known` that `names` asks for, in its order."""
    by_name = {one.name: one for one in known}
    unknown = [name for name in names.split(",") if name not in by_name]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; there are: {', '.join(by_name)}")
    return [by_name[name] for name in names.split(",")]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all cells of all contestants and print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.survival", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--tries", type=int, default=20)
    parser.add_argument("--cells", default=",".join(cell.name for cell in CELLS))
    parser.add_argument("--contestants", default=",".join(one.name for one in CONTESTANTS))
    parser.add_argument("--seed", type=int, default=0, help="of moments and victims")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--keep", type=Path, help="where to leave the folders of failed tries")
    options = parser.parse_args(arguments)
    wanted = _named(CONTESTANTS, options.contestants, parser)
    cells = _named(CELLS, options.cells, parser)
    chance = random.Random(options.seed)
    notes = _notes(wanted)
    rows: list[Row] = []
    text = to_markdown(rows, notes)
    for contestant in wanted:
        for cell in () if contestant.missing() else cells:
            outcomes = [
                attempt(contestant, cell, chance, keep=options.keep) for _ in range(options.tries)
            ]
            row = Row(
                contestant=contestant.name,
                cell=cell.name,
                outcomes=outcomes,
                load=os.getloadavg()[0],
            )
            rows.append(row)
            print(_line(row.cells()), flush=True)
            text = to_markdown(rows, notes)
            _write(rows, notes, json_to=options.json, markdown_to=options.markdown)
    print(f"\n{text}", end="")


def _write(
    rows: Sequence[Row], notes: Sequence[str], *, json_to: Path | None, markdown_to: Path | None
) -> None:
    """Write what there is so far: a whole matrix takes long enough to be interrupted."""
    if markdown_to:
        markdown_to.write_text(to_markdown(rows, notes), encoding="utf-8")
    if json_to:
        plain = {"schema": 1, "notes": notes, "rows": [row.to_json() for row in rows]}
        json_to.write_text(json.dumps(plain, indent=1), encoding="utf-8")
