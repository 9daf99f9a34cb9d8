"""Runs quick tests and the demo on each supported Python that this machine has.

`make test-pythons` calls it. The Python of the development environment itself has its quick tests
in `make test`; here it only shows the demo. The others leave out the tests that tell the same on
each of them. What a machine lacks is named and skipped.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tests.programs.pythons import interpreters
from tests.programs.pythons.environments import ROOT, Environment, NotToBeHadError

if TYPE_CHECKING:
    from collections.abc import Sequence

OWN = "{}.{}".format(*sys.version_info)
QUICK = (
    *("-q", "-o", "tmp_path_retention_policy=failed"),
    *("-m", "not e2e and not cloud and not same_everywhere"),
)
AGAIN = ("-n", "0", "--last-failed", "--last-failed-no-failures=none")


def quick_tests(environment: Environment, more: list[str]) -> bool:
    """Run them, what fails a second time, as `make test` does; return whether all passed."""
    cache = ("-o", f"cache_dir=.pytest_cache/pythons-{environment.name}")
    command = [str(environment.python), "-m", "pytest", *QUICK, *cache, *more]
    return _passes([*command, "-n", "2"]) or _passes([*command, *AGAIN])


def demo(venv: Path) -> bool:
    """Run `make demo` in an environment, with a home of its own; return whether it ended well."""
    with tempfile.TemporaryDirectory(prefix="spotguard-demo-") as home:
        return _passes(["make", "--no-print-directory", "demo", f"VENV={venv}"], HOME=home)


def _passes(command: list[str], **env: str) -> bool:
    return not subprocess.run(command, cwd=ROOT, env={**os.environ, **env}, check=False).returncode


def tried(environment: Environment, more: list[str]) -> str:
    """Return in a few words how it went on one Python."""
    if environment.version == OWN and not environment.lowest:
        return "passed" if demo(Path(sys.prefix)) else "FAILED: the demo"
    interpreter = interpreters.find(environment.version)
    if interpreter is None:
        return "skipped: there is no such Python on this machine"
    try:
        environment.make(interpreter)
    except NotToBeHadError as problem:
        return f"skipped: {problem}"
    wrong = [] if quick_tests(environment, more) else ["the quick tests"]
    wrong += [] if demo(environment.folder) else ["the demo"]
    return f"FAILED: {' and '.join(wrong)}" if wrong else "passed"


def _say(*lines: str) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """Try each Python, then the lowest versions of all packages on the oldest; print a table.

    Returns 1 if anything failed; what is not to be had here is skipped, and fails nothing.
    """
    every = [Environment(version) for version in interpreters.SUPPORTED]
    every.append(Environment(interpreters.SUPPORTED[0], lowest=True))
    names = [environment.name for environment in every]
    parser = argparse.ArgumentParser(prog="python -m tests.programs.pythons", description=__doc__)
    parser.add_argument("--only", action="append", choices=names, help="may come several times")
    parser.add_argument("tests", nargs="*", help="given to pytest; all quick tests if none")
    chosen = parser.parse_args(arguments)
    lines = []
    for environment in every:
        if environment.name in (chosen.only or names):
            began, used_s = time.monotonic(), _children_s()
            word = tried(environment, chosen.tests)
            took = f"{time.monotonic() - began:.0f} s, {_children_s() - used_s:.0f} s of processors"
            lines.append(f"Python {environment.name}: {word} ({took})")
            _say(lines[-1])
    _say("", *lines)
    return int(any("FAILED" in line for line in lines))


def _children_s() -> float:
    """Return the processor seconds of all processes that were started here and have ended."""
    times = os.times()
    return times.children_user + times.children_system


if __name__ == "__main__":
    sys.exit(main())
