"""What shipping a log costs a step: the same steps with and without, on one core, in turns.

    python -m benchmarks.log_shipping --rounds 9 --lines-per-s 20

A rank computes, and prints so many lines a second into its file, as under the agent. Rank and
agent have one core between them, so that what the agent takes is taken from the step. The bare
variant prints into such a file that nobody reads. Each round measures both, in changing order.
On a machine with other work the step's own slow-down is told by its processor time. What the agent
takes is its processor time for each second of the clock: it reads and stores by the clock, so that
is the share of a core, and of a step that keeps the core busy.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import TYPE_CHECKING

from spotguard.launch.logs.printed_files import LAUNCHER_FILES
from spotguard.launch.logs.shipping import Shipping
from spotguard.shared.units import SystemClock
from spotguard.storage import open_store

if TYPE_CHECKING:
    from pathlib import Path

_RANK = """
import os, sys, time
steps, every = int(sys.argv[1]), float(sys.argv[2])
os.sched_setaffinity(0, {int(sys.argv[3])})
print("begins", flush=True)
began, due = time.perf_counter(), 0.0
begun_s = time.process_time()
for step in range(steps):
    total = 0
    for number in range(200_000):
        total += number * number
    while time.perf_counter() - began > due:
        print(f"step {step} loss {total % 977:.4f} lr 0.0003 grad_norm 1.25", flush=True)
        due += every
took_s = time.process_time() - begun_s
with open(sys.argv[4], "w") as told:
    print(took_s, file=told)
"""
_PROMISED_SHARE = 0.005


def _steps(folder: Path, steps: int, every_s: float, core: int) -> tuple[float, float]:
    """Return the processor's seconds that a rank took for its steps, and this process's share.

    They count from its first line on: what it takes to start a process is not counted.
    """
    rank = folder / "none_x" / "attempt_0" / "0"
    rank.mkdir(parents=True)
    told = folder / "told"
    with (rank / "stdout.log").open("wb") as out, (rank / "stderr.log").open("wb") as err:
        process = subprocess.Popen(
            [sys.executable, "-c", _RANK, str(steps), str(every_s), str(core), str(told)],
            stdout=out,
            stderr=err,
        )
        while not (rank / "stdout.log").stat().st_size and process.poll() is None:
            time.sleep(0.05)
        before_s, began = time.process_time(), time.monotonic()
        process.wait()
        share = (time.process_time() - before_s) / (time.monotonic() - began)
    return float(told.read_text()), share


def _shipped(store: str, steps: int, every_s: float, core: int) -> tuple[float, float]:
    """Return the same with a log that this process ships."""
    shipping = Shipping(
        lambda: open_store(store),
        url=store,
        attempt=1,
        node=0,
        first_rank=0,
        nproc=1,
        secrets={"hunter2hunter2"},
        clock=SystemClock(),
    )
    for name in LAUNCHER_FILES:
        (shipping.folder / name).touch()
    shipping.start()
    told = _steps(shipping.folder, steps, every_s, core)
    shipping.finish(30.0)
    shipping.join()
    return told


def main() -> None:
    """Print ratio and share, each with its spread."""
    from pathlib import Path

    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--lines-per-s", type=float, default=20.0)
    given = parser.parse_args()
    core = min(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})
    every_s = 1 / given.lines_per_s
    ratios, shares = [], []
    null = os.open(os.devnull, os.O_WRONLY)
    shown = os.dup(1)
    for number in range(given.rounds):
        with tempfile.TemporaryDirectory() as folder:
            bare: tuple[float, float] | None = None
            if number % 2:
                bare = _steps(Path(folder, "bare"), given.steps, every_s, core)
            os.dup2(null, 1)  # the agent shows what it ships
            shipped = _shipped(str(Path(folder, "store")), given.steps, every_s, core)
            os.dup2(shown, 1)
            if bare is None:
                bare = _steps(Path(folder, "bare"), given.steps, every_s, core)
        ratios.append(shipped[0] / bare[0])
        shares.append(shipped[1])
    low, _, high = statistics.quantiles(ratios, n=4)
    load = os.getloadavg()[0]
    print(f"{given.rounds} rounds of {given.steps} steps, {given.lines_per_s:g} lines a second")
    print(
        f"rank's processor time with shipping / without: {statistics.median(ratios):.4f} "
        f"(quartiles {low:.4f} to {high:.4f}); load {load:.1f}"
    )
    print(
        f"agent's share of a core: {100 * statistics.median(shares):.2f} % "
        f"({100 * min(shares):.2f} to {100 * max(shares):.2f} %); promised: "
        f"{100 * _PROMISED_SHARE:g} %"
    )


if __name__ == "__main__":
    main()
