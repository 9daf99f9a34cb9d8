"""The checkpoint benchmark: spotguard beside its rivals and the limits of the machine.

python -m benchmarks.checkpoint --mb 500 --rounds 7 --json out.json --markdown out.md
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from benchmarks.checkpoint.bars import bars, bars_to_markdown
from benchmarks.checkpoint.contestants import FLOORS, METHODS
from benchmarks.checkpoint.flips import flip_bits
from benchmarks.checkpoint.measure import Bench, run_rounds
from benchmarks.checkpoint.memory import measure_extra_memory
from benchmarks.checkpoint.report import Report, make_report, to_markdown
from benchmarks.checkpoint.state import TrainingState
from benchmarks.machine import describe_machine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.checkpoint.method import Method


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure as told, print the tables, and write them where asked."""
    parser = _parser()
    given = parser.parse_args(arguments)
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no GPU here; use --device cpu")
    warnings.filterwarnings("ignore")  # of the rivals: deprecations, single-process hints
    logging.disable(logging.WARNING)
    report = _measure(given)
    found = bars(report)
    text = f"{to_markdown(report)}\n{bars_to_markdown(found)}"
    sys.stdout.write(f"\n{text}")
    if given.markdown:
        given.markdown.write_text(text, encoding="utf-8")
    if given.json:
        body = {**report.to_json(), "bars": [{**asdict(b), "verdict": b.verdict} for b in found]}
        given.json.write_text(json.dumps(body, indent=1), encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoint", description=__doc__)
    parser.add_argument("--mb", type=float, default=500, help="size of the state (500)")
    parser.add_argument("--rounds", type=int, default=7, help="besides one of warm-up (7)")
    parser.add_argument("--tensors", type=int, help="that many equal tensors, not a GPT's")
    parser.add_argument("--flips", type=int, default=90, help="bits to flip per format (90)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="disk to measure (here)")
    parser.add_argument("--only", type=_names, metavar="NAME,NAME", help="of these methods only")
    parser.add_argument("--no-memory", action="store_true", help="leave out a process per method")
    parser.add_argument("--seed", type=int, default=0, help="of the order and the flips (0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables there")
    return parser


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    known = [kind.name for kind in METHODS]
    for name in names:
        if name not in known:
            raise argparse.ArgumentTypeError(f"{name!r}; allowed are: {', '.join(known)}")
    return names


def _measure(given: argparse.Namespace) -> Report:
    device = given.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    methods = [kind for kind in METHODS if given.only is None or kind.name in given.only]
    with tempfile.TemporaryDirectory(dir=given.dir, prefix="benchmark-") as folder:
        machine = describe_machine(device) | {"disk of": str(given.dir)}
        state, target = (
            TrainingState(size_mb=given.mb, tensors=given.tensors, device=device, seed=seed)
            for seed in (0, 1)
        )
        bench = Bench(state=state, target=target, folder=Path(folder), seed=given.seed)
        samples = run_rounds(bench, methods, FLOORS, rounds=given.rounds, say=_say)
        usable = [kind for kind in methods if samples[kind.name].problem is None]
        flips = flip_bits(usable, flips=given.flips, seed=given.seed)
        machine["load average after"] = " ".join(f"{load:.2f}" for load in os.getloadavg())
        size_bytes, tensors = state.size_bytes, len(state.flat())
    memory = {} if given.no_memory else _memory(usable, given, device)
    return make_report(
        samples,
        state_bytes=size_bytes,
        tensors=tensors,
        rounds=given.rounds,
        machine=machine,
        memory=memory,
        flips=flips,
    )


def _memory(
    methods: Sequence[type[Method]], given: argparse.Namespace, device: str
) -> dict[str, float | None]:
    found = {}
    for kind in methods:
        found[kind.name] = measure_extra_memory(
            kind.name, size_mb=given.mb, tensors=given.tensors, device=device, folder=given.dir
        )
        _say(f"memory of {kind.name} done")
    return found


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
