"""Kills nodes, agents and ranks that print, at random: `tests.programs.log_kills --kills 100`.

Kill n of seed S is kill 1 of seed S + n - 1: `--seed <that> --kills 1` repeats it alone. What is
lost is told, and each line that was lost, told twice or out of its order fails the program.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.launch.logs.killing import VICTIMS, Kill, Loss, play


def _one(seed: int, folder: Path) -> tuple[Kill, Loss]:
    kill, own = Kill.drawn(seed), folder / str(seed)
    own.mkdir()
    loss = play(kill, own)
    for what in loss.wrong:
        _say(f"seed {seed}, {kill.victim} after {kill.after_s:.1f} s: {what}; see {own}")
    if not loss.wrong:
        shutil.rmtree(own)
    return kill, loss


def main() -> int:
    """Kill, and say what was lost; return 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--beside", type=int, default=4, help="How many at once; each waits most.")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="spotguard-log-kills-"))
    with ThreadPoolExecutor(given.beside) as pool:
        seeds = range(given.seed, given.seed + given.kills)
        played = list(pool.map(lambda seed: _one(seed, folder), seeds))
    for victim in VICTIMS:
        lost = [loss.lost_s for kill, loss in played if kill.victim == victim]
        if lost:
            _say(
                f"{victim}: {len(lost)} kills, lost {statistics.median(lost):.1f} s (median), "
                f"{max(lost):.1f} s at most"
            )
    wrong = sum(bool(loss.wrong) for _, loss in played)
    _say(f"{len(played)} kills, {sum(loss.lines for _, loss in played)} lines: {wrong} went wrong")
    if not wrong:
        shutil.rmtree(folder)
    return 1 if wrong else 0


def _say(words: str) -> None:
    sys.stdout.write(words + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
