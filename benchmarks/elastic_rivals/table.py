"""Which samples of an interrupted epoch are read on another number of ranks: ours and rivals'.

python -m benchmarks.elastic_rivals --json out.json

An epoch is interrupted on 4 ranks and goes on with another number of them. Once each rank's
batch stays what it was, as in most scripts, and once the script sets it to the global batch over
the ranks. Nothing is trained but by Lightning: it is the libraries' own loaders that are asked.
"""

from __future__ import annotations

import argparse
import collections
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.elastic_rivals.deepspeed_elasticity import CONFIGS, Worlds, missing, worlds
from benchmarks.elastic_rivals.lightning_resume import Lightning, LightningStateful
from benchmarks.elastic_rivals.ways import (
    GLOBAL_BATCH,
    RANKS,
    SAMPLES,
    STEPS,
    Accelerate,
    AccelerateSplits,
    Saved,
    Spotguard,
    Stateful,
    Streaming,
    StreamingCanonical,
    StreamingNodes,
    Torchrun,
    TorchrunSkips,
    Way,
    together,
)
from benchmarks.machine import describe_machine

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

WAYS: tuple[Way, ...] = (
    Spotguard(),
    Torchrun(),
    TorchrunSkips(),
    Stateful(),
    Accelerate(),
    AccelerateSplits(),
    Lightning(),
    LightningStateful(),
    Streaming(),
    StreamingNodes(),
    StreamingCanonical(),
)
AFTER = (4, 3, 2)
"""Ranks after the interruption; with 4, what is repeated is not the change's fault."""
MANY = range(1, 65)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of the epoch on so many ranks."""

    ranks: int
    repeated: float = 0.0
    """Percent of the samples that were read more than once."""
    never: float = 0.0
    """Percent that were not read at all."""
    global_batch: int = 0
    """Of the steps after the interruption."""
    same_steps: bool = False
    """True if each step had the samples that it has without an interruption.

    All but the epoch's last, which some pad to so many samples for each rank.
    """
    refused: str = ""

    @property
    def once(self) -> bool:
        """True if each sample was read once."""
        return not self.refused and not self.repeated and not self.never

    def __str__(self) -> str:
        """Return the cell of the table."""
        if self.refused:
            return "refused"
        return f"{self.repeated:.3g} / {self.never:.3g}{' =' if self.same_steps else ''}"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One way, with one rule for the batch."""

    way: str
    kept: str
    """Which batch stays what it was."""
    outcomes: list[Outcome]
    many: list[Outcome]
    """On 1 to 64 ranks; empty if that was not tried."""

    def __str__(self) -> str:
        """Return the row of the table."""
        counts = [sum(outcome.once for outcome in self.many)]
        counts.append(sum(outcome.same_steps for outcome in self.many))
        batches = " ".join(str(o.global_batch) for o in self.outcomes)
        cells = [self.way, self.kept, batches, *map(str, self.outcomes)]
        cells += map(str, counts) if self.many else ["", ""]
        return f"| {' | '.join(cells)} |"


def judge(
    ranks: int, before: Iterable[list[int]], after: Sequence[list[int]], whole: Sequence[list[int]]
) -> Outcome:
    """Return what became of the epoch.

    Args:
        ranks: After the interruption.
        before: The samples of each step until then.
        after: Those of each step from then on.
        whole: Those of each step of the epoch if nothing happens.
    """
    parts = [*before, *after]
    times = collections.Counter(sample for step in parts for sample in step)
    return Outcome(
        ranks=ranks,
        repeated=100 * sum(count > 1 for count in times.values()) / SAMPLES,
        never=100 * (SAMPLES - len(times)) / SAMPLES,
        global_batch=len(after[0]) if after else 0,
        same_steps=[*map(sorted, parts[:-1])] == [*map(sorted, whole[:-1])],
    )


def row(way: Way, *, keep_global: bool) -> Row:
    """Return what became of the epoch with one rule for the batch."""
    first = batch_of(way, RANKS, keep_global=keep_global)
    saved = way.interrupt(first)
    whole = together(way.loaders(RANKS, first, None))

    def on(ranks: int) -> Outcome:
        return outcome(way, ranks, batch_of(way, ranks, keep_global=keep_global), saved, whole)

    return Row(
        way=way.title,
        kept="global" if keep_global else "each rank's",
        outcomes=[on(ranks) for ranks in AFTER],
        many=[on(ranks) for ranks in MANY if way.quick and keep_global],
    )


def outcome(way: Way, ranks: int, batch: int, saved: Saved, whole: Sequence[list[int]]) -> Outcome:
    """Return what became of the epoch on `ranks` ranks, or why the library refused them."""
    try:
        after = together(way.loaders(ranks, batch, saved))
    except ValueError as refusal:
        return Outcome(ranks=ranks, refused=str(refusal))
    return judge(ranks, saved.read, after, whole)


def batch_of(way: Way, ranks: int, *, keep_global: bool) -> int:
    """Return the batch that a script tells the library: as near as whole samples come."""
    if way.takes_global_batch:
        return GLOBAL_BATCH
    return max(1, round(GLOBAL_BATCH / (ranks if keep_global else RANKS)))


def to_markdown(
    found: Sequence[Row], accepted: Sequence[Worlds], left_out: Sequence[str], machine: str
) -> str:
    """Return both tables, and what was left out."""
    header = [
        f"Cells: % of {SAMPLES:,} samples repeated / never read, interrupted after {STEPS} steps "
        f"of {GLOBAL_BATCH}; `=`: the same samples in each step (the last aside) as without.",
        "Last two columns: on how many of 1 to 64 ranks is each sample read once, or that so.",
        "",
        "| way | batch kept | global batch | 4→4 | 4→3 | 4→2 | each once | same steps |",
        "|---|---|---|---|---|---|---|---|",
    ]
    second = [
        "",
        "| DeepSpeed elasticity | batch | ranks accepted | ranks refused |",
        "|---|---|---|---|",
    ]
    facts = ["", *(f"- {fact}" for fact in (*left_out, machine))]
    tables = [*header, *map(str, found), *(second if accepted else []), *map(str, accepted)]
    return "\n".join([*tables, *facts]) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Try all that is installed, print the tables, and write them where asked."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.elastic_rivals", description=__doc__
    )
    parser.add_argument("--only", default="", help="ways whose name has this in it (all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables there")
    given = parser.parse_args(arguments)
    chosen = [way for way in WAYS if given.only.lower() in way.name.lower()]
    found = [
        row(way, keep_global=keep_global)
        for way in chosen
        if not way.missing()
        for keep_global in (True, False)
        if keep_global or not way.takes_global_batch
    ]
    tried = not missing() and given.only.lower() in "deepspeed"
    accepted = [worlds(config) for config in CONFIGS] if tried else []
    left_out = [said for said in (*(way.missing() for way in chosen), missing()) if said]
    text = to_markdown(found, accepted, left_out, describe_machine("cpu")["software"])
    sys.stdout.write(text)
    if given.markdown:
        given.markdown.write_text(text, encoding="utf-8")
    if given.json:
        body: dict[str, Any] = {
            "schema": 1,
            "results": [*map(asdict, found)],
            "deepspeed": [*map(asdict, accepted)],
            "left_out": left_out,
        }
        given.json.write_text(json.dumps(body, indent=1), encoding="utf-8")
