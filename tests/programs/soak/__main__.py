"""Plays many random runs, and names those that went wrong: `tests.programs.soak --runs 1000`.

Run n of seed S is run 1 of seed S + n - 1: `--seed <that> --runs 1` plays it alone, with the same
training and the same lives. Where in a step a signal lands differs a little each time.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.programs.soak.play import Play
from tests.programs.soak.scenario import scenario
from tests.runtime.harness.processes import Zygote


class Soak:
    """Runs beside one another, each worker with a zygote of its own."""

    def __init__(self, folder: Path, beside: int) -> None:
        self._folder = folder
        self._own = threading.local()
        self._zygotes: list[Zygote] = []
        self._pool = ThreadPoolExecutor(beside, initializer=self._begin)

    def _begin(self) -> None:
        self._own.zygote = Zygote()
        self._zygotes.append(self._own.zygote)

    def play(self, first: int, runs: int) -> list[Play]:
        """Play runs of the seeds from `first`; return them in order."""
        try:
            return list(self._pool.map(self._one, range(first, first + runs)))
        finally:
            self._pool.shutdown()
            for zygote in self._zygotes:
                zygote.close()

    def _one(self, seed: int) -> Play:
        folder = self._folder / str(seed)
        folder.mkdir()
        play = Play(scenario(seed), self._own.zygote, folder)
        play.run()
        for what in play.wrong:
            _say(f"seed {seed}: {what}")
        if not play.wrong:
            shutil.rmtree(folder)
        return play


def summary(plays: list[Play], seconds: float) -> list[str]:
    """Return what came of it, in lines."""
    ends = sum((play.ends for play in plays), Counter[str]())
    wrong = [play.scenario.seed for play in plays if play.wrong]
    bitwise = sum(play.scenario.bitwise for play in plays)
    return [
        f"{len(plays)} runs, {bitwise} of them compared bit by bit, in {seconds:.0f} s:",
        *(f"  {count:6} lives: {end}" for end, count in ends.most_common()),
        f"{len(wrong)} wrong runs" + (f", of seeds {' '.join(map(str, wrong))}" if wrong else ""),
    ]


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> int:
    """Return 1 if a run went wrong; what it left is kept."""
    parser = argparse.ArgumentParser(prog="python -m tests.programs.soak", description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--beside", type=int, default=1, help="runs that are played at one time")
    asked = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="spotguard-soak-"))
    began = time.monotonic()
    plays = Soak(folder, asked.beside).play(asked.seed, asked.runs)
    _say("\n".join(summary(plays, time.monotonic() - began)))
    if any(play.wrong for play in plays):
        _say(f"what the wrong runs left is in {folder}")
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
