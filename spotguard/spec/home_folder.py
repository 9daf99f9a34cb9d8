"""Where spotguard keeps its own files on this machine."""

from __future__ import annotations

import contextlib
import os
import stat
from typing import TYPE_CHECKING

from spotguard.shared.paths import expanded, home_folder

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

HOME_VARIABLE = "SPOTGUARD_HOME"


def spotguard_home(environ: Mapping[str, str] | None = None) -> Path:
    """Return the absolute folder of runs, settings and the default store; it need not exist yet.

    `$SPOTGUARD_HOME`, else `~/.spotguard`. Read on every call, so a change takes effect at once.

    Raises:
        EnvironmentFailure: there is neither.
    """
    given = (os.environ if environ is None else environ).get(HOME_VARIABLE)
    return expanded(given).absolute() if given else home_folder() / ".spotguard"


def default_store(home: Path | None = None) -> Path:
    """Return the folder of checkpoints and events of runs whose job names no store."""
    return (home or spotguard_home()) / "store"


def keep_private(store: str) -> None:
    """Make the default store a folder that nobody else can enter; leave any other store alone.

    Older versions made it as open as all folders are. One that belongs to somebody else, or that
    is a link to another place, is for whoever arranged it.
    """
    folder = default_store()
    if store != str(folder):
        return
    with contextlib.suppress(OSError):  # who cannot write there is told so by the store itself
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        found = folder.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
            folder.chmod(0o700)
