"""What agreeing on a stop costs per step when nobody stops: ours, Accelerate's and Lightning's.

python -m benchmarks.consensus --json out.json

Every way asks its question in one run, on the same gloo ranks: blocks of steps take turns in
random order, and a block lasts as long as its slowest rank. There is nothing else in a step, so
nobody waits for a peer that is late: the best case for those who ask all ranks in each step.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.metadata
import importlib.util
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
from spotguard.runtime.distributed.rendezvous import Rendezvous
from spotguard.runtime.preemption.stop_consensus import StopGate, StopWatch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Ask = Callable[[int], object]
    """What a training loop calls in each step, with the number of the step."""

INSTALL = "pip install -c constraints.txt '.[bench]'"
OURS = "spotguard"


@contextlib.contextmanager
def spotguard_gate() -> Iterator[Ask]:
    """Ask as `run.steps` does: between two steps, and at a step's first batch.

    The thread that looks for the word of another rank runs as it does in a job.
    """
    gate = StopGate()
    watch = StopWatch(
        gate=gate,
        coordinator=Rendezvous.from_environment(),
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        reserve_s=float,
        on_agreed=lambda request, _: sys.exit(f"nobody asked to stop, yet: {request}"),
    )

    def ask(step: int) -> bool:
        return gate.passes(step) and gate.enter(step)

    watch.start()
    yield ask
    watch.close(timeout_s=5.0)


@contextlib.contextmanager
def accelerate_trigger() -> Iterator[Ask]:
    """Ask as Accelerate's users are told to: `Accelerator.check_trigger`, in each step.

    It reduces one number over all ranks and reads it (accelerate/accelerator.py).
    """
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    yield lambda _: accelerator.check_trigger()


@contextlib.contextmanager
def lightning_broadcast() -> Iterator[Ask]:
    """Ask as Lightning does before each batch: `_TrainingEpochLoop.advance`.

    It calls `_broadcast_sigterm_tensor`: a broadcast of the first rank's flag, which is then read
    (lightning/pytorch/loops/training_epoch_loop.py). The flags of other ranks are not asked for.
    """
    import lightning.pytorch as pl

    with contextlib.redirect_stdout(sys.stderr):  # it says what hardware it sees
        trainer = pl.Trainer(
            accelerator="cpu",
            strategy="ddp",
            devices=dist.get_world_size(),
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
        )
    loop = trainer.fit_loop.epoch_loop
    yield lambda _: loop._broadcast_sigterm_tensor()


@contextlib.contextmanager
def bare_all_reduce() -> Iterator[Ask]:
    """Ask by the least that a flag of all ranks can cost."""

    def ask(_: int) -> bool:
        flag = torch.zeros(1)
        dist.all_reduce(flag)
        return bool(flag.item())

    yield ask


@contextlib.contextmanager
def bare_broadcast() -> Iterator[Ask]:
    """Ask by the least that a flag of the first rank can cost."""

    def ask(_: int) -> bool:
        flag = torch.zeros(1)
        dist.broadcast(flag, src=0)
        return bool(flag.item())

    yield ask


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to find out whether to stop."""

    name: str
    opened: Callable[[], contextlib.AbstractContextManager[Ask]]
    package: str = ""
    """What must be installed; empty if nothing."""
    times: int = 1
    """Steps in a block, as a multiple of the others': a quick way needs more of them."""

    def missing(self) -> str:
        """Return why it cannot be measured; empty if it can."""
        if not self.package or importlib.util.find_spec(self.package):
            return ""
        return f"{self.name}: left out, because `{self.package}` is not installed: {INSTALL}"

    @property
    def title(self) -> str:
        """Its name, with the version of what it is."""
        version = f" {importlib.metadata.version(self.package)}" if self.package else ""
        return f"{self.name}{version}"


