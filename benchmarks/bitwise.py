"""What `exact="bitwise"` costs: a step with gradients in one order, over the same step without.

python -m benchmarks.bitwise --json out.json

Each row runs in processes of its own. Both kinds of step take turns, in random order within each
pair. The ratio is that of the fastest steps; median and spread are of all pairs. All have one
thread per rank: that bitwise mode takes the other threads away is not in the ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from benchmarks.machine import describe_machine
from spotguard.runtime.data.loader import ElasticLoader
from spotguard.runtime.distributed.bitwise_reduce import BitwiseSync
from spotguard.runtime.distributed.collectives import ProcessGroup
from spotguard.runtime.distributed.gradients import GradientSync

if TYPE_CHECKING:
    from collections.abc import Sequence

_WIDTH = 512


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row: a multilayer perceptron on so many ranks."""

    ranks: int
    micro_batches: int
    """In a global batch."""
    samples: int
    """In a micro-batch: the more, the more there is to compute for each gradient."""
    layers: int
    pairs: int


class Bench:
    """One rank's training, with either way to synchronise."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(_WIDTH, _WIDTH) for _ in range(case.layers)]
        self._model = torch.nn.Sequential(*layers)
        self._optimizer = torch.optim.AdamW(self._model.parameters())
        self._x = torch.randn(case.samples, _WIDTH)
        ranks = ProcessGroup(int(os.environ.get("RANK", "0")), case.ranks)
        self._loader = ElasticLoader(
            range(case.micro_batches), global_batch_size=case.micro_batches, micro_batch_size=1,
            shuffle=False, drop_last=False, seed=0, reseed=False, collate_fn=list, num_workers=0,
            options={}, rank=ranks.rank, world_size=ranks.world_size,
        )  # fmt: skip
        models, optimizers = [self._model], [self._optimizer]
        self._syncs: dict[bool, Any] = {
            False: GradientSync(models, optimizers, ranks),
            True: BitwiseSync(models, optimizers, ranks, self._loader),
        }

    def step_s(self, *, exact: bool) -> float:
        """Return the seconds of a step."""
        sync = self._syncs[exact]
        started = time.perf_counter()
        for share, _ in self._loader.read(0, 1):
            sync.begin(share)
            sync.backward(self._model(self._x).square().mean(), share.weight, share)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return time.perf_counter() - started


def child(text: str) -> None:
    """Run as one rank; the first prints the seconds of each pair of steps, exact and not."""
    case = Case(**json.loads(text))
    torch.set_num_threads(1)
    if case.ranks > 1:
        dist.init_process_group("gloo")
    bench = Bench(case)
    chance = random.Random(0)  # the same order on every rank
    pairs = []
    for number in range(case.pairs + 2):
        seconds = {exact: bench.step_s(exact=exact) for exact in chance.sample([True, False], 2)}
        if number > 1:  # the first two warm up
            pairs.append((seconds[True], seconds[False]))
    if os.environ.get("RANK", "0") == "0":
        sys.stdout.write(f"{json.dumps(pairs)}\n")
    if case.ranks > 1:
        dist.destroy_process_group()


def measure(case: Case) -> list[tuple[float, float]]:
    """Return the seconds of each pair of steps, exact and not, from processes."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={case.ranks}"]
    command = [
        *(sys.executable, *(torchrun if case.ranks > 1 else [])),
        *("-m", "benchmarks.bitwise", "--child", json.dumps(asdict(case))),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.stderr.write(done.stderr)
        raise SystemExit(f"the measured loop failed with exit code {done.returncode}")
    return [(exact, plain) for exact, plain in json.loads(done.stdout.splitlines()[-1])]


def cases(*, pairs: int, layers: int) -> list[Case]:
    """Return all rows."""
    return [
        Case(ranks=ranks, micro_batches=8, samples=samples, layers=layers, pairs=pairs)
        for samples in (4, 64)
        for ranks in (1, 2, 3)
    ]


def to_markdown(
    found: Sequence[tuple[Case, list[tuple[float, float]]]], machine: dict[str, str]
) -> str:
    """Return the ratios as a table."""
    rows = []
    for case, pairs in found:
        ratios = sorted(exact / plain for exact, plain in pairs)
        quarter = len(ratios) // 4
        exact_s, plain_s = (min(steps) for steps in zip(*pairs, strict=True))
        numbers = [
            *(str(case.ranks), str(case.micro_batches), str(case.samples)),
            *(f"{1e3 * plain_s:.1f} ms", f"{exact_s / plain_s:.2f}"),
            f"{statistics.median(ratios):.2f}",
            f"{ratios[quarter]:.2f}..{ratios[-1 - quarter]:.2f}",
        ]
        rows.append(f"| {' | '.join(numbers)} |")
    header = [
        "| ranks | micro-batches | samples in each | step | bitwise ÷ it | median | half of all |",
        "|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*header, *rows, "", *(f"- {k}: {v}" for k, v in machine.items())]) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, and write it where asked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bitwise", description=__doc__)
    parser.add_argument("--pairs", type=int, default=40, help="steps of each kind (40)")
    parser.add_argument("--layers", type=int, default=16, help="of 262 656 parameters (16)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.child:
        child(given.child)
        return
    machine = describe_machine("cpu")
    rows_of = cases(pairs=given.pairs, layers=given.layers)
    found = [(case, measure(case)) for case in rows_of]
    sys.stdout.write(to_markdown(found, machine))
    if given.json:
        rows = [{"case": asdict(case), "pairs": pairs} for case, pairs in found]
        body: dict[str, Any] = {"schema": 1, "machine": machine, "results": rows}
        given.json.write_text(json.dumps(body, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
