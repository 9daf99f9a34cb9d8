"""What starts the ranks of a node: spotguard's own way beside torchrun, in turns.

    python -m benchmarks.recovery.node_start --rounds 7 --ranks 2

Each round starts a script that does nothing once by each, and waits for its end. What the script
itself imports comes on top of both. Told are seconds of the clock and of a processor, and for each
round how many times as long torchrun took.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.machine import describe_machine
from benchmarks.recovery.table import spread
from spotguard.launch.agent import command_line
from spotguard.launch.membership import Part
from spotguard.shared.net import free_port

if TYPE_CHECKING:
    from collections.abc import Sequence

OURS, TORCHRUN = "spotguard", "torchrun"
_OURS, _MODULE = "spotguard.launch.ranks", "torch.distributed.run"


def start(command: Sequence[str]) -> tuple[float, float]:
    """Return the seconds until the script has ended, and those of a processor."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    subprocess.run(command, check=True, capture_output=True)
    wall_s = time.monotonic() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def commands(script: Path, ranks: int) -> dict[str, list[str]]:
    """Return what starts the script on the only node of a cluster, by each way."""
    part = Part(attempt=1, node=0, nodes=(0,), host="127.0.0.1", port=free_port())
    ours = command_line(part, ranks, [str(script)])
    torchruns = [_MODULE if word == _OURS else word for word in ours]
    return {OURS: ours, TORCHRUN: torchruns}


def measure(rounds: int, ranks: int) -> dict[str, list[tuple[float, float]]]:
    """Return for each way what each round took."""
    took: dict[str, list[tuple[float, float]]] = {OURS: [], TORCHRUN: []}
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "nothing.py"
        script.write_text("")
        for number in range(rounds + 1):
            ways = commands(script, ranks)
            for way in sorted(ways, reverse=bool(number % 2)):
                seconds = start(ways[way])
                if number:  # the first one fills the machine's caches
                    took[way].append(seconds)
    return took


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and tell."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    for flag in ("rounds", "ranks"):
        if (number := getattr(given, flag)) < 1:
            parser.error(f"--{flag}: at least 1, not {number}")
    facts = describe_machine("cpu")
    took = measure(given.rounds, given.ranks)
    ratios = [theirs[0] / ours[0] for ours, theirs in zip(took[OURS], took[TORCHRUN], strict=True)]
    if given.json:
        sys.stdout.write(json.dumps({"machine": facts, "seconds": took, "ratios": ratios}) + "\n")
        return
    for name, told in facts.items():
        sys.stdout.write(f"{name}: {told}\n")
    for way, pairs in took.items():
        wall, cpu = (spread(column, digits=2) for column in zip(*pairs, strict=True))
        sys.stdout.write(f"{way:10} {wall} s, {cpu} s of a processor\n")
    sys.stdout.write(f"torchrun takes {spread(ratios, digits=0)} times as long\n")


if __name__ == "__main__":
    main()
