"""Paths as people write them."""

from __future__ import annotations

import os
from pathlib import Path

from spotguard.errors import EnvironmentFailure


def expanded(path: str | os.PathLike[str]) -> Path:
    """Return a path with its `~` resolved; `~nobody` is an ordinary name, as it is for a shell."""
    return Path(os.path.expanduser(path))  # noqa: PTH111 - Path's own raises RuntimeError there


def home_folder() -> Path:
    """Return the user's home: `$HOME`, else what the system's list of users has.

    Raises:
        EnvironmentFailure: neither names one, as for a container's user without an entry.
    """
    try:
        return Path.home()
    except RuntimeError:
        raise EnvironmentFailure(
            f"user {os.getuid()} has no home folder: HOME is not set, and the system does not "
            "know the user",
            hint="set HOME, or SPOTGUARD_HOME, to a folder that may be written",
        ) from None
