"""Tells in a tenth of pip's time whether pip has anything to do: each start of a job waits for it.

    python -I -m spotguard.launch.requirements_check -r FILE REQUIREMENT...

Exits with 0 if the environment that runs it has what these arguments of `pip install` ask for, and
what that needs in turn. Exits with 1 if something is missing, and wherever pip had better look
itself: at an option, an address, a path, or a line that is no requirement.
"""

from __future__ import annotations

import contextlib
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from packaging.requirements import Requirement

_ABSENT = 1


def main(arguments: Sequence[str]) -> int:
    """Return the exit code for these arguments of `pip install`."""
    try:
        from packaging.requirements import Requirement
    except ImportError:  # one of spotguard's own requirements: there is something to install
        return _ABSENT
    try:
        asked = [Requirement(line) for line in _lines(arguments)]
        return 0 if are_met(asked) else _ABSENT
    except (OSError, ValueError):  # also of what is installed: an odd version, an odd need
        return _ABSENT


def are_met(
    asked: Sequence[Requirement],
    find: Callable[[str], metadata.Distribution] = metadata.distribution,
) -> bool:
    """Tell whether all requirements are installed, and all that those need in this environment.

    Args:
        asked: as `packaging` parses them.
        find: returns what is installed under a name, or raises `PackageNotFoundError`.
    """
    to_do = [each for each in asked if each.marker is None or each.marker.evaluate()]
    done = set[tuple[str, frozenset[str]]]()
    while to_do:
        wanted = to_do.pop()
        try:
            installed = find(wanted.name)
        except metadata.PackageNotFoundError:
            return False
        # As pip: a pre-release that is there is good enough.
        if wanted.url or not wanted.specifier.contains(installed.version, prereleases=True):
            return False
        seen = (wanted.name, frozenset(wanted.extras))
        if seen not in done:
            done.add(seen)
            to_do += _needs(installed, seen[1])
    return True


def missing(lines: Sequence[str]) -> tuple[str, ...]:
    """Return those of these requirements that this Python lacks, or that are no plain ones."""
    return tuple(line for line in lines if main([line]))


def installed_with(lines: Sequence[str]) -> set[str] | None:
    """Return the names of all that comes with these requirements; None if that cannot be said.

    What is not installed here counts by its name alone.
    """
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        to_do = [Requirement(line) for line in lines]
    except InvalidRequirement:
        return None
    done = set[tuple[str, frozenset[str]]]()
    while to_do:
        wanted = to_do.pop()
        seen = (re.sub(r"[-_.]+", "-", wanted.name).lower(), frozenset(wanted.extras))
        if seen in done:
            continue
        done.add(seen)
        with contextlib.suppress(metadata.PackageNotFoundError):
            to_do += _needs(metadata.distribution(wanted.name), seen[1])
    return {name for name, _ in done}


def _needs(installed: metadata.Distribution, extras: frozenset[str]) -> Iterator[Requirement]:
    from packaging.requirements import Requirement

    for line in installed.requires or ():
        need = Requirement(line)
        if need.marker is None or any(
            need.marker.evaluate({"extra": extra}) for extra in ("", *extras)
        ):
            yield need


def _lines(arguments: Sequence[str]) -> Iterator[str]:
    rest = iter(arguments)
    for argument in rest:
        if argument == "-r":
            text = Path(next(rest)).read_text(encoding="utf-8")
            lines = (line.partition(" #")[0].strip() for line in text.splitlines())
            yield from (line for line in lines if line and not line.startswith("#"))
        else:
            yield argument


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
