"""Where spotguard keeps its own files on this machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

HOME_VARIABLE = "SPOTGUARD_HOME"


def spotguard_home(environ: Mapping[str, str] | None = None) -> Path:
    """Return the absolute folder of runs, settings and the default store; it need not exist yet.

    `$SPOTGUARD_HOME`, else `~/.spotguard`. Read on every call, so a change takes effect at once.
    """
    given = (os.environ if environ is None else environ).get(HOME_VARIABLE)
    return Path(given).expanduser().absolute() if given else Path.home() / ".spotguard"
