"""Strikes training scripts at random, and says which runs did not end as if nothing had happened.

python -m tests.property --draws 500 --seed 7
python -m tests.property --replay 'loops/plain save=3_steps 2:term-all@stepped:0.41:0 2'

Without a seed it is the day's, which is printed. A run that went wrong is made smaller, and told by
the line that plays it again.
"""

from __future__ import annotations

import argparse
import datetime
import shutil
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tests.property.child.planted import BUGS
from tests.property.draw import parsed
from tests.property.runner import Result, Runner, Servers
from tests.property.scripts import corpus
from tests.property.shrink import shrunk
from tests.property.table import tables

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.property.scripts import Script


def seed_of_the_day() -> int:
    """Return the day's number, so that each day tries other draws, and all of a day the same."""
    return datetime.datetime.now(datetime.timezone.utc).date().toordinal()


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.property", description=__doc__)
    parser.add_argument("--draws", type=int, default=40)
    parser.add_argument("--first", type=int, default=0, help="the number of the first draw")
    parser.add_argument("--seed", type=int, default=seed_of_the_day(), help="default: the day's")
    parser.add_argument("--beside", type=int, default=2, help="runs that are played at one time")
    parser.add_argument("--only", default="", help="scripts whose name begins so")
    parser.add_argument("--seconds", type=float, default=0.0, help="begin no draw after so long")
    parser.add_argument("--replay", default="", help="play this one line")
    parser.add_argument("--times", type=int, default=1, help="play the line so often")
    parser.add_argument(
        "--bug", default="", help="break the runtime in this way first, or in `all` ways in turn"
    )
    parser.add_argument("--no-shrink", action="store_true")
    parser.add_argument("--keep", action="store_true", help="keep what wrong runs left")
    parser.add_argument("--list", action="store_true", help="name the scripts, and end")
    return parser.parse_args()


def main() -> int:
    """Return 1 if a run went wrong."""
    asked = _arguments()
    scripts = [s for name, s in corpus().items() if name.startswith(asked.only)]
    if asked.list:
        _say("\n".join(f"{s.name:<34} {s.elastic:<9} {s.server}" for s in scripts))
        return 0
    memory = Path("/dev/shm")
    folder = Path(
        tempfile.mkdtemp(prefix="spotguard-property-", dir=memory if memory.is_dir() else None)
    )
    servers = Servers()
    runner = Runner(folder, servers, bug=asked.bug)
    began = time.monotonic()
    results: list[Result] = []
    try:
        if asked.bug == "all":
            quick = [script for script in scripts if script.server == "base"]
            return _find_bugs(folder, servers, asked.seed, quick, asked.draws, asked.beside)
        if asked.replay:
            for _ in range(asked.times):
                results.append(runner.play(parsed(asked.replay)))
                _tell(results[-1])
        else:
            _say(f"{len(scripts)} scripts, seed {asked.seed}")

            def over() -> bool:
                return bool(asked.seconds) and time.monotonic() - began > asked.seconds

            numbers = range(asked.first, asked.first + asked.draws)
            for result in runner.many(
                asked.seed, numbers, scripts, beside=asked.beside, until=over
            ):
                results.append(result)
                _tell(result)
        _say("\n".join(tables(results, time.monotonic() - began)))
        if not (asked.no_shrink or asked.replay):
            _shrink([result for result in results if result.wrong], runner)
    finally:
        servers.close()
    if not any(result.wrong for result in results):
        shutil.rmtree(folder, ignore_errors=True)
        return 0
    _say(f"what the wrong runs left is in {folder}")
    return 1


def _tell(result: Result) -> None:
    if result.wrong:
        _say(f"WRONG {result.draw.number}: {'; '.join(result.wrong[:4])}")
        _say(f"      in {result.folder}")
        _say(f"      python -m tests.property --replay '{result.draw}'")


def _find_bugs(
    folder: Path, servers: Servers, seed: int, scripts: Sequence[Script], draws: int, beside: int
) -> int:
    """Break the runtime in each way; say after how many draws it was found."""
    unfound = 0
    for bug in BUGS:
        found: list[Result] = []
        tried = 0
        runner = Runner(folder, servers, bug=bug)
        over = partial(bool, found)
        for result in runner.many(seed, range(draws), scripts, beside=beside, until=over):
            tried += not found
            found += [result] * bool(result.wrong)
        unfound += not found
        how = f"found by draw {tried}: {found[0].wrong[0]}" if found else "not found"
        _say(f"{bug:<10} {how}" + (f"\n  --bug {bug} --replay '{found[0].draw}'" if found else ""))
    shutil.rmtree(folder, ignore_errors=True)
    return int(bool(unfound))


def _shrink(wrong: Sequence[Result], runner: Runner) -> None:
    for result in wrong[:5]:
        if "undisturbed" in result.wrong[0]:
            continue
        smallest = shrunk(result.draw, lambda draw: bool(runner.play(draw).wrong))
        _say(f"smallest: python -m tests.property --replay '{smallest}'")


if __name__ == "__main__":
    sys.exit(main())
