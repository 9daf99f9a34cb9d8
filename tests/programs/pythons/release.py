"""Builds what would be released, and tries the wheel on each Python that this machine has.

`make release` calls it. Nothing is uploaded. Each wheel is installed into a fresh environment and
used from an empty folder, in a home of its own: no file of this checkout can stand in for one that
is missing in the wheel.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from spotguard.shared.version import __version__
from tests.programs.pythons import interpreters
from tests.programs.pythons.environments import ROOT, Environment, NotToBeHadError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

DIST: Final = ROOT / "dist"
_PYTHON: Final = (sys.executable, "-m")
_UP: Final = ("up", "train.py", "--yes", "--nodes", "1")
_MOST_LINES: Final = 40


class FailedError(Exception):
    """A step of the release went wrong; says which, and what was printed."""


def build() -> Path:
    """Build the sdist, and the wheel from it, into an empty `dist`; return the wheel.

    Raises:
        FailedError: there are changes that no commit has, a build failed, or the wheel is another
            one when it is built from the checkout.
    """
    if changed := said(["git", "status", "--porcelain"]):
        raise FailedError(f"commit these first, or remove them:\n{changed}")
    shutil.rmtree(DIST, ignore_errors=True)
    said([*_PYTHON, "build", "--outdir", str(DIST), str(ROOT)])
    [wheel] = DIST.glob("*.whl")
    with tempfile.TemporaryDirectory(prefix="spotguard-wheel-") as folder:
        said([*_PYTHON, "build", "--wheel", "--outdir", folder, str(ROOT)])
        [direct] = Path(folder).glob("*.whl")
        if different := differences(wheel, direct):
            raise FailedError(f"not the same from the sdist: {', '.join(different)}")
    said([*_PYTHON, "twine", "check", "--strict", *map(str, sorted(DIST.iterdir()))])
    return wheel


def differences(wheel: Path, other: Path) -> list[str]:
    """Return the files that only one of two wheels has, or has otherwise."""
    ours, theirs = _digests(wheel), _digests(other)
    return sorted(name for name in ours | theirs if ours.get(name) != theirs.get(name))


def _digests(wheel: Path) -> dict[str, str]:
    with zipfile.ZipFile(wheel) as files:
        return {name: hashlib.sha256(files.read(name)).hexdigest() for name in files.namelist()}


def used_as_a_user_does(environment: Environment) -> None:
    """Look at what is installed, at the command, and train what `init` writes to its end.

    Raises:
        FailedError: a command failed, or what is imported is not what was installed.
    """
    said([*_PYTHON, "uv", "pip", "check", "--python", str(environment.python)])
    folder = environment.python.parent
    with tempfile.TemporaryDirectory(prefix="spotguard-release-") as home:
        empty = Path(home) / "empty"
        empty.mkdir()
        place = {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "HOME": home}

        def run(*words: str) -> str:
            return said([str(folder / words[0]), *words[1:]], cwd=empty, env=place)

        where = run("python", "-c", "import spotguard; print(spotguard.__file__)")
        if not Path(where).is_relative_to(environment.folder):
            raise FailedError(f"what is imported is not the wheel, but {where}")
        version = run("spotguard", "--version")
        if version != f"spotguard {__version__}":
            raise FailedError(f"the wheel calls itself {version!r}, not {__version__}")
        run("spotguard", "--help")
        run("spotguard", "init")
        run("spotguard", *_UP)
        status = json.loads(run("spotguard", "status", "--json"))
        if (status["state"], status["saved_step"]) != ("finished", status["total_steps"]):
            raise FailedError(f"the run is {status['state']} at step {status['step']}")


def said(command: Sequence[str], *, cwd: Path = ROOT, env: Mapping[str, str] | None = None) -> str:
    """Run a command to its end; return what it printed to stdout.

    Raises:
        FailedError: it ended with another exit code than 0.
    """
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        printed = f"{done.stdout}\n{done.stderr}".strip().splitlines()
        last = "\n".join(printed[-_MOST_LINES:])
        raise FailedError(f"exit code {done.returncode} of {' '.join(command)}:\n{last}")
    return done.stdout.strip()


def tried(environment: Environment) -> str:
    """Return in a few words how it went on one Python."""
    interpreter = interpreters.find(environment.version)
    if interpreter is None:
        return "skipped: there is no such Python on this machine"
    try:
        environment.make(interpreter)
        used_as_a_user_does(environment)
    except NotToBeHadError as problem:
        return f"skipped: {problem}"
    except FailedError as problem:
        return f"FAILED: {problem}"
    return "passed"


def main(arguments: Sequence[str] | None = None) -> int:
    """Build, check and try; return 1 if anything failed, or if no Python could try the wheel."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.programs.pythons.release", description=__doc__
    )
    several = "may come several times"
    parser.add_argument("--only", action="append", choices=interpreters.SUPPORTED, help=several)
    chosen = parser.parse_args(arguments).only or interpreters.SUPPORTED
    try:
        wheel = build()
    except FailedError as problem:
        _say(f"FAILED: {problem}")
        return 1
    _say(*(f"built {path.relative_to(ROOT)}" for path in sorted(DIST.iterdir())))
    words = []
    for version in chosen:
        words.append(tried(Environment(version, wheel=wheel)))
        _say(f"Python {version}: {words[-1]}")
    good = "passed" in words and not any(word.startswith("FAILED") for word in words)
    _say("ready in dist; nothing was uploaded" if good else "not to be released")
    return int(not good)


def _say(*lines: str) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
