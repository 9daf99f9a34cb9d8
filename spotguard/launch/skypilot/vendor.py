"""The one way to SkyPilot: importing it takes seconds and 150 MB, so only when it is used."""

from __future__ import annotations

import contextlib
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from spotguard.errors import MissingExtra

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from types import ModuleType


def load_sky() -> ModuleType:
    """Return SkyPilot's package.

    Raises:
        MissingExtra: it is not installed.
    """
    try:
        with off_stdout():  # its loggers keep the stream that they see now
            import sky
            import sky.catalog
            import sky.catalog.common
    except ImportError as problem:
        raise MissingExtra(
            "SkyPilot is not installed, and every place but local needs it",
            hint="pip install 'spotguard[sky]'",
        ) from problem
    module: ModuleType = sky
    return module


def off_stdout() -> AbstractContextManager[object]:
    """Send to stderr what SkyPilot prints on stdout, such as `<sky-payload>`: JSON stays JSON."""
    return contextlib.redirect_stdout(sys.stderr)


def in_use() -> bool:
    """Return whether SkyPilot is installed and was ever used or set up here. Imports nothing.

    Asking a SkyPilot that never was would start its API server, and tell nothing.
    """
    if find_spec("sky") is None:
        return False
    folder = Path(os.environ.get("SKY_RUNTIME_DIR", "~")).expanduser() / ".sky"
    traces = (folder / "state.db", folder / "config.yaml")
    return "SKYPILOT_API_SERVER_ENDPOINT" in os.environ or any(map(Path.exists, traces))
