"""What of a job's folder is not in its copy, and what a person should know of that."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

from spotguard.launch.workdir.copy_rules import NotCopied, first_of, way_out

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from spotguard.launch.workdir.snapshot import Snapshot

_GIT_S = 10.0


def told(snapshot: Snapshot, missed: Sequence[NotCopied]) -> list[str]:
    """Return what a person should know of a copy, a sentence each.

    `missed` is what stays behind though it should not, as far as is known: of most it is right.
    """
    said = list(snapshot.notes)
    if snapshot.leads_out:
        shown: Sequence[str] = snapshot.leads_out[:3]
        more = len(snapshot.leads_out) - len(shown)
        said.append(
            f"links that lead out of the folder lead to nothing on a node: {', '.join(shown)}"
            f"{f' and {more} more' if more else ''}"
        )
    if missed:
        said.append(f"git keeps what SkyPilot does not copy: {first_of(missed)}; {way_out(missed)}")
    return said


def missed_by_git(snapshot: Snapshot, workdir: Path) -> list[NotCopied]:
    """Return what git keeps of a folder and a copy has not: by lines that rsync reads otherwise.

    Nothing where git, or its repository, is not there.
    """
    command = ["git", "-c", "safe.directory=*", "-C", str(workdir), "ls-files", "-z"]
    try:
        listed = subprocess.run(
            [*command, "--cached", "--others", "--exclude-standard"],
            capture_output=True,
            timeout=_GIT_S,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    paths = [path for path in os.fsdecode(listed).split("\0") if path]
    by_path = {left.path: left for left in snapshot.left}
    found = [left_above(by_path, path) for path in paths]
    return [each for each in found if each is not None]


def left_above(by_path: Mapping[str, NotCopied], path: str) -> NotCopied | None:
    """Return why a path is not in a copy, by what was left: itself, or a folder that it is in."""
    parts = path.split("/")
    for length in range(1, len(parts) + 1):
        if (found := by_path.get("/".join(parts[:length]))) is not None:
            return NotCopied(path, found.rules, found.line)
    return None