WAYS = (
    Way(name=OURS, opened=spotguard_gate, times=200),
    Way(name="Accelerate `check_trigger`", opened=accelerate_trigger, package="accelerate"),
    Way(name="Lightning's broadcast", opened=lightning_broadcast, package="lightning"),
    Way(name="a bare all-reduce", opened=bare_all_reduce),
    Way(name="a bare broadcast", opened=bare_broadcast),
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """What one way cost on so many ranks."""

    ranks: int
    way: str
    us: list[float]
    """Microseconds a step, of each round."""
    ratios: list[float]
    """The same, over ours of the same round."""

    def __str__(self) -> str:
        """Return the row of the table."""
        median, ratio = statistics.median(self.us), statistics.median(self.ratios)
        spread = f"{min(self.us):.2f}..{max(self.us):.2f}"
        return f"| {self.ranks} | {self.way} | {median:.2f} | {spread} | {ratio:,.0f} |"


def block_us(ask: Ask, steps: int) -> float:
    """Return the microseconds a step of the slowest rank."""
    dist.barrier()
    started = time.perf_counter()
    for step in range(steps):
        ask(step)
    took = torch.tensor(1e6 * (time.perf_counter() - started) / steps)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return took.item()


def child(rounds: int, steps: int) -> None:
    """Run as one rank; the first prints the microseconds of each way, round by round."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    chance = random.Random(0)  # the same order on every rank
    ways = [way for way in WAYS if not way.missing()]
    found: dict[str, list[float]] = {way.name: [] for way in ways}
    for number in range(rounds + 1):
        for way in chance.sample(ways, len(ways)):
            with way.opened() as ask:
                us = block_us(ask, steps * way.times)
            if number:  # the first round warms up
                found[way.name].append(us)
    if not dist.get_rank():
        sys.stdout.write(f"{json.dumps(found)}\n")
    dist.destroy_process_group()


def measure(ranks: int, *, rounds: int, steps: int) -> list[Row]:
    """Return a row for each way that is installed, from processes."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *(f"--nproc-per-node={ranks}", "-m", "benchmarks.consensus"),
        *("--child", "--rounds", str(rounds), "--steps", str(steps)),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.stderr.write(done.stderr)
        raise SystemExit(f"the measured ranks failed with exit code {done.returncode}")
    return rows(ranks, json.loads(done.stdout.splitlines()[-1]))


def rows(ranks: int, found: dict[str, list[float]]) -> list[Row]:
    """Return the rows from the microseconds of each way, round by round."""
    titles = {way.name: way for way in WAYS}
    return [
        Row(
            ranks=ranks,
            way=titles[name].title,
            us=us,
            ratios=[theirs / ours for theirs, ours in zip(us, found[OURS], strict=True)],
        )
        for name, us in found.items()
    ]


def to_markdown(found: Sequence[Row], missing: Sequence[str], machine: dict[str, str]) -> str:
    """Return the rows as a table, and who is missing from it."""
    header = [
        "| ranks | way | µs a step, median | min..max | ÷ spotguard |",
        "|---|---|---|---|---|",
    ]
    facts = [*missing, *(f"{name}: {fact}" for name, fact in machine.items())]
    return "\n".join([*header, *map(str, found), "", *(f"- {fact}" for fact in facts)]) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, and write it where asked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.consensus", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="blocks of each way (15)")
    parser.add_argument("--steps", type=int, default=200, help="in a block, of the rivals (200)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3], help="(2 3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.child:
        child(given.rounds, given.steps)
        return
    machine = describe_machine("cpu")
    missing = [said for way in WAYS if (said := way.missing())]
    measured = functools.partial(measure, rounds=given.rounds, steps=given.steps)
    found = [row for ranks in given.ranks for row in measured(ranks)]
    text = to_markdown(found, missing, machine)
    sys.stdout.write(text)
    if given.markdown:
        given.markdown.write_text(text, encoding="utf-8")
    if given.json:
        results = [*map(asdict, found)]
        body: dict[str, Any] = {
            "schema": 1, "machine": machine, "missing": missing, "results": results,
        }  # fmt: skip
        given.json.write_text(json.dumps(body, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
