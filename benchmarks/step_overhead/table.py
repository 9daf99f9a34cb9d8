"""What the runtime costs per step when nothing happens, beside the same loop without it.

python -m benchmarks.step_overhead --json out.json

Each loop runs in processes of its own: blocks of steps with the runtime and blocks of the bare
loop, in random order within each pair, so that both see the same noise.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import default_collate

import spotguard.runtime as spotguard
from benchmarks.machine import describe_machine
from benchmarks.step_overhead import parts
from spotguard.runtime.preemption.stop_consensus import StopGate

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_SAMPLES = 512
_MICRO_BATCH = 2
_STOP_CHECK = "stop check"


@dataclass(frozen=True, kw_only=True)
class Loop:
    """One loop to measure."""

    ranks: int
    micro_batches: int
    """In a step, of each rank."""
    wait_ms: float
    """Of each step, for an accelerator to do its work (the CPU sleeps)."""
    steps: int
    """In a block."""
    pairs: int
    """Blocks of each kind."""
    part: str = "everything"
    """Of the runtime; or one of `PARTS` alone, without the rest of it."""


class Row(NamedTuple):
    """What a loop shows, and the most that it may be."""

    what: str
    unit: str
    loop: Loop
    most: float | None


@dataclass(frozen=True, kw_only=True)
class Result:
    """What was measured, and the most that it may be."""

    what: str
    unit: str
    quiet: float
    """From the fastest blocks of each kind: what it costs when nothing else disturbs."""
    median: float
    """Of all pairs."""
    low: float
    high: float
    most: float | None
    """None: nothing was promised."""

    @property
    def verdict(self) -> str:
        """Return `passed`, `missed` or nothing; noise is not held against it."""
        if self.most is None:
            return ""
        return "passed" if self.quiet <= self.most else "missed"


class Bench:
    """The same training twice: once with the runtime, once bare."""

    def __init__(self, loop: Loop, store: str) -> None:
        self._loop = loop
        total = loop.steps * (loop.pairs + 1)
        self._dataset = [(torch.randn(16), torch.randn(1)) for _ in range(_SAMPLES)]
        run = spotguard.init(store=store, save_every="1000000 steps")
        model, optimizer = self._training()
        run.track(model=model, optimizer=optimizer)
        loader = run.loader(
            self._dataset,
            global_batch_size=loop.ranks * loop.micro_batches * _MICRO_BATCH,
            micro_batch_size=_MICRO_BATCH,
        )
        self._steps = run.steps(loader, total=total)
        self._guarded = model, optimizer
        self._bare = self._training()
        self._order = self._endless_order()

    def guarded_block_s(self) -> float:
        """Return the seconds of a block of steps with the runtime."""
        model, optimizer = self._guarded
        started = time.perf_counter()
        for _ in range(self._loop.steps):
            step = next(self._steps)
            for x, y in step:
                self._wait()
                step.backward(torch.nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return time.perf_counter() - started

    def bare_block_s(self) -> float:
        """Return the seconds of a block of the same steps without it."""
        model, optimizer = self._bare
        count = self._loop.micro_batches
        started = time.perf_counter()
        for _ in range(self._loop.steps):
            for number in range(count):
                indices = [next(self._order) for _ in range(_MICRO_BATCH)]
                x, y = default_collate([self._dataset[index] for index in indices])
                self._wait()
                with self._synchronised(model, last=number == count - 1):
                    loss = torch.nn.functional.mse_loss(model(x), y) / count
                    loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return time.perf_counter() - started

    def finish(self) -> None:
        """End the run."""
        next(self._steps, None)

    def _training(self) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model: torch.nn.Module = torch.nn.Linear(16, 1)
        if self._loop.ranks > 1:
            model = DistributedDataParallel(model)
        return model, torch.optim.SGD(model.parameters(), lr=1e-3)

    def _endless_order(self) -> Iterator[int]:
        while True:
            yield from torch.randperm(_SAMPLES).tolist()

    def _wait(self) -> None:
        if self._loop.wait_ms:
            time.sleep(self._loop.wait_ms / 1e3 / self._loop.micro_batches)

    @staticmethod
    def _synchronised(
        model: torch.nn.Module, *, last: bool
    ) -> contextlib.AbstractContextManager[None]:
        if last or not isinstance(model, DistributedDataParallel):
            return contextlib.nullcontext()
        return model.no_sync()


PARTS: dict[str, type[parts.Layout | parts.Buffers]] = {
    "layout": parts.Layout,
    "buffers": parts.Buffers,
}


def _bench(loop: Loop, store: str) -> Bench | parts.Layout | parts.Buffers:
    if loop.part == "everything":
        return Bench(loop, store)
    torch.set_num_threads(1)
    if loop.ranks > 1:
        dist.init_process_group("gloo")
    return PARTS[loop.part](ranks=loop.ranks, steps=loop.steps)


def stop_check_us(calls: int = 200_000) -> float:
    """Return the microseconds of the one question that each step asks."""
    gate = StopGate()
    started = time.perf_counter()
    for step in range(calls):
        gate.enter(step)
    asked = time.perf_counter()
    for _ in range(calls):
        pass
    return 1e6 * (2 * asked - started - time.perf_counter()) / calls


def measure(loop: Loop) -> list[tuple[float, float]]:
    """Return the seconds per step of each pair of blocks, guarded and bare, from processes."""
    with tempfile.TemporaryDirectory() as folder:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={loop.ranks}"]
        command = [
            sys.executable,
            *(launcher if loop.ranks > 1 else []),
            *("-m", "benchmarks.step_overhead", "--child", json.dumps(asdict(loop)), folder),
        ]
        ours = {name: text for name, text in os.environ.items() if not name.startswith("SPOTGUARD")}
        done = subprocess.run(
            command,
            env={**ours, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        sys.stderr.write(done.stderr)
        raise SystemExit(f"the measured loop failed with exit code {done.returncode}")
    return [(guarded, bare) for guarded, bare in json.loads(done.stdout.splitlines()[-1])]


def child(text: str, store: str) -> None:
    """Run as one rank of a measured loop; the first rank prints the seconds per step."""
    loop = Loop(**json.loads(text))
    bench = _bench(loop, store)
    blocks = {"guarded": bench.guarded_block_s, "bare": bench.bare_block_s}
    chance = random.Random(0)  # the same order on every rank
    pairs = []
    for number in range(loop.pairs + 1):
        seconds = {name: blocks[name]() for name in chance.sample(sorted(blocks), 2)}
        if number:  # the first pair warms up
            pairs.append((seconds["guarded"] / loop.steps, seconds["bare"] / loop.steps))
    bench.finish()
    if os.environ.get("RANK", "0") == "0":
        sys.stdout.write(f"{json.dumps(pairs)}\n")
    if dist.is_initialized():
        dist.destroy_process_group()


def rows(*, pairs: int, steps: int) -> list[Row]:
    """Return what is measured in processes."""
    # Blocks without a wait last some milliseconds: take more of them.
    short = Loop(ranks=1, micro_batches=1, wait_ms=0, steps=steps, pairs=4 * pairs)
    longer = replace(short, micro_batches=8)
    together = replace(short, ranks=2, micro_batches=4, wait_ms=20, pairs=pairs)
    norms = replace(short, part="buffers", steps=max(1, steps // 10))
    layout = replace(norms, part="layout")
    kept = "buffers of 50 BatchNorms kept"
    return [
        Row("a step of one micro-batch, everything", "µs", short, None),
        Row("a micro-batch of a step of 8, everything", "µs", longer, 20.0),
        Row("a 20 ms step on 2 ranks, everything", "%", together, 0.5),
        *(
            Row(
                f"DDP's buckets laid out by us, {ranks} ranks",
                "%",
                replace(layout, ranks=ranks),
                2.0,
            )
            for ranks in (2, 3, 4)
        ),
        Row(f"{kept}, 1 rank", "µs", norms, None),
        Row(f"{kept} and shared, 3 ranks", "µs", replace(norms, ranks=3), None),
    ]


def results(*, pairs: int, steps: int, only: str = "") -> list[Result]:
    """Measure everything, or what has `only` in its name."""
    found = []
    if only in _STOP_CHECK:
        checks = [stop_check_us() for _ in range(pairs)]
        found.append(_result(_STOP_CHECK, "µs", checks, min(checks), most=1.0))
    wanted = (row for row in rows(pairs=pairs, steps=steps) if only in row.what)
    return [*found, *(_compare(row.what, row.unit, row.loop, most=row.most) for row in wanted)]


def _compare(what: str, unit: str, loop: Loop, *, most: float | None) -> Result:
    """Return the result for a loop: µs per micro-batch, or % of a step."""
    pairs = measure(loop)
    guarded_s, bare_s = (min(block) for block in zip(*pairs, strict=True))
    scale = 100 / bare_s if unit == "%" else 1e6 / loop.micro_batches
    differences = [scale * (guarded - bare) for guarded, bare in pairs]
    return _result(what, unit, differences, scale * (guarded_s - bare_s), most=most)


def _result(
    what: str, unit: str, values: Sequence[float], quiet: float, *, most: float | None
) -> Result:
    return Result(
        what=what,
        unit=unit,
        quiet=quiet,
        median=statistics.median(values),
        low=min(values),
        high=max(values),
        most=most,
    )


def to_markdown(found: Sequence[Result], machine: dict[str, str]) -> str:
    """Return the results as a table."""
    rows = [
        f"| {r.what} | {r.quiet:.2f} {r.unit} | {r.median:.2f} | {r.low:.2f}..{r.high:.2f} "
        f"| {'' if r.most is None else f'{r.most:g} {r.unit}'} | {r.verdict} |"
        for r in found
    ]
    header = [
        "| overhead of the runtime | quiet | median | min..max | at most | |",
        "|---|---|---|---|---|---|",
    ]
    return "\n".join([*header, *rows, "", *(f"- {k}: {v}" for k, v in machine.items())]) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, and write it where asked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step_overhead", description=__doc__)
    parser.add_argument("--pairs", type=int, default=15, help="blocks of each kind (15)")
    parser.add_argument("--steps", type=int, default=25, help="in a block (25)")
    parser.add_argument("--only", default="", metavar="TEXT", help="rows with this in their name")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.child:
        child(*given.child)
        return
    machine = describe_machine("cpu")
    found = results(pairs=given.pairs, steps=given.steps, only=given.only)
    text = to_markdown(found, machine)
    sys.stdout.write(text)
    if given.markdown:
        given.markdown.write_text(text, encoding="utf-8")
    if given.json:
        body: dict[str, Any] = {"schema": 1, "machine": machine, "results": [*map(asdict, found)]}
        given.json.write_text(json.dumps(body, indent=1), encoding="utf-8")
